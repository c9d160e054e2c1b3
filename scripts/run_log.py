"""Files of one JSON object a line: the log of a run (train_gpt --log), with the kind of line in `event`, and the rows that other
scripts collect.
"""
import contextlib
import json
import sys

HINT = "take the line out, or take a log that train_gpt --log has written"


class Damaged(ValueError):
    """A line that no program writes."""

    def __init__(self, path, number, what):
        super().__init__(f"{path}, line {number}: {what}")


def objects(path, keys, what):
    """One by one, each with one of the keys. A last line that is cut off is none: its writer may have been killed."""
    with open(path, "rb") as file:  # a cut may go through a letter
        for number, line in enumerate(file, 1):
            try:
                found = json.loads(line)
            except ValueError:
                if not line.endswith(b"\n"):
                    return
                raise Damaged(path, number, "no JSON object") from None
            if not isinstance(found, dict) or not keys & found.keys():
                raise Damaged(path, number, what)
            yield found


def events(path):
    return objects(path, {"event"}, "no event of a run")


@contextlib.contextmanager
def readable(path):
    """For scripts: a log that cannot be read ends them with a hint."""
    try:
        yield
    except OSError as error:
        sys.exit(f"error: cannot read log {path}: {error.strerror}\nhint:  name a file that train_gpt --log has written")
    except Damaged as error:
        sys.exit(f"error: log {error}\nhint:  {HINT}")
    except KeyError as error:
        sys.exit(f"error: log {path}: an event without {error}\nhint:  {HINT}")


def drop_cut_line(path):
    """Before lines are appended: the next one would be glued to it."""
    with open(path, "rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
