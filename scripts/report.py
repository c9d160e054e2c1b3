#!/usr/bin/env python3
"""make report: run the experiments that fit this machine, and write a report of them.

    scripts/report.py [--out DIR] [--place auto|lab|local] [--only NAME[,NAME]] [--quick] [--fresh]
    scripts/report.py --sweep FILE.jsonl [--only sweep]     with the runs that scripts/mfu_sweep has collected
    scripts/report.py --patience 4 …                        measure every point four times as long: smaller errors
    scripts/report.py --compare DIR DIR                     how far the ratios of two reports are apart

DIR (build/report) then holds report.md, a CSV of every row of each experiment, figures as PNG and SVG, and rows.jsonl:
a first line that says where the rows were measured, then a line for each point, written when it has been measured.
That file is the report; all else is drawn from it. An interrupted report holds the points measured so far and says so;
the same command resumes it and skips the points that are there. Rows of another machine, program or place do not belong
in one table: then nothing is resumed until --fresh, or another --out, is given.

An experiment is a module of scripts/experiments with NAME and TITLE; points(place, quick), which may say how many seconds they
take; measure(place, point), its rows; tables(rows) and figures(rows, folder); and perhaps problems(rows), which must not be, and
ratios(rows), the figures in which two reports must agree.
"""
import argparse
import datetime
import fcntl
import hashlib
import importlib
import json
import os
import pathlib
import shlex
import signal
import statistics
import sys
import time

import lab
import plots
import run_log
import tables
from experiments import processors
from experiments.place import Place, PlaceError
from runner import ROOT

EXPERIMENTS = "operations", "training", "timeline"  # in the order of the report
SWEEP = "sweep"  # rows that scripts/mfu_sweep has collected
ROWS = "rows.jsonl"
NOT_OF_THE_SETUP = "date", "enough", "processors"  # may differ between rows of one report
TOLERANCE = 0.03
CORES_MAX = 16  # of the largest number of ranks that an experiment takes
PROGRAMS = "train_gpt", "tests/bench/bench_fuse", "tests/bench/bench_train"
INTERRUPTED, REFUSED = 130, 2


def load(name):
    return importlib.import_module(f"experiments.{name}")


def refuse(what, hint):
    print(f"report.py: {what}\n  {hint}", file=sys.stderr)
    sys.exit(REFUSED)


# --- where it runs ---


def setup_of(place, o):
    """What the rows depend on, and with whose they may not be mixed."""
    build, ask = pathlib.Path(ROOT, "build/release"), place.runner.printed
    programs = [build / name for name in PROGRAMS]
    onednn = ask("sh", "-c", 'printf "#include <dnnl.h>\nDNNL_VERSION_MAJOR.DNNL_VERSION_MINOR.DNNL_VERSION_PATCH" | '
                 "cc -E -P -x c - | tail -n 1")
    return {**place.describe(), "compiler": (ask("cc", "--version").splitlines() or ["unknown"])[0],
            "onednn": onednn.replace(" ", "") or "unknown",
            "version": (build / "version").read_text().strip() if (build / "version").exists() else
            ask("git", "describe", "--always", "--dirty") or "unknown",
            "program": hashlib.sha256(b"".join(program.read_bytes() for program in programs)).hexdigest()[:12]
            if all(program.exists() for program in programs) else "not built",
            "length": ("quick" if o.quick else "full") + (f", patience {o.patience:g}" if o.patience != 1 else ""),
            "date": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")}


def doubts(setup):
    """What figures suffer from here, for the whole report."""
    if not setup["enough"][0]:
        return f"In all that follows {lab.SHARED}: {setup['enough'][1]}"
    if setup.get("processors") and setup["processors"]["slowed"] > processors.SLOWED_MAX:
        return ("These processors share their cores with others, so times differ from minute to minute: "
                f"{processors.text(setup['processors'])}")
    return ""


def caption(setup):
    cores = "" if setup["enough"][0] else f" (**{lab.SHARED}**: {setup['enough'][1]})"
    if setup.get("processors"):
        cores += f" ({processors.text(setup['processors'])})"
    return (f"{setup['processor']}, {setup['cores']} cores{cores}; {setup['system']} {setup['kernel']}; "
            f"{setup['compiler']}; {setup['mpi']}; oneDNN {setup['onednn']}; commfuse {setup['version']} ({setup['program']}); "
            f"{'lab, link as named' if setup['place'] == 'lab' else 'one host, shared memory'}; {setup['date']}")


# --- rows ---


class Rows:
    """DIR/rows.jsonl, held by one report at a time."""

    def __init__(self, folder, setup, fresh):
        self.path = folder / ROWS
        self.file = open(self.path, "a", encoding="utf-8")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            refuse(f"{self.path} is being written by another report", "wait for it, or choose another --out DIR")
        if fresh:
            self.file.truncate(0)
        run_log.drop_cut_line(self.path)
        self.setup, self.done = read_rows(self.path)
        if not self.setup:
            self.setup = setup
            self.append({"setup": setup})
        different = [f"{name} was {self.setup.get(name)!r} and is {setup.get(name)!r}" for name in {**self.setup, **setup}
                     if name not in NOT_OF_THE_SETUP and self.setup.get(name) != setup.get(name)]
        if different:
            refuse(f"{self.path} holds rows measured elsewhere: {'; '.join(different)}",
                   "start anew with --fresh, or choose another --out DIR")

    def append(self, line):
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())

    def has(self, name, point):
        plain = json.loads(json.dumps(point))  # a tuple is a list there
        return any((line["experiment"], line["point"]) == (name, plain) for line in self.done)


