"""Steps of training in several modes: measured in turns, compared in a table. The experiments training and ablation
are lists of points of this kind: a mesh and its modes."""
import os
import re
import tempfile
import time

import numpy as np

import lab
import run_log
import runner
from runner import ROOT, Failed, Runner
from tables import markdown, remarks

PROGRAM, BENCH = f"{ROOT}/build/release/train_gpt", f"{ROOT}/build/release/tests/bench/bench_train"
SHAPES = {"d12": (12, 768, 12), "d6": (6, 384, 6), "wide": (2, 1536, 24), "half of d12": (6, 768, 12)}  # layers, channels, heads
QUICK_SIZE, WIDE_SIZE = dict(model="d6", seq=256, batch=4), dict(model="wide", seq=512, batch=2)
MESHES = ("tpsp", 2, 1), ("up", 2, 1), ("tpsp", 1, 2), ("tpsp", 2, 2)
WITHOUT_TRANSFERS = "nowire", "ideal"  # losses are wrong by construction
LOSS_TOLERANCE = 1e-5  # relative to mode none, for every step
LOSS_ROUNDS = 30       # losses are compared up to here: rounding alone makes them differ by 4e-8 after 50 steps, 5e-5 after 100
BLOCK_ROUNDS, QUICK_ROUNDS = 12, 6  # of one process, at most; of fewer than six no difference could be told
DRAWS = 10000  # of the bootstrap
SECONDS, QUICK_SECONDS = 900, 12  # of a point, approximately
TIMEOUT_S = 7200    # only a limit: ranks that hang end themselves after a minute
FREE_LINK = 40e9    # bits per second: practically unlimited


