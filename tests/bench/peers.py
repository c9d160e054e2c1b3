#!/usr/bin/env python3
"""Steps of this program beside PyTorch's, on two hosts made of this machine, over the same link: the program that a user would take
instead.

    scripts/install_deps.sh --torch
    tests/bench/peers.py --compile-only           # once: torch.compile takes minutes; what it makes is kept in build/inductor
    tests/bench/peers.py --minutes 8 --rate 1gbit --out build/peers.csv

All train the same weights on the same tokens (tests/bench/torch_ranks.py), fp32, one thread a rank, in processes that take turns in
an order drawn anew: tp 2 (ours in TPSP; PyTorch's tensor parallelism with whole and with split activations), dp 2 (ours; DDP and
FSDP2), and one process of each with half of the sequences, which is what a rank of either computes. PyTorch's products are those of
MKL, which on AMD's processors may be no faster than AVX2 allows, so one row of ours has AVX2 only. A process's first step does not count, nor
do the steps in which `auto` tries schedules. Losses of the first step must agree to 1e-4. --out gets a row for each step. --local:
over shared memory; --size: layers, channels, heads, sequence, vocabulary, sequences a step.
"""
import argparse
import csv
import datetime
import json
import os
import pathlib
import random
import socket
import statistics
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/train")]
import lab
import reference
import run_log
import shapes
from command import Problem, note, status_of, whole
from runner import Failed, Runner, shown, words_of
from tables import markdown
from tokens import write_tokens

SIZE = 2, 1536, 24, 512, 8192, 2  # layers, channels, heads, sequence, vocabulary, sequences a step
OURS = "none", "slice:4", "ring:4", "auto"
AVX2 = " AVX2"  # of a mode of ours: products without wider vectors
GROUPS = {"tp 2": [*OURS, "ring:4" + AVX2, "tp", "tp compiled", "sequence", "sequence compiled"],
          "dp 2": [*OURS, "ring:4" + AVX2, "ddp", "ddp compiled", "fsdp", "fsdp compiled"],
          "one process": ["none", "none" + AVX2, "one", "one compiled"]}
NAMES = {"tp": "PyTorch, tensor parallel", "sequence": "PyTorch, tensor + sequence parallel", "ddp": "PyTorch, DDP",
         "fsdp": "PyTorch, FSDP2", "one": "PyTorch"}
BASE = {"tp 2": "ring:4", "dp 2": "ring:4", "one process": "none"}  # what others are divided by
LOSS_TOLERANCE = 1e-4  # of the first step, relative to ours
LIMIT_S = 900
GBIT = lab.quantity({"mbit": 1e-3, "gbit": 1})
RECIPE = dict(val_every=0, lr=3e-4, min_lr=3e-4, warmup=0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip=1, threads=1,
              peak_tflops=1)


def is_ours(mode):
    return mode.removesuffix(AVX2) in OURS


