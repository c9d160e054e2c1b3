"""The share of each operation's transfers that every schedule hides, by the ratio of transfer time to computation.

All variants of an operation take turns in bench_fuse. The rate of the lab's link is set before every ten repetitions, so that the
payload takes `ratio` times as long as the whole computation without communication took in the ten before: a machine's speed changes
within minutes, a link's does not. (Over shared memory at its full speed: make bench, which prints bench_fuse's table.)

    chunking  T_nowire − T_compute: the cost of cutting into slices
    exposed   T − T_nowire: the cost of communication beside that; for `none`, which is not cut, T − T_compute
    hidden    1 − exposed / wire; wire: the payload over the line rate, without headers (about 4 %), the shortest possible transfer

Other work can only lengthen a time, so times are means over the faster half of the repetitions. The standard error of a figure is
its deviation over bootstrap samples of the repetitions, the same ones for all variants. A cell has the hidden share in %, ± one
standard error, and the cost of slices in ms. With one slice per rank a GEMM hides its transfer if its columns per rank (K of
GEMM ▸ reduce-scatter, n of all-gather ▸ GEMM) are at least e·F/(2B).

Sizes: a computation of 50 to 200 ms, so that timers and barriers do not count; half the batch above a ratio of 1. At a ratio of 0.1
one per cent of the communication is a thousandth of the computation, by which equal computations differ: trust the error there, not
the share. Ratios of 0.25 to 0.8, where all-gather and reduce-scatter may hide completely, are measured longer, on the largest
model, whose transfers disturb computation least. No schedule wins everywhere.
"""
import collections
import time

import numpy as np

import plots
import run_log
from runner import ROOT
from tables import markdown, number, percent

from .place import FREE_LINK
from .samples import drawings, undisturbed

NAME, TITLE = "operations", "Operations by ratio of communication to computation"
ELEMENT = 4  # bytes, fp32
TITLES = {
    "gather_gemm": "all-gather ▸ GEMM",
    "gemm_scatter": "GEMM ▸ reduce-scatter",
    "attention_scatter": "attention + projection ▸ reduce-scatter",
    "gemm_alltoall": "GEMM ▸ all-to-all",
    "attention_alltoall": "attention ▸ all-to-all ▸ projection",
    "alltoall_gemm": "all-to-all ▸ GEMM",
    "wgrad_scatter": "wgrad ▸ reduce-scatter",
}
FIELDS = "operation", "model", "where", "T", "B", "C", "columns", "H"
LAB = (
    ("gather_gemm", "d24", "mlp.fc1", 1024, 4, 1024, 4096, 16),
    ("gemm_scatter", "d24", "mlp.fc2", 1024, 4, 1024, 4096, 16),
    ("attention_scatter", "d24", "att", 1024, 4, 1024, 1024, 16),
    ("gemm_alltoall", "d24", "att.qkv", 1024, 4, 1024, 3072, 16),
    ("attention_alltoall", "d24", "att", 1024, 4, 1024, 1024, 16),
    ("alltoall_gemm", "d24", "att.qkv", 1024, 4, 1024, 3072, 16),
    ("wgrad_scatter", "d24", "fcw", 1024, 2, 1024, 4096, 16))
# Here a millisecond decides whether 99 % is hidden. (An MLP has no heads: 20 instead of d48's 25, which two ranks cannot share.)
DECISIVE = ("gather_gemm", "d48", "mlp.fc1", 1024, 2, 1600, 6400, 20), ("gemm_scatter", "d48", "mlp.fc2", 1024, 2, 1600, 6400, 20)
# Other widths per rank, for the line of the rule.
WIDTHS = (("gather_gemm", "d24", "att.proj, backward", 2048, 4, 1024, 1024, 16),
          ("gemm_scatter", "d24", "att.proj", 2048, 4, 1024, 1024, 16))
QUICK = ("gather_gemm", "d12", "mlp.fc1", 256, 4, 768, 3072, 12), ("gemm_scatter", "d12", "mlp.fc2", 256, 4, 768, 3072, 12)
# Tables 1 and 4 of the paper (arXiv 2604.24013), which does not name its hardware and number of slices. It has four ranks, so its
# CommFuse is compared with N·m = 4. T_comm of its attention is assumed to be the time that Query-Split saves. Its ratio is that of
# the collective, ours that of the wire, which is harder. Work, case, ratio, hidden shares of its slicing and of its CommFuse:
PAPER = ((LAB[1], "MLP, 32 × 4096", 43.8 / (122.3 - 43.8), 1 - 7.1 / 43.8, 1 - 0.1 / 43.8),
         (LAB[2], "attention, 16 × 4096", (270.1 - 215.8) / 215.8, (270.1 - 246.1) / (270.1 - 215.8), 1.0),
         (LAB[2], "attention, 4 × 8192", (195.6 - 145.1) / 145.1, (195.6 - 279.7) / (195.6 - 145.1), 1.0))