def read_rows(path):
    """(setup, lines) of a report; (None, []): there is none."""
    if not path.exists():
        return None, []
    try:
        first, *lines = [line for _, line in run_log.objects(path, {"setup", "experiment"}, "no row of a report")] or [{}]
    except run_log.Damaged as error:
        refuse(str(error), "mend it, or start anew with --fresh or another --out DIR")
    return first.get("setup"), lines


# --- running ---


def run(place, names, rows, o):
    """Measures what is missing. Points that fail are reported and left out; the rest goes on."""
    todo, failures = [], []
    for name in names:
        points = load(name).points(place, o.quick)
        if not points:
            print(f"{name}: nothing to measure {'in a lab' if place.kind == 'lab' else 'over shared memory'}", file=sys.stderr)
        # Points without seconds count something else.
        points = [{**point, "seconds": o.patience * point["seconds"]} if "seconds" in point else point for point in points]
        todo += [(name, point) for point in points if not rows.has(name, point)]
    print(f"{len(todo)} points to measure" + (f", {len(rows.done)} are there already" if rows.done else ""), file=sys.stderr)
    for number, (name, point) in enumerate(todo):
        left = sum(point.get("seconds", 0) for _, point in todo[number:])
        short = " ".join(str(value) for value in point.values() if isinstance(value, (str, int, float)))[:70]
        print(f"[{number + 1}/{len(todo)}] {name} {short}  {left / 60:.0f} min left, or more", file=sys.stderr, flush=True)
        place.commands, begin = [], time.monotonic()
        try:
            found = load(name).measure(place, point)
        except Exception as error:  # whatever it is, the other points are worth having
            failures.append(f"{name} {short}: {error}")
            print(f"failed: {failures[-1]}", file=sys.stderr)
            continue
        rows.done.append({"experiment": name, "point": point, "rows": found, "seconds": round(time.monotonic() - begin, 2),
                          "commands": place.commands})
        rows.append(rows.done[-1])
    return failures


# --- writing ---


def section(module, lines, folder, where):
    """Tables, figures, rows and commands of one experiment."""
    rows = [row for line in lines for row in line["rows"]]
    tables.write_csv(folder / f"{module.NAME}.csv", rows)
    shown = module.tables(rows)
    text = [f"## {module.TITLE}", "", shown.strip(), ""]
    for name in module.figures(rows, str(folder)):
        if name.endswith(".png") and f"({name})" not in shown:
            text += [f"![{module.TITLE}]({name})", ""]
    text += [f"*{where}.* Every row: [{module.NAME}.csv]({module.NAME}.csv); figures also as SVG.", ""]
    commands = list(dict.fromkeys(command for line in lines for command in line["commands"]))
    return "\n".join([*text, f"<details><summary>{len(commands)} commands</summary>", "", "```sh", *commands, "```", "", "</details>", ""])


