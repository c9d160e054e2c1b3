"""What the schedule alone gains.

In the experiment `training` a mode has the policy that is usual for its schedule: two things differ at once. Here all modes have one
policy: gradients are reduced when they are ready, weights gathered four layers ahead, and the whole embedding table is communicated.
Every schedule that cuts has four slices. `nowire:4` is cut like `ring:4` and communicates nothing: what it takes beyond `ideal` is
what cutting costs. On two ranks `direct:4` is the same schedule as `ring:4`: the two must not differ. Modes are judged in pairs of
one round. It is measured as `training` is.
"""
from . import steps

NAME, TITLE = "ablation", "The schedule alone"
measure, problems = steps.measure, steps.problems
POLICY = "--gradients", "ready", "--prefetch", 4, "--embedding", "table"
SCHEDULES = "none", "slice:4", "ring:4", "direct:4", "auto", "nowire:4", "ideal"
PAIRS = (("slice:4", "none"), ("ring:4", "slice:4"), ("auto", "slice:4"), ("auto", "ring:4"), ("direct:4", "ring:4"),
         ("nowire:4", "ideal"))
SIZE = dict(model="half of d12", seq=512, batch=2)


def points(place, quick, modes=SCHEDULES):
    return [steps.point_of(place, quick, mesh, SIZE, list(modes), POLICY, wide=not quick)
            for mesh in steps.MESHES if mesh[1] * mesh[2] <= place.ranks]


def shown(rows, _=None):
    return steps.shown(rows, pairs=PAIRS)
