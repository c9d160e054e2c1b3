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

from command import Parser, Problem, at_least, status_of, whole
from runner import ROOT, Runner

run, BENCHES = Runner().output, "build/release/tests/bench"
SIZES = (128, 2, 2, 256, 2048), (384, 6, 2, 256, 8192), (768, 12, 2, 512, 16384)  # C H B T V
MEMORY = ("layernorm forward", "layernorm backward", "gelu forward 4C", "gelu backward 4C", "residual", "crossentropy stats",
          "crossentropy combine", "adamw")
PRODUCTS = "linear forward C→4C", "linear dgrad 4C→C", "linear wgrad"


def kernels(ranks, threads):
    """Curves of TFLOP/s over flops in 10⁹, GB/s of the other kernels together, and the peak in TFLOP/s."""
    curves, peak = {"product_tflops": [], "attention_tflops": [], "attention_backward_tflops": []}, 0
    for C, H, B, T, V in SIZES:
        text = run([f"{BENCHES}/bench_layers", C, H, B, T, V, 10], copies=ranks, OMP_WAIT_POLICY="passive",
                   OMP_PROC_BIND="false", OMP_NUM_THREADS=str(threads))  # copies would be bound to the same cores
        peak = max(peak, float(re.search(r"GEMM peak ([\d.]+)", text).group(1)) / 1e3)

        def column(name, number):  # ms, spread, then GFLOP/s, its share, GB/s
            row = next(line for line in text.splitlines() if line.startswith(name))
            return float(re.findall(r"[\d.]+", row[len(name):])[number])

        rows = B * T
        product = statistics.median(column(name, 2) for name in PRODUCTS) / 1e3
        curves["product_tflops"].append([8 * rows * C * C / 1e9, min(product, peak)])
        curves["attention_tflops"].append([2 * rows * T * C / 1e9, column("attention forward", 2) / 1e3])
        curves["attention_backward_tflops"].append([5 * rows * T * C / 1e9, column("attention backward", 2) / 1e3])
        times = {name: column(name, 0) for name in MEMORY}
        memory = sum(ms * column(name, -1) for name, ms in times.items()) / sum(times.values())
    return curves, memory, peak  # of the last size, because that fits in no cache


def wire(ranks):
    """Latency in µs and GB/s of one exchange, and [MB, share of that rate] of native all-gathers."""
    text = run(["scripts/mpirun.sh", "-np", ranks, f"{BENCHES}/bench_collectives", "--rounds", 9], OMP_WAIT_POLICY="passive")
    sizes = [(ranks - 1) * 1024 * int(kib) for kib in re.findall(r"(\d+) KiB", text)]
    exchange, native = ([float(ms) / 1e3 for ms in re.findall(r"([\d.]+) \(", re.search(rf"^{name}.*$", text, re.M)[0])]
                        for name in ("the wire: MPI_Sendrecv", "MPI_Allgather"))
    rate = sizes[-1] / exchange[-1]
    latency = max(1e-6, exchange[0] - sizes[0] / rate)
    return latency * 1e6, rate / 1e9, [[size / 1e6, min(1, size / rate / s)] for size, s in zip(sizes, native)]


def allowed_cores():
    """How many cores the ranks may use, and what limits them, in words, as the program finds it."""
    text = run(["build/release/train_gpt", "--dry-run", "--layers", 1, "--channels", 64, "--heads", 1, "--seq", 16])
    limit = re.search(r" \(.* (\d+) of \d+ cores\)", text)
    return (int(limit[1]), limit[0]) if limit else (os.cpu_count(), "")


def measured(o):
    """The machine."""
    run(["make", "-s", "build/release/train_gpt", *(f"{BENCHES}/bench_{name}" for name in ("layers", "collectives"))])
    cores, limit = allowed_cores()
    curves, memory, peak = kernels(o.ranks, o.threads)
    latency, rate, share = wire(o.ranks)
    link = {"gb_per_s": rate, "block_gb_per_s": 0, "latency_us": latency + 10, "step_us": latency, "copied": 0,
            "taken": min(0.5, max(0, 1 - cores / (o.ranks * (o.threads + 1))))}  # where transfers share cores with computation
    print(f"{o.out}: products at {curves['product_tflops'][-1][1] * 1e3:.0f} GFLOP/s, memory at {memory:.1f} GB/s, messages at "
          f"{rate:.1f} GB/s after {latency:.0f} µs; {cores} cores{limit}")
    return {
        **json.loads(pathlib.Path(ROOT, "scripts/machines/laptop.json").read_text()),  # what is not measured here
        "name": os.uname().nodename[:40],
        "comment": f"{cores} cores{limit}, {o.ranks} ranks of {o.threads} threads; load while measured {os.getloadavg()[0]:.1f}",
        "peak_tflops": peak, "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9 / o.ranks,
        "memory_gb_per_s": memory, **curves, "native_us": latency, "native_share": share,
        "links": [{"name": "memory", "ranks": o.ranks, **link}, {"name": "network", "ranks": 0, **link}]}


def main():
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=at_least(2), default=2, help="on this host; messages between them are measured (2)")
    parser.add_argument("--threads", type=at_least(1), default=1, help="that compute, of each rank (1)")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    o = parser.parse_args()
    if not shutil.which("mpirun"):
        raise Problem("there is no mpirun", "scripts/install_deps.sh installs it")
    with whole(o.out) as file:  # before minutes are spent
        file.write(json.dumps(measured(o), indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(status_of(main))
