#!/usr/bin/env python3
"""Measured tables of documents, from rows that the repository keeps.

    tests/bench/measured.py            prints them
    tests/bench/measured.py --write    puts them into the documents, each between the comments that name it

The rows are those of three commands (--rows names another folder than scripts/experiments/results):

    scripts/report.py --place lab --only ablation --ratio 0.7 --out DIR    ablation.csv; ablation-2.csv: another day or machine
    tests/bench/peers.py --out DIR/peers.csv                               peers.csv
    tests/bench/optimizers.py --text FILE --out DIR/optimizers.csv         optimizers.csv, and its picture
"""
import argparse
import csv
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/bench")]
from command import Problem, status_of, write_whole  # first: it says that this Python is too old

import numpy as np

import optimizers
import peers
from experiments import ablation, steps
from tables import markdown

COMMAND = "scripts/report.py --place lab --only ablation --ratio 0.7 --out DIR"
SHOWN = "none", "slice:4", "ring:4", "auto"
MESHES = {"tpsp 2x1": "TPSP, tp 2", "up 2x1": "UP, tp 2", "tpsp 1x2": "dp 2"}
DOCUMENTS = {"ablation": "README.md", "peers": "README.md", "pairs": "tests/bench/README.md",
             "optimizers": "layers/optimizer/README.md"}


def number(text):
    try:
        return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
    except ValueError:
        return text


def read(path):
    with open(path, encoding="utf-8", newline="") as file:
        rows = [{name: cell if name == "commit" else number(cell) for name, cell in row.items()} for row in csv.DictReader(file)]
    if not rows:
        raise Problem(f"{path} has no rows")
    return rows


def source(rows):
    first = rows[0]
    commits = " and ".join(dict.fromkeys(row["commit"] for row in rows))
    return f"{first['processor']}, {first['date']}, commit {commits}"


def percent(modes, mode, other):
    """By how much the step of `mode` differs from the other's, in pairs of one round, with its 95 % interval."""
    middle, low, high = steps.beside(modes[mode], modes[other])
    return f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})" + ", not significant" * bool(low <= 0 <= high)


def less_exposed(modes, mode, other):
    return f"{100 * (np.median(modes[mode]['exposed_ms']) / np.median(modes[other]['exposed_ms']) - 1):+.0f} %"


def ablation_table(runs):
    """The first run; the last column is of the second."""
    lines, meshes = [], [steps.by_mesh(rows) for rows in runs]
    columns = {"`ring:4` vs. `none`": (0, "none"), "`ring:4` vs. `slice:4`": (0, "slice:4"),
               f"the same, {runs[-1][0]['date']}": (1, "slice:4")}
    for mesh, modes in meshes[0].items():
        ms, exposed = ({mode: np.median(modes[mode][name]) for mode in (*SHOWN, "ideal")} for name in ("step_ms", "exposed_ms"))
        for name, cells, compare in ((f"{MESHES.get(mesh, mesh)}: step ÷ `ideal`", [f"{ms[mode] / ms['ideal']:.3f}" for mode in SHOWN], percent),
                                     ("exposed, ms", [f"{exposed[mode]:.0f}" for mode in SHOWN], less_exposed)):
            lines.append({"": name, **{f"`{mode}`": cell for mode, cell in zip(SHOWN, cells)}, **{
                column: compare(meshes[run][mesh], "ring:4", other) for column, (run, other) in columns.items() if run < len(runs)}})
    return markdown(lines)


