"""One transformer layer in every mode, drawn from traces of training: the paper's picture, but measured.

    scripts/experiments/timeline.py --out FILE none=a.json slice=b.json commfuse=c.json

draws traces that train_gpt has written (--trace FILE --trace-steps A:B), of any machine. As an experiment, it makes
them: a mesh of two ranks, a link whose transfers take half as long as computing.

Of all layers and steps that a trace holds, but not the outermost layers, the one of median length is drawn, the same
for all ranks. Both directions start at zero, so that panels of different modes can be laid over each other.
"""
import argparse
import collections
import json
import pathlib
import statistics
import sys
import tempfile

if not __package__:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import plots
from experiments import training
from tables import markdown
from tokens import write_tokens

NAME, TITLE = "timeline", "One layer on the time line"
MODES = "none", "slice", "commfuse"
DIRECTIONS = "forward", "backward"
STEPS = 5


def points(place, quick):
    size = dict(model="d6", vocab=8192, seq=256, batch=4) if quick else dict(model="d12", vocab=8192, seq=512, batch=2)
    ratio = 0.5 if place.kind == "lab" else None
    return [dict(training.size_for(place, size), strategy=strategy, tp=2, dp=1, steps=STEPS, ratio=ratio)
            for strategy in (("tpsp",) if quick else ("tpsp", "up"))]


def measure(place, point):
    rows, rate, ranks = [], None, point["tp"] * point["dp"]
    with tempfile.TemporaryDirectory(prefix="commfuse-report-") as folder:
        tokens, trace = f"{folder}/tokens.bin", f"{folder}/trace.json"
        write_tokens(tokens, point["batch"] * (point["steps"] + 1) * point["seq"] + 1, point["vocab"])
        if point["ratio"]:
            rate = training.set_link(place, point, training.without_transfers(place, point)[1])
        for mode in MODES:
            place.run(ranks, [training.PROGRAM, *training.model_options(point), "--train", tokens, "--batch", point["batch"],
                              "--steps", point["steps"], "--val-every", 0, "--overlap", mode, "--trace", trace,
                              "--trace-steps", f"1:{point['steps']}"], timeout=600)
            with open(trace, encoding="utf-8") as file:
                rows += [{"mesh": training.mesh_name(point), "model": point["model"], "seq": point["seq"],
                          "batch": point["batch"], "link_bits_per_s": rate, "mode": mode, **row}
                         for row in layer_of(json.load(file)["traceEvents"])]
    return rows


# --- traces ---


def layer_of(events):
    """Rows of the median layer: what happened from the begin of its block to its end, in ms from that begin. Transfers
    of its own count wherever they end; those of gradients and weights, which belong to no product, are named so."""
    events = [event for event in events if event["ph"] == "X"]
    blocks = collections.defaultdict(dict)  # (step, layer) → (rank, direction) → event
    for event in events:
        if event["name"] in ("block forward", "block backward"):
            key = event["args"]["step"], event["args"]["layer"]
            blocks[key][event["pid"], event["name"].split()[1]] = event
    whole = {key: block for key, block in blocks.items() if len(block) == max(map(len, blocks.values()))}
    if not whole:
        sys.exit("the trace holds no layer: choose steps that the run takes with --trace-steps A:B")
    last = max(layer for _, layer in whole)
    inner = {key: block for key, block in whole.items() if 0 < key[1] < last} or whole
    length = {key: sum(event["dur"] for event in block.values()) for key, block in inner.items()}
    step, layer = min(length, key=lambda key: abs(length[key] - statistics.median_low(length.values())))
    rows = []
    for direction in DIRECTIONS:
        mine = {rank: event for (rank, way), event in inner[step, layer].items() if way == direction}
        origin = min(event["ts"] for event in mine.values())
        for rank, block in sorted(mine.items()):
            begin, end = block["ts"], block["ts"] + block["dur"]
            rows.append(row_of(block, origin, direction, layer, "block"))
            rows += [row_of(event, origin, direction, layer, event["cat"]) for event in events
                     if event["pid"] == rank and event is not block and event["ts"] < end
                     and event["ts"] + event["dur"] > begin and not event["name"].startswith("block ")]
    return rows


def row_of(event, origin, direction, layer, kind):
    return {"direction": direction, "rank": event["pid"], "kind": kind, "layer": layer, "name": event["name"],
            "slice": event["args"].get("slice"), "begin_ms": (event["ts"] - origin) / 1e3,
            "end_ms": (event["ts"] + event["dur"] - origin) / 1e3, "bytes": event["args"].get("bytes", 0)}


def total(rows, kind):
    return sum(row["end_ms"] - row["begin_ms"] for row in rows if row["kind"] == kind)


