"""Training steps end to end: every mode on every mesh, over a link whose transfers take half as long as the ideal step, or
`--ratio` times as long.

A point is one mesh. All modes take turns in one process (bench_train), a step each in an order drawn again for each round, so that
the steps compared are seconds apart and a drift of the machine affects all modes. After some rounds another process continues, with
other memory and other choices of its libraries. The first round of a process is not counted. Mode auto finds its plan in trials
before the first round; later processes read it. The bytes of a step over the line rate take `ratio` times the step of mode ideal
(whole computations, no transfers). A machine's speed changes within minutes, so the link of each process is set by the ideal step
of the process before. Other work can only lengthen a step, so modes are compared by the mean of the faster half of their steps. The
standard error is the deviation of this ratio over bootstrap samples of blocks of eight rounds. It describes one report; another
report may differ by 1 or 2 %. Modes do not differ if their difference is within two such errors of it. Medians and percentiles are of
all steps. Of the time beyond ideal, nowire shows what slices cost without transfers; exposed is the mean over ranks of what the log
says. A rank has two cores in every mode, one of them for transfers.
"""
import tempfile
import time

import numpy as np

import lab
import plots
import run_log
from runner import ROOT, Failed
from tables import markdown, remarks

from .operations import faster_half, undisturbed_ms
from .place import FREE_LINK

NAME, TITLE = "training", "Training steps, end to end"
BUILD = f"{ROOT}/build/release"
PROGRAM, BENCHES = f"{BUILD}/train_gpt", f"{BUILD}/tests/bench"
# In the order of the tables.
MODES = "none", "slice", "slice:8", "ring", "direct", "ring:4", "auto", "nowire:4", "nowire", "ideal"
QUICK_MODES = "none", "slice", "ring", "auto", "nowire", "ideal"
WITHOUT_TRANSFERS = "nowire", "ideal"  # losses are wrong by construction
SHAPES = {"d12": (12, 768, 12), "d6": (6, 384, 6), "wide": (2, 1536, 24), "half of d12": (6, 768, 12)}  # layers, channels, heads
LOSS_TOLERANCE = 1e-5  # relative to mode none, for every step
LOSS_ROUNDS = 30       # losses are compared up to here: rounding alone makes them differ by 4e-8 after 50 steps, 5e-5 after 100
DRAWINGS = 200
BLOCK_ROUNDS, QUICK_ROUNDS = 8, 4  # of one process
SECONDS, QUICK_SECONDS = 900, 12  # of a point, approximately
NO_PEAK = "--peak-tflops", 1  # skips the measurement of the peak, where MFU is not needed


def size_for(place, size):
    """Where cores are shared: wide layers, which compute more per byte and so have a slower link, so that moving bytes takes little
    of the cores."""
    return {**size, "model": "wide", "seq": 512, "batch": 2} if lab.shortage(2, place.cores) else size


def points(place, quick):
    meshes = [("tpsp", 2, 1), *[("up", 2, 1)] * (not quick), ("tpsp", 1, 2), *[("tpsp", 2, 2)] * (not quick and place.ranks >= 4)]
    # GPT-2's sequence: attention hides as much as in a real run.
    size = size_for(place, dict(model="d6", vocab=8192, seq=256, batch=4) if quick else dict(model="d12", vocab=8192, seq=1024))
    ratio = place.ratio if place.kind == "lab" else None  # None: shared memory
    # Left out: more slices on tp 1, where buckets of gradients are not cut; direct on two ranks, where it is ring.
    return [{"batch": dp, **size, "strategy": strategy, "tp": tp, "dp": dp, "ratio": ratio,
             "rounds": QUICK_ROUNDS if quick else BLOCK_ROUNDS, "seconds": QUICK_SECONDS if quick else SECONDS,
             "modes": [mode for mode in (QUICK_MODES if quick else MODES)
                       if (tp > 1 or mode != "slice:8") and (tp * dp > 2 or mode != "direct")]}
            for strategy, tp, dp in meshes]


def mesh_name(point):
    return f"{point['strategy']} {point['tp']}x{point['dp']}"


# --- measuring ---