def span(values, form):
    low, high = (format(value, form) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def ablation_setup(rows):
    """What was measured, and how."""
    meshes = steps.by_mesh(rows)
    ideal = [modes["ideal"] for modes in meshes.values()]
    row = rows[0]
    layers, channels, _ = steps.SHAPES.get(row["model"], (row["model"], "?", 0))
    rounds = ", ".join(f"{len(modes['ideal']['step_ms'])} ({MESHES.get(mesh, mesh)})" for mesh, modes in meshes.items())
    rates, shares = np.concatenate([mine["link_bits_per_s"] for mine in ideal]) / 1e6, [
        np.median(mine["line_ms"]) / np.median(mine["step_ms"]) for mine in ideal]
    return (f"{layers} layers of {channels} channels, {row['parameters'] / 1e6:.0f} M parameters, {row['batch']} sequences of "
            f"{row['seq']} tokens, fp32; `ideal` takes {span([np.median(mine['step_ms']) for mine in ideal], '.0f')} ms. Each row's link "
            f"rate ({span(rates, '.0f')} Mbit/s) is such that a step's bytes alone take {span(shares, '.1f')} times `ideal`. Rounds: {rounds}.")


def pairs_table(runs):
    """Every pair of modes that the experiment compares, in each run."""
    meshes = [steps.by_mesh(rows) for rows in runs]
    return markdown([{"step of": f"`{mode}` vs. `{other}`", **{
        MESHES.get(mesh, mesh) + f", run {number}" * (len(runs) > 1): percent(of_run[mesh], mode, other)
        for mesh in meshes[0] for number, of_run in enumerate(meshes, 1)}} for mode, other in ablation.PAIRS])


def added(rows):
    """What two ranks add to the step of one process, which computes the same and communicates nothing."""
    ms = {key: np.median([row["step_ms"] for row in rows if (row["group"], row["mode"]) == key and row["step"] > 0])
          for key in {(row["group"], row["mode"]) for row in rows}}
    said = []
    for group, peer in ("tp 2", "tp"), ("dp 2", "ddp"):
        found = [f"{name} {ms[group, mode] - ms['one process', alone]:.0f} ms" for name, mode, alone in (
            ("`none`", "none", "none"), ("`ring:4`", "ring:4", "none"),
            ("with AVX2 only", "ring:4" + peers.AVX2, "none" + peers.AVX2), (peers.NAMES[peer], peer, "one"),
            ("compiled", f"{peer} compiled", "one compiled")) if (group, mode) in ms and ("one process", alone) in ms]
        said += [f"{group}: {', '.join(found)}"] if found else []
    return (f"Added to the step of one process by communication, {'; '.join(said)}." if said else "") + "\n"


def parts(folder):
    """Of each comment of a document: what stands there, if there are rows."""
    found, files = {}, [folder / f"ablation{number}.csv" for number in ("", "-2")]
    runs = [read(path) for path in files if path.exists()]
    if runs:
        again = "".join(f"; again: {source(rows)}, [every round]({{to}}{path.name})" for path, rows in zip(files[1:], runs[1:]))
        found["ablation"] = (f"{ablation_table(runs)}\n{ablation_setup(runs[0])} `{COMMAND}`: {source(runs[0])}, [every round]"
                             f"({{to}}{files[0].name}){again}. [Every pair](tests/bench/README.md#the-schedule-alone-measured).\n")
        found["pairs"] = f"{pairs_table(runs)}\n" + "".join(f"Run {number}: {source(rows)}. {ablation_setup(rows)}\n"
                                                           for number, rows in enumerate(runs, 1))
    if (folder / "peers.csv").exists():
        rows = peers.read(folder / "peers.csv")
        turns = 1 + max(row["turn"] for row in rows)
        steps_each = max(row["step"] for row in rows)
        found["peers"] = (f"{peers.table(rows)}\n{source(rows)}, {rows[0]['rate']}; {steps_each} steps of each in {turns} "
                          f"turn{'s' * (turns > 1)}; × ours: step over `ring:4`'s of the same turn (last rows: over one process "
                          f"of this program), median and range of the turns; AVX2: over the same with AVX2 only "
                          f"([every step]({{to}}peers.csv)). {added(rows)}")
    if (folder / "optimizers.csv").exists():
        found["optimizers"] = f"{optimizers.table(optimizers.read(folder / 'optimizers.csv'))}\n"
    return {name: text.format(to="scripts/experiments/results/") for name, text in found.items()}


def filled(document, found, path="README.md"):
    """The document, with each part between its comments."""
    for name, text in found.items():
        begin, end = f"<!-- {name}: tests/bench/measured.py -->\n", f"<!-- end of {name} -->"
        if document.count(begin) != 1 or document.count(end) != 1:
            raise Problem(f"{path} has no place for {name}", f"write the lines {begin.strip()} and {end}")
        head, rest = document.split(begin)
        document = head + begin + "\n" + text + "\n" + end + rest.split(end)[1]
    return document


def documents(found):
    """Each document of the repository as it should be."""
    for path in dict.fromkeys(DOCUMENTS.values()):
        text = (ROOT / path).read_text(encoding="utf-8")
        yield path, text, filled(text, {name: part for name, part in found.items() if DOCUMENTS[name] == path}, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=pathlib.Path, default=ROOT / "scripts/experiments/results", metavar="DIR")
    parser.add_argument("--write", action="store_true", help="into the documents")
    o = parser.parse_args()
    found = parts(o.rows)
    if o.write:
        for path, _, text in documents(found):
            write_whole(ROOT / path, text)
    else:
        print("\n".join(found.values()))


if __name__ == "__main__":
    sys.exit(status_of(main))
