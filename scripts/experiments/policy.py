"""What the policy alone gains: what else is communicated, and when.

All modes have one schedule, `ring:4`, and the policy of the experiment `ablation`, of which one part is changed at a time: gradients
are reduced at the end of backward (end) or computed owner by owner (owners), rows of the embedding table are communicated instead of
the whole (rows), weights are gathered just before they are needed (ahead0) or all at once (ahead4096).
"""
from . import ablation, steps

NAME, TITLE = "policy", "The policy alone"
measure, problems = steps.measure, steps.problems
CHANGED = tuple(f"ring:4+{word}" for word in ("end", "owners", "rows", "ahead0", "ahead4096"))


def points(place, quick):
    return ablation.points(place, quick, ("none", "ring:4", *CHANGED, "ideal"))


def shown(rows, _=None):
    return steps.shown(rows, pairs=[(mode, "ring:4") for mode in CHANGED])
