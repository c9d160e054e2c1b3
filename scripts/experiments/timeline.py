"""One transformer layer in every mode, drawn from traces of training: the paper's figure, measured.

Two ranks, and a link whose transfers take half as long as the computation. Among all steps and layers of a trace but the first and
last layer, the one of median length is drawn, the same for all ranks: an example, not a statistic. Forward and backward both start
at zero, so that panels can be compared.
"""
import json
import tempfile

import plots
from matplotlib.patches import Patch  # after plots
from tokens import write_tokens

from . import steps

NAME, TITLE = "timeline", "One layer on the time line"
MODES = {"none": "none: blocking collectives", "slice:4": "slice:4: data slicing", "ring:4": "ring:4: CommFuse"}
SIZE = dict(model="d12", seq=512, batch=2)
STEPS = 5


def points(place, quick):
    return [{**steps.point_of(place, quick, ("tpsp", 2, 1), SIZE, list(MODES)), "seconds": 30}]


def measure(place, point):
    rows = []
    with tempfile.TemporaryDirectory(prefix="commfuse-report-") as folder:
        tokens, trace = f"{folder}/tokens.bin", f"{folder}/trace.json"
        write_tokens(tokens, point["batch"] * (STEPS + 1) * point["seq"] + 1, point["vocab"])
        rate = point["ratio"] and steps.set_link(place, point, *steps.first_look(place, point))
        for mode in MODES:
            place.run(point["tp"] * point["dp"], [
                steps.PROGRAM, *steps.model_options(point), "--train", tokens, "--batch", point["batch"], "--steps", STEPS,
                "--val-every", 0, "--overlap", mode, "--trace", trace, "--trace-steps", f"1:{STEPS}"])
            with open(trace, encoding="utf-8") as file:
                rows += [{"model": point["model"], "seq": point["seq"], "batch": point["batch"], "link_bits_per_s": rate,
                          "mode": mode, **row}
                         for row in layer_of(json.load(file)["traceEvents"])]
    return rows


