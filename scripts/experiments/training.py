"""Training steps end to end: every mode on every mesh, over a link whose transfers take half as long as computing.

A measurement is one mesh. All modes take turns in one process, a step each in an order drawn anew for each round
(bench_train), so that seconds lie between the steps compared, and a drift of the machine meets all modes; after eight rounds
another process goes on: its memory, and what libraries choose at their start, is another's. Mode auto finds its plan in trials
before the first round; the other processes read it. The bytes of a step (tests/train/traffic.py's formula) over the line rate
are `ratio` times the step of mode ideal, whole computations without transfers: a machine's speed moves within minutes, so each
process has a link set anew, by what that step took in the one before. Then the library's own collectives are timed alone
(bench_fuse). A process's first round is not counted. Whatever else a machine does only ever adds to a step, so modes are
compared by the mean of the faster half of their steps. The standard error is what drawing other blocks of eight rounds from
those measured makes of a ratio: it is of one report, and another report's ratio may be 1 or 2 % apart. Medians and percentiles
are of all steps.

Where the time goes that a mode takes longer than ideal: chunking, what as many slices cost without transfers (nowire); exposed
time, as the trainer logs it for the mean of the ranks, beyond that of the mode without transfers; and the rest, computation made
slower by the bytes that move beside it.

What follows by arithmetic: none takes ideal + the time of every collective, at the rates measured alone; commfuse takes nowire +
what cannot hide. A place whose slices take c to compute and w on the line, in m slices of each of N ranks' parts, hides all but
(N - 1)·w + c/m - N·c; nothing hides the lookup; the layers are taken to hide gradients and weights.

A rank has two cores, one of them for its transfers in all modes (MFU is of both). Who blocks could compute on both: the last
table of a mesh has the steps of two threads a rank on the same cores over the same link.
"""
import collections
import json
import sys
import tempfile
import types

import numpy as np

import plots
from runner import ROOT
from tables import markdown, number

sys.path.insert(0, f"{ROOT}/tests/train")
import traffic
from . import fused, memory
from .place import FREE_LINK, PlaceError

NAME, TITLE = "training", "Training steps, end to end"
BUILD = f"{ROOT}/build/release"
PROGRAM, BENCHES = f"{BUILD}/train_gpt", f"{BUILD}/tests/bench"
# As bench_train writes them: overlap, route and slices; slice alone is in 4 pieces. In the order of the tables.
MODES = "none", "slice", "slice:8", "commfuse", "commfuse:direct", "commfuse:4", "auto", "nowire:4", "nowire", "ideal"
QUICK_MODES = "none", "slice", "commfuse", "auto", "nowire", "ideal"
WITHOUT_TRANSFERS = "nowire", "ideal"  # losses are wrong by construction
SPARE_MODES, SPARE_ROUNDS = ("none", "commfuse:4", "ideal"), 10  # with two threads a rank
SPARE_ENV = {"GOMP_SPINCOUNT": "10000"}  # threads that wait for work leave their core to the transfers after a moment
SLICES = {mode: int(mode.rpartition(":")[2]) if mode[-1].isdigit() else 1 for mode in MODES if plots.overlap(mode) == "commfuse"}
SHAPES = {"d12": (12, 768, 12), "d6": (6, 384, 6), "wide": (2, 1536, 24)}  # layers, channels, heads
LOSS_TOLERANCE = 1e-5  # relative, of every step, against mode none
LOSS_ROUNDS = 30       # whose losses are compared: rounding alone drives trainings apart, by 4e-8 in 50 steps, 5e-5 in 100
DRAWINGS = 200
SECONDS, QUICK_SECONDS, ROUNDS_MIN = 900, 12, 4  # of the turns of a mesh, about
BASE_ROUNDS, BLOCK_ROUNDS = 6, 8  # by which the first link is chosen; of one process, about
NO_PEAK = "--peak-tflops", 1  # is measured: nobody asks for MFU
TURNS_TIMEOUT_S = 7200


