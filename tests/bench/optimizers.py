#!/usr/bin/env python3
"""AdamW beside Muon: how many steps, and seconds, until Muon has the validation loss with which AdamW ends.

    tests/bench/optimizers.py --text corpus.txt --out optimizers.csv                 # losses, then steps' times
    tests/bench/optimizers.py --text corpus.txt --out optimizers.csv --only times    # on a machine that nobody else uses

Losses: d6 on the text's bytes; each optimizer takes its best of three learning rates by the first seed, and that with two more seeds.
Each run decays its rate to 0 over its steps. Rows that are there already are not measured again. Times: both take turns, a few steps
each, in rounds. A run's seconds are its steps times the median step. The picture, FILE.png beside FILE.csv, has the mean of the
seeds and all between the least and the most.
"""
import argparse
import csv
import datetime
import pathlib
import statistics
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/bench")]
import peers
import plots
import run_log
from command import Problem, note, status_of
from runner import Runner, shown, words_of
from tables import markdown

RATES = {"adamw": ("5e-4", "1e-3", "3e-3"), "muon": ("3e-3", "1e-2", "3e-2")}
SEEDS = 1, 2, 3
STEPS = 300
RECIPE = dict(model="d6", seq=128, micro_batch=8, warmup=20, val_batches=8, threads=1, peak_tflops=1)
ROUNDS, ROUND_STEPS = 8, 6


class Bench:
    def __init__(self, o, folder):
        self.o, self.folder, self.runner = o, folder, Runner(gently=True, bound=True)
        self.rows = read(o.out) if pathlib.Path(o.out).exists() else []
        self.stamp = {"commit": self.runner.printed("git", "describe", "--always", "--dirty"),
                      "date": f"{datetime.date.today()}", "processor": peers.processor_of(self.runner)}
        self.runner.output([sys.executable, "data/prepare.py", "--input", o.text, "--out", folder], 300)

    def run(self, **options):
        log = f"{self.folder}/log.jsonl"
        pathlib.Path(log).unlink(missing_ok=True)
        command = [ROOT / self.o.build / "train_gpt", *words_of(**RECIPE, **options, train=self.folder, val=self.folder, log=log)]
        note(shown(command))
        self.runner.output(command, 7200, OMP_NUM_THREADS="1")
        return list(run_log.lines(log))

    def add(self, rows, **same):
        empty = dict(kind="", optimizer="", lr="", seed="", step="", val_loss="", step_ms="", round="")
        self.rows += [{**empty, **same, **row, **self.stamp} for row in rows]
        peers.write(self.o.out, self.rows)

    def losses(self, optimizer, rate, seed):
        known = max(curve(self.rows, optimizer, rate, seed), default=0)
        if known not in (0, self.o.steps):
            raise Problem(f"{self.o.out} has a training of {known} steps, not of {self.o.steps}", "give another --out, or its --steps")
        if not known:
            events = self.run(optimizer=optimizer, lr=rate, seed=seed, steps=self.o.steps, val_every=max(1, self.o.steps // 30))
            self.add([{"step": event["step"], "val_loss": f"{event['loss']:.6g}"} for event in events if event["event"] == "val"],
                     kind="loss", optimizer=optimizer, lr=rate, seed=seed)

    def all_losses(self):
        for optimizer, rates in RATES.items():
            for rate in rates:
                self.losses(optimizer, rate, SEEDS[0])
        for seed in SEEDS[1:]:
            for optimizer in RATES:
                self.losses(optimizer, best_rate(self.rows, optimizer), seed)

    def all_times(self):
        """Anew: earlier ones may be of a machine that others used."""
        self.rows = [row for row in self.rows if row["kind"] != "time"]
        for number in range(ROUNDS):
            for optimizer in RATES if number % 2 else reversed(RATES):
                steps = run_log.steps(self.run(optimizer=optimizer, steps=ROUND_STEPS, val_every=0))
                self.add([{"step_ms": f"{step['step_ms']:.5g}"} for step in steps[1:]], kind="time", optimizer=optimizer, round=number)


def read(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def curve(rows, optimizer, rate, seed):
    """Validation losses by step."""
    return {int(row["step"]): float(row["val_loss"]) for row in rows
            if (row["kind"], row["optimizer"], row["lr"], str(row["seed"])) == ("loss", optimizer, rate, str(seed))}


def last(losses):
    return losses[max(losses)]


def best_rate(rows, optimizer):
    return min(RATES[optimizer], key=lambda rate: last(curve(rows, optimizer, rate, SEEDS[0])))


def best_curves(rows, optimizer):
    """One for each seed."""
    return [curve(rows, optimizer, best_rate(rows, optimizer), seed) for seed in SEEDS]


def span(values, form):
    values = list(values)
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def table(rows):
    """Median of the seeds (least to most). A seed's goal is where AdamW ends with the same seed."""
    lines, goals = [], [last(losses) for losses in best_curves(rows, "adamw")]
    for optimizer in RATES:
        curves = best_curves(rows, optimizer)
        reached = [next((step for step, loss in sorted(losses.items()) if loss <= goal), None) for losses, goal in zip(curves, goals)]
        times = [float(row["step_ms"]) for row in rows if (row["kind"], row["optimizer"]) == ("time", optimizer)]
        all_reach = None not in reached
        ms = statistics.median(times) if times else None
        lines.append({"": optimizer, "--lr": best_rate(rows, optimizer), **{
            f"loss by --lr, seed {SEEDS[0]}": ", ".join(f"{rate} {last(curve(rows, optimizer, rate, SEEDS[0])):.3f}"
                                                       for rate in RATES[optimizer])},
            f"loss after {max(curves[0])} steps": span(map(last, curves), ".3f"),
            "steps to AdamW's": span(reached, ".0f") if all_reach else "not by all seeds",
            "step, ms": f"{ms:.0f}" if ms else "–",
            "seconds to AdamW's": span([step * ms / 1e3 for step in reached], ".0f") if ms and all_reach else "–"})
    return markdown(lines)


def draw(rows, path):
    figure, axes = plots.plt.subplots(figsize=(5, 3.4))
    for optimizer in RATES:
        curves = best_curves(rows, optimizer)
        steps = sorted(curves[0])
        values = [[losses[step] for losses in curves] for step in steps]
        line, = axes.plot(steps, [statistics.mean(v) for v in values], label=f"{optimizer}, --lr {best_rate(rows, optimizer)}")
        axes.fill_between(steps, [min(v) for v in values], [max(v) for v in values], alpha=0.25, color=line.get_color(), linewidth=0)
    axes.set(xlabel="steps", ylabel="validation loss, nats per byte", ylim=(None, 3.5))
    axes.legend()
    plots.save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--text", required=True, help="the corpus")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", choices=["losses", "times"])
    parser.add_argument("--out", default="build/optimizers.csv")
    o = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="commfuse-optimizers-", dir=ROOT / "build") as folder:
        bench = Bench(o, folder)
        if o.only != "times":
            bench.all_losses()
        if o.only != "losses":
            bench.all_times()
    rows = read(o.out)
    if not any(row["kind"] == "loss" for row in rows):
        raise Problem(f"{o.out} has no losses yet", "leave out --only times")
    print(table(rows))
    draw(rows, pathlib.Path(o.out).with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(status_of(main))