def write_report(folder, setup, done, failures, sweep, command, stopped=False):
    present = {name: lines for name in EXPERIMENTS if (lines := [line for line in done if line["experiment"] == name and line["rows"]])}
    text = [f"**{doubts(setup)}.**", ""] if doubts(setup) else []
    text += ["# What overlapping brings, measured", "", f"{caption(setup)}.", ""]
    if stopped:
        text += [f"**Not complete: interrupted when {len(done)} points had been measured. The same command goes on.**", ""]
    text += ["To repeat all of it:", "", "```sh",
             "make all build/release/tests/bench/bench_fuse build/release/tests/bench/bench_train", command, "```", "",
             "Single runs are listed at the end of each experiment; `$DIR` is any folder, and `$DIR/tokens.bin` any "
             "token file (`data/prepare.py`): contents do not change times.", ""]
    problems = [problem for name, lines in present.items() if hasattr(load(name), "problems")
                for problem in load(name).problems([row for line in lines for row in line["rows"]])]
    if problems or failures:
        text += ["## What went wrong", "", *(f"- **ERROR** {' '.join(problem.split())}" for problem in problems),
                 *(f"- not measured: {' '.join(failure.split())[:600]}" for failure in failures), ""]
    plots.note = "" if setup["enough"][0] else f"{setup['cores']} cores: {lab.SHARED}"
    text += [section(load(name), lines, folder, caption(setup)) for name, lines in present.items()]
    if sweep:
        plots.note = ""
        text.append(section(load(SWEEP), [{"rows": sweep, "commands": [row["command"] for row in sweep]}], folder,
                            "Machine and version are in each row"))
    path = folder / "report.md"
    path.write_text("\n".join(text), encoding="utf-8")
    return path, problems


# --- comparing ---


def ratios_of(folder):
    """Place, and (experiment, figure) → value."""
    setup, done = read_rows(pathlib.Path(folder) / ROWS)
    if setup is None:
        refuse(f"{folder}/{ROWS} is no report's rows", "give the folders of two reports: --compare DIR DIR")
    return setup.get("place"), {
        (name, figure): value for name in EXPERIMENTS if hasattr(load(name), "ratios")
        for figure, value in load(name).ratios([row for line in done if line["experiment"] == name for row in line["rows"]]).items()}


def compare(folders, tolerance):
    """Prints every figure that two reports have in common; 1 if one is further apart than `tolerance`."""
    (place, first), (other, second) = map(ratios_of, folders)
    if place != other:
        refuse(f"one report was measured on {place}, the other on {other}", "compare reports of one kind of place")
    apart = {key: max(first[key] / second[key], second[key] / first[key]) - 1 for key in first if key in second}
    if not apart:
        refuse("the two reports have no figure in common", "run the same experiments, with or without --quick alike")
    for (name, figure), share in apart.items():
        print(f"{'  ' if share <= tolerance else '! '}{name}: {figure}: {first[name, figure]:.4f} and "
              f"{second[name, figure]:.4f}, {100 * share:.2f} % apart")
    further, lonely = sum(share > tolerance for share in apart.values()), len(first.keys() ^ second.keys())
    print(f"{len(apart)} figures: at most {100 * max(apart.values()):.2f} % apart, "
          f"{100 * statistics.median(apart.values()):.2f} % in the median; {further} further than the "
          f"{100 * tolerance:g} % asked" + (f". {lonely} more are in one of the reports only" if lonely else ""))
    return int(further > 0)


