#!/usr/bin/env python3
"""make bench: what this machine reaches. Prints three tables; nothing is compared with a stored figure.

1. One process, d12, B 4, T 1024, all cores: step time, share of the GEMM peak measured in the same run, memory.
2. The layers one by one (bench_layers).
3. Fused operations over MPI shared memory, two ranks, a core to spare per rank (bench_fuse).

Options: --build DIR (where the programs are), --only step|layers|fuse, --steps N, --ranks N.
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


def bench_fuse(build, ranks):
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    subprocess.run([ROOT / "scripts/mpirun.sh", "-np", str(ranks), f"{build}/tests/bench/bench_fuse"], check=True,
                   env=environment)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--only", choices=("step", "layers", "fuse"))
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


if __name__ == "__main__":
    sys.exit(main())
