"""One JSON object a line: the log of a run (train_gpt --log), what benchmarks print, and rows that other scripts collect."""
import json
import statistics

from command import Problem, opened


def lines(path, *keys, read=iter):
    """The objects of a file, as far as it is written; each has the keys ("event"). A cut last line is ignored: its writer may have
    been killed, or not be done. If only its end is missing, it counts. read: gives the lines of the open file."""
    with opened(path) as file:
        for number, line in enumerate(read(file), 1):  # bytes, because a cut may split a character
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                if not line.endswith(b"\n"):
                    return
                value = None
            for key in keys or ("event",):
                if not isinstance(value, dict) or key not in value:
                    raise Problem(f"{path}, line {number}: not a JSON object with {key!r}", "repair it, or name another file")
            yield value


def printed(text):
    """The objects among the lines that a program has printed."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def turns(text):
    """What bench_train --json has printed: the configuration, and the steps of all modes without those of the first round."""
    events = printed(text)
    config = {name: value for event in events if event["event"] != "step" for name, value in event.items()}
    return config, [event for event in events if event["event"] == "step" and event["round"] > 0]


TRIAL_STEPS = 54  # of --overlap auto, at most (CF_TRIAL_STEPS)


def steps(events):
    return [event for event in events if event["event"] == "step"]


def warm(steps):
    """Without the first, which takes memory from the system, and without trials."""
    return [step for step in steps[1:] if not step.get("trial")]


def median(steps, name):
    """Of the steps that know it; None: none does."""
    values = [step[name] for step in steps if step.get(name) is not None]
    return statistics.median(values) if values else None
