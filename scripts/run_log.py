"""Files of one JSON object a line: the log of a run (train_gpt --log), whose lines say by `event` what they hold, and the rows
that other scripts collect.
"""
import json
import sys

HINT = "take the line out, or take a log that train_gpt --log has written"


class Damaged(ValueError):
    """A line that nobody writes."""

    def __init__(self, path, number, what):
        super().__init__(f"{path}, line {number}: {what}")


def objects(path, keys, what):
    """Line number and object, one by one, each with one of the keys. A last line that is cut off is none: its writer may have been
    killed."""
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
            yield number, found


def events(path):
    return objects(path, {"event"}, "no event of a run")


def drop_cut_line(path):
    """For who appends: the next line would be glued to it."""
    with open(path, "rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def read(path, kind, names):
    """Events of one kind, all with these names. For scripts: a log that cannot be read ends them with a word."""
    found = []
    try:
        for number, event in events(path):
            if event["event"] != kind:
                continue
            for name in names:
                if name not in event:
                    raise Damaged(path, number, f"a {kind} without {name}")
            found.append(event)
    except OSError as error:
        sys.exit(f"error: cannot read log {path}: {error.strerror}\nhint:  name a file that train_gpt --log has written")
    except Damaged as error:
        sys.exit(f"error: log {error}\nhint:  {HINT}")
    return found


def with_loss(found):
    """Those whose loss was a number; it is null where a step was left out (--skip-nonfinite)."""
    return [event for event in found if event["loss"] is not None]
