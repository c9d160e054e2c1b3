#!/usr/bin/env python3
"""make report: run the experiments that fit this machine, and write a report of them.

DIR (build/report) gets report.md, and of each experiment a CSV of all rows and perhaps a figure. They are written again after each
point, so an interrupted report holds what has been measured, and says so.

An experiment is a module of scripts/experiments: its text tells what it measures; NAME and TITLE; points(place, quick), each with
its approximate seconds; measure(place, point), which returns rows; shown(rows, folder), Markdown of tables, or of a figure in the
folder; and perhaps problems(rows), which are errors on any machine.
"""
import csv
import datetime
import os
import pathlib
import shlex
import sys

import lab
import plots
from command import Parser, at_least, note, some_of, status_of, whole, write_whole
from experiments import ablation, policy, timeline, training
from experiments.steps import Place

EXPERIMENTS = {module.NAME: module for module in (ablation, policy, training, timeline)}  # in the order of the report


def doubts(cores):
    """Why figures are less exact on so few; "" if no reason is known."""
    shortage = lab.shortage(2, cores)
    return shortage and f"**{lab.SHARED}**: {shortage}"


def caption_of(place):
    """The conditions of what is measured from now on."""
    config = dict(line.split(maxsplit=1) for line in place.runner.output(["make", "-s", "config"]).splitlines())
    shared = doubts(place.cores) and f" ({doubts(place.cores)})"
    return (f"{config['machine']}{shared}, load {os.getloadavg()[0]:.2f} at the start; {config['compiler']}; {config['mpi']}; "
            f"oneDNN {config['oneDNN']}; {config['build']}; "
            f"{'lab, link as named' if place.kind == 'lab' else 'one host, shared memory'}; "
            f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}")


# --- writing ---


def section(module, rows, commands, folder, where):
    """Text, tables or a figure, rows and commands of one experiment."""
    with whole(folder / f"{module.NAME}.csv", newline="") as file:
        table = csv.DictWriter(file, list(dict.fromkeys(column for row in rows for column in row)))
        table.writeheader()
        table.writerows({name: f"{cell:.9g}" if isinstance(cell, float) else cell for name, cell in row.items()} for row in rows)
    commands = list(dict.fromkeys(commands))
    return "\n".join([
        f"## {module.TITLE}", "", module.__doc__.strip(), "", module.shown(rows, folder),
        f"*{where}.* Every row: [{module.NAME}.csv]({module.NAME}.csv).", "",
        f"<details><summary>{len(commands)} commands</summary>", "", "```sh", *commands, "```", "", "</details>", ""])


def problems_of(done):
    """Errors on any machine."""
    return [f"ERROR {name} {problem}" for name, (rows, _) in done.items()
            for problem in getattr(EXPERIMENTS[name], "problems", lambda _: [])(rows)]


def write_report(folder, cores, caption, done, wrong, left=0):
    """done: of each experiment its rows and commands."""
    text = [f"In this report {doubts(cores)}.", ""] if doubts(cores) else []
    text += ["# What overlapping brings, measured", "", f"{caption}.", ""]
    if left:
        text += [f"**Not complete: {left} points were not measured.**", ""]
    text += ["To repeat all of it:", "", "```sh",
             "make all build/release/tests/bench/bench_train",
             f'"$(scripts/find_python.sh)" {shlex.join(["scripts/report.py", *sys.argv[1:]])}', "```", "",
             "Single runs are listed at the end of each experiment; `$DIR` is any folder, and `$DIR/tokens.bin` any "
             "token file (`data/prepare.py`): contents do not change times.", ""]
    if wrong:
        text += ["## What went wrong", "", *(f"- **{' '.join(one.split())[:600]}**" for one in wrong), ""]
    plots.note = doubts(cores) and f"{cores} cores: {lab.SHARED}"
    text += [section(EXPERIMENTS[name], *found, folder, caption) for name, found in done.items()]
    write_whole(folder / "report.md", "\n".join(text))


def main():
    parser = Parser(__doc__)
    parser.add_argument("--out", default="build/report", type=pathlib.Path, help="folder of the report (default: build/report)")
    parser.add_argument("--place", default="auto", choices=("auto", "lab", "local"))
    parser.add_argument("--only", metavar="NAME[,NAME]", type=some_of(EXPERIMENTS), default=list(EXPERIMENTS),
                        help=f"of {', '.join(EXPERIMENTS)}")
    parser.add_argument("--quick", action="store_true", help="smaller models, fewer repetitions: under five minutes")
    parser.add_argument("--patience", type=at_least(0.01, kind=float), default=1, metavar="X",
                        help="measure points X times as long, on a machine with other work (default: %(default)s)")
    parser.add_argument("--ratio", type=at_least(0.01, kind=float), default=0.5, metavar="X",
                        help="training and ablation in the lab: transfers over the ideal step (default: %(default)s)")
    o = parser.parse_args()
    o.out.mkdir(parents=True, exist_ok=True)
    place, done, failed = Place(o.place, o.ratio), {}, []
    caption = caption_of(place)
    stamp = {"commit": place.runner.printed("git", "describe", "--always", "--dirty"), "date": f"{datetime.date.today()}",
             "processor": caption.split(",")[0].replace("Model name ", "")}
    points = [(name, {**point, "seconds": o.patience * point["seconds"]})
              for name, module in EXPERIMENTS.items() if name in o.only for point in module.points(place, o.quick)]
    note(caption)
    for number, (name, point) in enumerate(points, 1):
        left = sum(point["seconds"] for _, point in points[number - 1:])
        short = " ".join(str(value) for value in point.values() if isinstance(value, (str, int, float)))[:70]
        note(f"[{number}/{len(points)}] {name} {short}  {left / 60:.0f} min left, or more")
        place.commands = []
        try:
            measured = EXPERIMENTS[name].measure(place, point)
            rows, commands = done.setdefault(name, ([], []))
            rows += [{**row, **stamp} for row in measured]
            commands += place.commands
        except Exception as error:  # any error: the other points are still useful
            failed.append(f"not measured: {name} {short}: {error}")
            note(failed[-1])
        wrong = problems_of(done) + failed
        write_report(o.out, place.cores, caption, done, wrong, len(points) - number)
    note("".join(f"{one}\n" for one in wrong) + f"{o.out}/report.md")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(status_of(main))
