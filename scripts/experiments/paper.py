"""Experiment 2: the paper's tables in their proportions, its figures beside ours.

Sizes are scaled down and the link is slowed until the communication is to the computation as it was there. Then
relative figures can be compared: which share of the communication's overhead a schedule removes, and of the whole.

What cannot be compared:
- Milliseconds. The paper's hardware is not named; here CPUs compute in fp32 and a shaped TCP link carries it.
- Ranks. The paper has four; two hosts with two cores each are two. N ranks with m slices each cut a shard's worth of
  work into N·m, so what stands beside the paper's CommFuse is the m that makes N·m = 4; other m stay in the tables.
- Slicing. The paper does not say into how many; 2, 4 and 8 are shown. Nor along what it slices its attention layer,
  where that loses more than it gains at 4 × 8192: here it is along the queries, or of the projection alone.
- T_comm of the attention layer is not given. It is taken to be what Query-Split saves over vanilla, as if that hid
  everything. Nor are there times for single sequence lengths: all get the ratio of the MLP at 4096.
- The baseline. An MPI library's reduce-scatter takes longer than its bytes need on the line. Where "match" says native,
  the link is as fast as makes that collective keep the paper's proportion, so vanilla is the paper's vanilla, and
  what point-to-point transfers save is credited to CommFuse; where it says wire, payload over rate keeps the
  proportion, which is the harder test of hiding, and vanilla is worse than the paper's.
- Attention of the paper's 4096 channels over 4096 positions becomes 768 over 768: their quotient is what sets
  the cost of attention against that of the projection. Its MLP is taken to be the second linear layer.
"""
import types

from . import fused

NAME = "paper"
TITLE = "The paper's tables in their proportions"
SECONDS, QUICK_SECONDS = 35, 8  # of one point, about; at least ten repetitions in any case

# Milliseconds of the paper (arXiv 2604.24013).
MLP = {"vanilla": 122.3, "slicing": 83.9, "CommFuse": 77.1}
MLP_OVERHEAD = {"vanilla": 43.8, "slicing": 7.1, "CommFuse": 0.1}
MLP_RATIO = MLP_OVERHEAD["vanilla"] / (MLP["vanilla"] - MLP_OVERHEAD["vanilla"])
MLP_CUT = {"overhead": {"slicing": 0.839, "CommFuse": 0.998}, "whole": {"slicing": 0.314, "CommFuse": 0.369}}
SEQUENCES = {"overhead": {"slicing": (0.779, 0.852), "CommFuse": (0.997, 0.998)},
             "whole": {"slicing": (0.295, 0.350), "CommFuse": (0.350, 0.402)}}
ATTENTION = {"16 × 4096": {"vanilla": 270.1, "slicing": 246.1, "row-parallel": 230.9, "query-split": 215.8},
             "4 × 8192": {"vanilla": 195.6, "slicing": 279.7, "query-split": 145.1}}

MLP_SHAPE = dict(T=1024, B=4, C=1024, columns=4096, H=16)
LENGTHS = (1024, 2048, 4096, 8192, 16384)
ATTENTION_SHAPES = {"16 × 4096": dict(T=768, B=16, C=768, columns=768, H=12),
                    "4 × 8192": dict(T=1536, B=4, C=768, columns=768, H=12)}
RANKS = 4  # of the paper: more slices than its own would stand beside it


def attention_ratio(case):
    times = ATTENTION[case]
    return times["vanilla"] / times["query-split"] - 1


def points(place, quick):
    works = [dict(table="mlp", match=match, **MLP_SHAPE) for match in ("native", "wire")]
    works += [dict(table="sequence", match="native", T=T, B=1, C=512, columns=2048, H=8) for T in LENGTHS]
    works += [dict(table="attention", match="native", case=case, **shape) for case, shape in ATTENTION_SHAPES.items()]
    if quick:
        works = [dict(works[0], T=256), dict(works[-2], B=1)]
    if place.kind != "lab":  # nothing to match by
        works = [dict(work, match="none") for work in works if work["match"] == "native"]
    seconds = QUICK_SECONDS if quick else SECONDS
    found = [dict(work, seconds=seconds, ranks=min(RANKS, fused.ranks_for(place, work["H"]))) for work in works]
    return [point for point in found if point["ranks"]]


# ------------------------------------------------------------------------------------------ measuring


def operation_of(point):
    return "attention_scatter" if point["table"] == "attention" else "gemm_scatter"


def ratio_wanted(point):
    return attention_ratio(point["case"]) if point["table"] == "attention" else MLP_RATIO


