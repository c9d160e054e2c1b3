"""The trainer's account against the clock: is a step as much longer as the trainer says that it waited?

Training on two ranks (tpsp 2x1) over links from one that is busy for a quarter of the step without transfers to one that
is busy as long as it; modes in turns, and the parts of a step, as in "Training steps, end to end". By so much is a mode
`longer` than nowire by the clock; of that, chunking is measured without transfers, and the trainer has logged what is
exposed. The rest is neither: computation made slower, most likely by bytes that move beside it and by data that arrives in
another core's cache, where nowire finds what was there before in its own (and, of slice, its chunking).

Over a fast link little is exposed, and the rest is much of what there is. But it must not grow with what is exposed. By
how much longer − chunking grows for each millisecond that the trainer logs more is in the second table and the legend
of the figure; if the trainer forgot a tenth of its waits, it would be 1.1.
"""
import numpy as np

from . import fused, training

NAME, TITLE = "account", "The trainer's account against the clock"
RATIOS = 0.25, 0.5, 1.0
SECONDS = 400  # of the turns over one link, about
POINT = dict(model="d12", vocab=8192, seq=1024, batch=1, strategy="tpsp", tp=2, dp=1, modes=training.PAIR_MODES)
COPIED = "mode", "round", "step_ms", "exposed_mean_ms", "line_ms", "loss"


def points(place, quick):
    if quick or place.kind != "lab":
        return []  # it is a matter of links of several speeds, and of errors of a few milliseconds
    return [{**POINT, "modes": list(POINT["modes"]), "ratio": ratio, "seconds": SECONDS} for ratio in RATIOS]


def measure(place, point):
    _, steps = training.measure_steps(place, point, place.link, options=training.NO_PEAK)
    shared = {name: point[name] for name in ("model", "seq", "batch", "ratio")}
    return [{**shared, **{name: step[name] for name in COPIED}} for step in steps]


# --- what follows from the rows ---


def by_ratio(rows):
    """ratio → mode → rows of all rounds"""
    found = {}
    for row in rows:
        found.setdefault(row["ratio"], {}).setdefault(row["mode"], []).append(row)
    return dict(sorted(found.items()))


def compared(links):
    """Modes with transfers, of all links."""
    return [mode for mode in training.MODES if all(mode in modes for modes in links.values())
            and not mode.startswith("nowire")]


def slope_of(accounts):
    """Growth of longer − chunking for each millisecond exposed; None: a single link."""
    longer, chunking, exposed, _ = np.transpose(accounts)
    return float(np.polyfit(exposed, longer - chunking, 1)[0]) if len(accounts) > 1 else None


def ratios(rows):
    """The figures in which two reports must agree."""
    return {f"wire {ratio:g} of the step, step({mode}) / step(nowire)": training.ratio_to_bound(modes, mode)
            for ratio, modes in by_ratio(rows).items() for mode in modes if not mode.startswith("nowire")}


def problems(rows):
    return [f"account, wire {ratio:g} of the step: {problem}" for ratio, modes in by_ratio(rows).items()
            for problem in training.loss_problems(modes)]


# --- tables and figures ---


def tables(rows):
    links = by_ratio(rows)
    text = [__doc__.split("\n\n", 1)[1].strip(), "",
            "All of the faster half of the steps, in ms; the rest with one standard error.", ""]
    heading = ["wire / step", "mode", "step", "longer", "chunking", "exposed", "rest", "within 10 % or 1 ms"]
    lines = []
    for ratio, modes in links.items():
        for mode in compared(links):
            longer, chunking, exposed, _ = training.account(modes, mode)
            times = training.undisturbed(modes[mode]), longer, chunking, exposed
            lines.append([f"{ratio:g}", mode, *(f"{ms:.1f}" for ms in times), *training.rest_cells(modes, mode)])
    text += [fused.table(heading, lines)]
    slopes = {mode: slope_of([training.account(modes, mode) for modes in links.values()]) for mode in compared(links)}
    text += [fused.table(["mode", "clock / trainer, ms for each ms more"],
                         [[mode, f"{slope:.3f}"] for mode, slope in slopes.items() if slope is not None])]
    return "\n".join(text)


def figures(rows, folder):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    links = by_ratio(rows)
    figure, axis = plt.subplots(figsize=(7, 5), layout="constrained")
    most = 0
    for mode in compared(links):
        accounts = [training.account(modes, mode) for modes in links.values()]
        exposed, clock = [one[2] for one in accounts], [one[0] - one[1] for one in accounts]
        slope = slope_of(accounts)
        axis.plot(exposed, clock, "o-", markersize=4, linewidth=1, color=training.COLOURS[mode],
                  label=mode if slope is None else f"{mode}: {slope:.2f}")
        most = max(most, *exposed, *clock)
    axis.plot([0, most], [0, most], "k--", linewidth=1, label="equal")
    axis.fill_between([0, most], [0, 0.9 * most], [0, 1.1 * most], color="black", alpha=0.08, linewidth=0, label="10 %")
    axis.set_xlabel("exposed, as the trainer logs it, ms above nowire")
    axis.set_ylabel("step by the clock, ms above nowire, without chunking")
    axis.set_title(f"Clock against trainer, wire {' '.join(f'{ratio:g}' for ratio in links)} of the step", fontsize=11)
    axis.legend(frameon=False, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    names = fused.save(figure, folder, NAME)
    plt.close(figure)
    return names
