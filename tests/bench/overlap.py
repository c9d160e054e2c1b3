#!/usr/bin/env python3
"""Steps of all modes where two or four ranks share one GPU side by side, beside the same steps by the imagined clock.

    scripts/gpu_check.sh --only overlap                         builds what this runs, and keeps its output
    tests/bench/overlap.py --compare results/gpu/overlap.json   afterwards, without the GPU: beside the clock (make emulated-tests)

Without MPS processes take turns on a GPU. Under MPS they run side by side, each with a share of the multiprocessors. A link is
imitated by a kernel that copies within the GPU's memory at a given rate (COMMFUSE_LINK_GBPS). So products, attention, streams,
events and words are real, and how they overlap is measured. It says nothing of NVLink: no byte leaves the GPU, and copies take four
multiprocessors, which products leave them, and memory. The clock (tests/emulator/clock.cc) gets multiprocessors and memory rate
as bench_wires measures them, and the rate of products at which its `ideal` step takes as long; what is compared are the ratios to
`ideal`. The exit status is 1 if they differ by more than 3 %, if processes do not run side by side, or if there is no MPS.
"""
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2] / folder) for folder in ("scripts", "tests")]
import run_log
from command import Parser, status_of
from gpu.check import environment, free_port
from runner import ROOT, Failed, Late, Runner, words_of

CLOCK = f"{ROOT}/build/emulated-bf16"
MODES = "none", "slice", "ring", "direct", "auto", "ideal"
SHAPE = dict(channels=1280, heads=20, layers=2, vocab=8192, seq=1024, embedding="table", recompute=0, peak_tflops=989,
             rounds=20, timeout=50)
# 32 sequences on a whole GPU: with a share of its multiprocessors, products have as many waves.
MESHES = {"tp 2": (2, dict(tp=2, micro_batch=16)), "dp 2": (2, dict(dp=2, micro_batch=16)),  # the most telling ones first
          "tp 4": (4, dict(tp=4, micro_batch=8)), "UP 2": (2, dict(tp=2, strategy="up", micro_batch=16))}
LINK_GBPS = 100
ROUND_TRIP_US, BAND = 15, 0.03
TFLOPS, MULTIPROCESSORS = 770, 132  # of products, as clock.cc has it: where the fit begins


@contextlib.contextmanager
def mps(runner):
    """The environment of its clients; the daemon runs meanwhile."""
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        env = dict(CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder, CUDA_VISIBLE_DEVICES="0")
        control = "nvidia-cuda-mps-control"
        try:
            runner.output(["sh", "-c", f"{control} -d"], 20, **env)
            yield env
        finally:
            subprocess.run(["sh", "-c", f"echo quit | {control}"], env={**os.environ, **env}, capture_output=True, timeout=20,
                           check=False)


def wires(runner, o, env):
    """What bench_wires says of a share of the GPU: multiprocessors, GB/s of a copy, and microseconds of a round trip."""
    result = runner.run([f"{o.build}/tests/bench/bench_wires"], 40, env)
    found = [re.search(rf"^ *{what} +([\d.]+)", result.output, re.M)
             for what in ("multiprocessors", "copy of 65536 KiB", "ping-pong of 0 KiB, each way")]
    if not all(found):
        raise Failed(f"bench_wires does not say what is needed: {result.reason}")
    multiprocessors, copy, way = (float(match[1]) for match in found)
    return int(multiprocessors), copy, 2 * way


def steps(runner, build, ranks, words, env, modes=MODES):
    """The median step of each mode."""
    port, command = free_port(), [f"{build}/tests/bench/bench_train", *words_of(**SHAPE, **words, modes=",".join(modes),
                                                                                transport="ipc"), "--json"]
    env = dict(env, COMMFUSE_LINK_GBPS=str(LINK_GBPS))
    result = runner.ranks([command] * ranks, [{**environment(rank, ranks, port, "ipc"), **env} for rank in range(ranks)], 90)
    if result.status:
        raise Failed(f"bench_train, {' '.join(words_of(**words))}: {result.reason}")
    _, rows = run_log.turns(result.output)
    return {mode: run_log.median([row for row in rows if row["mode"] == mode], "step_ms") for mode in modes}


