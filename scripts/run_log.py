"""One JSON object a line: the log of a run (train_gpt --log), what benchmarks print, and rows that other scripts collect."""
import json
import os

from command import Problem, opened

HINT = "remove the line, or name a log that train_gpt --log has written"
LONGEST_LINE = 1 << 26  # bytes


class Lines:
    """The objects of a file, as far as it is written; asked again, those added since. `fault` says what is wrong with one. A cut
    last line is ignored: its writer may have been killed, or not be done. If only its end is missing, it is given every time."""

    def __init__(self, path, fault, hint=HINT):
        self.path, self.fault, self.hint = path, fault, hint
        self.number, self.last = 0, b""  # bytes, because a cut may split a character
        try:
            self.file = opened(path)
        except OSError as error:
            raise Problem(f"cannot read {path}: {error.strerror}", "name a file that train_gpt --log has written") from None

    def __iter__(self):
        while line := self.file.readline(LONGEST_LINE):
            cut = not line.endswith(b"\n")
            if cut:
                self.file.seek(-len(line), os.SEEK_CUR)
            try:
                found = json.loads(line.decode())
                if rb"\ud" in line.lower():  # half of a surrogate pair, perhaps
                    json.dumps(found, ensure_ascii=False).encode()
            except (ValueError, RecursionError):
                if cut and len(line) < LONGEST_LINE:
                    return
                found = None
            if what := "not a JSON object" if found is None else self.fault(found if isinstance(found, dict) else {}):
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


def objects(path, keys, what, hint="repair it, or give another --out"):
    """Yields the objects; each must have one of the keys."""
    return iter(Lines(path, lambda found: None if keys & found.keys() else what, hint))


def is_number(value):
    return type(value) in (int, float) and abs(value) < 1e300


# What log_to.py and plot_loss.py need of some events, and of what kind it must be.
NEEDED = {"step": ("step", "loss"), "val": ("step", "loss"), "sample": ("step", "text"), "hellaswag": ("step",)}
KINDS = {"step": lambda value: type(value) is int and 0 <= value < 1 << 62, "text": lambda value: isinstance(value, str),
         "loss": lambda value: value is None or is_number(value)}


def fault(event):
    if not isinstance(event.get("event"), str):
        return "not an event of a run"
    return next((f"its {name} is of the wrong kind" if name in event else f"an event without '{name}'"
                 for name in NEEDED.get(event["event"], ()) if name not in event or not KINDS[name](event[name])), None)


def events(path):
    return objects(path, {"event"}, "not an event of a run", HINT)


def printed(text):
    """The objects among the lines that a program has printed."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def turns(text):
    """What bench_train --json has printed: the configuration, and the steps of all modes without those of the first round."""
    events = printed(text)
    config = {name: value for event in events if event["event"] != "step" for name, value in event.items()}
    return config, [event for event in events if event["event"] == "step" and event["round"] > 0]


def drop_cut_line(path):
    """Removes a cut last line, before lines are appended."""
    with opened(path, "rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
