"""Experiment 4: where the tail returns. One operation of each kind and a training step, over links whose delay grows,
whose delay varies, and with one host that computes slower than the others.

A transfer that keeps the line busy for w ms and is under way for d ms hides behind the c ms of the slice computed
meanwhile only if all of it fits into c. It comes in chunks, and in the lab MPI lets a chunk just come, so that the delay
is paid once. (Elsewhere, unless told otherwise, it announces each chunk and waits for the answer.) N ranks do this
N − 1 times. A ring's tail must be

    (N − 1) · max(0, w + d − c),    c = compute / N,    w = wire / (N − 1)

which is the column "expected", with half of the measured round trip for d. At a ratio of 0.5 two ranks have w = c:
there is nothing in reserve and every delay shows; at 0.25 half of c is in reserve. None of the modes is immune: what
commfuse leaves out is the transfer that nothing is computed behind, not the delay of those that are too long for it.

The slow host: its computation alone is slowed, and everybody waits for it. All variants then become slower by nearly
the same time, nowire included, and what is asked is whether the time exposed beside that stays what it was.

The wire takes its share of the computation as it would be without the slow host. (A training step without transfers
still has a few small exchanges, which the delay lengthens, so the wire takes a little longer too.) A delay of 0 is the
bare link. The shortest delay that can be made adds some tens of microseconds of its own; the column "round trip" is
measured, and says what it was.
"""
import contextlib

import numpy as np

from . import fused, training
from .place import FREE_LINK

NAME, TITLE = "sensitivity", "Delay, jitter and a slow host: where the tail returns"

DELAYS_MS = (0, 0.01, 0.1, 0.25, 0.5, 1, 2, 5)
JITTERS = ((1, 0.5), (5, 2.5))  # delay, jitter
SLOWER = (1.25, 1.5, 2)         # host 1 computes so many times slower
RATIOS = (0.25, 0.5)            # of the wire's time to the computation
TRAINING_RATIO = 0.5
OPERATIONS = {"gather_gemm": "mlp.fc1", "gemm_scatter": "mlp.fc2"}
SHAPE = fused.Shape(T=1024, B=2, C=768, columns=3072, H=12)
QUICK_SHAPE = fused.Shape(T=512, B=1, C=768, columns=3072, H=12)
SECONDS, QUICK_SECONDS = 12, 6  # of an operation under one condition, about; at least ten repetitions in any case
TRAINING_SECONDS, QUICK_TRAINING_SECONDS = 60, 8
VARIANTS = "none", "slice 4", "ring 1", "ring 2", "direct 1", "nowire 1"  # in the tables; rows have all
MODES = "none", "slice", "commfuse ring", "commfuse direct", "nowire"
TRAINING = "training"


def conditions(quick):
    """(delay, jitter, slower)"""
    if quick:
        return [(0, 0, 1), (1, 0, 1), (0, 0, 1.5)]
    return [(delay, 0, 1) for delay in DELAYS_MS] + [(*pair, 1) for pair in JITTERS] + [(0, 0, f) for f in SLOWER]


def points(place, quick):
    if place.kind != "lab" or fused.ranks_for(place) < 2:
        return []  # neither shared memory nor a host among many ranks on few cores can be slowed down
    found = []
    for delay, jitter, slower in conditions(quick):
        at = {"delay_ms": delay, "jitter_ms": jitter, "slower": slower, "ranks": 2, "quick": quick}
        for ratio in RATIOS[-1:] if quick else RATIOS:
            if ratio == RATIOS[-1] or (jitter == 0 and slower == 1):
                found += [{"what": operation, "ratio": ratio, "seconds": QUICK_SECONDS if quick else SECONDS, **at}
                          for operation in OPERATIONS]
        found.append({"what": TRAINING, "ratio": TRAINING_RATIO,
                      "seconds": QUICK_TRAINING_SECONDS if quick else TRAINING_SECONDS, **at})
    return found


# --- measuring ---


@contextlib.contextmanager
def conditions_of(place, point):
    """The delay and the slow host, for a while; gives link(rate) and the round trip."""
    def link(rate):
        place.link(rate, point["delay_ms"], point["jitter_ms"])
    link(FREE_LINK)
    place.slow(1, point["slower"])
    try:
        yield link, place.round_trip_ms() if point["slower"] == 1 else None  # a slow host answers late
    finally:
        place.slow(1, 1)
        place.link(FREE_LINK)


def measure(place, point):
    return (measure_training if point["what"] == TRAINING else measure_operation)(place, point)


def measure_operation(place, point):
    shape = QUICK_SHAPE if point["quick"] else SHAPE
    with conditions_of(place, point) as (link, round_trip):
        found = fused.measure(place, point["ranks"], [point["what"]], shape, point["ratio"], point["seconds"], link=link,
                              slower=point["slower"])
    return [{**point, **row, "round_trip_ms": round_trip, "expected_ms": expected_ms(row, point["ranks"], round_trip)}
            for row in fused.accounts(found.lines[0], found.wire_ms)]


def expected_ms(row, ranks, round_trip):
    """Of the ring with one slice for each rank."""
    if row["label"] != "ring 1" or round_trip is None:
        return None
    hop = row["wire_ms"] / (ranks - 1) + round_trip / 2
    return (ranks - 1) * max(0.0, hop - row["compute_ms"] / ranks)