def measure(place, point):
    shape, operation, ratio = fused.Shape.of(point), operation_of(point), ratio_wanted(point)
    operations = [operation, "gemm_scatter"] if point["table"] == "attention" else [operation]
    found = fused.measure(place, point["ranks"], operations, shape, ratio, point["seconds"], point["match"])
    rows, *projection = (fused.accounts(lines, found.wire_ms) for lines in found.lines)
    if projection:
        rows = [dict(row, layout="query-split") for row in rows] + behind_attention(*projection, rows)
    about = dict(point, rate_mbit_per_s=None if found.rate is None else found.rate / 1e6, ratio_asked=ratio)
    return [{**about, **row, "ratio": row["comm_ms"] / row["compute_ms"]} for row in rows]


def behind_attention(projection, whole):
    """Row-parallel: projection ▸ reduce-scatter behind attention that is computed in one go and hides nothing. Its time
    is the sum of the two, the attention's being what the whole computation takes beyond the projection's."""
    layer, alone = (next(row for row in rows if row["label"] == "compute") for rows in (whole, projection))
    moved = [dict(row, layout="row-parallel") for row in projection if row["label"] in fused.FUSED]
    for row in moved:
        row["compute_ms"] = layer["compute_ms"]
        row["undisturbed_ms"] += layer["undisturbed_ms"] - alone["undisturbed_ms"]
        for key in ("ms", "p10_ms", "p90_ms"):
            row[key] += layer["ms"] - alone["ms"]
    return moved


# ------------------------------------------------------------------------------------------ arithmetic


def cuts(row, vanilla):
    """What a schedule removes: of vanilla's overhead above one monolithic computation; of it with chunking left out
    (what is exposed); of the whole time."""
    overhead, time = above_compute(vanilla), "undisturbed_ms"
    return types.SimpleNamespace(overhead=1 - above_compute(row) / overhead, exposed=1 - row["exposed_ms"] / overhead,
                                 whole=1 - row[time] / vanilla[time])


def above_compute(row):
    return row["undisturbed_ms"] - row["compute_ms"]


def column_of(row):
    """Under which name the paper has it."""
    mode = row["label"].split()[0]
    if mode == "none":
        return "vanilla"
    return "slicing" if mode == "slice" else "CommFuse"


def stands_beside(row):
    """The variant set against the paper's in figures: four slices of the whole by ring, or slicing into four."""
    if row["label"] == "slice 4":
        return True
    return row["label"] == f"ring {max(1, 4 // row['ranks'])}"


def title_of(row):
    if row["table"] == "attention":
        return f"{row['case']} as {row['B']} × {row['T']}"
    return f"T {row['T']}, B {row['B']}"


def by_point(rows, table):
    grouped = {}
    for row in rows:
        if row["table"] == table:
            grouped.setdefault((title_of(row), row["match"]), []).append(row)
    return grouped


def vanilla_of(rows):
    return next(row for row in rows if row["label"] == "none" and row.get("layout") != "row-parallel")


# ------------------------------------------------------------------------------------------ tables


def point_text(key, rows):
    first = rows[0]
    link = "" if first["rate_mbit_per_s"] is None else (f"; link {first['rate_mbit_per_s']:.0f} Mbit/s, wire "
                                                        f"{first['wire_ms']:.2f} ms, matched by {first['match']}")
    return (f"**{key[0]}**, C {first['C']}, {first['columns']} columns, {first['H']} heads, {first['ranks']} ranks "
            f"(the paper: 4). Native collective {first['comm_ms']:.2f} ms to a computation of "
            f"{vanilla_of(rows)['compute_ms']:.2f} ms: ratio "
            f"{first['ratio']:.3f}, the paper's {first['ratio_asked']:.3f}{link}. {first['repetitions']} repetitions: "
            "ms is their median (10th…90th percentile), all else is of the mean of the faster half.\n")


def span_text(kind, column):
    low, high = SEQUENCES[kind][column]
    return f"{fused.percent(low)} to {fused.percent(high)}"


def papers_cell(table, kind, column):
    if column == "vanilla":
        return "0"
    return fused.percent(MLP_CUT[kind][column]) if table == "mlp" else span_text(kind, column)


def times_line(row):
    return [f"{row['label']}" + (f", {row['layout']}" if row.get("layout") == "row-parallel" else ""),
            f"{row['ms']:.2f} ({row['p10_ms']:.2f}…{row['p90_ms']:.2f})"]