class Place:
    """Where ranks run, each with one compute thread. kind: lab (hosts made of this machine), local (over shared memory), or auto (a
    lab if possible). ratio: of the transfers of a step to the ideal step. rate: of the lab's links, bits per second each way.
    commands: what was run, in a form that can be typed."""

    def __init__(self, kind="auto", ratio=0.5):
        obstacle = kind != "local" and lab.obstacle()
        if kind == "lab" and obstacle:
            raise Failed(obstacle, "--place local measures over shared memory")
        self.kind, self.ratio = "local" if kind == "local" or obstacle else "lab", ratio
        self.cores, self.runner = len(os.sched_getaffinity(0)), Runner(gently=True, bound=True)
        self.rate, self.commands = FREE_LINK, []
        self.ranks = max(2, min(8, self.cores // lab.CORES_PER_RANK))

    def run(self, ranks, command, timeout=TIMEOUT_S):
        """Runs a command on a number of ranks and returns its output."""
        launcher = ["scripts/mpirun.sh", "-np", ranks]
        if self.kind == "lab":
            launcher = ["scripts/lab.py", "--hosts", ranks, "--rate", f"{self.rate / 1e6:.6g}mbit", "--"]
        command = [*launcher, *command]
        self.commands.append(re.sub(r"\S*/commfuse-report-\w+/", "$DIR/", runner.shown(command)))
        return self.runner.output(command, timeout, OMP_NUM_THREADS="1")


def point_of(place, quick, mesh, size, modes, policy=(), wide=True):
    """wide: where cores are shared, with wide layers, which compute more per byte and so have a slower link, so that moving bytes
    takes little of the cores."""
    strategy, tp, dp = mesh
    size = WIDE_SIZE if wide and lab.shortage(2, place.cores) else QUICK_SIZE if quick else size
    ratio = place.ratio if place.kind == "lab" else None  # of a step's transfers to the ideal step; None: shared memory
    rounds, seconds = (QUICK_ROUNDS, QUICK_SECONDS) if quick else (BLOCK_ROUNDS, SECONDS)
    return {"batch": dp, **size, "vocab": 8192, "strategy": strategy, "tp": tp, "dp": dp, "ratio": ratio, "modes": modes,
            "policy": list(policy), "rounds": rounds, "seconds": seconds}


# --- measuring ---


def model_options(point):
    shape = dict(zip(("layers", "channels", "heads"), SHAPES[point["model"]]))
    shape |= {name: point[name] for name in ("vocab", "seq", "strategy", "tp", "dp")}
    return [*runner.words_of(**shape, micro_batch=point["batch"] // point["dp"], threads=1), *point.get("policy", ())]


def take_turns(place, point, modes, rounds, *options):
    """Runs all modes in turns. Returns the configuration and the steps."""
    return run_log.turns(place.run(point["tp"] * point["dp"], [
        BENCH, "--modes", ",".join(modes), *model_options(point), *options, "--rounds", rounds, "--json"]))


def ideal_of(steps):
    return run_log.median([step for step in steps if step["mode"] == "ideal"], "step_ms")


def first_look(place, point):
    """The ideal step in ms and the bits of a step, over a practically unlimited link."""
    place.rate = FREE_LINK
    _, steps = take_turns(place, point, ("ring", "ideal"), QUICK_ROUNDS, "--peak-tflops", 1)
    return ideal_of(steps), 8 * max(step["bytes_sent_rank0"] for step in steps)


def set_link(place, point, ideal_ms, bits):
    """Sets and returns the rate with which the bits of a step take `ratio` of the ideal step; None over shared memory."""
    place.rate = point["ratio"] and 1e3 * bits / (point["ratio"] * ideal_ms)
    return place.rate


def measure(place, point):
    """A row for each step, of one process after another; the last one takes the rounds that the seconds of the point leave."""
    end = time.monotonic() + point["seconds"]
    ideal_ms, bits = first_look(place, point)
    rows, before, rounds, begin = [], 0, point["rounds"], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="commfuse-report-") as folder:
        while rounds > 0:
            rate = set_link(place, point, ideal_ms, bits)
            config, steps = take_turns(place, point, point["modes"], rounds, "--out", folder)
            flops_of_peak = config.get("peak_tflops_all_ranks", 0) * 1e9  # in a millisecond
            rows += [{"mesh": "{strategy} {tp}x{dp}".format(**point), "ranks": config["ranks"], "model": point["model"],
                      "seq": point["seq"], "batch": point["batch"], "parameters": config["parameters"], "mode": step["mode"],
                      "round": before + step["round"], "step_ms": step["step_ms"], "link_bits_per_s": rate,
                      "line_ms": rate and 1e3 * bits / rate, "tokens_per_s": 1e3 * point["batch"] * point["seq"] / step["step_ms"],
                      "mfu_share": config["flops"] / (step["step_ms"] * flops_of_peak), "exposed_ms": step["exposed_mean_ms"],
                      "comm_ms": step["comm_ms"], "loss": step["loss"], "bytes_sent_per_step": step["bytes_sent_rank0"]}
                     for step in sorted(steps, key=lambda step: point["modes"].index(step["mode"]))]
            now = time.monotonic()
            left = int((end - now) * (rounds + 1) / max(now - begin, 1e-3)) - 1  # a process begins with a round that does not count
            ideal_ms, before, begin, rounds = ideal_of(steps), before + rounds, now, min(point["rounds"], left)
    return rows


# --- arithmetic ---


def by_mesh(rows):
    """mesh → mode → columns, each in the order of the point."""
    meshes = {}
    for row in rows:
        meshes.setdefault(row["mesh"], {}).setdefault(row["mode"], []).append(row)
    return {mesh: {mode: {name: np.array([row[name] for row in mine]) for name in mine[0]} for mode, mine in modes.items()}
            for mesh, modes in meshes.items()}


def beside(columns, other):
    """By how much a mode's step is longer than another's, in percent: the median over rounds of the ratio of the two steps of a
    round, which lie seconds apart, so that what slows the machine down for longer counts for nothing; and the bounds of its 95 %
    interval, by bootstrap over the rounds."""
    percent = 100 * (columns["step_ms"] / other["step_ms"] - 1)
    drawn = np.random.default_rng(1).integers(len(percent), size=(DRAWS, len(percent)))
    return np.median(percent), *np.percentile(np.median(percent[drawn], axis=1), [2.5, 97.5])


def alike(columns, other):
    _, low, high = beside(columns, other)
    return low <= 0 <= high


def difference(modes, mode, other):
    """As a sentence."""
    middle, low, high = beside(modes[mode], modes[other])
    if low <= 0 <= high:
        return f"`{mode}` and `{other}` do not differ significantly ({low:+.1f} to {high:+.1f} %, {len(modes[mode]['step_ms'])} rounds)"
    word = "longer" if middle > 0 else "shorter"
    low, middle, high = sorted(map(abs, (low, middle, high)))
    return f"`{mode}` is {middle:.1f} % {word} than `{other}` ({low:.1f} to {high:.1f})"


def compared(modes):
    """The modes whose losses are right."""
    return [mode for mode in modes if mode.split(":")[0] not in WITHOUT_TRANSFERS]


def loss_difference(columns, reference):
    """The largest relative difference in the first LOSS_ROUNDS steps."""
    return max(abs(columns["loss"] / reference["loss"] - 1)[columns["round"] <= LOSS_ROUNDS])


def problems(rows):
    """Errors on any machine."""
    return [f"{mesh}: losses of {mode} differ from those of none by {difference:.1e}, more than {LOSS_TOLERANCE:g}"
            for mesh, modes in by_mesh(rows).items() for mode in compared(modes)
            for difference in [loss_difference(modes[mode], modes["none"])] if not difference <= LOSS_TOLERANCE]


# --- the table ---


def table(modes):
    right, lines, ideal_ms = compared(modes), [], np.median(modes["ideal"]["step_ms"])
    for mode, steps in modes.items():
        low, middle, high = np.percentile(steps["step_ms"], [10, 50, 90]) / ideal_ms
        same = [name for name in right if name != mode and mode in right and alike(steps, modes[name])]
        difference = loss_difference(steps, modes["none"])
        lines.append({
            "mode": mode, "step, ms": f"{middle * ideal_ms:.1f}", "of ideal, p10 – p90": f"{middle:.3f} ({low:.3f} – {high:.3f})",
            "exposed, ms": f"{np.median(steps['exposed_ms']):.1f}",
            "rest, ms": f"{np.median(steps['step_ms'] - modes['ideal']['step_ms']) - np.median(steps['exposed_ms']):.1f}",
            "tokens/s": f"{np.median(steps['tokens_per_s']):.0f}", "MFU": f"{100 * np.median(steps['mfu_share']):.1f} %",
            "loss differs by": ("wrong by construction" if mode not in right else
                                f"{'' if difference <= LOSS_TOLERANCE else '**ERROR** '}{difference:.0e}"),
            "remarks": remarks(same, float(middle))})
    return markdown(lines)


def describe_mesh(modes):
    ideal = modes["ideal"]
    row, ms = {name: values[0] for name, values in ideal.items()}, np.median(ideal["step_ms"])
    text = (f"{row['ranks']} ranks, {row['model']} with {row['parameters'] / 1e6:.1f} M parameters, "
            f"{row['batch']} sequences of {row['seq']} tokens a step, fp32, one thread a rank, "
            f"{len(ideal['step_ms'])} steps a mode, in turns. A rank sends "
            f"{max(np.median(steps['bytes_sent_per_step']) for steps in modes.values()) / 1e6:.1f} MB a step ")
    if not row["link_bits_per_s"]:
        return text + "through shared memory."
    rates, line = ideal["link_bits_per_s"] / 1e6, np.median(ideal["line_ms"])
    return text + (f"over a link of {min(rates):.0f} to {max(rates):.0f} Mbit/s each way, which takes {line:.0f} ms, "
                   f"{line / ms:.2f} of the ideal step.")


def shown(rows, _=None, pairs=()):
    """Markdown of the rows, and the differences of pairs of modes."""
    return "\n".join(f"### {mesh}\n\n{describe_mesh(modes)}\n\n{table(modes)}" +
                     "".join(f"\n* {difference(modes, *pair)}" for pair in pairs) + "\n" * bool(pairs)
                     for mesh, modes in by_mesh(rows).items())
