#!/usr/bin/env python3
"""Write MACHINE.json for --predict: of this CPU, by the project's benchmarks, in two minutes; of a GPU, from its reports.

    make && scripts/measure_machine.py --ranks 2 --out here.json
    make build/release/tests/bench/bench_collectives && mpirun -np 2 --host one,two scripts/measure_machine.py --out here.json
    scripts/measure_machine.py --report scripts/experiments/results/gpu/h200.txt --out scripts/machines/h200x8.json

Measures the kernels of a rank of --threads threads at three sizes (tests/bench/bench_layers) while the other --ranks compute the
same, because they share memory and clock, and messages between the ranks (bench_collectives). Started by mpirun, one rank a host, it
also measures the network; else that gets the same link as the host: edit it. Other work on the machine lowers the rates; the file
records the load.

--report puts the rates of a report of gpu_check.py into a file that is there: those of all kernels of a step together. The table of
kernels may come from a second report; then computation is scaled by the rate of large products, memory by that of copies.
"""
import json
import math
import os
import pathlib
import re
import shutil
import statistics
import sys

from command import Parser, Problem, at_least, status_of, whole
from runner import Runner

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


def wire(ranks, *launcher):
    """A link: latency and rate of one exchange, and share of that rate of native all-gathers."""
    text = run([*launcher, f"{BENCHES}/bench_collectives", "--rounds", 9], OMP_WAIT_POLICY="passive")
    if not text:  # rank 0 prints
        sys.exit(0)
    sizes = [(ranks - 1) * 1024 * int(kib) for kib in re.findall(r"(\d+) KiB", text)]
    exchange, native = ([float(ms) / 1e3 for ms in re.findall(r"([\d.]+) \(", re.search(rf"^{name}.*$", text, re.M)[0])]
                        for name in ("the wire: MPI_Sendrecv", "MPI_Allgather"))
    rate = sizes[-1] / exchange[-1]
    latency = max(1e-6, exchange[0] - sizes[0] / rate) * 1e6
    return {"gb_per_s": rate / 1e9, "latency_us": latency + 10, "step_us": latency,
            "native_share": [[size / 1e6, min(1, size / rate / s)] for size, s in zip(sizes, native)]}


def between_hosts():
    """The link, where mpirun has started this script: the benchmark takes the place of its ranks. Else None."""
    ranks = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE")
    found = wire(int(ranks)) if ranks else None
    for name in [name for name in os.environ if re.match("OMPI_|PMI|PRTE", name)]:
        del os.environ[name]  # what is measured within this host has an mpirun of its own
    return found


def measured(o):
    """The machine."""
    network = between_hosts()
    run(["make", "-s", "build/release/train_gpt", *(f"{BENCHES}/bench_{name}" for name in ("layers", "collectives"))])
    told = run(["build/release/train_gpt", "--dry-run", "--layers", 1, "--channels", 64, "--heads", 1, "--seq", 16])
    limited = re.search(r" \(.* (\d+) of \d+ cores\)", told)  # of the ranks; what limits them, in words
    cores, limit = (int(limited[1]), limited[0]) if limited else (os.cpu_count(), "")
    curves, memory, peak = kernels(o.ranks, o.threads)
    near = wire(o.ranks, "scripts/mpirun.sh", "-np", o.ranks)
    taken = min(0.5, max(0, 1 - cores / (o.ranks * (o.threads + 1))))  # where transfers share cores with computation
    print(f"{o.out}: products at {curves['product_tflops'][-1][1] * 1e3:.0f} GFLOP/s, memory at {memory:.1f} GB/s, messages at "
          f"{near['gb_per_s']:.1f} GB/s after {near['step_us']:.0f} µs; {cores} cores{limit}")
    return {
        "name": os.uname().nodename[:40], "device": "cpu",
        "comment": f"{cores} cores{limit}, {o.ranks} ranks of {o.threads} threads; load while measured {os.getloadavg()[0]:.1f}",
        "peak_tflops": peak, "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9 / o.ranks,
        "memory_gb_per_s": memory, **curves, "native_us": near["step_us"],
        "links": [{"name": "memory", "ranks": o.ranks, **near, "taken": taken},
                  {"name": "network", "ranks": 0, **(network or near), "taken": taken}]}


KERNEL = r"^ {8}(\S.*?) {2,}([\d.]+) +\d+% +(\d+) +[\d.]+(?: +(\d+\.\d+) +[\d.]+%)?(?: +(\d+) +[\d.]+%)?$"


def together(calls):
    """[work of a call, rate] of kernels (number, ms, rate)."""
    work = sum(number * ms * rate for number, ms, rate in calls)
    return [round(work / sum(number for number, *_ in calls), 1), round(work / sum(number * ms for number, ms, _ in calls), 1)]


def reported(o):
    """The machine of --out with the rates of its reports. Kernels smaller than those measured keep theirs, but are no faster."""
    texts = [path.read_text(encoding="utf-8") for path in o.report]
    before, table = texts[-1].split("\nkernels:")
    best = [float(re.search(r"best ([\d.]+) TFLOP/s", text)[1]) for text in texts]
    faster, memory, kinds = best[0] / best[-1], 1, {}
    if len(texts) > 1:  # a copy reads and writes
        memory = 2 * float(re.search(r"copy of 65536 KiB, default +(\S+)", texts[0])[1]) / float(re.search(r"copy (\d+)", table)[1])
    for name, ms, number, tflops, gb in re.findall(KERNEL, table, re.M):
        kind = name if "attention" in name else tflops and round(math.log2(float(tflops) * float(ms)))  # products by size
        scale = faster if tflops else memory
        kinds.setdefault(kind, []).append((int(number), float(ms) / scale, float(tflops or gb or 0) * scale))
    products = sorted(together(kinds[kind]) for kind in kinds if isinstance(kind, int))
    machine = json.loads(o.out.read_text(encoding="utf-8"))
    for field, known in (("product", products), ("attention", [together(kinds["attention forward"])]),
                         ("attention_backward", [together(kinds["attention backward"])])):
        smaller = [[x, min(y, known[0][1])] for x, y in machine[f"{field}_tflops"] if x < known[0][0]]
        machine[f"{field}_tflops"] = smaller + known
    source = "; ".join(re.match(r".* 20\d\d(, commit \w+)?", text)[0] for text in texts)
    commit = re.findall(r"commit (\w+)", before)[-1]
    return {**machine, "memory_gb_per_s": together(kinds[""])[1],
            "comment": f"Products, attention, memory: reports of {source}, kernels of commit {commit}. The rest: data sheet, "
                       "others' figures"}


def main():
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=at_least(2), default=2, help="on this host; messages between them are measured (2)")
    parser.add_argument("--threads", type=at_least(1), default=1, help="that compute, of each rank (1)")
    parser.add_argument("--report", type=pathlib.Path, nargs="+", help="of gpu_check.py, and perhaps another one")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    o = parser.parse_args()
    if not o.report and not shutil.which("mpirun"):
        raise Problem("there is no mpirun", "scripts/install_deps.sh installs it")
    with whole(o.out) as file:  # before minutes are spent
        fields = reported(o) if o.report else measured(o)
        short = {name: value for name, value in fields.items() if not isinstance(value, list) and name != "comment"}
        lines = short, *({name: value} for name, value in fields.items() if name not in short)
        file.write("{\n  " + ",\n  ".join(json.dumps(line)[1:-1] for line in lines) + "\n}\n")


if __name__ == "__main__":
    sys.exit(status_of(main))
