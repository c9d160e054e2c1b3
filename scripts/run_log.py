"""One JSON object a line: the log of a run (train_gpt --log), what benchmarks print, and rows that other scripts collect."""
import contextlib
import json
import sys

HINT = "remove the line, or name a log that train_gpt --log has written"


class Damaged(ValueError):
    """A line that is not one of this kind of file."""

    def __init__(self, path, number, what):
        super().__init__(f"{path}, line {number}: {what}")


def objects(path, keys, what):
    """Yields the objects; each must have one of the keys. A cut last line is ignored: its writer may have been killed."""
    with open(path, "rb") as file:  # bytes, because a cut may split a character
        for number, line in enumerate(file, 1):
            try:
                found = json.loads(line)
            except ValueError:
                if not line.endswith(b"\n"):
                    return
                raise Damaged(path, number, "not a JSON object") from None
            if not isinstance(found, dict) or not keys & found.keys():
                raise Damaged(path, number, what)
            yield found


def events(path):
    return objects(path, {"event"}, "not an event of a run")


def printed(text):
    """The objects among the lines that a program has printed."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def turns(text):
    """What bench_train --json has printed: the configuration, and the steps of all modes without those of the first round."""
    events = printed(text)
    config = {name: value for event in events if event["event"] != "step" for name, value in event.items()}
    return config, [event for event in events if event["event"] == "step" and event["round"] > 0]


@contextlib.contextmanager
def readable(path):
    """Ends the script with a hint if a log cannot be read."""
    try:
        yield
    except OSError as error:
        sys.exit(f"error: cannot read log {path}: {error.strerror}\nhint:  name a file that train_gpt --log has written")
    except Damaged as error:
        sys.exit(f"error: log {error}\nhint:  {HINT}")
    except KeyError as error:
        sys.exit(f"error: log {path}: an event without {error}\nhint:  {HINT}")


def drop_cut_line(path):
    """Removes a cut last line, before lines are appended."""
    with open(path, "rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
