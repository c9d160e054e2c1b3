"""Training steps end to end: every mode on every mesh, over a link whose transfers take half as long as the ideal step, or
`--ratio` times as long.

A point is one mesh. All modes take turns in one process (bench_train), a step each in an order drawn again for each round, so that
the steps compared are seconds apart and a drift of the machine affects all modes. After some rounds another process continues, with
other memory and other choices of its libraries. The first round of a process is not counted. Mode auto finds its plan in trials
before the first round; later processes read it. The bytes of a step over the line rate take `ratio` times the step of mode ideal
(whole computations, no transfers). A machine's speed changes within minutes, so the link of each process is set by the ideal step
of the process before. Times are medians; the step also has its 10th and 90th percentile. Modes are compared in pairs of one round:
two do not differ if the 95 % interval of the median ratio (bootstrap) includes 1. Exposed time is the mean over ranks of what the log
says; the rest of the time beyond `ideal` is what slices cost and what transfers take of the cores. A rank has two cores in every
mode, one of them for transfers.
"""
from . import steps

NAME, TITLE = "training", "Training steps, end to end"
measure, shown, problems = steps.measure, steps.shown, steps.problems
MODES = "none", "slice", "slice:8", "ring", "direct", "ring:4", "auto", "nowire:4", "nowire", "ideal"
QUICK_MODES = "none", "slice", "ring", "auto", "nowire", "ideal"
QUICK_MESHES = ("tpsp", 2, 1), ("tpsp", 1, 2)
SIZE = dict(model="d12", seq=1024)  # GPT-2's sequence: attention hides as much as in a real run


def points(place, quick):
    """Without more slices on tp 1, where buckets of gradients are not cut, and direct on two ranks, where it is ring."""
    modes = QUICK_MODES if quick else MODES
    return [steps.point_of(place, quick, (strategy, tp, dp), SIZE,
                           [mode for mode in modes if (tp > 1 or mode != "slice:8") and (tp * dp > 2 or mode != "direct")])
            for strategy, tp, dp in (QUICK_MESHES if quick else steps.MESHES) if tp * dp <= place.ranks]