def tail_ms(rows):
    """Waiting between the last computation that a transfer follows and the end of the layer: what nothing is left to hide. Of
    the worst rank."""
    def of(rank):
        mine = [row for row in rows if row["rank"] == rank]
        ends = [row["end_ms"] for row in mine if row["kind"] == "compute" and row["name"] != "add"]
        return sum(row["end_ms"] - row["begin_ms"] for row in mine
                   if row["kind"] == "wait" and row["begin_ms"] >= max(ends, default=0) - 0.01)
    return max(map(of, {row["rank"] for row in rows}))


# --- table ---


def select(rows, **values):
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def distinct(rows, name):
    return list(dict.fromkeys(row[name] for row in rows))


def union_ms(rows):
    """Time in which at least one transfer was in flight."""
    sum_ms, reached = 0.0, -1e300
    for row in sorted(rows, key=lambda row: row["begin_ms"]):
        sum_ms += max(0.0, row["end_ms"] - max(reached, row["begin_ms"]))
        reached = max(reached, row["end_ms"])
    return sum_ms


def tables(rows):
    text = ["Waiting is the compute thread's, of all of the layer; the tail is what of it comes after the layer's last "
            "computation. Each figure is the worst rank's. One layer of one step, the one of median length: a picture, "
            "not a statistic.", ""]
    for mesh in distinct(rows, "mesh"):
        lines = []
        for mode in distinct(rows, "mode"):
            for direction in DIRECTIONS:
                mine = select(rows, mesh=mesh, mode=mode, direction=direction)
                each = [select(mine, rank=rank) for rank in distinct(mine, "rank")]
                comm = [select(rank, kind="comm") for rank in each]
                lines.append({"mode": mode, "direction": direction,
                              "layer, ms": f"{max(total(rank, 'block') for rank in each):.1f}",
                              "waiting, ms": f"{max(total(rank, 'wait') for rank in each):.1f}",
                              "tail, ms": f"{tail_ms(mine):.1f}", "transfers in flight, ms": f"{max(map(union_ms, comm)):.1f}",
                              "MB sent": f"{max(sum(row['bytes'] for row in rank) for rank in comm) / 1e6:.2f}"})
        text += [f"### {mesh}", "", f"![{mesh}]({file_name(mesh)}.png)", "", markdown(lines)]
    return "\n".join(text)


# --- picture ---

PLACES = {"att.qkv": ("QKV", "#7fb3d5"), "att.proj": ("attention", "#76d7c4"), "mlp.fc1": ("MLP 1", "#f7dc6f"),
          "mlp.fc2": ("MLP 2", "#d7a8e0")}
OTHER, WAITING, BETWEEN = "#c8ccd0", "#d62718", "#e6e8ea"
NAMES = {"none": "none: blocking collectives", "slice": "slice: data slicing, 4 slices",
         "commfuse": "commfuse", "nowire": "nowire: no transfers, the bound"}
COMPUTE_HEIGHT, WIRE_HEIGHT, GAP = 0.62, 0.42, 0.18
LETTER_POINTS = 7
PANEL_INCHES, REST_INCHES = 1.4, 2


def place_of(name):
    return next(((label, colour) for place, (label, colour) in PLACES.items() if name.split(" ")[-1] == place),
                ("", OTHER))


def lanes(events):
    """Each transfer with the first free lane, and how many lanes there are: transfers overlap one another."""
    free, placed = [], []
    for event in sorted(events, key=lambda event: event["begin_ms"]):
        lane = next((i for i, until in enumerate(free) if until <= event["begin_ms"]), len(free))
        free[lane:lane + 1] = [event["end_ms"]]
        placed.append((lane, event))
    return placed, max(1, len(free))


def box(axes, event, bottom, height, colour, end, text="", **style):
    """With its text, where that fits."""
    begin, until = max(0, event["begin_ms"]), min(event["end_ms"], end)
    if until > begin:
        axes.broken_barh([(begin, until - begin)], (bottom, height), facecolors=colour, **style)
    # A letter is about 0.6 of its height wide.
    if (until - begin) * axes.bbox.width / end > len(text) * LETTER_POINTS * 0.6 * axes.figure.dpi / 72:
        axes.text((begin + until) / 2, bottom + height / 2, text, ha="center", va="center", fontsize=LETTER_POINTS, clip_on=True)