def imagine(runner, ranks, words, multiprocessors, memory_gbps, ideal_ms):
    """The clock's steps, with products so fast that its ideal step is about ideal_ms."""
    tflops = TFLOPS * multiprocessors / MULTIPROCESSORS
    env = dict(EMULATOR_CLOCK="1", EMULATOR_DEVICES=str(ranks), EMULATOR_MULTIPROCESSORS=str(multiprocessors),
               EMULATOR_MEMORY_GBPS=f"{memory_gbps:.0f}")
    first = steps(runner, CLOCK, ranks, words, dict(env, EMULATOR_TFLOPS=f"{tflops:.0f}"), ("ideal",))
    fitted = max(1, tflops * first["ideal"] / ideal_ms)
    return steps(runner, CLOCK, ranks, words, dict(env, EMULATOR_TFLOPS=f"{fitted:.0f}"))


def shown(row):
    """What was measured of a mesh."""
    ideal = row["measured"]["ideal"]
    return (f"{row['mesh']}: {row['multiprocessors']} multiprocessors a rank, ideal {ideal:.2f} ms; of ideal: " +
            ", ".join(f"{mode} {ms / ideal:.3f}" for mode, ms in row["measured"].items()))


def measure(runner, o):
    """Rows, printed and on the disk as soon as they are measured."""
    done = []
    try:
        with mps(runner) as env:
            clients = {ranks: dict(env, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=str(100 // ranks)) for ranks in (1, 2, 4)}
            shares = {ranks: wires(runner, o, client) for ranks, client in clients.items()}
            trip = max(share[2] for share in shares.values())
            if trip >= ROUND_TRIP_US:
                raise Failed(f"a round trip takes {trip:.1f} us, not less than {ROUND_TRIP_US}: processes still take turns")
            for name, (ranks, words) in MESHES.items():  # a copy reads and writes; all ranks share the memory
                done.append(dict(mesh=name, multiprocessors=shares[ranks][0],
                                 memory_gbps=2 * min(shares[ranks][1], shares[1][1] / ranks),
                                 measured=steps(runner, o.build, ranks, words, clients[ranks])))
                print(shown(done[-1]), flush=True)
                pathlib.Path(o.measured).write_text(json.dumps(done), encoding="utf-8")
    except Late:
        raise Failed(f"time is over after {', '.join(row['mesh'] for row in done) or 'no mesh'}") from None


def compare(runner, mesh, multiprocessors, memory_gbps, measured):
    """Prints a table. False: they disagree."""
    ranks, words = MESHES[mesh]
    imagined = imagine(runner, ranks, words, multiprocessors, memory_gbps, measured["ideal"])
    pairs = {mode: (measured[mode] / measured["ideal"], imagined[mode] / imagined["ideal"]) for mode in MODES}
    far = max(abs(a / b - 1) for a, b in pairs.values())
    ideal = f"ideal {measured['ideal']:.2f} ms, by the clock {imagined['ideal']:.2f}"
    print(f"{mesh}: {multiprocessors} multiprocessors a rank, {ideal}")
    print(f"  {'of ideal':<12}{'measured':>10}{'the clock':>10}")
    for mode, (a, b) in pairs.items():
        print(f"  {mode:<12}{a:>10.3f}{b:>10.3f}")
    print(f"  {'agree' if far <= BAND else 'DISAGREE'} to {far:.1%} (band {BAND:.0%})", flush=True)
    return far <= BAND


def main():
    parser = Parser(__doc__)
    parser.add_argument("--build", default="build/cuda-bf16")
    parser.add_argument("--seconds", type=float, default=540, help="for everything")
    parser.add_argument("--measured", default="results/gpu/overlap.json", help="a file for what is measured")
    parser.add_argument("--compare", metavar="FILE", help="measure nothing: compare what was measured with the clock")
    o = parser.parse_args()
    runner = Runner(bound=True)
    runner.deadline = time.monotonic() + o.seconds
    print(f"Ranks share one GPU under MPS; a link is a copy within it, at {LINK_GBPS} GB/s. This says nothing of NVLink.")
    if not o.compare:
        measure(runner, o)
        return 0
    agree = all([compare(runner, **row) for row in json.loads(pathlib.Path(o.compare).read_text(encoding="utf-8"))])
    if not agree:
        print("not all meshes agree: see DISAGREE above")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(status_of(main))