# --- the command ---


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="build/report", help="folder of the report (default: build/report)")
    parser.add_argument("--place", default="auto", choices=("auto", "lab", "local"))
    parser.add_argument("--only", metavar="NAME[,NAME]", help=f"of {', '.join((*EXPERIMENTS, SWEEP))}")
    parser.add_argument("--quick", action="store_true", help="smaller models, fewer repetitions: under five minutes")
    parser.add_argument("--patience", type=float, default=1, metavar="X",
                        help="measure points X times as long, on a restless machine (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="forget rows that are there")
    parser.add_argument("--sweep", metavar="FILE", help="draw what scripts/mfu_sweep has collected, too")
    parser.add_argument("--compare", nargs=2, metavar="DIR", help="compare the ratios of two reports, nothing else")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="of --compare (default: %(default)s)")
    o = parser.parse_args()
    o.only = o.only.split(",") if o.only else [SWEEP] if o.sweep else list(EXPERIMENTS)
    for name in o.only:
        if name not in (*EXPERIMENTS, SWEEP):
            parser.error(f"--only {name}: experiments are {', '.join((*EXPERIMENTS, SWEEP))}")
    if not 0 < o.patience < float("inf"):
        parser.error(f"--patience {o.patience:g}: not a positive number")
    if SWEEP in o.only and not o.sweep:
        parser.error("--only sweep needs the rows that scripts/mfu_sweep has collected: --sweep FILE.jsonl")
    return o


def measure_all(o, folder):
    """Setup, lines and failures of a report whose missing points have been measured, and whether that was stopped."""
    names = [name for name in EXPERIMENTS if name in o.only]
    if not names:  # nothing to run: what is there, if anything, is drawn again
        setup, done = read_rows(folder / ROWS)
        return setup or setup_of(Place("local"), o), done, [], False
    rows = None
    try:
        place = Place(o.place)
        setup = {**setup_of(place, o), "processors": processors.measure(sorted(os.sched_getaffinity(0))[:CORES_MAX])}
        rows = Rows(folder, setup, o.fresh)
        if rows.setup["program"] == "not built":
            refuse("build/release lacks a program", "make report builds what it needs")
        if doubts(rows.setup):
            print(doubts(rows.setup), file=sys.stderr)
        return rows.setup, rows.done, run(place, names, rows, o), False
    except PlaceError as error:
        refuse(str(error), "--place local measures over shared memory")
    except KeyboardInterrupt:
        print(f"\ninterrupted: {len(rows.done) if rows else 0} points are kept in {folder / ROWS}; the same command "
              "goes on from there", file=sys.stderr)
        if not rows or not rows.done:
            sys.exit(INTERRUPTED)
        return rows.setup, rows.done, [], True


def main():
    o = options()
    try:  # before hours are spent, not after them
        importlib.import_module("numpy")
        importlib.import_module("matplotlib")
    except ImportError as error:
        refuse(f"{error}, in {sys.executable}", '"$(scripts/find_python.sh)" scripts/report.py finds a Python that has it; '
               "scripts/install_deps.sh installs it")
    if o.compare:
        return compare(o.compare, o.tolerance)
    ends = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]  # as nohup has it
    for number in ends:
        signal.signal(number, signal.default_int_handler)
    folder, sweep = pathlib.Path(o.out), None
    if o.sweep:
        try:
            sweep = load(SWEEP).latest([row for _, row in run_log.objects(o.sweep, {"status"}, "no run of a sweep")])
        except (OSError, run_log.Damaged) as error:
            refuse(f"--sweep: {error}", "collect runs with scripts/mfu_sweep --out FILE.jsonl")
    folder.mkdir(parents=True, exist_ok=True)
    setup, done, failures, stopped = measure_all(o, folder)
    for number in ends:
        signal.signal(number, signal.SIG_DFL)
    command = '"$(scripts/find_python.sh)" ' + shlex.join(["scripts/report.py", *(word for word in sys.argv[1:] if word != "--fresh")])
    path, problems = write_report(folder, setup, done, failures, sweep, command, stopped)
    for problem in problems:
        print(f"ERROR {problem}", file=sys.stderr)
    print(path)
    return INTERRUPTED if stopped else int(bool(problems or failures))


if __name__ == "__main__":
    sys.exit(main())
