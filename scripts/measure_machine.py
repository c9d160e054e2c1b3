#!/usr/bin/env python3
"""Write MACHINE.json of this CPU for --predict, from the project's benchmarks, in two minutes.

    make && scripts/measure_machine.py --ranks 2 --out here.json

Measures the kernels of a rank of --threads threads at three sizes (tests/bench/bench_layers) while the other --ranks compute the
same, because they share memory and clock, and messages between the ranks (bench_collectives). The network gets the same link as the
host: edit it. Other work on the machine lowers the rates; the file records the load.
"""
import json
import os
import pathlib
import re
import shutil
import statistics
import sys

from command import Parser, Problem, status_of, whole
from runner import ROOT, Runner

run, BENCHES = Runner().output, "build/release/tests/bench"
SIZES = (128, 2, 2, 256, 2048), (384, 6, 2, 256, 8192), (768, 12, 2, 512, 16384)  # C H B T V
MEMORY = ("layernorm forward", "layernorm backward", "gelu forward 4C", "gelu backward 4C", "residual", "crossentropy stats",
          "crossentropy combine", "adamw")


def kernels(ranks, threads):
    """Curves of TFLOP/s over flops in 10⁹, GB/s of the other kernels together, and the peak."""
    curves, memory, peak = {"product": [], "attention": [], "attention_backward": []}, [], 0
    for C, H, B, T, V in SIZES:
        text = run([f"{BENCHES}/bench_layers", C, H, B, T, V, 10], copies=ranks, OMP_WAIT_POLICY="passive",
                   OMP_PROC_BIND="false", OMP_NUM_THREADS=str(threads))  # copies would be bound to the same cores
        peak = max(peak, float(re.search(r"GEMM peak ([\d.]+)", text).group(1)))

        def column(name, number):  # ms, spread, then GFLOP/s, its share, GB/s
            row = next(line for line in text.splitlines() if line.startswith(name))
            return float(re.findall(r"[\d.]+", row[len(name):])[number])

        rows = B * T
        product = statistics.median(column(n, 2) for n in ("linear forward C→4C", "linear dgrad 4C→C", "linear wgrad"))
        curves["product"].append([8 * rows * C * C / 1e9, min(product, peak) / 1e3])
        curves["attention"].append([2 * rows * T * C / 1e9, column("attention forward", 2) / 1e3])
        curves["attention_backward"].append([5 * rows * T * C / 1e9, column("attention backward", 2) / 1e3])
        times = [column(name, 0) for name in MEMORY]
        memory = sum(ms * column(name, -1) for ms, name in zip(times, MEMORY)) / sum(times)
    return curves, memory, peak  # of the last size, because that fits in no cache


def wire(ranks):
    """Latency in seconds and bytes/s of one exchange, and [MB, share of that rate] of native all-gathers."""
    text = run(["scripts/mpirun.sh", "-np", ranks, f"{BENCHES}/bench_collectives", "--rounds", 9], OMP_WAIT_POLICY="passive")
    sizes = [1024 * int(kib) for kib in re.findall(r"(\d+) KiB", text)]

    def times(name):
        row = re.search(rf"^{name}.*$", text, re.M).group(0)
        return [float(ms) / 1e3 for ms in re.findall(r"([\d.]+) \(", row)]

    exchange, native = times("the wire: MPI_Sendrecv"), times("MPI_Allgather")
    rate = sizes[-1] * (ranks - 1) / exchange[-1]
    latency = max(1e-6, exchange[0] - sizes[0] * (ranks - 1) / rate)
    share = [[(ranks - 1) * size / 1e6, min(1, (ranks - 1) * size / rate / s)] for size, s in zip(sizes, native)]
    return latency, rate, share


def allowed_cores():
    """How many cores the ranks may use, and what limits them, in words, as the program finds it."""
    text = run(["build/release/train_gpt", "--dry-run", "--layers", 1, "--channels", 64, "--heads", 1, "--seq", 16])
    limit = re.search(r" \(.* (\d+) of \d+ cores\)", text)
    return (int(limit[1]), limit[0]) if limit else (os.cpu_count(), "")


def main():
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="on this host, at least 2 (2)")
    parser.add_argument("--threads", type=int, default=1, help="that compute, of each rank (1)")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    o = parser.parse_args()
    if o.ranks < 2:
        parser.error(f"--ranks {o.ranks}: messages between ranks are measured, so at least 2")
    if not shutil.which("mpirun"):
        raise Problem("there is no mpirun", "scripts/install_deps.sh installs it")
    with whole(o.out) as file:  # before minutes are spent
        machine, summary = measured(o)
        file.write(json.dumps(machine, indent=2) + "\n")
    print(f"{o.out}: {summary}")


def measured(o):
    """The machine, and a line about it."""
    run(["make", "-s", "build/release/train_gpt", *(f"{BENCHES}/bench_{name}" for name in ("layers", "collectives"))])
    cores, limit = allowed_cores()
    curves, memory, peak = kernels(o.ranks, o.threads)
    latency, rate, share = wire(o.ranks)
    link = {"gb_per_s": rate / 1e9, "block_gb_per_s": 0, "latency_us": latency * 1e6 + 10, "step_us": latency * 1e6,
            "copied": 0,
            "taken": min(0.5, max(0, 1 - cores / (o.ranks * (o.threads + 1))))}  # where transfers share cores with computation
    machine = {
        **json.loads(pathlib.Path(ROOT, "scripts/machines/laptop.json").read_text()),  # what is not measured here
        "name": os.uname().nodename[:40],
        "comment": f"{cores} cores{limit}, {o.ranks} ranks of {o.threads} threads; load while measured {os.getloadavg()[0]:.1f}",
        "peak_tflops": peak / 1e3, "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9 / o.ranks,
        "memory_gb_per_s": memory,
        **{f"{name}_tflops": points for name, points in curves.items()},
        "native_us": latency * 1e6, "native_share": share,
        "links": [{"name": "memory", "ranks": o.ranks, **link}, {"name": "network", "ranks": 0, **link}]}
    return machine, (f"products at {curves['product'][-1][1] * 1e3:.0f} GFLOP/s, memory at {memory:.1f} GB/s, messages at "
                     f"{rate / 1e9:.1f} GB/s after {latency * 1e6:.0f} µs; {cores} cores{limit}")


if __name__ == "__main__":
    sys.exit(status_of(main))
