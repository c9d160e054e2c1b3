"""What every schedule hides of each operation, by how long the wire is busy against the computation.

The lab's link has, at any time, the rate at which the payload takes `ratio` times as long as the computation does by then:
the ratio is the wire's, bytes over line rate. (Over shared memory, as fast as it is: make bench, which prints bench_fuse's
own table.)

Sizes: a computation of 50 to 200 ms, so that timers and barriers do not count; above a ratio of 1 half the batch, so
that a point stays below a minute. At a ratio of 0.1 one per cent of the communication is a thousandth of the
computation, which two computations of the same thing differ by: there the column ± matters more than the share. Whether
an all-gather and a reduce-scatter hide altogether (0.25 to 0.8) is asked of the largest model, whose bytes disturb the
least computation, with more repetitions than the rest.
Not every schedule wins everywhere, and every one stays in the tables.

Beside the paper (arXiv 2604.24013): points at the ratios of its tables 1 and 4. Its hardware and its number of slices are not
named; it has four ranks, so its CommFuse is compared with the m of N·m = 4. T_comm of its attention layer is not given: it is
taken to be what Query-Split saves. Its ratio is that of its collective, ours that of the wire, the harder test.

Delay: a transfer that keeps the line busy for w ms and is under way for d ms is hidden by the c ms of the slice computed
meanwhile only if all of it fits into c; N ranks do this N − 1 times. So a ring with one slice a rank must expose
(N − 1)·max(0, w + d − c). At a ratio of 0.5 two ranks have w = c, and every delay shows; at 0.25 half of c is in reserve.
"""
import plots
from tables import markdown, number, percent, spread

from . import fused

NAME = "operations"
TITLE = "Operations by ratio of communication to computation"

RATIOS = (0.1, 0.25, 0.5, 0.8, 1.0, 1.5, 3.0)
QUICK_RATIOS = (0.5, 1.5)
SECONDS, QUICK_SECONDS = 35, 8  # of one point, about; at least ten repetitions in any case
# operation, model, place, T, B, C, columns, heads
LAB = (
    ("gather_gemm", "d24", "mlp.fc1", 1024, 4, 1024, 4096, 16),
    ("gemm_scatter", "d24", "mlp.fc2", 1024, 4, 1024, 4096, 16),
    ("attention_scatter", "d24", "att", 1024, 4, 1024, 1024, 16),
    ("gemm_alltoall", "d24", "att.qkv", 1024, 4, 1024, 3072, 16),
    ("attention_alltoall", "d24", "att", 1024, 4, 1024, 1024, 16),
    ("alltoall_gemm", "d24", "att.qkv", 1024, 4, 1024, 3072, 16),
    ("wgrad_scatter", "d24", "fcw", 1024, 2, 1024, 4096, 16),
)
# Whether 99 % hide is a question of a millisecond. (Heads do not matter to an MLP; two ranks cannot share the 25 of d48.)
DECISIVE = (
    ("gather_gemm", "d48", "mlp.fc1", 1024, 2, 1600, 6400, 20),
    ("gemm_scatter", "d48", "mlp.fc2", 1024, 2, 1600, 6400, 20),
)
DECISIVE_RATIOS, DECISIVE_SECONDS = (0.25, 0.5, 0.8), 120
# Other widths per rank, for the line of what can hide.
WIDTHS = (
    ("gather_gemm", "d24", "att.proj, backward", 2048, 4, 1024, 1024, 16),
    ("gemm_scatter", "d24", "att.proj", 2048, 4, 1024, 1024, 16),
)
WIDTH_RATIOS = (0.25, 0.5, 1.5)
DELAYS_MS, DELAY_RATIOS = (0.1, 1, 5), (0.25, 0.5)  # of the first two
PAPER = (  # operation, case, ratio, hidden shares of its slicing and of its CommFuse
    ("gemm_scatter", "MLP, 32 × 4096", 43.8 / (122.3 - 43.8), 1 - 7.1 / 43.8, 1 - 0.1 / 43.8),
    ("attention_scatter", "attention, 16 × 4096", (270.1 - 215.8) / 215.8, (270.1 - 246.1) / (270.1 - 215.8), 1.0),
    ("attention_scatter", "attention, 4 × 8192", (195.6 - 145.1) / 145.1, (195.6 - 279.7) / (195.6 - 145.1), 1.0))
QUICK = tuple((operation, "d12", where, 256, 4, 768, 3072, 12)
              for operation, where in (("gather_gemm", "mlp.fc1"), ("gemm_scatter", "mlp.fc2")))
FIELDS = ("operation", "model", "where", "T", "B", "C", "columns", "H")


