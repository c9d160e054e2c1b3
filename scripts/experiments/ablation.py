"""What the order of operations alone gains, and what else travels, and when.

In the experiment `training` a mode has the policy that is usual for its schedule: two things differ at once. Here one of them is
fixed: first the policy (gradients when they are ready, weights four layers ahead, the whole table of the embedding), with slices in
four for every schedule that takes some; then the schedule, ring:4, with one part of the policy changed at a time: gradients at the
end of backward (end) or owner by owner (owners), rows of the table (rows), weights just before they are needed (ahead0) or all at
once (ahead4096). On two ranks direct:4 is ring:4: how far apart they are is how small a difference can be seen. It is measured as
`training` is.
"""
from . import steps

NAME, TITLE = "ablation", "The schedule alone, the policy alone"
measure, shown, problems = steps.measure, steps.shown, steps.problems
POLICY = "--gradients", "ready", "--prefetch", 4, "--embedding", "table"
SCHEDULES = "none", "slice:4", "ring:4", "direct:4", "auto", "ideal"
POLICIES = tuple(f"ring:4+{word}" for word in ("end", "owners", "rows", "ahead0", "ahead4096"))
SIZE = dict(model="half of d12", seq=512, batch=2)


def points(place, quick):
    return [steps.point_of(place, quick, mesh, SIZE, [*SCHEDULES, *POLICIES], POLICY, wide=False)
            for mesh in steps.MESHES if mesh[1] * mesh[2] <= place.ranks]
