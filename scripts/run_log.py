"""The log of a run (train_gpt --log): one JSON object a line, whose `event` says what it holds."""
import json
import sys

HINT = "take the line out, or take a log that train_gpt --log has written"


class Damaged(ValueError):
    """A line that no run writes."""

    def __init__(self, path, number, what):
        super().__init__(f"{path}, line {number}: {what}")


def events(path):
    """Line number and event, one by one. A last line that is cut off is none: its writer may have been killed."""
    with open(path, "rb") as file:  # a cut may go through a letter
        for number, line in enumerate(file, 1):
            try:
                event = json.loads(line)
            except ValueError:
                if not line.endswith(b"\n"):
                    return
                raise Damaged(path, number, "no JSON object") from None
            if not isinstance(event, dict) or "event" not in event:
                raise Damaged(path, number, "no event of a run")
            yield number, event


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
