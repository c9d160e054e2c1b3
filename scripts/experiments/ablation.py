"""What the order of operations alone gains, and what else travels, and when.

In the experiment `training` a mode has the policy that is usual for its schedule: two things differ at once. Here one of them is
fixed: first the policy (gradients when they are ready, weights four layers ahead, the whole table of the embedding), with slices in
four for every schedule that takes some; then the schedule, ring:4, with one part of the policy changed at a time: gradients at the
end of backward (end) or owner by owner (owners), rows of the table (rows), weights just before they are needed (ahead0) or all at
once (ahead4096). On two ranks direct:4 is ring:4: how far apart they are is how small a difference can be seen.

Measured as `training` is: all in turns in one process, over a link whose transfers take half as long as the ideal step (whole
operations, no transfers). Medians, and from the tenth to the ninetieth percentile, as multiples of the median of ideal. Rows of a
table do not differ if the difference is within two standard errors of it, by bootstrap.
"""
import functools

import lab
import numpy as np
from tables import markdown

from . import training

NAME, TITLE = "ablation", "The schedule alone, the policy alone"
POLICY = "--gradients", "ready", "--prefetch", 4, "--embedding", "table"
SCHEDULES = "none", "slice:4", "ring:4", "direct:4", "auto", "ideal"
POLICIES = "ring:4", *(f"ring:4+{word}" for word in ("end", "owners", "rows", "ahead0", "ahead4096"))
MESHES = ("tpsp", 2, 1), ("up", 2, 1), ("tpsp", 1, 2), ("tpsp", 2, 2)

measure, problems = training.measure, training.problems


def points(place, quick):
    size = dict(model="d6", seq=256, batch=4) if quick else dict(model="half of d12", seq=512, batch=2)
    return [{**size, "vocab": 8192, "strategy": strategy, "tp": tp, "dp": dp, "ratio": place.ratio if place.kind == "lab" else None,
             "policy": list(POLICY), "modes": list(dict.fromkeys(SCHEDULES + POLICIES)),
             "rounds": training.QUICK_ROUNDS if quick else training.BLOCK_ROUNDS,
             "seconds": training.QUICK_SECONDS if quick else training.SECONDS}
            for strategy, tp, dp in MESHES if tp * dp <= place.ranks]


def table(modes, names, what):
    found, ideal = training.multiples(modes, functools.partial(np.median, axis=-1)), np.median(modes["ideal"]["step_ms"])
    right = [name for name in names if name != "ideal"]
    return markdown([{
        what: name, "of ideal": f"{found[name][0]:.3f}",
        "p10 – p90": "{:.3f} – {:.3f}".format(*np.percentile(modes[name]["step_ms"], [10, 90]) / ideal),
        "exposed, ms": f"{np.median(modes[name]['exposed_ms']):.1f}",
        "remarks": training.remarks_of(name, found, right if name in right else ())} for name in names])


def tables(rows):
    meshes = training.by_mesh(rows)
    text = [__doc__.split("\n\n", 1)[1].strip(), ""]
    for mesh, modes in meshes.items():
        text += [f"### {mesh}", "", training.describe_mesh(modes), "", table(modes, SCHEDULES, "schedule"),
                 table(modes, POLICIES, "policy")]
    if not any(row["ranks"] == 4 for row in rows):
        text += [f"tp 2 x dp 2 is not measured: four ranks need {4 * lab.CORES_PER_RANK} cores. Where they take turns, one computes while "
                 "another waits, and nothing is left to hide.", ""]
    return "\n".join(text)
