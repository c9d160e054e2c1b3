#!/usr/bin/env python3
"""make report: run the experiments that fit this machine, and write a report of them.

    scripts/report.py [--out DIR] [--place auto|lab|local] [--only NAME[,NAME]] [--quick]
    scripts/report.py --patience 4 …                        measure every point four times as long: smaller errors
    scripts/report.py --ratio 1 --only training …           a lab link whose transfers take as long as the ideal step

DIR (build/report) gets report.md, a CSV of all rows of each experiment, figures as PNG and SVG, and rows.jsonl: a line for each
point, written as soon as it is measured, with the conditions of the measurement. Everything else is made from that file. The same
command resumes an interrupted report, which holds the points measured so far and says so. Points of another machine, program or
place are left out, and measured again.

An experiment is a module of scripts/experiments: its text tells what it measures; NAME and TITLE; points(place, quick), each with
its approximate seconds; measure(place, point), which returns rows; tables(rows); figures(rows), by the ends of their names; and
perhaps problems(rows), which are errors on any machine.
"""
import csv
import datetime
import hashlib
import os
import pathlib
import shlex
import signal
import sys
import time

import lab
import plots
import run_log
from command import Parser, note, positive, some_of, status_of, whole, write_whole
from runner import ROOT

try:  # before hours are spent, not after them
    from experiments import ablation, timeline, training
    from experiments.steps import Place
    plots.pyplot()
except ImportError as error:
    sys.exit(f"report.py: {error}, in {sys.executable}\n  \"$(scripts/find_python.sh)\" scripts/report.py uses a Python that has it; "
             "scripts/install_deps.sh installs it")

EXPERIMENTS = {module.NAME: module for module in (ablation, training, timeline)}  # in the order of the report
CONFIG = "machine", "compiler", "mpi", "oneDNN"  # of make config
LOAD_MAX = 0.1  # of each core, from other work: above it, times change from minute to minute
PROGRAMS = "train_gpt", "tests/bench/bench_train"
INTERRUPTED = 130


