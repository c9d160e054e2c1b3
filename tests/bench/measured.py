#!/usr/bin/env python3
"""The measured tables of README.md, from rows that the repository keeps.

    tests/bench/measured.py            prints them
    tests/bench/measured.py --write    puts them into README.md, each between the comments that name it

The rows are those of two commands (--rows names another folder than scripts/experiments/results):

    scripts/report.py --place lab --only ablation --ratio 0.7 --out DIR    ablation.csv; ablation-2.csv: another day or machine
    tests/bench/peers.py --out DIR/peers.csv                               peers.csv
"""
import argparse
import csv
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/bench")]
import numpy as np

import peers
from command import Problem, status_of, write_whole
from experiments import ablation, steps
from tables import markdown

COMMAND = "scripts/report.py --place lab --only ablation --ratio 0.7 --out DIR"
SHOWN = "none", "slice:4", "ring:4", "auto"
MESHES = {"tpsp 2x1": "TPSP, tp 2", "up 2x1": "UP, tp 2", "tpsp 1x2": "dp 2"}


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
    return f"{first['processor']}, {first['date']}, commit {first['commit']}"


def percent(modes, mode, other):
    """`mode` beside `other`, in pairs of one round."""
    said = steps.difference(modes, mode, other)
    return re.sub(r", \d+ rounds", "", said.split("` ")[2]) if " do not " in said else re.sub(r".* is | than .*?`.*?`", "", said)


def ablation_table(rows):
    lines = []
    for mesh, modes in steps.by_mesh(rows).items():
        ideal = np.median(modes["ideal"]["step_ms"])
        cells = {f"`{mode}`": f"{np.median(modes[mode]['step_ms']) / ideal:.3f}, {np.median(modes[mode]['exposed_ms']):.0f} ms"
                 for mode in SHOWN}
        lines.append({"step ÷ `ideal`, exposed": MESHES.get(mesh, mesh), **cells,
                      "`ring:4` beside `slice:4`": percent(modes, "ring:4", "slice:4"),
                      "cutting alone: `nowire:4` beside `ideal`": percent(modes, "nowire:4", "ideal"),
                      "rounds": len(modes["ideal"]["step_ms"])})
    return markdown(lines)


def ablation_text(rows):
    """What follows from the pairs, mesh by mesh."""
    said = [f"{MESHES.get(mesh, mesh)} (`ideal` {np.median(modes['ideal']['step_ms']):.0f} ms): " +
            "; ".join(steps.difference(modes, *pair) for pair in ablation.PAIRS[2:5]) + "."
            for mesh, modes in steps.by_mesh(rows).items()]
    return " ".join(said) + "\n"


def ranking(rows):
    """Of each mesh: from the shortest step to the longest, = between those that do not differ."""
    lines = []
    for mesh, modes in steps.by_mesh(rows).items():
        order = sorted(SHOWN, key=lambda mode: np.median(modes[mode]["step_ms"]))
        text = f"`{order[0]}`"
        for mode, other in zip(order, order[1:]):
            text += f" {'=' if steps.alike(modes[mode], modes[other]) else '<'} `{other}`"
        lines.append(f"{MESHES.get(mesh, mesh)} {text}")
    return "; ".join(lines)


def added(rows):
    """What two ranks add to the step of one process, which computes the same and communicates nothing."""
    ms = {key: np.median([row["step_ms"] for row in rows if (row["group"], row["mode"]) == key and row["step"] > 0])
          for key in {(row["group"], row["mode"]) for row in rows}}
    said = [f"{name} {ms['tp 2', mode] - ms['one process', alone]:.0f} ms" for name, mode, alone in (
        ("PyTorch's tensor parallelism", "tp", "one"), ("`none`", "none", "none"), ("`ring:4`", "ring:4", "none"))
            if ("tp 2", mode) in ms and ("one process", alone) in ms]
    return f"With tp 2, two ranks add to one process: {', '.join(said)}.\n" if said else ""


def parts(folder):
    """Of each comment of README: what stands there, if there are rows."""
    found = {}
    first, second = (folder / f"ablation{number}.csv" for number in ("", "-2"))
    if first.exists():
        rows = read(first)
        found["ablation"] = (f"{ablation_table(rows)}\nPairs of one round: the median difference (95 % interval). {source(rows)}; "
                             f"`{COMMAND}`; [every round]({{to}}{first.name}).\n{ablation_text(rows)}"
                             f"Ranking: {ranking(rows)}.\n")
        if second.exists():
            other = read(second)
            found["ablation"] += f"Again, {source(other)} ([rounds]({{to}}{second.name})): {ranking(other)}.\n"
    if (folder / "peers.csv").exists():
        rows = peers.read(folder / "peers.csv")
        turns = 1 + max(row["turn"] for row in rows)
        found["peers"] = (f"{peers.table(rows)}\n{source(rows)}, {rows[0]['rate']}, turns: {turns}; × ours: of one turn, ours is "
                          f"`ring:4` ([every step]({{to}}peers.csv)).\n{added(rows)}")
    return {name: text.format(to="scripts/experiments/results/") for name, text in found.items()}


def filled(document, found):
    """The document, with each part between its comments."""
    for name, text in found.items():
        begin, end = f"<!-- {name}: tests/bench/measured.py -->\n", f"<!-- end of {name} -->"
        if document.count(begin) != 1 or document.count(end) != 1:
            raise Problem(f"README.md has no place for {name}", f"write the lines {begin.strip()} and {end}")
        head, rest = document.split(begin)
        document = head + begin + "\n" + text + "\n" + end + rest.split(end)[1]
    return document


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=pathlib.Path, default=ROOT / "scripts/experiments/results", metavar="DIR")
    parser.add_argument("--write", action="store_true", help="into README.md")
    o = parser.parse_args()
    found = parts(o.rows)
    if o.write:
        write_whole(ROOT / "README.md", filled((ROOT / "README.md").read_text(encoding="utf-8"), found))
    else:
        print("\n".join(found.values()))


if __name__ == "__main__":
    sys.exit(status_of(main))