def draw_rank(axes, events, top, width):
    """Two rows: what the compute thread does (waiting in red), and what is on the wire."""
    block = next(event for event in events if event["kind"] == "block")
    bottom = top - COMPUTE_HEIGHT
    box(axes, block, bottom, COMPUTE_HEIGHT, BETWEEN, width)
    for event in events:
        if event["kind"] in ("compute", "wait"):
            label, colour = place_of(event["name"]) if event["kind"] == "compute" else ("", WAITING)
            box(axes, event, bottom, COMPUTE_HEIGHT, colour, width, label, edgecolor="white", linewidth=0.5)
    bottom -= WIRE_HEIGHT + 0.04
    placed, count = lanes([event for event in events if event["kind"] == "comm"])
    for lane, event in placed:
        height = WIRE_HEIGHT / count
        box(axes, event, bottom + height * (count - 1 - lane), height, place_of(event["name"])[1], width, hatch="////",
            edgecolor="#5d6d7e", linewidth=0.4)
    return block["end_ms"]


def draw_panel(axes, rows, mode, width, last):
    ranks = distinct(rows, "rank")[:2]
    step = COMPUTE_HEIGHT + WIRE_HEIGHT + GAP
    ticks, labels, ends = [], [], []
    for i, rank in enumerate(ranks):
        top = (len(ranks) - i) * step
        ends.append(draw_rank(axes, select(rows, rank=rank), top, width))
        ticks += [top - COMPUTE_HEIGHT / 2, top - COMPUTE_HEIGHT - 0.04 - WIRE_HEIGHT / 2]
        labels += [f"rank {rank} compute", "on the wire"]
    end = max(ends)
    waiting = max(total(select(rows, rank=rank), "wait") for rank in ranks)
    axes.axvline(end, color="black", linewidth=1.2)
    axes.set_title(f"{NAMES.get(mode, mode)}  –  {end:.0f} ms, of which {waiting:.0f} ms waiting", loc="left", pad=3)
    axes.set(ylim=(GAP / 2, len(ranks) * step + 0.08), xlim=(0, width))
    axes.set_yticks(ticks, labels, fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, labelbottom=last)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)


def legend():
    """Handles by label."""
    from matplotlib.patches import Patch
    whole = {"attention": "attention and projection", "MLP 1": "MLP 1: first product", "MLP 2": "MLP 2: second product"}
    patches = {whole.get(label, label): Patch(facecolor=colour) for label, colour in PLACES.values()}
    return {**patches, "layer norm, GELU, sums": Patch(facecolor=BETWEEN),
            "waiting: exposed communication": Patch(facecolor=WAITING),
            "transfer, in the colour of its product": Patch(facecolor="white", hatch="////", edgecolor="#5d6d7e")}


def draw(rows, folder, name, title):
    """Forward above, backward below, a panel for each mode, one time axis in each direction. The names of the files."""
    modes = distinct(rows, "mode")
    panels = [(direction, mode) for direction in DIRECTIONS for mode in modes]
    figure, axes = plots.panels(len(panels), 1, (10, PANEL_INCHES * len(panels) + REST_INCHES))
    plots.legend_below(figure, legend(), 4, lines=2)
    figure.suptitle(title, fontsize=11)
    figure.draw_without_rendering()  # from now on a panel knows how wide it is
    for panel, (direction, mode) in zip(axes.flat, panels):
        way = select(rows, direction=direction)
        width = 1.02 * max(row["end_ms"] for row in way if row["kind"] == "block")
        draw_panel(panel, select(way, mode=mode), mode, width, mode == modes[-1])
        if mode == modes[-1]:
            panel.set_xlabel(f"{direction}: ms since the layer began")
    return plots.save(figure, folder, name)


def file_name(mesh):
    return f"{NAME}-{mesh.replace(' ', '-')}"


def figures(rows, folder):
    names = []
    for mesh in distinct(rows, "mesh"):
        mine = select(rows, mesh=mesh)
        row = mine[0]
        link = f"link of {row['link_bits_per_s'] / 1e6:.0f} Mbit/s" if row["link_bits_per_s"] else "shared memory"
        names += draw(mine, folder, file_name(mesh), f"One layer of {row['model']} in training, {mesh}, "
                      f"{row['batch']} x {row['seq']} tokens, {link}")
    return names


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="MODE=TRACE", help="traces of train_gpt, in the order to be drawn")
    parser.add_argument("--out", default="timeline", metavar="FILE", help="FILE.png and FILE.svg (default: timeline)")
    parser.add_argument("--title", default="One layer in training")
    o = parser.parse_args()
    rows = []
    for argument in o.traces:
        mode, equals, path = argument.partition("=")
        if not equals:
            parser.error(f"'{argument}' is not MODE=TRACE, such as none=trace.json")
        with open(path, encoding="utf-8") as file:
            rows += [{"mode": mode, **row} for row in layer_of(json.load(file)["traceEvents"])]
    print(" and ".join(draw(rows, ".", o.out.removesuffix(".png"), o.title)))


if __name__ == "__main__":
    main()