def layer_of(events):
    """Rows of the median layer of a trace: the events that overlap its block, in ms from the begin of the block."""
    events = [event for event in events if event["ph"] == "X"]
    layers = {}  # (step, layer) → (rank, name) → the event of its block
    for event in events:
        if event["name"] in ("block forward", "block backward"):
            layer = layers.setdefault((event["args"]["step"], event["args"]["layer"]), {})
            layer[event["pid"], event["name"]] = event
    last = max(layer for _, layer in layers)
    inner = [blocks for (_, layer), blocks in layers.items() if 0 < layer < last] or list(layers.values())
    inner.sort(key=lambda blocks: sum(block["dur"] for block in blocks.values()))
    blocks, rows = inner[(len(inner) - 1) // 2], []
    for (rank, name), block in sorted(blocks.items()):
        origin = min(other["ts"] for (_, same), other in blocks.items() if same == name)
        begin, end = block["ts"], block["ts"] + block["dur"]
        rows += [{"direction": name.split()[1], "rank": rank, "kind": "block" if event is block else event["cat"],
                  "layer": block["args"]["layer"], "name": event["name"],
                  "begin_ms": (event["ts"] - origin) / 1e3, "end_ms": (event["ts"] + event["dur"] - origin) / 1e3}
                 for event in events if event is block or event["pid"] == rank and not event["name"].startswith("block ")
                 and event["ts"] < end and event["ts"] + event["dur"] > begin]
    return rows


# --- picture ---

# Colours and texts of the legend: of products by the last word of an event's name, of others by its kind.
PLACES = {"att.qkv": ("#7fb3d5", "QKV"), "att.proj": ("#76d7c4", "attention and projection"),
          "mlp.fc1": ("#f7dc6f", "MLP 1: first product"), "mlp.fc2": ("#d7a8e0", "MLP 2: second product")}
KINDS = {"block": ("#e6e8ea", "weight gradients, norms, GELU, sums"), "wait": ("#d62718", "exposed communication")}
OTHER = "#c8ccd0"
COMPUTING, TRANSFER = {"edgecolor": "white", "linewidth": 0.5}, {"hatch": "////", "edgecolor": "#5d6d7e", "linewidth": 0.4}
COMPUTE_HEIGHT, WIRE_HEIGHT, RANK_HEIGHT = 0.62, 0.42, 1.26
PANEL_INCHES, REST_INCHES = 1.4, 2


def select(rows, **values):
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def lanes(events):
    """Puts transfers, which overlap, in lanes: (lane, event) of each, and the number of lanes."""
    free, placed = [], []
    for event in sorted(events, key=lambda event: event["begin_ms"]):
        lane = next((i for i, until in enumerate(free) if until <= event["begin_ms"]), len(free))
        free[lane:lane + 1] = [event["end_ms"]]
        placed.append((lane, event))
    return placed, len(free)


def draw(axes, events, bottom, height, style):
    colours = [KINDS.get(event["kind"], PLACES.get(event["name"].split(" ")[-1], (OTHER,)))[0] for event in events]
    spans = [(event["begin_ms"], event["end_ms"] - event["begin_ms"]) for event in events]
    axes.broken_barh(spans, (bottom, height), facecolors=colours, **style)


def draw_panel(axes, rows, title):
    """Draws two rows for each rank: the compute thread (exposed time in red) and the wire. The title has the exposed time of the
    rank that has most."""
    ticks, ranks = {}, sorted({row["rank"] for row in rows})
    for i, rank in enumerate(reversed(ranks)):
        events, wire, computing = select(rows, rank=rank), i * RANK_HEIGHT, i * RANK_HEIGHT + WIRE_HEIGHT + 0.04
        ticks |= {f"rank {rank} on the wire": wire + WIRE_HEIGHT / 2, f"rank {rank} compute": computing + COMPUTE_HEIGHT / 2}
        for kind in "block", "compute", "wait":
            draw(axes, select(events, kind=kind), computing, COMPUTE_HEIGHT, COMPUTING)
        placed, count = lanes(select(events, kind="comm"))
        for lane, event in placed:
            draw(axes, [event], wire + WIRE_HEIGHT * (count - 1 - lane) / count, WIRE_HEIGHT / count, TRANSFER)
    end = max(row["end_ms"] for row in select(rows, kind="block"))
    exposed = max(sum(row["end_ms"] - row["begin_ms"] for row in select(rows, rank=rank, kind="wait")) for rank in ranks)
    axes.axvline(end, color="black", linewidth=1.2)
    axes.set_title(f"{title}  –  {end:.0f} ms, of which {exposed:.0f} ms exposed", loc="left", pad=3)
    axes.set_yticks(list(ticks.values()), list(ticks), fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.set_axisbelow(True)


def figure(rows):
    """A panel for each mode and direction, forward above backward; panels of a direction share the time axis."""
    legend = {text: Patch(facecolor=colour) for colour, text in [*PLACES.values(), *KINDS.values()]}
    legend["transfer, in the colour of its product"] = Patch(facecolor="white", **TRANSFER)
    legend["transfer of the embedding and of vectors"] = Patch(facecolor=OTHER, **TRANSFER)
    row, modes = rows[0], list(MODES)
    drawn, axes = plots.plt.subplots(2 * len(modes), figsize=(10, 2 * PANEL_INCHES * len(modes) + REST_INCHES))
    line = 0.2 / drawn.get_figheight()  # the legend has two, above the note, which has one
    drawn.get_layout_engine().set(rect=(0, 3 * line, 1, 1 - 3 * line))
    drawn.legend(legend.values(), legend, loc="lower center", ncols=4, bbox_to_anchor=(0.5, line / 2))
    link = f"link of {row['link_bits_per_s'] / 1e6:.0f} Mbit/s" if row["link_bits_per_s"] else "shared memory"
    channels, tokens = steps.SHAPES[row["model"]][1], f"{row['batch']} x {row['seq']} tokens"
    drawn.suptitle(f"One layer of {channels} channels in training, TPSP, tp 2, {tokens}, {link}", fontsize=11)
    for way, direction in enumerate(("forward", "backward")):
        panels, now = axes[way * len(modes):][:len(modes)], select(rows, direction=direction)
        width = 1.02 * max(row["end_ms"] for row in select(now, kind="block"))
        for axis, mode in zip(panels, modes):
            draw_panel(axis, select(now, mode=mode), MODES[mode])
            axis.set_xlim(0, width)
            axis.tick_params(axis="x", labelsize=8, labelbottom=mode == modes[-1])
        panels[-1].set_xlabel(f"{direction}: ms since the layer began")
    return drawn


def shown(rows, folder):
    """Draws the picture and returns Markdown that shows it."""
    plots.save(figure(rows), folder / f"{NAME}.png")
    return f"![{TITLE}]({NAME}.png)\n"
