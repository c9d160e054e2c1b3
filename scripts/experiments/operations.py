"""Experiment 1: what every schedule hides of each operation, by how long the wire is busy against the computation.

On a lab the link has, at any time, the rate at which the payload takes `ratio` times as long as the computation does by
then: the ratio is the wire's, bytes over line rate. On a local place shared memory is as fast as it is,
so shapes vary instead, and the ratio is that of the native collective.

Sizes: a computation of 50 to 200 ms, so that timers and barriers do not count; above a ratio of 1 half the batch, so
that a point stays below a minute. At a ratio of 0.1 one per cent of the communication is a thousandth of the
computation, which two computations of the same thing differ by: there the column ± matters more than the share. Whether
an all-gather and a reduce-scatter hide altogether (0.25 to 0.8) is asked of the largest model, whose bytes disturb the
least computation, with more repetitions than the rest.
Attention is causal, so its slices differ in cost, and the line of what can be hidden at best is not drawn for it.
Not every schedule wins everywhere, and every one stays in the tables.
"""
import math

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
LOCAL = LAB + WIDTHS + (
    ("gather_gemm", "d6", "mlp.fc1", 256, 4, 384, 1536, 6),
    ("gather_gemm", "d12", "mlp.fc1", 1024, 4, 768, 3072, 12),
    ("gemm_scatter", "d6", "mlp.fc2", 256, 4, 384, 1536, 6),
    ("gemm_scatter", "d12", "mlp.fc2", 1024, 4, 768, 3072, 12),
    ("attention_scatter", "d12", "att", 1024, 4, 768, 768, 12),
    ("gemm_alltoall", "d12", "att.qkv", 1024, 4, 768, 2304, 12),
    ("attention_alltoall", "d12", "att", 1024, 4, 768, 768, 12),
    ("alltoall_gemm", "d12", "att.qkv", 1024, 4, 768, 2304, 12),
    ("wgrad_scatter", "d12", "fcw", 1024, 2, 768, 3072, 12),
)
QUICK = tuple((operation, "d12", where, 256, 4, 768, 3072, 12)
              for operation, where in (("gather_gemm", "mlp.fc1"), ("gemm_scatter", "mlp.fc2")))
FIELDS = ("operation", "model", "where", "T", "B", "C", "columns", "H")


