"""One JSON object a line: the log of a run (train_gpt --log), what benchmarks print, and rows that other scripts collect."""
import fcntl
import json
import os
import statistics

from command import Problem, opened

HINT = "remove the line, or name a log that train_gpt --log has written"
# What readers need of some events, and of what kind it must be.
NEEDED = {"step": ("step", "loss"), "val": ("step", "loss"), "sample": ("step", "text"), "hellaswag": ("step",)}
KINDS = {"step": lambda value: type(value) is int and 0 <= value < 1 << 62,
         "text": lambda value: isinstance(value, str) and value == value.encode(errors="replace").decode(),  # no half of a letter
         "loss": lambda value: value is None or is_number(value)}


def is_number(value):
    return type(value) in (int, float) and abs(value) < 1e300


def fault(event):
    if not isinstance(event.get("event"), str):
        return "not an event of a run"
    return next((f"its {name} is of the wrong kind" if name in event else f"an event without '{name}'"
                 for name in NEEDED.get(event["event"], ()) if name not in event or not KINDS[name](event[name])), None)


class Lines:
    """The objects of a file, as far as it is written; asked again, those added since. `fault` says what is wrong with one. A cut
    last line is ignored: its writer may have been killed, or not be done. If only its end is missing, it is given every time."""

    def __init__(self, path, fault=fault, hint=HINT):
        self.path, self.fault, self.hint = path, fault, hint
        self.number, self.last = 0, b""  # bytes, because a cut may split a character
        try:
            self.file = opened(path)
        except OSError as error:
            raise Problem(f"cannot read {path}: {error.strerror}", "name a file that train_gpt --log has written") from None

    def __iter__(self):
        while line := self.file.readline():
            cut = not line.endswith(b"\n")
            if cut:
                self.file.seek(-len(line), os.SEEK_CUR)
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                if cut:
                    return
                found = None
            if what := self.fault(found) if isinstance(found, dict) else "not a JSON object":
                raise Problem(f"{self.path}, line {self.number + 1}: {what}", self.hint)
            if not cut:
                self.number, self.last = self.number + 1, line
            yield found
            if cut:
                return

    def stay(self):
        """Whether the file still has this name, and what has been read is still there."""
        return (os.path.samestat(os.stat(self.path), os.fstat(self.file.fileno())) and
                os.pread(self.file.fileno(), len(self.last), self.file.tell() - len(self.last)) == self.last)


class Rows:
    """A file of rows that one command at a time adds to, and that the same command continues. Each has one of the keys."""

    def __init__(self, path, keys, what):
        self.path, self.file = path, opened(path, "a", encoding="utf-8")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Problem(f"{path} is being written by another command", "wait for it, or choose another --out") from None
        with opened(path, "rb+") as file:  # the last line may be cut
            file.truncate(file.read().rfind(b"\n") + 1)
        self.done = list(Lines(path, lambda row: None if keys & row.keys() else what, "repair it, or give another --out"))

    def append(self, row):
        self.done.append(row)
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())


def printed(text):
    """The objects among the lines that a program has printed."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def turns(text):
    """What bench_train --json has printed: the configuration, and the steps of all modes without those of the first round."""
    events = printed(text)
    config = {name: value for event in events if event["event"] != "step" for name, value in event.items()}
    return config, [event for event in events if event["event"] == "step" and event["round"] > 0]


def steps(events):
    return [event for event in events if event["event"] == "step"]


def median(steps, name):
    """Of the steps that know it; None: none does."""
    values = [step[name] for step in steps if step.get(name) is not None]
    return statistics.median(values) if values else None