def size_for(place, size):
    """Where cores are shared: layers so wide that computing takes the more time for every byte, and the link is slow, so
    that moving the bytes takes the least part of the cores."""
    return size if place.enough(2)[0] else {**size, "model": "wide", "seq": 512, "batch": 2}


def points(place, quick):
    meshes = [("tpsp", 2, 1), *[("up", 2, 1)] * (not quick), ("tpsp", 1, 2), *[("tpsp", 2, 2)] * (not quick and place.ranks >= 4)]
    # GPT-2's own sequence: attention hides as much as in a real run.
    size = size_for(place, dict(model="d6", vocab=8192, seq=256, batch=4, seconds=QUICK_SECONDS) if quick else
                    dict(model="d12", vocab=8192, seq=1024, seconds=SECONDS))
    ratio = 0.5 if place.kind == "lab" else None  # None: shared memory, as fast as it is
    # Gradients travel bucket by bucket, in however many pieces activations do; two ranks have one route.
    return [{"batch": dp, **size, "strategy": strategy, "tp": tp, "dp": dp, "ratio": ratio, "spare": not quick,
             "modes": [mode for mode in (QUICK_MODES if quick else MODES)
                       if (tp > 1 or mode != "slice:8") and (tp * dp > 2 or mode != "commfuse:direct")]}
            for strategy, tp, dp in meshes]


def mesh_name(point):
    return f"{point['strategy']} {point['tp']}x{point['dp']}"


# --- measuring ---


