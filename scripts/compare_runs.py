"""Put runs of the same training side by side: losses must agree, times and exposed communication may not.

    python3 scripts/compare_runs.py NAME=LOG.jsonl NAME=LOG.jsonl …

Medians and quartiles are over the steps after the first fifth, in which caches and buffers warm up. Where the
quartiles lie far apart, other work disturbed the run. Steps that were left out (--skip-nonfinite) count in neither.
The exit status is 1 if the losses of any step differ by more than 1e-5 of their size from those of the first run, or
if a run has other steps.
"""
import statistics
import sys

import run_log
from tables import columns

TOLERANCE = 1e-5
TIMES = ("step_ms", "step, ms"), ("comm_ms", "communication, ms"), ("exposed_comm_ms", "exposed, ms")


def quartiles(steps, key):
    values = [step[key] for step in steps[len(steps) // 5:]]
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def difference(steps, reference):
    """Largest relative difference of the losses of two runs; infinite if their steps are not the same."""
    if [s["step"] for s in steps] != [s["step"] for s in reference]:
        return float("inf")
    pairs = [(a["loss"], b["loss"]) for a, b in zip(steps, reference)]
    return max(abs(a - b) / max(abs(a), abs(b)) if a != b else 0 for a, b in pairs)


def main():
    if len(sys.argv) < 2 or not all("=" in argument for argument in sys.argv[1:]):
        sys.exit(__doc__)
    named = [argument.partition("=")[::2] for argument in sys.argv[1:]]
    if len(dict(named)) < len(named):
        sys.exit("error: two runs have the same name\nhint:  give each its own: NAME=LOG.jsonl")
    keys = "step", "loss", *(key for key, _ in TIMES)
    runs = {name: run_log.with_loss(run_log.read(path, "step", keys)) for name, path in named}
    empty = [name for name, steps in runs.items() if not steps]
    if empty:
        sys.exit(f"error: no step with a loss in the log of {', '.join(empty)}\nhint:  let the run come further, then compare")
    reference = next(iter(runs.values()))
    differences = [difference(steps, reference) for steps in runs.values()]

    def row(title, values):
        print(columns([title, *values], [-28, *[15] * len(runs)]))

    row("overlap", runs)
    row("loss, first step", [f"{steps[0]['loss']:.6f}" for steps in runs.values()])
    row("loss, last step", [f"{steps[-1]['loss']:.6f}" for steps in runs.values()])
    row("largest difference", [f"{d:.1e}" for d in differences])
    for key, title in TIMES:
        spread = [quartiles(steps, key) for steps in runs.values()]
        row(f"{title}, median", [f"{middle:.1f}" for _, middle, _ in spread])
        row("    quartiles", [f"{low:.1f} – {high:.1f}" for low, _, high in spread])
    other = [name for name, d in zip(runs, differences) if d == float("inf")]
    if other:
        sys.exit(f"error: the steps of {', '.join(other)} are not those of {next(iter(runs))}\n"
                 "hint:  let all runs go to the same step and leave none out, then compare")
    if max(differences) > TOLERANCE:
        sys.exit(f"error: losses differ by {max(differences):.1e} of their size, more than {TOLERANCE:g}")


if __name__ == "__main__":
    main()