def measure_training(place, point):
    run = {"model": "d6", "vocab": 8192, "seq": 256, "batch": 2 if point["quick"] else 4, "strategy": "tpsp", "tp": 2,
           "dp": 1, "seconds": point["seconds"], "ratio": point["ratio"], "modes": MODES}
    with conditions_of(place, point) as (link, round_trip):
        _, steps = training.measure_steps(place, run, link, point["slower"], training.NO_PEAK)
    modes = {mode: [step for step in steps if step["mode"] == mode] for mode in MODES}
    bound = training.median(modes["nowire"], "step_ms")
    rows = []
    for mode, log in modes.items():
        low, middle, high = np.percentile(training.warm(log, "step_ms"), [10, 50, 90])
        rows.append({**point, "label": mode, "ms": float(middle), "p10_ms": float(low), "p90_ms": float(high),
                     "wire_ms": training.undisturbed(log, "line_ms"), "exposed_ms": float(middle) - bound,
                     "logged_exposed_ms": training.median(log, "exposed_comm_ms"), "round_trip_ms": round_trip})
    return rows


# --- tables and figures ---


def by_condition(rows, what, ratio):
    """condition → label → row"""
    found = {}
    for row in rows:
        if (row["what"], row["ratio"]) == (what, ratio):
            found.setdefault((row["slower"], row["jitter_ms"], row["delay_ms"]), {})[row["label"]] = row
    return dict(sorted(found.items()))


def subjects(rows):
    return sorted({(row["what"], row["ratio"]) for row in rows}, key=lambda s: (s[0] == TRAINING, s))


def condition_text(condition):
    slower, jitter, delay = condition
    return ", ".join([f"{delay:g} ms" + (f" ± {jitter:g}" if jitter else "")]
                     + ([f"host 1 {slower:g} times slower"] if slower != 1 else []))


def names_of(what):
    return MODES if what == TRAINING else VARIANTS


def title_of(what, ratio):
    name = "training step, d6, tp 2" if what == TRAINING else fused.TITLES[what]
    return f"{name}, wire {ratio:g} of the computation"


def times_table(conditions, names):
    heading = ["delay", "round trip, ms", *(f"{name}, ms" for name in names)]
    return fused.table(heading, [[condition_text(key), fused.milliseconds(at[names[0]]["round_trip_ms"]),
                                  *(time_text(at[name]) for name in names)] for key, at in conditions.items()])


def time_text(row):
    median, low, high = (fused.milliseconds(row[field]) for field in ("ms", "p10_ms", "p90_ms"))
    return f"{median} ({low} – {high})"


def exposed_table(conditions, names, expected):
    shown = [name for name in names if not name.startswith("nowire")]
    heading, lines = ["delay", *(f"{name}, ms" for name in shown)], []
    for key, at in conditions.items():
        lines.append([condition_text(key), *(fused.milliseconds(at[name]["exposed_ms"]) for name in shown)])
        if expected:
            lines[-1].append(fused.milliseconds(at["ring 1"]["expected_ms"]))
    return fused.table(heading + ["expected of ring 1, ms"] * expected, lines)


def tables(rows):
    text = [__doc__.split("\n\n", 1)[1].strip(), ""]
    for what, ratio in subjects(rows):
        conditions, names = by_condition(rows, what, ratio), names_of(what)
        text += [f"### {title_of(what, ratio)}", "", "Median (10th – 90th percentile):", "",
                 times_table(conditions, names),
                 "Median of the step, above that of nowire:" if what == TRAINING else
                 "Exposed, mean of the faster half above that of nowire with as many slices:", "",
                 exposed_table(conditions, names, what != TRAINING)]
    return "\n".join(text)


COLOURS = {"none": "#b03a2e", "slice": "#d68910", "slice 4": "#d68910", "ring 1": "#1f618d", "ring 2": "#154360",
           "direct 1": "#5499c7", "commfuse ring": "#1f618d", "commfuse direct": "#5499c7"}


def figures(rows, folder):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    shown = subjects(rows)
    figure, axes = plt.subplots(1, len(shown), figsize=(4 * len(shown), 4.2), squeeze=False, layout="constrained")
    for axis, (what, ratio) in zip(axes[0], shown):
        conditions = {key[2]: at for key, at in by_condition(rows, what, ratio).items() if key[:2] == (1, 0)}
        for name in names_of(what):
            if name in COLOURS:
                axis.plot(list(conditions), [at[name]["exposed_ms"] for at in conditions.values()], "o-", markersize=3,
                          color=COLOURS[name], label=name)
        if what != TRAINING:
            axis.plot(list(conditions), [at["ring 1"]["expected_ms"] for at in conditions.values()], "k:",
                      label="ring 1, expected")
        axis.set_xscale("symlog", linthresh=0.1)
        axis.set_title(title_of(what, ratio), fontsize=8)
        axis.set_xlabel("delay each way, ms")
        axis.set_ylabel("exposed, ms above nowire")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    names = fused.save(figure, folder, NAME)
    plt.close(figure)
    return names