def conditions_of(place):
    """Of what is measured from now on. Points of another setup do not belong in one table."""
    build, config = pathlib.Path(ROOT, "build/release"), place.runner.output(["make", "-s", "config"])
    lines = dict(line.split(maxsplit=1) for line in config.splitlines())
    program = hashlib.sha256(b"".join((build / name).read_bytes() for name in PROGRAMS)).hexdigest()[:12]
    return {"setup": {"place": place.kind, "cores": place.cores, **{name: lines[name] for name in CONFIG},
                      "version": (build / "version").read_text().strip(), "program": program},
            "date": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"), "load": os.getloadavg()[0]}


def doubts(conditions):
    """Why figures are less exact on this machine; "" if no reason is known."""
    cores, load = conditions["setup"]["cores"], conditions["load"]
    if shortage := lab.shortage(2, cores):
        return f"In this report {lab.SHARED}: {shortage}"
    if load > LOAD_MAX * cores:
        return f"Other work shares these processors, so times differ from minute to minute: load {load:.2f} at the start"
    return ""


def caption(conditions):
    setup = conditions["setup"]
    shortage = lab.shortage(2, setup["cores"])
    shared = shortage and f" (**{lab.SHARED}**: {shortage})"
    return (f"{setup['machine']}{shared}, load {conditions['load']:.2f} at the start; {setup['compiler']}; {setup['mpi']}; "
            f"oneDNN {setup['oneDNN']}; commfuse {setup['version']} ({setup['program']}); "
            f"{'lab, link as named' if setup['place'] == 'lab' else 'one host, shared memory'}; {conditions['date']}")


def run(place, todo, keep, failed):
    """Measures points. Those that fail are added to `failed`, and the others are still measured."""
    for number, (name, point) in enumerate(todo):
        left = sum(point["seconds"] for _, point in todo[number:])
        short = " ".join(str(value) for value in point.values() if isinstance(value, (str, int, float)))[:70]
        note(f"[{number + 1}/{len(todo)}] {name} {short}  {left / 60:.0f} min left, or more")
        place.commands, begin = [], time.monotonic()
        try:
            rows = EXPERIMENTS[name].measure(place, point)
        except Exception as error:  # any error: the other points are still useful
            failed.append(f"not measured: {name} {short}: {error}")
            note(failed[-1])
        else:
            keep({"experiment": name, "point": point, "rows": rows, "seconds": round(time.monotonic() - begin, 2),
                  "commands": place.commands})


# --- writing ---


def section(module, lines, folder, where):
    """Text, tables, figures, rows and commands of one experiment."""
    rows = [row for line in lines for row in line["rows"]]
    with whole(folder / f"{module.NAME}.csv", newline="") as file:
        table = csv.DictWriter(file, list(dict.fromkeys(column for row in rows for column in row)))
        table.writeheader()
        table.writerows(rows)
    text = [f"## {module.TITLE}", "", module.__doc__.strip(), "", module.tables(rows)]
    for end, figure in module.figures(rows).items():
        plots.save(figure, folder / (module.NAME + end))
        text += [f"![{module.TITLE}]({module.NAME}{end}.png)", ""]
    commands = list(dict.fromkeys(command for line in lines for command in line["commands"]))
    return "\n".join([
        *text, f"*{where}.* Every row: [{module.NAME}.csv]({module.NAME}.csv); figures also as SVG.", "",
        f"<details><summary>{len(commands)} commands</summary>", "", "```sh", *commands, "```", "", "</details>", ""])


def problems_of(done):
    """Errors on any machine."""
    return [f"ERROR {line['experiment']} {problem}" for line in done
            for problem in getattr(EXPERIMENTS[line["experiment"]], "problems", lambda _: [])(line["rows"])]


def write_report(folder, conditions, done, wrong, command, stopped=False):
    text = [f"**{doubts(conditions)}.**", ""] if doubts(conditions) else []
    text += ["# What overlapping brings, measured", "", f"{caption(conditions)}.", ""]
    if stopped:
        text += [f"**Not complete: interrupted when {len(done)} points had been measured. The same command continues.**", ""]
    text += ["To repeat all of it:", "", "```sh",
             "make all build/release/tests/bench/bench_train", command, "```", "",
             "Single runs are listed at the end of each experiment; `$DIR` is any folder, and `$DIR/tokens.bin` any "
             "token file (`data/prepare.py`): contents do not change times.", ""]
    if wrong:
        text += ["## What went wrong", "", *(f"- **{' '.join(one.split())[:600]}**" for one in wrong), ""]
    cores = conditions["setup"]["cores"]
    plots.note = f"{cores} cores: {lab.SHARED}" if lab.shortage(2, cores) else ""
    for name, module in EXPERIMENTS.items():
        lines = [line for line in done if line["experiment"] == name]
        text += [section(module, lines, folder, caption(conditions))] if lines else []
    write_whole(folder / "report.md", "\n".join(text))


def options():
    parser = Parser(__doc__)
    parser.add_argument("--out", default="build/report", type=pathlib.Path, help="folder of the report (default: build/report)")
    parser.add_argument("--place", default="auto", choices=("auto", "lab", "local"))
    parser.add_argument("--only", metavar="NAME[,NAME]", type=some_of(EXPERIMENTS), default=list(EXPERIMENTS),
                        help=f"of {', '.join(EXPERIMENTS)}")
    parser.add_argument("--quick", action="store_true", help="smaller models, fewer repetitions: under five minutes")
    parser.add_argument("--patience", type=positive, default=1, metavar="X",
                        help="measure points X times as long, on a machine with other work (default: %(default)s)")
    parser.add_argument("--ratio", type=positive, default=0.5, metavar="X",
                        help="training and ablation in the lab: transfers over the ideal step (default: %(default)s)")
    return parser.parse_args()


def main():
    o = options()
    o.out.mkdir(parents=True, exist_ok=True)
    for number in signal.SIGINT, signal.SIGTERM:
        signal.signal(number, signal.default_int_handler)
    place, failed, stopped = Place(o.place, o.ratio), [], False
    now, rows = conditions_of(place), run_log.Rows(o.out / "rows.jsonl", "experiment")
    points = [(name, {**point, "seconds": o.patience * point["seconds"]})
              for name, module in EXPERIMENTS.items() for point in module.points(place, o.quick)]
    done = [line for line in rows.done if line["setup"] == now["setup"] and (line["experiment"], line["point"]) in points]
    there = [(line["experiment"], line["point"]) for line in done]
    todo = [point for point in points if point[0] in o.only and point not in there]
    note(f"{len(todo)} points to measure" + (f", {len(there)} are there already" if there else ""))
    if doubts(now):
        note(doubts(now))

    def keep(line):
        done.append({**now, **line})
        rows.append(done[-1])
    try:
        run(place, todo, keep, failed)
    except KeyboardInterrupt:
        stopped = True
        note(f"\ninterrupted: {len(done)} points are kept in {rows.path}; the same command continues from there")
    wrong = problems_of(done) + failed
    command = f'"$(scripts/find_python.sh)" {shlex.join(["scripts/report.py", *sys.argv[1:]])}'
    write_report(o.out, done[0] if done else now, done, wrong, command, stopped)
    note("".join(f"{one}\n" for one in wrong) + f"{o.out}/report.md")
    return INTERRUPTED if stopped else int(bool(wrong))


if __name__ == "__main__":
    sys.exit(status_of(main))
