#!/usr/bin/env python3
"""make bench: what this machine reaches. Prints four tables; nothing is compared with a stored figure.

1. One process, d12, B 4, T 1024, all cores: step time, share of the GEMM peak measured in the same run, memory.
2. The layers one by one (bench_layers).
3. Fused operations over MPI shared memory, two ranks, a core to spare per rank (bench_fuse).
4. Training steps of two ranks, d12, B 4, T 256, as tp 2 and as dp 2, in every overlap mode.

Options: --build DIR (where the programs are), --only step|layers|fuse|train, --steps N, --ranks N.
"""
import argparse
import array
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
VOCAB, T, B = 50257, 1024, 4


def write_random_tokens(path, count):
    """A token file (data/tokens.h) whose content does not matter, only its size and range."""
    draw = random.Random(1)
    head = array.array("i", [20240520, 1, count] + [0] * 253)
    body = array.array("H", (draw.randrange(VOCAB) for _ in range(count)))
    with open(path, "wb") as file:
        head.tofile(file)
        body.tofile(file)


def bench_step(build, steps):
    with tempfile.TemporaryDirectory() as folder:
        tokens, log = f"{folder}/tokens.bin", f"{folder}/log.jsonl"
        write_random_tokens(tokens, 8 * B * T + 1)
        command = [f"{build}/train_gpt", "--model", "d12", "--vocab", str(VOCAB), "--train", tokens, "--batch", str(B),
                   "--micro-batch", str(B), "--seq", str(T), "--steps", str(steps), "--log", log]
        print("$", " ".join(command).replace(folder, "TMP"), flush=True)
        subprocess.run(command, check=True)
        lines = [json.loads(line) for line in open(log)]
    config, end = lines[0], lines[-1]
    warm = [line for line in lines if line["event"] == "step"][1:]  # the first step takes memory from the system
    ms, share = [s["step_ms"] for s in warm], [100 * s["mfu"] for s in warm]
    print(f"\nd12, B {B}, T {T}, {config['threads']} threads, fp32, median of {len(warm)} steps (min - max)")
    print(f"  step           {statistics.median(ms):8.0f} ms ({min(ms):.0f} - {max(ms):.0f})")
    print(f"  GEMM peak      {1e3 * config['peak_tflops_all_ranks']:8.1f} GFLOP/s, {config['peak_source']}")
    print(f"  share of it    {statistics.median(share):8.1f} % ({min(share):.1f} - {max(share):.1f})   asked: 70, aim: 80")
    print(f"  peak memory    {end['peak_rss_mib']:8.0f} MiB   asked: at most 6144\n", flush=True)


def train_two_ranks(build, tokens, log, tp, dp, mode, steps):
    command = [ROOT / "scripts/mpirun.sh", "-np", "2", f"{build}/train_gpt", "--tp", str(tp), "--dp", str(dp), "--model",
               "d12", "--vocab", str(VOCAB), "--train", tokens, "--batch", str(B), "--micro-batch", str(B // dp), "--seq",
               "256", "--steps", str(steps), "--threads", "1", "--val-every", "0", "--overlap", mode, "--log", log]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [line for line in map(json.loads, open(log)) if line["event"] == "step"]


def bench_train(build, steps):
    cores = os.cpu_count()
    print(f"two ranks of one compute thread and one progress thread on {cores} cores"
          f"{'' if cores >= 4 else ' (TOO FEW: 4 are needed to conclude anything)'}; d12, B {B}, T 256, fp32, "
          f"median of {steps - 1} steps (min - max)")
    print(f"{'mesh':6}{'overlap':10}{'step, ms':>28}{'exposed, ms':>13}{'MFU':>8}{'of nowire':>11}{'loss differs by':>18}")
    with tempfile.TemporaryDirectory() as folder:
        tokens = f"{folder}/tokens.bin"
        write_random_tokens(tokens, 8 * B * T + 1)
        for tp, dp in ((2, 1), (1, 2)):
            runs = {mode: train_two_ranks(build, tokens, f"{folder}/log", tp, dp, mode, steps)
                    for mode in ("nowire", "none", "slice", "commfuse")}
            bound = statistics.median(s["step_ms"] for s in runs["nowire"][1:])
            for mode, lines in runs.items():
                ms = [s["step_ms"] for s in lines[1:]]
                exposed = statistics.median(s["exposed_comm_ms"] for s in lines[1:])
                share = 100 * statistics.median(s["mfu"] for s in lines[1:])
                apart = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(lines, runs["none"]))
                step = f"{statistics.median(ms):.0f} ({min(ms):.0f} - {max(ms):.0f})"
                print(f"tp{tp}dp{dp} {mode:10}{step:>28}{exposed:13.1f}{share:7.1f}%{statistics.median(ms) / bound:11.3f}"
                      f"{'by construction' if mode == 'nowire' else f'{apart:.0e}':>18}", flush=True)


def bench_fuse(build, ranks):
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    subprocess.run([ROOT / "scripts/mpirun.sh", "-np", str(ranks), f"{build}/tests/bench/bench_fuse"], check=True,
                   env=environment)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--only", choices=("step", "layers", "fuse", "train"))
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--ranks", type=int, default=2)
    o = parser.parse_args()
    if o.only in (None, "step"):
        bench_step(o.build, o.steps)
    if o.only in (None, "layers"):
        subprocess.run([f"{o.build}/tests/bench/bench_layers"], check=True)
        print()
    if o.only in (None, "fuse"):
        bench_fuse(o.build, o.ranks)
        print()
    if o.only in (None, "train"):
        bench_train(o.build, o.steps)


if __name__ == "__main__":
    sys.exit(main())