def points(place, quick):
    found = []

    def add(work, **more):
        point = dict(zip(FIELDS, work), **more)
        point["seconds"] = QUICK_SECONDS if quick else DECISIVE_SECONDS if work in DECISIVE else SECONDS
        point["ranks"] = fused.ranks_for(place, point["H"])
        if point["ranks"]:
            found.append(point)

    if place.kind != "lab":
        for work in QUICK if quick else LOCAL:
            add(work)
        return found
    full = (DECISIVE, DECISIVE_RATIOS), (LAB, RATIOS), (WIDTHS, WIDTH_RATIOS)
    for works, ratios in ((QUICK, QUICK_RATIOS),) if quick else full:
        for work in works:
            for ratio in ratios:
                add(work[:4] + (work[4] // 2 if ratio > 1 else work[4],) + work[5:], ratio=ratio)
    return found


def measure(place, point):
    shape, match = fused.Shape.of(point), "wire" if "ratio" in point else "none"
    found = fused.measure(place, point["ranks"], [point["operation"]], shape, point.get("ratio", 1), point["seconds"],
                          match)
    about = {key: point[key] for key in FIELDS + ("ranks",)}
    about["ratio_asked"] = point.get("ratio")
    about["rate_mbit_per_s"] = None if found.rate is None else found.rate / 1e6
    rows = [{**about, **row} for row in fused.accounts(found.lines[0], found.wire_ms)]
    for row in rows:
        row["ratio"] = ratio_of(row)
    return rows


def ratio_of(row):
    """The wire's where its rate is known, the native collective's elsewhere."""
    return (row["comm_ms"] if row["wire_ms"] is None else row["wire_ms"]) / row["compute_ms"]


# ------------------------------------------------------------------------------------------ tables


def of_point(row):
    return (row["operation"], row["model"], row["where"], fused.Shape.of(row), row["ranks"], row["ratio_asked"])


def by_point(rows):
    """{point: {label: row}}, points of a place in order of their ratio."""
    grouped = {}
    for row in sorted(rows, key=lambda row: (row["where"], row["ratio"])):
        grouped.setdefault(of_point(row), {})[row["label"]] = row
    return grouped


def column_title(by):
    row = next(iter(by.values()))
    return f"{row['model']} {row['where']}, B {row['B']}: **{row['ratio']:.2f}**"


def hidden_cell(row):
    if row is None or row["hidden_share"] is None:
        return "–"
    both = f"{fused.percent(row['hidden_share'])} ± {fused.percent(row['hidden_error_share'])}"
    wire = "" if row["hidden_wire_share"] is None else f" / {fused.percent(row['hidden_wire_share'])}"
    alone = f"{fused.percent(row['hidden_alone_share'])} ± {fused.percent(row['hidden_alone_error_share'])}"
    return f"{both}{wire} / {alone}"


def exposed_cell(row):
    return "–" if row is None else f"{fused.milliseconds(row['chunking_ms'])} + {fused.milliseconds(row['exposed_ms'])}"


def time_cell(row):
    return "–" if row is None else f"{row['ms']:.2f} ({row['p10_ms']:.2f}…{row['p90_ms']:.2f})"


def operation_tables(operation, columns):
    """columns: [{label: row}], a point each."""
    rows = [next(iter(by.values())) for by in columns]
    text = [f"### {fused.TITLES[operation]}\n", f"{rows[0]['ranks']} ranks. A column is a point: model and place, "
            "batch, and in bold the ratio of communication to computation.\n"]
    titles = [column_title(by) for by in columns]

    def block(caption, labels, cell):
        text.append(f"{caption}\n")
        text.append(fused.table([""] + titles, [[name] + [cell(by.get(name)) for by in columns] for name in labels]))

    text.append("The point: shape; what the rate was set to; time on the wire; native collective alone.\n")
    text.append(fused.table([""] + titles, [
        ["T × B × C → columns"] + [f"{r['T']} × {r['B']} × {r['C']} → {r['columns']}" for r in rows],
        ["link, Mbit/s"] + ["–" if r["rate_mbit_per_s"] is None else f"{r['rate_mbit_per_s']:.0f}" for r in rows],
        ["wire, ms"] + [fused.milliseconds(r["wire_ms"]) for r in rows],
        ["native collective / computation"] + [f"{r['comm_ms'] / r['compute_ms']:.2f}" for r in rows],
        ["MB sent by a rank"] + [f"{max(row['bytes'] for row in by.values()) / 1e6:.2f}" for by in columns],
        ["repetitions"] + [str(r["repetitions"]) for r in rows]]))
    block("Time, ms: median (10th…90th percentile).", fused.VARIANTS, time_cell)
    block("Hidden share, %: of the native collective ± one standard error / of the wire's time / the same without what "
          "chunking costs ± one standard error.", fused.FUSED, hidden_cell)
    block("Why not all of it, ms: chunking + exposed.", fused.FUSED, exposed_cell)
    return "\n".join(text)


def tables(rows):
    if not rows:
        return "Nothing was measured: two ranks need a core to compute and one for progress each.\n"
    grouped = by_point(rows)
    text = [operation_tables(operation, [by for point, by in grouped.items() if point[0] == operation])
            for operation in fused.TITLES if any(point[0] == operation for point in grouped)]
    return "\n".join(text + [line_table(grouped)])


# ------------------------------------------------------------------------------------------ the line


def threshold(row):
    """e·F/(2B): columns per rank from which a GEMM hides the transfer of a slice (F flop/s measured, B bytes/s of the
    line, or of the native collective where there is no line). None for other operations."""
    if row["operation"] not in ("gather_gemm", "gemm_scatter"):
        return None
    flops = 2 * row["T"] * row["B"] * row["C"] * row["columns"] / row["ranks"] / (row["compute_ms"] / 1e3)
    payload = fused.payload_bytes(row["operation"], fused.Shape.of(row), row["ranks"])
    bytes_per_s = payload / ((row["comm_ms"] if row["wire_ms"] is None else row["wire_ms"]) / 1e3)
    return fused.ELEMENT * flops / (2 * bytes_per_s)


def on_the_line(grouped):
    """(row of ring 1, columns per rank, threshold, hidden share) of every GEMM."""
    for by in grouped.values():
        row = by.get("ring 1")
        if row and threshold(row) is not None:
            share = row["hidden_share"] if row["wire_ms"] is None else row["hidden_wire_share"]
            yield row, row["columns"] // row["ranks"], threshold(row), share


def line_table(grouped):
    text = ("### The line\n\nWith one slice per rank a GEMM hides its transfer when its columns per rank (K of GEMM ▸ "
            "reduce-scatter, n of all-gather ▸ GEMM) are at least e·F/(2B).\n\n")
    heading = ["operation", "place", "columns per rank", "e·F/(2B)", "should hide all", "hidden by ring 1, %"]
    return text + fused.table(heading, [
        [fused.TITLES[row["operation"]], f"{row['model']} {row['where']}", str(width), f"{at:.0f}",
         "yes" if width >= at else "no", fused.percent(share)] for row, width, at, share in on_the_line(grouped)])


# ------------------------------------------------------------------------------------------ figures

STYLES = {"slice": ("#b45309", "s"), "ring": ("#1f4e79", "o"), "direct": ("#0f766e", "^")}
DASHES = {1: "-", 2: "--", 4: ":", 8: "-."}
FLOOR = -1.0  # shares below are drawn on the floor: the table has them


def shares_figure(grouped, plt):
    operations = [name for name in fused.TITLES if any(point[0] == name for point in grouped)]
    across = min(4, len(operations))
    down = -(-len(operations) // across)
    figure, axes = plt.subplots(down, across, figsize=(4.2 * across, 3.4 * down + 0.6), sharey=True, squeeze=False,
                                layout="constrained")
    legend_share = 0.5 / figure.get_figheight()
    figure.get_layout_engine().set(rect=(0, legend_share, 1, 1 - legend_share))
    for panel in axes.flat[len(operations):]:
        panel.set_visible(False)
    for panel, operation in zip(axes.flat, operations):
        columns = [by for point, by in grouped.items() if point[0] == operation]
        draw_panel(panel, operation, columns)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=7, frameon=False, fontsize=8)
    return figure


def draw_panel(panel, operation, columns):
    """On a lab a line over the ratios of the model and place that have most of them; else points, a shape each."""
    rows = [next(iter(by.values())) for by in columns]
    wheres = [(row["model"], row["where"]) for row in rows]
    first = rows[wheres.index(max(wheres, key=wheres.count))]
    shaped = first["wire_ms"] is not None
    title = fused.TITLES[operation]
    if shaped:
        columns = [by for by, where in zip(columns, wheres) if where == (first["model"], first["where"])]
        title += f", {first['model']}"
    share = "hidden_wire_share" if shaped else "hidden_share"
    for name in fused.FUSED[1:]:  # none hides nothing
        mode, slices = name.split()
        drawn = [(by[name]["ratio"], max(FLOOR, by[name][share])) for by in columns if name in by]
        color, marker = STYLES[mode]
        panel.plot(*zip(*drawn), DASHES[int(slices)] if shaped else "", color=color, marker=marker, linewidth=1.1,
                   markersize=3 if shaped else 2 + math.log2(int(slices)), label=name)
    ratios = [next(iter(by.values()))["ratio"] for by in columns]
    if operation in fused.EQUAL_SLICES and shaped:
        low, high = min(ratios), max(ratios)
        steps = [low * (high / low) ** (i / 99) for i in range(100)]
        for slices in (1, 4):
            panel.plot(steps, [fused.hideable(ratio, first["ranks"], slices) for ratio in steps], DASHES[slices],
                       color="#9ca3af", linewidth=2, zorder=0, label=f"possible with {slices}")
    panel.axvline(1, color="#6b7280", linewidth=0.8)
    panel.set_xscale("log")
    ticks = [tick for tick in (0.01, 0.03, 0.1, 0.3, 1, 3) if min(ratios) / 1.05 <= tick <= max(ratios) * 1.05]
    ticks = ticks if len(ticks) > 1 else ratios
    panel.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
    panel.minorticks_off()
    panel.set_ylim(FLOOR - 0.05, 1.15)
    panel.set_title(title, fontsize=9)
    panel.set_xlabel("communication / computation")
    if panel.get_subplotspec().is_first_col():
        panel.set_ylabel(f"hidden share of {'the wire' if shaped else 'T_comm'}")
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def line_figure(grouped, plt):
    figure, axes = plt.subplots(figsize=(6, 4.8), layout="constrained")
    found = list(on_the_line(grouped))
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
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.2, which="both")
    return figure


def figures(rows, folder):
    if not rows:
        return []
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    grouped = by_point(rows)
    drawn = {NAME: shares_figure(grouped, plt)}
    if any(True for _ in on_the_line(grouped)):
        drawn[f"{NAME}_line"] = line_figure(grouped, plt)
    names = []
    for name, figure in drawn.items():
        names += fused.save(figure, folder, name)
        plt.close(figure)
    return names
