"""The share of each operation's transfers that every schedule hides, by the ratio of transfer time to computation.

All variants of an operation take turns in bench_fuse. The rate of the lab's link is set before every ten repetitions, so that the
payload takes `ratio` times as long as the whole computation without communication took in the ten before: a machine's speed changes
within minutes, a link's does not. (Over shared memory at its full speed: make bench, which prints bench_fuse's table.)

    chunking  T_nowire − T_compute: the cost of cutting into slices
    exposed   T − T_nowire: the cost of communication beside that; for `none`, which is not cut, T − T_compute
    hidden    1 − exposed / wire; wire: the payload over the line rate, without headers (about 4 %), the shortest possible transfer

Other work can only lengthen a time, so times are means over the faster half of the repetitions. The standard error of a figure is
its deviation over bootstrap samples of the repetitions, the same ones for all variants.

Sizes: a computation of 50 to 200 ms, so that timers and barriers do not count; half the batch above a ratio of 1. At a ratio of 0.1
one per cent of the communication is a thousandth of the computation, by which equal computations differ: trust the error there, not
the share. Ratios of 0.25 to 0.8, where all-gather and reduce-scatter may hide completely, are measured longer, on the largest
model, whose transfers disturb computation least. No schedule wins everywhere.
"""
import time

import numpy as np

import plots
import run_log
from runner import ROOT
from tables import markdown, number, percent

from .place import FREE_LINK

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
# Operations, ratios, approximate seconds of each point: at least ten repetitions.
FULL_RUNS = (LAB, (0.1, 0.25, 0.5, 0.8, 1.0, 1.5, 3.0), 35), (DECISIVE, (0.25, 0.5, 0.8), 120), (WIDTHS, (0.25, 0.5, 1.5), 35)
QUICK_RUNS = (QUICK, (0.5, 1.5), 8),
REPETITIONS, DRAWINGS = 10, 400
# Tables 1 and 4 of the paper (arXiv 2604.24013), which does not name its hardware and number of slices. It has four ranks, so its
# CommFuse is compared with N·m = 4. T_comm of its attention is assumed to be the time that Query-Split saves. Its ratio is that of
# the collective, ours that of the wire, which is harder. Operation, case, ratio, hidden shares of its slicing and of its CommFuse:
PAPER = (("gemm_scatter", "MLP, 32 × 4096", 43.8 / (122.3 - 43.8), 1 - 7.1 / 43.8, 1 - 0.1 / 43.8),
         ("attention_scatter", "attention, 16 × 4096", (270.1 - 215.8) / 215.8, (270.1 - 246.1) / (270.1 - 215.8), 1.0),
         ("attention_scatter", "attention, 4 × 8192", (195.6 - 145.1) / 145.1, (195.6 - 279.7) / (195.6 - 145.1), 1.0))


def points(place, quick):
    if place.kind != "lab":
        return []
    found = [dict(zip(FIELDS, work), ratio=ratio, seconds=seconds)
             for works, ratios, seconds in (QUICK_RUNS if quick else FULL_RUNS) for work in works for ratio in ratios]
    found += [dict(zip(FIELDS, work), ratio=ratio, seconds=FULL_RUNS[0][2])
              for operation, _, ratio, *_ in PAPER for work in LAB if work[0] == operation and not quick]
    for point in found:  # the largest number of ranks that has cores and divides the shapes
        point["ranks"] = max(n for n in (2, 4, 8) if n <= place.ranks and point["H"] % n == 0)
        point["B"] //= 2 if point["ratio"] > 1 else 1
    return found


def shape_of(point):
    """In bench_fuse's format."""
    return ",".join(str(point[size]) for size in FIELDS[3:])


