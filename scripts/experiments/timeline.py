"""One transformer layer in every mode, drawn from traces of training: the paper's figure, measured.

Two ranks, and a link whose transfers take half as long as the computation. Among all steps and layers of a trace, the one of median
length is drawn, the same for all ranks: an example, not a statistic. Forward and backward both start at zero, so that panels can be
compared.
"""
import json
import tempfile

from matplotlib.patches import Patch

import plots
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
                layer = layer_of(json.load(file)["traceEvents"])
            shape = {name: point[name] for name in ("model", "seq", "batch")}
            rows += [{**shape, "link_bits_per_s": rate, "mode": mode, **row} for row in layer]
    return rows


def layer_of(events):
    """Rows of the median layer of a trace: the events that overlap its block, in ms from the begin of the block."""
    layers, others, rows = {}, [], []  # layers: (step, layer) → its blocks, of every rank, forward and backward
    for event in events:
        if event["name"] in ("block forward", "block backward"):
            layers.setdefault((event["args"]["step"], event["args"]["layer"]), []).append({**event, "cat": "block"})
        elif event["ph"] == "X":
            others.append(event)
    by_length = sorted(layers.values(), key=lambda blocks: sum(block["dur"] for block in blocks))
    blocks = by_length[(len(by_length) - 1) // 2]
    for block in blocks:
        origin, end = min(same["ts"] for same in blocks if same["name"] == block["name"]), block["ts"] + block["dur"]
        rows += [{"direction": block["name"].split()[1], "rank": block["pid"], "kind": event["cat"],
                  "layer": block["args"]["layer"], "name": event["name"],
                  "begin_ms": (event["ts"] - origin) / 1e3, "end_ms": (event["ts"] + event["dur"] - origin) / 1e3}
                 for event in [block, *others] if event["pid"] == block["pid"]
                 and event["ts"] < end and event["ts"] + event["dur"] > block["ts"]]
    return rows


# --- picture ---

# Colours and texts of the legend: of products by the last word of an event's name, of others by its kind.
PLACES = {"att.qkv": ("#7fb3d5", "QKV"), "att.proj": ("#76d7c4", "attention and projection"),
          "mlp.fc1": ("#f7dc6f", "MLP 1: first product"), "mlp.fc2": ("#d7a8e0", "MLP 2: second product")}
KINDS = {"block": ("#e6e8ea", "layer norm, GELU, sums"), "wait": ("#d62718", "waiting: exposed communication")}
COMPUTING, TRANSFER = {"edgecolor": "white", "linewidth": 0.5}, {"hatch": "////", "edgecolor": "#5d6d7e", "linewidth": 0.4}
COMPUTE_HEIGHT, WIRE_HEIGHT, RANK_HEIGHT = 0.62, 0.42, 1.26


def select(rows, **values):
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def draw(axes, events, bottom, height, style):
    colours = [KINDS.get(event["kind"], PLACES.get(event["name"].split(" ")[-1], ("#c8ccd0",)))[0] for event in events]
    spans = [(event["begin_ms"], event["end_ms"] - event["begin_ms"]) for event in events]
    axes.broken_barh(spans, (bottom, height), facecolors=colours, **style)


def draw_panel(axes, rows, title):
    """Draws two rows for each rank: the compute thread (waiting in red) and the wire, where a transfer covers what began before."""
    ticks, ranks = {}, sorted({row["rank"] for row in rows})
    for i, rank in enumerate(reversed(ranks)):
        wire, computing = i * RANK_HEIGHT, i * RANK_HEIGHT + WIRE_HEIGHT + 0.04
        ticks |= {f"rank {rank} on the wire": wire + WIRE_HEIGHT / 2, f"rank {rank} compute": computing + COMPUTE_HEIGHT / 2}
        for kind in "block", "compute", "wait":
            draw(axes, select(rows, rank=rank, kind=kind), computing, COMPUTE_HEIGHT, COMPUTING)
        draw(axes, select(rows, rank=rank, kind="comm"), wire, WIRE_HEIGHT, TRANSFER)
    end = max(row["end_ms"] for row in select(rows, kind="block"))
    waiting = max(sum(row["end_ms"] - row["begin_ms"] for row in select(rows, rank=rank, kind="wait")) for rank in ranks)
    axes.axvline(end, color="black", linewidth=1.2)
    axes.set_title(f"{title}  –  {end:.0f} ms, of which {waiting:.0f} ms waiting", loc="left", pad=3)
    axes.set_yticks(list(ticks.values()), list(ticks), fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.set_axisbelow(True)


def figure(rows):
    """A panel for each mode and direction, forward above backward."""
    legend = {text: Patch(facecolor=colour) for colour, text in [*PLACES.values(), *KINDS.values()]}
    legend["transfer, in the colour of its product"] = Patch(facecolor="white", **TRANSFER)
    row, panels = rows[0], [(direction, mode) for direction in ("forward", "backward") for mode in MODES]
    drawn, axes = plots.panels(len(panels), 1, (10, 1.4 * len(panels) + 2))
    link = f"link of {row['link_bits_per_s'] / 1e6:.0f} Mbit/s" if row["link_bits_per_s"] else "shared memory"
    drawn.suptitle(f"One layer of {row['model']} in training, tpsp 2x1, {row['batch']} x {row['seq']} tokens, {link}", fontsize=11)
    for axis, (direction, mode) in zip(axes[:, 0], panels):
        draw_panel(axis, select(rows, direction=direction, mode=mode), f"{direction}, {MODES[mode]}")
    axis.set(xlim=(0, None), xlabel="ms since the layer began")
    axis.legend(legend.values(), legend, loc="upper left", bbox_to_anchor=(0, -0.4), ncols=4)
    return drawn


def shown(rows, folder):
    """Draws the picture and returns Markdown that shows it."""
    plots.save(figure(rows), folder / f"{NAME}.png")
    return f"![{TITLE}]({NAME}.png)\n"