def model_options(point):
    layers, channels, heads = SHAPES[point["model"]]
    return ["--layers", layers, "--channels", channels, "--heads", heads, "--vocab", point["vocab"], "--seq",
            point["seq"], "--strategy", point["strategy"], "--tp", point["tp"], "--dp", point["dp"], "--micro-batch",
            point["batch"] // point["dp"], "--threads", point.get("threads", 1)]


def take_turns(place, point, modes, rounds, options=(), env=None):
    """Configuration, and the steps of all modes, in turns."""
    text = place.run(point["tp"] * point["dp"], [f"{BENCHES}/bench_train", "--modes", ",".join(modes), *model_options(point),
                                                 *options, "--rounds", rounds, "--json"], env, timeout=TURNS_TIMEOUT_S)
    events = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    steps = [event for event in events if event["event"] == "step"]
    return {name: value for event in events if event["event"] != "step" for name, value in event.items()}, steps


def kinds_of_step(point):
    """Bytes that each rank sends in a step, by what they are."""
    (layers, channels, heads), vocab, dp = SHAPES[point["model"]], point["vocab"], point["dp"]
    shape = types.SimpleNamespace(maxT=point["seq"], V=vocab, Vp=-(-vocab // 128) * 128, L=layers, heads=heads, C=channels)
    _, _, owned = traffic.table_owners(shape, point["strategy"], point["tp"], dp)
    tokens = point["seq"] * point["batch"] // dp // (point["tp"] if point["strategy"] == "up" else 1)
    rows = owned * (1 - (1 - 1 / vocab) ** tokens)  # of an owner that a rank's random tokens name, about
    return traffic.formula(shape, point["strategy"], point["tp"], dp, point["seq"], point["batch"] // dp, lists=2 * [rows])


def bytes_of_step(point):
    """The same by kind of collective."""
    layers, kinds = SHAPES[point["model"]][0], kinds_of_step(point)
    up = point["strategy"] == "up"
    gathers = 0 if up else (6 * layers + 1) / (10 * layers + 2)  # of activations: 2 forward, 4 backward, and the head's
    return {"alltoall": kinds["activations"] * up,
            "gather": kinds["activations"] * gathers + kinds["weights"] + kinds["lookup"] / 2,
            "scatter": kinds["activations"] * (1 - gathers) * (not up) + kinds["gradients"] + kinds["lookup"] / 2}


def native_ms(place, point, size):
    """What the library's collectives take for the bytes of a step, at the rates that they reach alone. They are timed
    with a message of the size that most bytes travel in: activations if tp > 1, else a matrix's gradient."""
    _, C, heads = SHAPES[point["model"]]
    T, B = (point["seq"], point["batch"] // point["dp"]) if point["tp"] > 1 else (4 * C, 1)
    operation = {"gather": "gather_gemm", "scatter": "gemm_scatter", "alltoall": "alltoall_gemm"}
    total = 0
    for kind, sent in size.items():
        if sent > 0:
            columns = 3 * C if kind == "alltoall" else heads  # next to nothing to compute
            work = dict(operation=operation[kind], ranks=point["tp"] * point["dp"], T=T, B=B, C=C, columns=columns, H=heads)
            line, = fused.run(place, work, 10, only="comm")
            total += sent / line["bytes"] * line["ms"]
    return total


def line_ms(point, rate):
    return sum(bytes_of_step(point).values()) * 8e3 / rate


def set_link(place, point, step_ms):
    """The rate at which the bytes of a step take the share of step_ms that is asked for; None over shared memory."""
    if not point["ratio"]:
        return None
    rate = line_ms(point, point["ratio"] * step_ms)
    place.link(rate)
    return rate


def without_transfers(place, point):
    """Configuration and step by which a link is chosen. It has a few bytes to carry meanwhile; it is as good as none."""
    if point["ratio"]:
        place.link(FREE_LINK)
    config, steps = take_turns(place, point, ["ideal"], BASE_ROUNDS, options=NO_PEAK)
    return config, undisturbed(columns_of(steps))


def check_memory(config, modes):
    """All modes have a model of their own, and a machine short of memory kills whom it likes."""
    need, have = config["memory_mib"] * config["ranks"] * modes, memory.available_mib()
    if need > have:
        raise PlaceError(f"{modes} modes on {config['ranks']} ranks need {need / 1024:.1f} GiB, {have / 1024:.1f} GiB "
                         "are available")


def measure_steps(place, point):
    """Configuration and steps of processes of some rounds each, over links that follow ideal if a ratio is asked for."""
    config, ideal_ms = without_transfers(place, point)
    check_memory(config, len(point["modes"]))
    a_round = len(point["modes"]) * ideal_ms * (1 + (point["ratio"] or 0) / 2)  # in the mean they wait for half
    rounds = max(ROUNDS_MIN, round(point["seconds"] * 1e3 / a_round))
    blocks = max(1, round(rounds / BLOCK_ROUNDS))
    rounds, found, peaks = rounds // blocks, [], []
    with tempfile.TemporaryDirectory(prefix="commfuse-report-") as folder:
        for block in range(blocks):
            rate = set_link(place, point, ideal_ms)
            config, steps = take_turns(place, point, point["modes"], rounds, options=("--out", folder))
            peaks.append(config.get("peak_tflops_all_ranks", 0))
            found += [{**step, "round": step["round"] + block * rounds, "link_bits_per_s": rate,
                       "line_ms": rate and line_ms(point, rate)} for step in steps if step["round"] > 0 or block == 0]
            ideal_ms = undisturbed(columns_of([step for step in steps if step["mode"] == "ideal"]))
    return {**config, "peak_tflops_all_ranks": float(np.mean(peaks))}, found


def measure(place, point):
    config, steps = measure_steps(place, point)
    if point["ratio"]:
        ideal = columns_of([step for step in steps if step["mode"] == "ideal"])
        place.link(line_ms(point, undisturbed(ideal, "line_ms")))
    peak = config["peak_tflops_all_ranks"]
    shared = {"mesh": mesh_name(point), "ranks": config["ranks"], "model": point["model"], "vocab": point["vocab"],
              "seq": point["seq"], "batch": point["batch"], "parameters": config["parameters"],
              "native_ms": native_ms(place, point, bytes_of_step(point)), "peak_tflops_per_rank": peak / config["ranks"]}
    if point.get("spare"):
        _, more = take_turns(place, {**point, "threads": 2}, SPARE_MODES, SPARE_ROUNDS, options=NO_PEAK, env=SPARE_ENV)
        steps += [{**step, "threads": 2} for step in more]
    return [{**shared, "mode": step["mode"], "threads": step.get("threads", 1), "round": step["round"],
             "step_ms": step["step_ms"], "link_bits_per_s": step.get("link_bits_per_s"), "line_ms": step.get("line_ms"),
             "tokens_per_s": 1e3 * point["batch"] * point["seq"] / step["step_ms"],
             "mfu_share": config["flops"] / (step["step_ms"] * 1e-3) / (peak * 1e12),
             "exposed_ms": step["exposed_comm_ms"], "exposed_mean_ms": step["exposed_mean_ms"],
             "comm_ms": step["comm_ms"], "loss": step["loss"], "bytes_sent_per_step": step["bytes_sent_rank0"]}
            for step in steps]


# --- what follows from the rows ---


def columns_of(rows):
    """Name → array of the values of all rounds but the first; "losses": of all, by round."""
    counted = [row for row in rows if row["round"] > 0]
    return {**{name: np.array([row[name] for row in counted]) for name in rows[0]},
            "losses": {row["round"]: row["loss"] for row in rows}}


def by_mesh(rows, threads=1):
    """mesh → mode → columns"""
    groups = collections.defaultdict(list)
    for row in rows:
        if row.get("threads", 1) == threads:
            groups[row["mesh"], row["mode"]].append(row)
    meshes = collections.defaultdict(dict)
    for (mesh, mode), some in groups.items():
        meshes[mesh][mode] = columns_of(some)
    return meshes


def first_of(modes):
    return {name: values[0] for name, values in modes["ideal"].items() if name != "losses"}


def undisturbed(columns, field="step_ms"):
    """Mean over the faster half of the steps."""
    return float(np.mean(columns[field][fused.faster_half(columns["step_ms"])]))


def ratio_to_ideal(modes, mode):
    return undisturbed(modes[mode]) / undisturbed(modes["ideal"])


def standard_error(modes, figure):
    """Of figure(modes): its standard deviation over drawings of as many rounds from those measured, in blocks of some that
    follow one another: what a machine does lasts for a while."""
    count, draw = len(modes["ideal"]["step_ms"]), np.random.default_rng(1)
    length = max(1, min(BLOCK_ROUNDS, count // 4))
    found = []
    for _ in range(DRAWINGS):
        begins = draw.integers(count, size=-(-count // length))
        rounds = ((begins[:, None] + np.arange(length)) % count).ravel()[:count]
        found.append(figure({mode: {name: columns[name][rounds] for name in ("step_ms", "exposed_mean_ms")}
                             for mode, columns in modes.items()}))
    return float(np.std(found))


def loss_difference(columns, reference):
    """The largest relative one of the first LOSS_ROUNDS steps, the very first included."""
    return max(abs(loss / reference["losses"][number] - 1) for number, loss in columns["losses"].items() if number <= LOSS_ROUNDS)


def without(modes, mode):
    """The mode that computes as this one does, without transfers; None: there is none."""
    same = f"nowire:{SLICES[mode]}" if mode in SLICES else None
    return "ideal" if mode == "none" else same if same in modes else "nowire" if mode in SLICES else None


def account(modes, mode):
    """Where a mode's time goes beyond ideal's, in ms: (all of it, chunking, exposed, rest); see above. None: not known."""
    longer, exposed = undisturbed(modes[mode]) - undisturbed(modes["ideal"]), undisturbed(modes[mode], "exposed_mean_ms")
    same = without(modes, mode)
    if same is None:
        return longer, None, exposed, None
    chunking = undisturbed(modes[same]) - undisturbed(modes["ideal"])
    exposed -= undisturbed(modes[same], "exposed_mean_ms")
    return longer, chunking, exposed, longer - chunking - exposed


def exposed_by_arithmetic(modes, mode):
    """What commfuse cannot hide of a TPSP step, in ms; nothing is said of UP, whose transfers wait for each other. Its
    transfers run at the line's rate, or, where that is not known, at that of the library's collectives."""
    row, nowire = first_of(modes), undisturbed(modes["nowire"])
    strategy, mesh = row["mesh"].split()
    N, dp = map(int, mesh.split("x"))
    if strategy != "tpsp":
        return None
    point = {name: row[name] for name in ("model", "vocab", "seq", "batch")} | dict(strategy=strategy, tp=N, dp=dp)
    per_byte = (undisturbed(modes["ideal"], "line_ms") if row["line_ms"] else row["native_ms"]) / sum(bytes_of_step(point).values())
    lookup = kinds_of_step(point)["lookup"] * per_byte
    if N == 1:
        return lookup
    L, C, _ = SHAPES[row["model"]]
    T, tokens = row["seq"], row["seq"] * row["batch"]
    products = row["parameters"] - T * C  # positions are looked up
    speed = (6 * products + 6 * L * C * T) * tokens / row["ranks"] / nowire  # flop a ms and rank, as it is
    rows_of_slice = tokens / dp / N
    w = rows_of_slice * C * 4 * per_byte
    product = 2 * rows_of_slice * C * C / N / speed       # of a slice with a (C, C) matrix split over the ranks
    attention = 2 * rows_of_slice * T * C / N / speed     # causal: half of the keys on average
    places = [  # computation of a slice, transfers
        (3 * product, 1), (product + attention, 1), (4 * product, 1), (4 * product, 1),              # forward
        (8 * product, 2), (8 * product, 2), (2 * product + 2.5 * attention, 1), (6 * product, 1)]    # backward
    left = sum(max(0, (N - 1) * transfers * w + c / SLICES[mode] - N * c) for c, transfers in places)
    return L * left + lookup


def prediction(modes, mode):
    """step_ms by arithmetic; None: it says nothing."""
    if mode == "none":
        return undisturbed(modes["ideal"]) + first_of(modes)["native_ms"]
    left = exposed_by_arithmetic(modes, mode) if mode in SLICES else None
    return None if left is None else undisturbed(modes[without(modes, mode)]) + left


def compared(modes):
    """Those whose losses are right."""
    return [mode for mode in modes if plots.overlap(mode) not in WITHOUT_TRANSFERS]


def ratios(rows):
    """The figures in which two reports must agree."""
    return {f"{row['model']}, {row['batch']} x {row['seq']} tokens, {mesh}, step({mode}) / step(ideal)": ratio_to_ideal(modes, mode)
            for mesh, modes in by_mesh(rows).items() for row in [first_of(modes)] for mode in compared(modes)}


def problems(rows):
    """What must not be, whatever the machine."""
    return [f"training {mesh}: losses of {mode} differ from those of none by {difference:.1e}, more than {LOSS_TOLERANCE:g}"
            for mesh, modes in by_mesh(rows).items() for mode in compared(modes)
            for difference in [loss_difference(modes[mode], modes["none"])] if not difference <= LOSS_TOLERANCE]


# --- tables and figures ---


def steps_table(modes):
    lines = []
    for mode in [mode for mode in MODES if mode in modes]:
        steps = modes[mode]
        low, middle, high = np.percentile(steps["step_ms"], [10, 50, 90])
        _, chunking, exposed, rest = account(modes, mode)
        difference = loss_difference(steps, modes["none"])
        lines.append({
            "mode": mode, "step, ms": f"{middle:.1f}", "p10 – p90": f"{low:.1f} – {high:.1f}",
            "of ideal": f"{ratio_to_ideal(modes, mode):.3f} ± {standard_error(modes, lambda drawn: ratio_to_ideal(drawn, mode)):.3f}",
            "predicted, ms": number(prediction(modes, mode), 1), "chunking, ms": number(chunking, 1), "exposed, ms": number(exposed, 1),
            "rest, ms": "–" if rest is None else
            f"{number(rest, 1)} ± {standard_error(modes, lambda drawn: account(drawn, mode)[3]):.1f}",
            "tokens/s": f"{np.median(steps['tokens_per_s']):.0f}", "MFU": f"{100 * np.median(steps['mfu_share']):.1f} %",
            "loss differs by": "wrong by construction" if mode not in compared(modes) else
            "**ERROR** " * (not difference <= LOSS_TOLERANCE) + f"{difference:.0e}"})
    return markdown(lines)


def spare_table(modes, spare):
    """Two threads a rank beside one, on the same cores."""
    return markdown([
        {"on the same cores": f"{mode}, {threads} thread{'s' * (threads > 1)}", "step, ms": f"{np.median(some[mode]['step_ms']):.1f}",
         "of ideal with one thread": f"{undisturbed(some[mode]) / undisturbed(modes['ideal']):.3f}"}
        for threads, some in ((2, spare), (1, modes)) for mode in SPARE_MODES if mode in some])


def describe_mesh(modes):
    row, ideal = first_of(modes), undisturbed(modes["ideal"])
    text = (f"{row['ranks']} ranks, {row['model']} with {row['parameters'] / 1e6:.1f} M parameters, "
            f"{row['batch']} sequences of {row['seq']} tokens a step, fp32, one thread a rank, "
            f"{len(modes['ideal']['step_ms'])} steps a mode, in turns. ")
    sent = f"{np.median(modes['commfuse']['bytes_sent_per_step']) / 1e6:.1f} MB a rank and step take"
    native = f"{row['native_ms']:.1f} ms by the library's own collectives at the rates measured alone"
    if not row["link_bits_per_s"]:
        return text + f"Shared memory, as fast as it is: {sent} {native}, {row['native_ms'] / ideal:.3f} of the ideal step."
    rates, line = modes["ideal"]["link_bits_per_s"] / 1e6, undisturbed(modes["ideal"], "line_ms")
    return text + (f"Link of {min(rates):.0f} to {max(rates):.0f} Mbit/s each way: {sent} {line:.0f} ms on the line, "
                   f"{line / ideal:.2f} of the ideal step, and {native}.")


def tables(rows):
    text = [__doc__.split("\n\n", 1)[1].strip(), ""]
    for mesh, modes in by_mesh(rows).items():
        text += [f"### {mesh}", "", describe_mesh(modes), "", steps_table(modes)]
        if spare := by_mesh(rows, threads=2).get(mesh):
            text.append(spare_table(modes, spare))
    return "\n".join(text)


def figures(rows, folder):
    meshes = by_mesh(rows)
    modes = [mode for mode in MODES if any(mode in compared(mesh) for mesh in meshes.values())]
    figure, axes = plots.panels(1, len(meshes), (10, 4.6))
    for axis, (mesh, runs) in zip(axes[0], meshes.items()):
        ideal = undisturbed(runs["ideal"])
        for i, (mode, colour) in enumerate(plots.shades(modes).items()):
            if mode in runs:
                low, middle, high = np.percentile(runs[mode]["step_ms"], [10, 50, 90]) / ideal
                axis.bar(i, middle, color=colour, width=0.75, label=mode)
                axis.errorbar(i, middle, [[middle - low], [high - middle]], color="#333333", capsize=3, linewidth=1)
                axis.annotate(f"{ratio_to_ideal(runs, mode):.2f}", (i, high), xytext=(0, 3), textcoords="offset points",
                              ha="center", fontsize=9)
        axis.axhline(1, color="black", linestyle="--", linewidth=1.2, label="ideal: whole computations, no transfers")
        axis.set(title=f"{mesh}, ideal {ideal:.0f} ms", xticks=[], ylim=(0, 1.12 * axis.get_ylim()[1]))
    axes[0][0].set_ylabel("times the ideal step: median, p10 to p90")
    plots.legend_below(figure, plots.handles_of(axes.flat), 5, lines=2)
    figure.suptitle("Training step by mode, times the ideal step; above a bar: of the faster half", fontsize=11)
    return plots.save(figure, folder, NAME)