def model_options(point):
    layers, channels, heads = SHAPES[point["model"]]
    return ["--layers", layers, "--channels", channels, "--heads", heads, "--vocab", point["vocab"], "--seq",
            point["seq"], "--strategy", point["strategy"], "--tp", point["tp"], "--dp", point["dp"], "--micro-batch",
            point["batch"] // point["dp"], "--threads", 1, *point.get("policy", ())]


def take_turns(place, point, modes, rounds, *options):
    """Runs all modes in turns. Returns the configuration and the steps."""
    return run_log.turns(place.run(point["tp"] * point["dp"], [
        f"{BENCHES}/bench_train", "--modes", ",".join(modes), *model_options(point), *options, "--rounds", rounds, "--json"]))


def ideal_of(steps):
    return undisturbed(columns_of([step for step in steps if step["mode"] == "ideal"]))


LOOKED_AT = "ring", "ideal"


def first_look(place, point):
    """Configuration, the ideal step in ms and the bits of a step, over a practically unlimited link."""
    place.rate = FREE_LINK
    config, steps = take_turns(place, point, LOOKED_AT, QUICK_ROUNDS, *NO_PEAK)
    return config, ideal_of(steps), 8 * max(step["bytes_sent_rank0"] for step in steps)


def set_link(place, point, ideal_ms, bits):
    """Sets and returns the rate with which the bits of a step take `ratio` of the ideal step; None over shared memory."""
    place.rate = point["ratio"] and 1e3 * bits / (point["ratio"] * ideal_ms)
    return place.rate


def check_memory(config, modes):
    """Each mode has a model in memory; a machine that runs out of memory may kill any process."""
    need, have = config["memory_mib"] / len(LOOKED_AT) * config["ranks"] * modes, config["free_mib"]
    if need > have:
        raise Failed(f"{modes} modes on {config['ranks']} ranks need {need / 1024:.1f} GiB, {have / 1024:.1f} GiB are available")


def measure(place, point):
    """A row for each step, of one process after another until the seconds of the point are over."""
    config, ideal_ms, bits = first_look(place, point)
    check_memory(config, len(point["modes"]))
    rows, end = [], time.monotonic() + point["seconds"]
    with tempfile.TemporaryDirectory(prefix="commfuse-report-") as folder:
        while not rows or time.monotonic() < end:
            rate, before = set_link(place, point, ideal_ms, bits), max((row["round"] for row in rows), default=0)
            config, steps = take_turns(place, point, point["modes"], point["rounds"], "--out", folder)
            flops_of_peak = config.get("peak_tflops_all_ranks", 0) * 1e9  # in a millisecond
            rows += [{"mesh": mesh_name(point), "ranks": config["ranks"], "model": point["model"], "seq": point["seq"],
                      "batch": point["batch"], "parameters": config["parameters"], "mode": step["mode"],
                      "round": before + step["round"], "step_ms": step["step_ms"], "link_bits_per_s": rate,
                      "line_ms": rate and 1e3 * bits / rate, "tokens_per_s": 1e3 * point["batch"] * point["seq"] / step["step_ms"],
                      "mfu_share": config["flops"] / (step["step_ms"] * flops_of_peak), "exposed_ms": step["exposed_mean_ms"],
                      "comm_ms": step["comm_ms"], "loss": step["loss"], "bytes_sent_per_step": step["bytes_sent_rank0"]}
                     for step in steps]
            ideal_ms = ideal_of(steps)
    return rows


# --- arithmetic ---


def columns_of(rows):
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def by_mesh(rows):
    """mesh → mode → columns"""
    return {mesh: {mode: columns_of([row for row in rows if (row["mesh"], row["mode"]) == (mesh, mode)])
                   for mode in dict.fromkeys(row["mode"] for row in rows if row["mesh"] == mesh)}
            for mesh in dict.fromkeys(row["mesh"] for row in rows)}


def undisturbed(columns, field="step_ms"):
    """Mean over the faster half of the steps."""
    return float(np.mean(columns[field][faster_half(columns["step_ms"])]))


def multiples(modes, middle=undisturbed_ms):
    """Each mode's multiple of ideal: (all rounds, (bootstrap samples of the rounds)), in blocks of consecutive rounds because
    disturbances last longer than a round."""
    count, draw = len(modes["ideal"]["step_ms"]), np.random.default_rng(1)
    length = max(1, min(BLOCK_ROUNDS, count // 4))
    begins = draw.integers(count, size=(DRAWINGS, -(-count // length)))
    rounds = ((begins[:, :, None] + np.arange(length)) % count).reshape(DRAWINGS, -1)[:, :count]
    steps = {mode: columns["step_ms"] for mode, columns in modes.items()}
    return {mode: (float(middle(ms) / middle(steps["ideal"])), middle(ms[rounds]) / middle(steps["ideal"][rounds]))
            for mode, ms in steps.items()}


def remarks_of(mode, found, among):
    """found: of multiples()."""
    ratio, drawn = found[mode]
    return remarks([name for name in among if name != mode and abs(found[name][0] - ratio) <= 2 * np.std(found[name][1] - drawn)], ratio)


def loss_difference(columns, reference):
    """The largest relative difference in the first LOSS_ROUNDS steps."""
    return max(abs(columns["loss"] / reference["loss"] - 1)[columns["round"] <= LOSS_ROUNDS])


def compared(modes):
    """The modes whose losses are right."""
    return [mode for mode in modes if plots.overlap(mode) not in WITHOUT_TRANSFERS]


def problems(rows):
    """Errors on any machine."""
    return [f"training {mesh}: losses of {mode} differ from those of none by {difference:.1e}, more than {LOSS_TOLERANCE:g}"
            for mesh, modes in by_mesh(rows).items() for mode in compared(modes)
            for difference in [loss_difference(modes[mode], modes["none"])] if not difference <= LOSS_TOLERANCE]


# --- tables and figures ---


def steps_table(modes):
    lines, found = [], multiples(modes)
    for mode in [mode for mode in MODES if mode in modes]:
        steps = modes[mode]
        low, middle, high = np.percentile(steps["step_ms"], [10, 50, 90])
        difference = loss_difference(steps, modes["none"])
        lines.append({
            "mode": mode, "step, ms": f"{middle:.1f}", "p10 – p90": f"{low:.1f} – {high:.1f}",
            "of ideal": f"{found[mode][0]:.3f} ± {np.std(found[mode][1]):.3f}",
            "exposed, ms": f"{undisturbed(steps, 'exposed_ms'):.1f}",
            "tokens/s": f"{np.median(steps['tokens_per_s']):.0f}", "MFU": f"{100 * np.median(steps['mfu_share']):.1f} %",
            "loss differs by": "wrong by construction" if mode not in compared(modes) else
            "**ERROR** " * (not difference <= LOSS_TOLERANCE) + f"{difference:.0e}",
            "remarks": remarks_of(mode, found, compared(modes) if mode in compared(modes) else ())})
    return markdown(lines)


def describe_mesh(modes):
    ideal = modes["ideal"]
    row, ms = {name: values[0] for name, values in ideal.items()}, undisturbed(ideal)
    text = (f"{row['ranks']} ranks, {row['model']} with {row['parameters'] / 1e6:.1f} M parameters, "
            f"{row['batch']} sequences of {row['seq']} tokens a step, fp32, one thread a rank, "
            f"{len(ideal['step_ms'])} steps a mode, in turns. A rank sends "
            f"{max(np.median(steps['bytes_sent_per_step']) for steps in modes.values()) / 1e6:.1f} MB a step ")
    if not row["link_bits_per_s"]:
        return text + "through shared memory."
    rates, line = ideal["link_bits_per_s"] / 1e6, undisturbed(ideal, "line_ms")
    return text + (f"over a link of {min(rates):.0f} to {max(rates):.0f} Mbit/s each way, which takes {line:.0f} ms, "
                   f"{line / ms:.2f} of the ideal step.")


def tables(rows):
    text = [__doc__.split("\n\n", 1)[1].strip(), ""]
    for mesh, modes in by_mesh(rows).items():
        text += [f"### {mesh}", "", describe_mesh(modes), "", steps_table(modes)]
    return "\n".join(text)


def figures(rows, folder):
    meshes = by_mesh(rows)
    shades = plots.shades([mode for mode in MODES if any(mode in compared(mesh) for mesh in meshes.values())])
    figure, axes = plots.panels(1, len(meshes), (10, 4.6))
    for axis, (mesh, runs) in zip(axes[0], meshes.items()):
        ideal, found = undisturbed(runs["ideal"]), multiples(runs)
        for mode in [mode for mode in shades if mode in runs]:
            low, middle, high = np.percentile(runs[mode]["step_ms"], [10, 50, 90]) / ideal
            bar = axis.bar(list(shades).index(mode), middle, color=shades[mode], width=0.75, label=mode, capsize=3,
                           yerr=[[middle - low], [high - middle]])
            axis.bar_label(bar, [f"{found[mode][0]:.2f}"], padding=3, fontsize=9)
        axis.axhline(1, color="black", linestyle="--", linewidth=1.2, label="ideal: whole computations, no transfers")
        axis.set(title=f"{mesh}, ideal {ideal:.0f} ms", xticks=[], ylim=(0, 1.12 * axis.get_ylim()[1]))
    axes[0][0].set_ylabel("times the ideal step: median, p10 to p90")
    handles = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels())}
    plots.legend_below(figure, handles, 5, lines=2)
    figure.suptitle("Training step by mode, times the ideal step; above a bar: of the faster half", fontsize=11)
    return plots.save(figure, folder, NAME)