class Bench:
    def __init__(self, o, folder):
        self.o, self.folder, self.failed, self.runner = o, folder, False, Runner(gently=True, bound=True)
        layers, channels, heads, self.seq, vocab, self.batch = o.size
        shape = shapes.Shape(maxT=self.seq, V=vocab, Vp=vocab, L=layers, heads=heads, C=channels)
        reference.write_model(f"{folder}/model.bin", shape, reference.random_model(shape, scale=0.02))
        for count in {self.batch, self.batch // 2}:
            write_tokens(f"{folder}/{count}.bin", count * self.seq + 1, vocab)

    def start(self, group, command, env):
        ranks = 1 if group == "one process" else 2
        launcher = ["taskset", "-c", "0"] if ranks == 1 else ["scripts/mpirun.sh", "-np", 2] if self.o.local else [
            "scripts/lab.py", "--hosts", 2, "--rate", self.o.rate, "--"]
        note(shown([*launcher, *command]))
        return self.runner.output([*launcher, *command], LIMIT_S, OMP_NUM_THREADS="1", **env)

    def ours(self, group, mode, steps):
        env, mode = {"DNNL_MAX_CPU_ISA": "AVX2"} if mode.endswith(AVX2) else {}, mode.removesuffix(AVX2)
        log, batch = f"{self.folder}/log.jsonl", self.batch // (1 + (group == "one process"))
        pathlib.Path(log).unlink(missing_ok=True)
        mesh = dict(tp=2) if group == "tp 2" else dict(dp=2) if group == "dp 2" else {}
        self.start(group, [ROOT / self.o.build / "train_gpt", *words_of(
            init_from=f"{self.folder}/model.bin", train=f"{self.folder}/{batch}.bin", seq=self.seq, batch=batch,
            micro_batch=batch // mesh.get("dp", 1), steps=steps + run_log.TRIAL_STEPS * (mode == "auto"),
            overlap=mode if mesh else None, plan="new" if mode == "auto" else None,
            network_gbit=GBIT(self.o.rate) if mesh and not self.o.local else None, log=log, **mesh, **RECIPE)], env)
        found = run_log.steps(run_log.lines(log))
        found = [found[0], *run_log.warm(found)[:steps - 1]]
        return [step["step_ms"] for step in found], [step["loss"] for step in found]

    def torch(self, group, mode, steps):
        way, _, compiled = mode.partition(" ")
        batch = self.batch // (1 + (group == "one process"))
        with socket.create_server(("127.0.0.1", 0)) as free:  # perhaps another run is here, too
            port = free.getsockname()[1]
        env = dict(TORCHINDUCTOR_CACHE_DIR=str(ROOT / "build/inductor"), TORCHINDUCTOR_COMPILE_THREADS="1", MASTER_PORT=str(port))
        if group != "one process" and not self.o.local:
            env.update(MASTER_ADDR="10.0.0.1", GLOO_SOCKET_IFNAME="eth0")  # host 0 of the lab
        command = [self.o.torch, "tests/bench/torch_ranks.py", f"{self.folder}/model.bin", f"{self.folder}/{batch}.bin"]
        text = self.start(group, [*command, *words_of(way=way, steps=steps, compile="blocks" if compiled else "no")], env)
        found = run_log.printed(text)[-1]
        return found["step_ms"], found["loss"]

    def measure(self, group, mode, steps):
        return (self.ours if is_ours(mode) else self.torch)(group, mode, steps)


def take_turns(bench, end, save):
    """Rows of each step; another turn begins if it will be over in time."""
    o, rows, begin = bench.o, [], time.monotonic()
    jobs = [(group, mode) for group in o.only for mode in GROUPS[group]]
    stamp = {"rate": "shared memory" if o.local else o.rate,
             "commit": bench.runner.printed("git", "describe", "--always", "--dirty"),
             "date": f"{datetime.date.today()}", "processor": processor_of(bench.runner)}
    turn = 0
    while jobs and (not turn or time.monotonic() + (time.monotonic() - begin) / turn < end):
        for group, mode in random.Random(turn).sample(jobs, len(jobs)):
            try:
                measured = bench.measure(group, mode, o.steps + 1)
            except Failed as failed:
                note(f"{group}, {mode}: {failed}")
                jobs.remove((group, mode))
                bench.failed = True
                continue
            tokens = bench.seq * bench.batch // (1 + (group == "one process"))
            rows += [{"group": group, "mode": mode, "turn": turn, "step": step, "step_ms": f"{ms:.5g}", "loss": f"{loss:.9g}",
                      "tokens": tokens, **stamp} for step, (ms, loss) in enumerate(zip(*measured))]
            save(rows)
        turn += 1
    return rows


def processor_of(runner):
    config = dict(line.split(maxsplit=1) for line in runner.output(["make", "-s", "config"]).splitlines())
    return config["machine"].split(",")[0].replace("Model name ", "")


def read(path):
    with open(path, encoding="utf-8", newline="") as file:
        return [{**row, **{name: int(row[name]) for name in ("turn", "step", "tokens")},
                 **{name: float(row[name]) for name in ("step_ms", "loss")}} for row in csv.DictReader(file)]


def problems(rows):
    """Losses of a first step that differ from ours, by group and mode."""
    first = [row for row in rows if row["step"] == 0]
    ours = {row["group"]: row["loss"] for row in first if row["mode"] == "none"}
    return {(row["group"], row["mode"]): f"the first loss is {row['loss']:.6f}, of `none` {ours[row['group']]:.6f}"
            for row in first if not abs(row["loss"] / ours.get(row["group"], row["loss"]) - 1) <= LOSS_TOLERANCE}


def name_of(group, mode):
    """Of a mode, or of PyTorch's two, which are a row."""
    names = NAMES | {"none": "this program"} if group == "one process" else NAMES
    first = mode.partition(" ")[0]
    return names.get(first, f"`{first}`") + ", AVX2 only" * mode.endswith(AVX2)


def table(rows):
    """Medians over all steps; the multiples of ours, of turns from least to most. What is eager and compiled is one row."""
    lines, wrong = {}, problems(rows)
    for group, modes in GROUPS.items():
        times = {mode: [row for row in rows if (row["group"], row["mode"]) == (group, mode) and row["step"] > 0] for mode in modes}
        times = {mode: mine for mode, mine in times.items() if mine}

        def middle(mode, turn=None):
            return statistics.median(row["step_ms"] for row in times[mode] if turn in (None, row["turn"]))

        def multiple(mode, base):
            """Of the base's step in the same turn."""
            turns = sorted({row["turn"] for row in times[mode]} & {row["turn"] for row in times.get(base, [])})
            ratios = [middle(mode, turn) / middle(base, turn) for turn in turns]
            span = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 and mode != base else ""
            return f"{statistics.median(ratios):.2f}{span}" if ratios else "–"
        for mode, mine in times.items():
            error = f" **ERROR: {wrong[group, mode]}**" if (group, mode) in wrong else ""
            line = lines.setdefault(f"{group}: {name_of(group, mode)}", {})
            for name, cell in {"": ("" if is_ours(mode) else "compiled" if " " in mode else "eager") + error,
                               "step, ms": f"{middle(mode):.0f}", "tokens/s": f"{1e3 * mine[0]['tokens'] / middle(mode):.0f}",
                               "× ours": multiple(mode, BASE[group]),
                               "× ours, AVX2": "" if mode in OURS else multiple(mode, BASE[group] + AVX2)}.items():
                line[name] = f"{line[name]} / {cell}" if name in line else cell
    return markdown([{**line, "": f"{name}, {line['']}" if line[""] else name} for name, line in lines.items()])


def write(path, rows):
    with whole(path, newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--torch", default=str(ROOT / "build/venv/bin/python"), metavar="INTERPRETER", help="that has PyTorch")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--steps", type=int, default=3, help="that count, of each process")
    parser.add_argument("--rate", default="1gbit", help="of the link, each way: 500mbit, 1gbit")
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--size", type=int, nargs=6, default=SIZE)
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--out", default="build/peers.csv")
    o = parser.parse_args()
    end = time.monotonic() + 60 * o.minutes
    if not o.local and lab.obstacle():
        raise Problem(lab.obstacle(), "--local measures over shared memory")
    with tempfile.TemporaryDirectory(prefix="commfuse-peers-", dir=ROOT / "build") as folder:
        bench = Bench(o, folder)
        if o.compile_only:
            return [bench.measure(group, mode, 1) for group in o.only for mode in GROUPS[group] if mode.endswith(" compiled")] and 0
        rows = take_turns(bench, end, lambda rows: write(o.out, rows))
    if not rows:
        raise Problem("nothing could be measured", "see above")
    rows = read(o.out)
    print(table(rows))
    return int(bool(problems(rows)) or bench.failed)


if __name__ == "__main__":
    sys.exit(status_of(main))