def linear_table(table, rows):
    """Of the MLP and of the sequence lengths."""
    vanilla, lines = vanilla_of(rows), []
    for row in rows:
        if row["label"] not in fused.FUSED:
            lines.append(times_line(row) + ["–"] * 6)
            continue
        cut, column = cuts(row, vanilla), column_of(row)
        lines.append(times_line(row) + [fused.milliseconds(above_compute(row)), fused.percent(cut.overhead),
                                        fused.percent(cut.exposed), papers_cell(table, "overhead", column),
                                        fused.percent(cut.whole), papers_cell(table, "whole", column)])
    heading = ["", "ms", "above compute, ms", "overhead cut, %", "without chunking, %", "paper", "whole cut, %", "paper"]
    return fused.table(heading, lines)


def attention_table(rows):
    case = ATTENTION[rows[0]["case"]]
    vanilla, lines = vanilla_of(rows), []
    for row in rows:
        if row["label"] not in fused.FUSED:
            lines.append(times_line(row) + ["–"] * 4)
            continue
        cut, name = cuts(row, vanilla), column_of(row)
        papers = case.get(row["layout"] if name == "CommFuse" else name)
        lines.append(times_line(row) + [fused.percent(cut.overhead), fused.percent(cut.whole),
                                        "–" if papers is None else f"{papers:.1f}",
                                        "–" if papers is None else fused.percent(1 - papers / case["vanilla"])])
    return fused.table(["", "ms", "overhead cut, %", "whole cut, %", "paper, ms", "paper, whole cut, %"], lines)


def tables(rows):
    if not rows:
        return "Nothing was measured: two ranks need a core to compute and one for progress each.\n"
    text = []
    for table, title in (("mlp", "MLP, GEMM ▸ reduce-scatter (the paper: 32 × 4096, 4096 channels)"),
                         ("sequence", "Sequence lengths (the paper: 1K to 16K, a range over all of them)"),
                         ("attention", "Attention layer, row-parallel and Query-Split")):
        grouped = by_point(rows, table)
        if grouped:
            text.append(f"### {title}\n")
        for key, mine in grouped.items():
            text.append(point_text(key, mine))
            text.append(attention_table(mine) if table == "attention" else linear_table(table, mine))
    return "\n".join(text)


# ------------------------------------------------------------------------------------------ figures


def bars(axes, names, here, papers, title):
    places = range(len(names))
    axes.bar([p - 0.2 for p in places], [100 * value for value in here], 0.38, color="#1f4e79", label="here")
    given = [(p + 0.2, 100 * value) for p, value in zip(places, papers) if value is not None]
    axes.bar(*zip(*given), 0.38, color="#9db8d2", label="paper")
    axes.set_xticks(list(places), names, fontsize=7)
    axes.set_title(title, fontsize=9)
    axes.axhline(0, color="#374151", linewidth=0.8)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw_linear(axes, rows, table, kind):
    names, here, papers = [], [], []
    for (title, match), mine in by_point(rows, table).items():
        vanilla = vanilla_of(mine)
        for row in filter(stands_beside, mine):
            column = column_of(row)
            names.append(f"{row['label']}\n{title.split(',')[0]}" + ("" if match == "none" else f"\n{match}"))
            here.append(getattr(cuts(row, vanilla), kind))
            papers.append(MLP_CUT[kind][column] if table == "mlp" else sum(SEQUENCES[kind][column]) / 2)
    bars(axes, names, here, papers, f"{'MLP' if table == 'mlp' else 'Sequence lengths'}: "
         f"{'overhead' if kind == 'overhead' else 'whole time'} cut, %")


def draw_attention(axes, rows):
    names, here, papers = [], [], []
    for mine in by_point(rows, "attention").values():
        vanilla, case = vanilla_of(mine), ATTENTION[mine[0]["case"]]
        for row in filter(stands_beside, mine):
            name = column_of(row)
            if name == "slicing" and row["layout"] == "row-parallel":
                continue
            paper = case.get(row["layout"] if name == "CommFuse" else name)
            names.append(f"{row['label']}\n{name if name == 'slicing' else row['layout']}\n{row['case']}")
            here.append(cuts(row, vanilla).whole)
            papers.append(None if paper is None else 1 - paper / case["vanilla"])
    bars(axes, names, here, papers, "Attention layer: whole time cut, %")


def figures(rows, folder):
    if not rows:
        return []
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    panels = [(draw_linear, table, kind) for table in ("mlp", "sequence") for kind in ("overhead", "whole")
              if by_point(rows, table)]
    if by_point(rows, "attention"):
        panels.append((draw_attention,))
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 2.6 * len(panels)), squeeze=False, layout="constrained")
    for panel, (draw, *which) in zip(axes.flat, panels):
        draw(panel, rows, *which)
    axes.flat[0].legend(frameon=False, fontsize=8)
    names = fused.save(figure, folder, NAME)
    plt.close(figure)
    return names