def payload_bytes(point):
    """Bytes that each rank sends in one run, without headers."""
    ranks, operation = point["ranks"], point["operation"]
    if operation == "wgrad_scatter":
        return (ranks - 1) * (point["columns"] // ranks) * point["C"] * ELEMENT
    width = point["columns"] // ranks if "alltoall" in operation else point["C"]
    return (ranks - 1) * (point["T"] // ranks) * point["B"] * width * ELEMENT


# --- measuring ---


def run(place, point, only=None):
    """bench_fuse's lines by their names."""
    command = [f"{ROOT}/build/release/tests/bench/bench_fuse", "--op", point["operation"], "--shape", shape_of(point),
               "--repetitions", REPETITIONS, "--json", *(["--only", only] if only else [])]
    return {line["variant"]: line for line in run_log.printed(place.run(point["ranks"], command))}


def measure(place, point):
    """Measures ten repetitions at a time, over a link set by the last ten."""
    bits, end = 8 * payload_bytes(point), time.monotonic() + point["seconds"]
    samples, wires, found = {}, [], run(place, point, "compute")
    while not wires or time.monotonic() < end:
        compute = undisturbed_ms(found["compute"]["samples_ms"])
        place.rate = min(FREE_LINK, 1e3 * bits / (point["ratio"] * float(compute)))
        found = run(place, point)
        for name, line in found.items():
            samples.setdefault(name, []).extend(line["samples_ms"])
        wires += len(found["compute"]["samples_ms"]) * [1e3 * bits / place.rate]
    # The wire's time in the repetitions that count in the computation's time.
    return accounts(point, samples, float(np.mean(np.array(wires)[faster_half(samples["compute"])])))


# --- arithmetic ---


def faster_half(samples):
    """Their indices."""
    return np.argsort(samples, kind="stable")[:(len(samples) + 1) // 2]


def undisturbed_ms(samples):
    """Mean over the faster half, for each row of samples."""
    ordered = np.sort(samples, axis=-1)
    return ordered[..., :(ordered.shape[-1] + 1) // 2].mean(axis=-1)


def accounts(point, samples, wire_ms):
    """A row for each variant."""
    count = min(map(len, samples.values()))  # some variants have several turns in each repetition
    drawn = np.random.default_rng(1).integers(count, size=(DRAWINGS, count))
    turns = {name: np.reshape(one, (count, -1)).T for name, one in samples.items()}
    # Turn by turn, because the faster half of many samples is faster than that of a few.
    times = {name: float(undisturbed_ms(one).mean()) for name, one in turns.items()}
    redrawn = {name: undisturbed_ms(one[:, drawn]).mean(axis=0) for name, one in turns.items()}
    rows = []
    for name, one in samples.items():
        mode, _, slices = name.partition(":")
        p10, median, p90 = map(float, np.percentile(one, [10, 50, 90]))
        row = {**{key: point[key] for key in (*FIELDS, "ranks")}, "ratio_asked": point["ratio"],
               "ratio": wire_ms / times["compute"], "label": name, "repetitions": count, "ms": median, "p10_ms": p10, "p90_ms": p90,
               "undisturbed_ms": times[name], "compute_ms": times["compute"], "wire_ms": wire_ms, **dict.fromkeys(
                   ("hidden_share", "hidden_error_share", "chunking_ms", "exposed_ms"))}
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


def beside_the_paper(rows):
    """In this comparison the cost of slices counts as exposed."""
    lines = []
    for operation, case, ratio, slicing, commfuse in PAPER:
        by = {row["label"]: row for row in rows if (row["operation"], row["ratio_asked"]) == (operation, ratio)}
        ours = [1 - (by[name]["exposed_ms"] + by[name]["chunking_ms"]) / by[name]["wire_ms"]
                for name in by and ("slice:4", {2: "ring:2"}.get(by["compute"]["ranks"], "ring"))]
        if by:
            lines.append({"the paper's": case, "ratio": f"{ratio:.2f}", "slicing in four, %": percent(ours[0]),
                          "its slicing": percent(slicing), "commfuse, N·m = 4, %": percent(ours[1]),
                          "its CommFuse": percent(commfuse)})
    return ["### Beside the paper", "", "Hidden share of the wire's time.", "", markdown(lines)] if lines else []


def tables(rows):
    text = ["For each schedule: the hidden share of the wire's time in %, ± one standard error, and the cost of its slices in ms. "
            "With one slice per rank a GEMM hides its transfer if its columns per rank (K of GEMM ▸ reduce-scatter, n of "
            "all-gather ▸ GEMM) are at least e·F/(2B).\n"]
    for operation, title in TITLES.items():
        points = {}
        for row in sorted(rows, key=lambda row: (row["where"], row["ratio"])):
            if row["operation"] == operation:
                points.setdefault((row["where"], row["model"], shape_of(row), row["ratio_asked"]), {})[row["label"]] = row
        lines = []
        for by in points.values():
            row = next(iter(by.values()))
            line = {"T × B × C → columns": f"{row['model']} {row['where']}: {row['T']} × {row['B']} × {row['C']} → "
                                           f"{row['columns']}",
                    "wire / computation": f"**{row['ratio']:.2f}**", "computation, ms": number(row["compute_ms"]),
                    "ranks": row["ranks"], "columns of each": row["columns"] // row["ranks"]}
            if operation in ("gather_gemm", "gemm_scatter"):
                line["e·F/(2B)"] = f"{threshold(row):.0f}"
            lines.append(line | {
                name: f"{percent(one['hidden_share'])} ± {percent(one['hidden_error_share'])}, {number(one['chunking_ms'])}"
                for name, one in by.items() if one["hidden_share"] is not None})
        text += [f"### {title}", "", markdown(lines)] if lines else []
    return "\n".join([*text, *beside_the_paper(rows)])


def figures(rows, folder):
    figure, ((axes,),) = plots.panels(size=(6, 4.8))
    ends = [np.inf, 0]
    for operation, marker in (("gather_gemm", "s"), ("gemm_scatter", "o")):
        mine = [(row["columns"] // row["ranks"], threshold(row), row["hidden_share"]) for row in rows
                if row["operation"] == operation and row["label"] == "ring"]
        widths, thresholds, shares = zip(*mine)
        drawn = axes.scatter(widths, thresholds, c=np.clip(shares, 0, 1), vmin=0, vmax=1, cmap="RdYlGn", marker=marker, s=60,
                             edgecolors="#374151", linewidths=0.6, label=TITLES[operation])
        ends = [min(ends[0], *widths, *thresholds), max(ends[1], *widths, *thresholds)]
    ends = [ends[0] / 1.5, ends[1] * 1.5]
    axes.plot(ends, ends, color="#1f4e79", linewidth=1.2, label="columns = e·F/(2B)")
    axes.fill_between(ends, [ends[0] / 10] * 2, ends, color="#1f4e79", alpha=0.06, linewidth=0)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends,
             xlabel="columns per rank: K of GEMM ▸ reduce-scatter, n of all-gather ▸ GEMM",
             ylabel="e·F/(2B) as measured", title="Below the line one slice per rank hides all")
    figure.colorbar(drawn, label="hidden share, ring, one slice per rank")
    axes.legend()
    axes.grid(which="both")
    return plots.save(figure, folder, f"{NAME}_line")
