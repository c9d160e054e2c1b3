"""Put runs of the same training side by side: losses must agree, times and exposed communication may not.

    python3 scripts/compare_runs.py NAME=LOG.jsonl NAME=LOG.jsonl …

Medians over the steps after the first fifth, in which caches and buffers warm up. The exit status is 1 if the
losses of any step differ by more than 1e-5 of their size from those of the first run.
"""
import json
import statistics
import sys

TOLERANCE = 1e-5
MEDIANS = ("step_ms", "median step, ms"), ("comm_ms", "communication, ms"), ("exposed_comm_ms", "exposed, ms")


def read(path):
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return [line for line in lines if line["event"] == "step"]


def median(steps, key):
    return statistics.median(step[key] for step in steps[len(steps) // 5:])


def difference(steps, reference):
    """Largest relative difference of the losses of two runs."""
    if [s["step"] for s in steps] != [s["step"] for s in reference]:
        return float("inf")
    return max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in zip(steps, reference))


def main():
    if len(sys.argv) < 2 or not all("=" in argument for argument in sys.argv[1:]):
        sys.exit(__doc__)
    runs = {name: read(path) for name, _, path in (argument.partition("=") for argument in sys.argv[1:])}
    empty = [name for name, steps in runs.items() if not steps]
    if empty:
        sys.exit(f"error: no steps in the log of {', '.join(empty)}")
    reference = next(iter(runs.values()))
    differences = [difference(steps, reference) for steps in runs.values()]

    def row(title, values):
        print(f"{title:<24}" + "".join(f"{value:>14}" for value in values))

    row("overlap", runs)
    row("loss, first step", [f"{steps[0]['loss']:.6f}" for steps in runs.values()])
    row("loss, last step", [f"{steps[-1]['loss']:.6f}" for steps in runs.values()])
    row("largest difference", [f"{d:.1e}" for d in differences])
    for key, title in MEDIANS:
        row(title, [f"{median(steps, key):.2f}" for steps in runs.values()])
    if max(differences) > TOLERANCE:
        sys.exit(f"error: losses differ by {max(differences):.1e} of their size, more than {TOLERANCE:g}")


if __name__ == "__main__":
    main()