def points(place, quick):
    if place.kind != "lab":
        return []
    if quick:
        works = [(work, {"ratio": ratio}) for work in QUICK for ratio in QUICK_RATIOS]
    else:
        full = (DECISIVE, DECISIVE_RATIOS), (LAB, RATIOS), (WIDTHS, WIDTH_RATIOS)
        works = [(work[:4] + (work[4] // 2 if ratio > 1 else work[4],) + work[5:], {"ratio": ratio})
                 for some, ratios in full for work in some for ratio in ratios]
        works += [(work, {"ratio": ratio}) for operation, _, ratio, *_ in PAPER for work in LAB if work[0] == operation]
        works += [(work, {"ratio": ratio, "delay_ms": delay})
                  for work in LAB[:2] for ratio in DELAY_RATIOS for delay in DELAYS_MS]
    found = []
    for work, more in works:
        point = dict(zip(FIELDS, work), **more)
        point["seconds"] = QUICK_SECONDS if quick else DECISIVE_SECONDS if work in DECISIVE else SECONDS
        # As many as the place serves honestly and the shapes can be shared by; 0 where two are too many.
        point["ranks"] = max((n for n in (2, 4, 8) if n <= place.ranks and point["H"] % n == 0), default=0)
        found += [point] if point["ranks"] else []
    return found


def measure(place, point):
    delay = point.get("delay_ms", 0)
    lines, wire_ms, rate = fused.measure(place, point, point["seconds"], point["ratio"], delay)
    about = {key: point[key] for key in FIELDS + ("ranks",)} | {
        "ratio_asked": point["ratio"], "delay_ms": delay, "rate_mbit_per_s": rate / 1e6}
    return [{**about, **row, "ratio": row["wire_ms"] / row["compute_ms"]} for row in fused.accounts(lines, wire_ms)]


def ratios(rows):
    """The figures in which two reports must agree: shares of a fast link would only magnify its noise."""
    return {f"{name_of(row)}, T {row['T']}, {row['label']}, time / computation": row["undisturbed_ms"] / row["compute_ms"]
            for row in rows if row["label"] != "compute"}


# --- tables ---


def by_point(rows):
    """{point: {label: row}}, points of a place in order of their ratio, then of their delay."""
    grouped = {}
    for row in sorted(rows, key=lambda row: (row["where"], row["delay_ms"], row["ratio"])):
        grouped.setdefault((name_of(row), fused.shape_of(row), row["ranks"]), {})[row["label"]] = row
    return list(grouped.values())


def name_of(row):
    delay = f", delay {row['delay_ms']:g} ms" if row["delay_ms"] else ""
    return f"{row['operation']} {row['model']} {row['where']}, B {row['B']}, ratio {row['ratio_asked']:.3g}{delay}"


def exposed_by_arithmetic(row):
    """Of the ring with one slice for each rank."""
    hop = row["wire_ms"] / (row["ranks"] - 1) + row["delay_ms"]
    return (row["ranks"] - 1) * max(0.0, hop - row["compute_ms"] / row["ranks"])


def operation_tables(operation, columns):
    """columns: [{label: row}], a point each."""
    rows = [next(iter(by.values())) for by in columns]
    titles = [f"{r['model']} {r['where']}, B {r['B']}, T {r['T']}: **{r['ratio']:.2f}**" + (
        f", delay {r['delay_ms']:g} ms" if r["delay_ms"] else "") for r in rows]

    def table(labels, cell):
        return markdown([[name, *(cell(name, by) for by in columns)] for name in labels], ["", *titles])
    facts = {"T × B × C → columns": lambda r: f"{r['T']} × {r['B']} × {r['C']} → {r['columns']}",
             "link, Mbit/s": lambda r: number(r["rate_mbit_per_s"], 0),
             "wire, ms": lambda r: number(r["wire_ms"]),
             "native collective / computation": lambda r: number(r["native_ms"] / r["compute_ms"]),
             "exposed of ring 1, by arithmetic, ms": lambda r: number(exposed_by_arithmetic(r)),
             "repetitions": lambda r: str(r["repetitions"])}
    text = [f"### {fused.TITLES[operation]}", "", f"{rows[0]['ranks']} ranks. A column is a point: model and place, batch, and in "
            "bold the ratio of communication to computation.", "",
            table(facts, lambda name, by: facts[name](next(iter(by.values()))))]
    for caption, labels, cell in (
            ("Time, ms: median (10th…90th percentile).", fused.VARIANTS, spread),
            ("Hidden share of the communication, %: all / without what chunking costs ± one standard error.", fused.FUSED,
             lambda row: f"{percent(row['hidden_share'])} / {percent(row['hidden_alone_share'])} ± "
             f"{percent(row['hidden_error_share'])}"),
            ("Why not all of it, ms: chunking + exposed.", fused.FUSED,
             lambda row: f"{number(row['chunking_ms'])} + {number(row['exposed_ms'])}")):
        text += [caption, "", table(labels, lambda name, by: cell(by[name]))]
    return "\n".join(text)


def paper_table(columns):
    """Of a share all that is lost counts, chunking too, as in the paper."""
    lines = []
    for operation, case, ratio, slicing, commfuse in PAPER:
        for by in columns:
            row = next(iter(by.values()))
            if row["operation"] == operation and row["ratio_asked"] == ratio:
                lines.append({"the paper's": case, "ratio": f"{ratio:.2f}",
                              "slicing in four, %": percent(by["slice 4"]["hidden_share"]), "its slicing": percent(slicing),
                              "commfuse, N·m = 4, %": percent(by[f"ring {max(1, 4 // row['ranks'])}"]["hidden_share"]),
                              "its CommFuse": percent(commfuse)})
    return ["### Beside the paper", "", "Hidden share of the wire's time.", "", markdown(lines)] if lines else []


def tables(rows):
    if not rows:
        return "Nothing was measured: two ranks need a core to compute and one for progress each.\n"
    columns = by_point(rows)
    text = [operation_tables(operation, mine) for operation in fused.TITLES
            if (mine := [by for by in columns if next(iter(by.values()))["operation"] == operation])]
    return "\n".join([*text, *paper_table(columns), line_table(columns)])


# --- the line ---


def threshold(row):
    """e·F/(2B): columns per rank from which a GEMM hides the transfer of a slice (F flop/s measured, B bytes/s of the
    line). None for other operations."""
    if row["operation"] not in ("gather_gemm", "gemm_scatter"):
        return None
    flops = 2 * row["T"] * row["B"] * row["C"] * row["columns"] / row["ranks"] / (row["compute_ms"] / 1e3)
    bytes_per_s = fused.payload_bytes(row) / (row["wire_ms"] / 1e3)
    return fused.ELEMENT * flops / (2 * bytes_per_s)


def on_the_line(columns):
    """[(row of ring 1, columns per rank, threshold, hidden share)] of every GEMM."""
    return [(row, row["columns"] // row["ranks"], threshold(row), row["hidden_share"])
            for by in columns if (row := by.get("ring 1")) and threshold(row) is not None and not row["delay_ms"]]


def line_table(columns):
    lines = [
        {"operation": fused.TITLES[row["operation"]], "place": f"{row['model']} {row['where']}", "columns per rank": width,
         "e·F/(2B)": f"{at:.0f}", "should hide all": "yes" if width >= at else "no", "hidden by ring 1, %": percent(share)}
        for row, width, at, share in on_the_line(columns)]
    return ("### The line\n\nWith one slice per rank a GEMM hides its transfer when its columns per rank (K of GEMM ▸ "
            "reduce-scatter, n of all-gather ▸ GEMM) are at least e·F/(2B).\n\n" + (markdown(lines) if lines else ""))


def figures(rows, folder):
    found = on_the_line(by_point(rows))
    if not found:
        return []
    figure, ((axes,),) = plots.panels(size=(6, 4.8))
    for operation, marker in (("gather_gemm", "s"), ("gemm_scatter", "o")):
        mine = [(width, at, max(0, min(1, share))) for row, width, at, share in found if row["operation"] == operation]
        if mine:
            widths, thresholds, shares = zip(*mine)
            drawn = axes.scatter(widths, thresholds, c=shares, vmin=0, vmax=1, cmap="RdYlGn", marker=marker, s=60,
                                 edgecolors="#374151", linewidths=0.6, label=fused.TITLES[operation])
    both = [value for _, width, at, _ in found for value in (width, at)]
    ends = [min(both) / 1.5, max(both) * 1.5]
    axes.plot(ends, ends, color="#1f4e79", linewidth=1.2, label="columns = e·F/(2B)")
    axes.fill_between(ends, [ends[0] / 10] * 2, ends, color="#1f4e79", alpha=0.06, linewidth=0)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends,
             xlabel="columns per rank: K of GEMM ▸ reduce-scatter, n of all-gather ▸ GEMM",
             ylabel="e·F/(2B) as measured", title="Below the line one slice per rank hides all")
    figure.colorbar(drawn, label="hidden share, ring, one slice per rank")
    axes.legend()
    axes.grid(which="both")
    return plots.save(figure, folder, f"{NAME}_line")