# Operations, ratios, approximate seconds of each point: at least ten repetitions.
FULL_RUNS = ((LAB, (0.1, 0.25, 0.5, 0.8, 1.0, 1.5, 3.0), 35), (DECISIVE, (0.25, 0.5, 0.8), 120), (WIDTHS, (0.25, 0.5, 1.5), 35),
             *(((work,), (ratio,), 35) for work, _, ratio, *_ in PAPER))
QUICK_RUNS = (QUICK, (0.5, 1.5), 8),
REPETITIONS = 10


def points(place, quick):
    runs = QUICK_RUNS if quick else FULL_RUNS
    return [point_of(place, work, ratio, seconds) for works, ratios, seconds in runs for work in works for ratio in ratios
            if place.kind == "lab"]


def point_of(place, work, ratio, seconds):
    """With the largest number of ranks that has cores and divides the shapes."""
    point = dict(zip(FIELDS, work), ratio=ratio, seconds=seconds)
    point["B"] //= 2 if ratio > 1 else 1
    return {**point, "ranks": max(n for n in (2, 4, 8) if n <= place.ranks and point["H"] % n == 0)}


def payload_bytes(point):
    """Bytes that each rank sends in one run, without headers."""
    ranks, operation = point["ranks"], point["operation"]
    if operation == "wgrad_scatter":
        return (ranks - 1) * (point["columns"] // ranks) * point["C"] * ELEMENT
    width = point["columns"] // ranks if "alltoall" in operation else point["C"]
    return (ranks - 1) * (point["T"] // ranks) * point["B"] * width * ELEMENT


# --- measuring ---


def shape_of(point):
    """In bench_fuse's format."""
    return ",".join(str(point[size]) for size in FIELDS[3:])


def run(place, point, *only):
    """bench_fuse's lines by their names."""
    command = [f"{ROOT}/build/release/tests/bench/bench_fuse", "--op", point["operation"], "--shape", shape_of(point),
               "--repetitions", REPETITIONS, "--json", *only]
    return {line["variant"]: line for line in run_log.printed(place.run(point["ranks"], command))}


def measure(place, point):
    """Measures ten repetitions at a time, over a link set by the last ten."""
    bits, end = 8 * payload_bytes(point), time.monotonic() + point["seconds"]
    samples, wires, found = collections.defaultdict(list), [], run(place, point, "--only", "compute")
    while not wires or time.monotonic() < end:
        compute = undisturbed(found["compute"]["samples_ms"])
        place.rate = min(FREE_LINK, 1e3 * bits / (point["ratio"] * float(compute)))
        found = run(place, point)
        for name, line in found.items():
            samples[name] += line["samples_ms"]
        wires += len(found["compute"]["samples_ms"]) * [1e3 * bits / place.rate]
    # The wire's time in the repetitions that count in the computation's time.
    return accounts(point, samples, float(undisturbed(samples["compute"], wires)))


# --- arithmetic ---


def accounts(point, samples, wire_ms):
    """A row for each variant."""
    count = min(map(len, samples.values()))  # some variants have several turns in each repetition
    drawn = drawings(count)
    turns = {name: np.reshape(one, (count, -1)).T for name, one in samples.items()}
    # Turn by turn, because the faster half of many samples is faster than that of a few.
    times = {name: float(undisturbed(one).mean()) for name, one in turns.items()}
    redrawn = {name: undisturbed(one[:, drawn]).mean(axis=0) for name, one in turns.items()}
    rows = []
    for name, one in samples.items():
        mode, _, slices = name.partition(":")
        p10, median, p90 = map(float, np.percentile(one, [10, 50, 90]))
        row = {**{key: point[key] for key in (*FIELDS, "ranks")}, "ratio_asked": point["ratio"],
               "ratio": wire_ms / times["compute"], "label": name, "repetitions": count, "ms": median, "p10_ms": p10, "p90_ms": p90,
               "undisturbed_ms": times[name], "compute_ms": times["compute"], "wire_ms": wire_ms}
        if mode not in ("compute", "comm", "nowire"):
            same = "compute" if mode == "none" else f"nowire:{slices}" if slices not in ("", "1") else "nowire"
            exposed = times[name] - times[same]
            row.update(chunking_ms=times[same] - times["compute"], exposed_ms=exposed, hidden_share=1 - exposed / wire_ms,
                       hidden_error_share=float(np.std(redrawn[name] - redrawn[same])) / wire_ms)
        rows.append(row)
    return rows


def threshold(row):
    """e·F/(2B): the columns per rank with which a GEMM hides the transfer of a slice (F measured flop/s, B bytes/s of the line)."""
    flops = 2 * row["T"] * row["B"] * row["C"] * row["columns"] / row["ranks"] / (row["compute_ms"] / 1e3)
    return ELEMENT * flops / (2 * payload_bytes(row) / (row["wire_ms"] / 1e3))


# --- tables and the figure ---


def by_point(rows):
    """The rows of each point by their labels, the points by place and ratio."""
    found = {}
    for row in sorted(rows, key=lambda row: (row["where"], row["ratio"])):
        found.setdefault((*(row[name] for name in FIELDS), row["ratio_asked"]), {})[row["label"]] = row
    return list(found.values())


def line_of(by):
    row = by["compute"]
    line = {"T × B × C → columns": f"{row['model']} {row['where']}: {row['T']} × {row['B']} × {row['C']} → {row['columns']}",
            "wire / computation": f"**{row['ratio']:.2f}**", "computation, ms": number(row["compute_ms"]),
            "ranks": row["ranks"], "columns of each": row["columns"] // row["ranks"]}
    if row["operation"] in ("gather_gemm", "gemm_scatter"):
        line["e·F/(2B)"] = f"{threshold(row):.0f}"
    return line | {name: f"{percent(one['hidden_share'])} ± {percent(one['hidden_error_share'])}, {number(one['chunking_ms'])}"
                   for name, one in by.items() if "hidden_share" in one}


def beside_the_paper(by):
    """In this comparison the cost of slices counts as exposed."""
    row, ring = by["compute"], "ring:2" if by["compute"]["ranks"] == 2 else "ring"
    slicing, commfuse = (1 - (by[name]["exposed_ms"] + by[name]["chunking_ms"]) / row["wire_ms"] for name in ("slice:4", ring))
    return [{"the paper's": case, "ratio": f"{ratio:.2f}",
             "slicing in four, %": percent(slicing), "its slicing": percent(its_slicing),
             "commfuse, N·m = 4, %": percent(commfuse), "its CommFuse": percent(its_commfuse)}
            for work, case, ratio, its_slicing, its_commfuse in PAPER if (work[0], ratio) == (row["operation"], row["ratio_asked"])]


def tables(rows):
    points = by_point(rows)
    titled = {title: [line_of(by) for by in points if by["compute"]["operation"] == operation]
              for operation, title in TITLES.items()}
    titled["Beside the paper: hidden share of the wire's time"] = [line for by in points for line in beside_the_paper(by)]
    return "\n".join(f"### {title}\n\n{markdown(lines)}" for title, lines in titled.items() if lines)


def figures(rows):
    figure, ((axes,),) = plots.panels(size=(6, 4.8))
    ends = []
    for operation, marker in (("gather_gemm", "s"), ("gemm_scatter", "o")):
        mine = [(row["columns"] // row["ranks"], threshold(row), row["hidden_share"]) for row in rows
                if row["operation"] == operation and row["label"] == "ring"]
        widths, thresholds, shares = zip(*mine)
        drawn = axes.scatter(widths, thresholds, c=np.clip(shares, 0, 1), vmin=0, vmax=1, cmap="RdYlGn", marker=marker, s=60,
                             edgecolors="#374151", linewidths=0.6, label=TITLES[operation])
        ends += [*widths, *thresholds]
    ends = [min(ends) / 1.5, max(ends) * 1.5]
    axes.plot(ends, ends, color="#1f4e79", linewidth=1.2, label="columns = e·F/(2B)")
    axes.fill_between(ends, [ends[0] / 10] * 2, ends, color="#1f4e79", alpha=0.06, linewidth=0)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends,
             xlabel="columns per rank: K of GEMM ▸ reduce-scatter, n of all-gather ▸ GEMM",
             ylabel="e·F/(2B) as measured", title="Below the line one slice per rank hides all")
    figure.colorbar(drawn, label="hidden share, ring, one slice per rank")
    axes.legend()
    axes.grid(which="both")
    return {"_line": figure}
