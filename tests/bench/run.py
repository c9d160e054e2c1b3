#!/usr/bin/env python3
"""make bench: tables of what this machine reaches; nothing is compared with a stored figure.

1. One process, d12, B 4, T 1024, all cores, fp32 and bf16 in turns: step time, share of the GEMM peak measured in the
   same run, memory. Parts 1, 2 and 8 leave bf16 out where the processor has no instructions for it.
2. The layers one by one (bench_layers), in fp32 and bf16.
3. Fused operations over MPI shared memory, two ranks, a core to spare per rank (bench_fuse).
4. How causal attention changes what is hidden, over links of several speeds (bench_causal, simulated from measured slices),
   and the same for the ranks of this machine, real and simulated. With a real slow link:
   scripts/lab.py --rate 4gbit -- build/release/tests/bench/bench_causal
5. Training steps of two ranks, B 4, T 256, as tp 2 (TPSP and UP) and as dp 2; modes take turns (bench_train), each with
   a separate model: d12 where there are 22 GiB, else d6.
   From traces, how long gradients are still in flight after the last computation of backward.
6. Bytes on the wire in a step of d6 for each strategy and mesh, counted and by the formula.
7. Many ranks with little work each: the default, --overlap auto, beside its baselines, modes take turns (bench_train); and
   how many transfers a step of d12 posts, for 2 to 512 replicas (--dry-run).
8. PyTorch beside one process, eager and compiled, in turns with this program; skipped where the interpreter of --torch
   has no torch.
9. A step beside busy processes, more of them than cores.
10. The MPI library's collectives, which the baselines use, beside a plain exchange of the same bytes (bench_collectives).
   Over a link of known speed: scripts/lab.py --rate 2gbit -- build/release/tests/bench/bench_collectives
"""
import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "train"), str(ROOT / "scripts")]
import run_log
import shapes
import traffic
from runner import words_of
from tokens import write_tokens

VOCAB, T, B = 50257, 1024, 4
STEP_TURNS = 4  # each measures its own peak: cores are not equally fast all the time
TURNS_MIB = 22 * 1024  # that bench_train's d12 takes
MESHES = ("tpsp", 2, 1), ("up", 2, 1), ("tpsp", 1, 2)  # tp, dp


def run_ranks(ranks, *command, stdout=None, **options):
    """Returns what they print if stdout is a pipe. OMP_NUM_THREADS is for programs without the option --threads."""
    return subprocess.run([ROOT / "scripts/mpirun.sh", "-np", str(ranks), *command, *words_of(**options)], check=True,
                          stdout=stdout, text=True, env=dict(os.environ, OMP_NUM_THREADS="1")).stdout


def log_of_one_process(build, steps, dtype, spin=None, **options):
    """The log of d12's steps, or with other options."""
    with tempfile.TemporaryDirectory() as folder:
        tokens, log = f"{folder}/tokens.bin", f"{folder}/log.jsonl"
        write_tokens(tokens, 8 * B * T + 1, VOCAB)
        options = dict(dict(model="d12", batch=B, micro_batch=B, seq=T), **options)
        command = [f"{build}/train_gpt", *words_of(vocab=VOCAB, train=tokens, steps=steps, dtype=dtype, log=log, **options)]
        print("$", " ".join(command).replace(folder, "TMP"), flush=True)
        done = subprocess.run(command, env=dict(os.environ, **({"GOMP_SPINCOUNT": spin} if spin else {})))
        if done.returncode != 0:
            sys.exit(f"error: this run ended with status {done.returncode}")
        return list(run_log.lines(log))


def types(build):
    """Without bf16 where the processor has no instructions for it: its steps would take minutes and say nothing."""
    told = subprocess.run([f"{build}/train_gpt", "--dry-run", "--dtype", "bf16"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True)
    slow = re.search(".*(?:no instructions for bf16|--dtype bf16: ).*", told.stdout)
    if slow:
        print(f"bf16 is left out: {slow[0].strip()}", flush=True)
    return ["fp32"] if slow else ["fp32", "bf16"]


def bench_step(build, steps):
    logs = {dtype: [] for dtype in types(build)}
    for dtype in list(logs) * STEP_TURNS:
        logs[dtype].append(log_of_one_process(build, steps, dtype))

    def row(name, unit, figures, digits=0):
        """Of each type: the median, and from least to most."""
        cells = [f"{statistics.median(v):9.{digits}f} ({min(v):.{digits}f} - {max(v):.{digits}f})"
                 for v in map(figures, logs.values())]
        print(f"  {name:13}" + "".join(f"{cell:30}" for cell in cells) + unit)

    def of_steps(field, scale=1):  # the first step of each run takes memory from the system
        return lambda runs: [scale * line[field] for log in runs
                             for line in log if line["event"] == "step" and line["step"] > 0]

    config = logs["fp32"][0][0]
    print(f"\nd12, B {B}, T {T}, {config['threads']} threads, {STEP_TURNS} runs of {steps - 1} steps each in turns: median (min - max)")
    print(" " * 15 + "".join(f"{dtype:>9}{'':21}" for dtype in logs))
    row("step", "ms", of_steps("step_ms"))
    row("GEMM peak", "GFLOP/s", lambda runs: [1e3 * log[0]["peak_tflops_all_ranks"] for log in runs], 1)
    row("share of it", "%", of_steps("mfu", 100), 1)
    row("peak memory", "MiB", lambda runs: [log[-1]["peak_rss_mib"] for log in runs])
    print(f"GEMM peak: {config['peak_source']}\n", flush=True)


def bench_torch(build, steps, interpreter, block, model, batch, seq):
    """Step times in turns: the ratio is of medians; the share is of the peak that this program measured."""
    if subprocess.run([interpreter, "-c", "import torch"], stderr=subprocess.DEVNULL).returncode != 0:
        return print(f"PyTorch: skipped, {interpreter} has no torch (--torch names another)", flush=True)
    layers, channels, heads = {"d12": (12, 768, 12), "d6": (6, 384, 6)}[model]
    print(f"{model} of {block}, B {batch}, T {seq}, {os.cpu_count()} threads, {steps} steps a turn, two turns: median ms (share of the "
          "peak)")
    for dtype in reversed(types(build)):
        times, peak, flops = {}, 0, 0
        for _ in range(2):
            log = log_of_one_process(build, steps + 1, dtype, model=model, block=block, batch=batch, micro_batch=batch, seq=seq)
            peak = max(peak, log[0]["peak_tflops_all_ranks"] * 1e12)  # one that other work disturbed would flatter
            times.setdefault("this program", []).extend(line["step_ms"] for line in log
                                                        if line["event"] == "step" and line["step"] > 0)
            for compile in ("no", "model"):
                words = words_of(compile=compile, device="cpu", dtype=dtype, block=block, steps=steps, warmup=1)
                done = subprocess.run([interpreter, ROOT / "tests/bench/torch_gpt.py", *map(str, (layers, channels, heads, batch,
                                       seq)), *words], check=True, text=True, stdout=subprocess.PIPE,
                                      env=dict(os.environ, OMP_NUM_THREADS=str(os.cpu_count())))
                found = json.loads(done.stdout.splitlines()[-1])
                flops = found["flops_per_token"] * batch * seq
                times.setdefault({"no": "PyTorch eager", "model": "PyTorch compiled"}[compile], []).append(found["step_ms"])
        ours = statistics.median(times["this program"])
        for name, ms in times.items():
            middle = statistics.median(ms)
            print(f"  {dtype}  {name:18}{middle:10.1f} ms  ({1e5 * flops / middle / peak:5.1f} %)  this program takes "
                  f"{ours / middle:.2f} of it", flush=True)


def bench_busy(build, steps):
    """Beside as many busy processes and one more, with this program's wait for work and with gcc's, in turns."""
    times, spins = {}, {"this program's wait": None, "gcc's wait": "300000"}
    for _ in range(3):
        for others in (0, os.cpu_count() + 1):
            for name, spin in spins.items():
                busy = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(others)]
                try:
                    log = log_of_one_process(build, steps, "fp32", spin, model="d6", layers=2, channels=256, heads=4, batch=1,
                                             micro_batch=1, seq=256)
                finally:
                    for process in busy:
                        process.kill()
                times.setdefault((name, others), []).extend(line["step_ms"] for line in log
                                                            if line["event"] == "step" and line["step"] > 0)
    for name in spins:
        alone, beside = (statistics.median(times[name, others]) for others in (0, os.cpu_count() + 1))
        print(f"  {name:20} alone {alone:8.1f} ms, beside {os.cpu_count() + 1} busy processes {beside:8.1f} ms: "
              f"{beside / alone:.2f} times", flush=True)


def train(build, folder, model, strategy, tp, dp, micro_batch, mode, steps, trace_steps):
    """The trace of some steps of a run of tp x dp ranks."""
    trace = f"{folder}/trace"
    run_ranks(tp * dp, f"{build}/train_gpt", stdout=subprocess.DEVNULL, strategy=strategy, tp=tp, dp=dp, model=model, vocab=VOCAB,
              train=f"{folder}/tokens.bin", batch=micro_batch * dp, micro_batch=micro_batch, seq=256, steps=steps, threads=1,
              val_every=0, overlap=mode, trace=trace, trace_steps=trace_steps)
    return traffic.Trace(trace)


def tail_ms(trace, step):
    """How long gradients are still in flight after the last computation of backward."""
    def tail(rank):
        _, end = trace.last_computation(rank, step)
        return max([e["ts"] + e["dur"] - end for e in trace.gradient_sync(rank, step)], default=0)
    return max(0, max(map(tail, trace.ranks)) / 1e3)


def bench_train(build, steps):
    printed = subprocess.run([f"{build}/train_gpt", "--dry-run"], check=True, stdout=subprocess.PIPE, text=True).stdout
    cores, free_mib = os.cpu_count(), float(re.search(r"MiB per rank, of ([\d.]+) MiB", printed)[1])
    model = "d12" if free_mib > TURNS_MIB else "d6"
    print(f"two ranks of one compute thread and one progress thread on {cores} cores"
          f"{'' if cores >= 4 else ', shared'}; {model}, B {B}, T 256, fp32, "
          f"{steps - 1} steps a mode in turns, medians", flush=True)
    for strategy, tp, dp in MESHES:
        run_ranks(tp * dp, f"{build}/tests/bench/bench_train", modes="none,slice,ring,ring:4,auto,nowire,ideal",
                  strategy=strategy, tp=tp, dp=dp, model=model, vocab=VOCAB, seq=256, micro_batch=B // dp, threads=1,
                  rounds=steps - 1)
        print(flush=True)


def bench_tail(build):
    modes = "none", "slice", "ring"
    print("gradients still in flight after a rank's last computation of backward, ms, median of 3 steps\n"
          f"{'mesh':11}{''.join(f'{mode:>10}' for mode in modes)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(f"{folder}/tokens.bin", 8 * B * T + 1, VOCAB)
        for strategy, tp, dp in MESHES:
            traces = [train(build, folder, "d12", strategy, tp, dp, B // dp, mode, 4, "1:4") for mode in modes]
            tails = [statistics.median(tail_ms(trace, step) for step in trace.steps) for trace in traces]
            print(f"{f'{strategy} {tp}x{dp}':11}{''.join(f'{tail:10.1f}' for tail in tails)}", flush=True)


def bench_bytes(build):
    d6 = shapes.Shape(maxT=256, V=VOCAB, Vp=50304, L=6, heads=6, C=384)
    kinds = ("activations", "lookup", "gradients", "weights")
    print("MiB that each rank sends in a step of d6 (50257 tokens of vocabulary), T 256, 2 sequences a replica, fp32,\n"
          "--overlap ring; in brackets by the formula of tests/train/traffic.py where they differ")
    print(f"{'mesh':11}{''.join(f'{kind:>16}' for kind in kinds)}{'all':>16}  equal to the byte")
    with tempfile.TemporaryDirectory() as folder:
        tokens = write_tokens(f"{folder}/tokens.bin", 8 * B * T + 1, VOCAB)
        samples = [tokens[first:first + 256] for first in range(0, len(tokens) - 256, 256)]
        for strategy, tp, dp in (("tpsp", 2, 1), ("tpsp", 1, 2), ("tpsp", 2, 2), ("up", 2, 1), ("up", 2, 2)):
            trace = train(build, folder, "d6", strategy, tp, dp, 2, "ring", 3, "1:3")
            step = trace.steps[-1]
            lists = traffic.longest_lists(d6, strategy, tp, dp, samples, 2, step)
            expected = [traffic.formula(d6, strategy, tp, dp, 256, 2, lists=lists[rank]) for rank in trace.ranks]
            counted = [trace.bytes_sent(rank, step) for rank in trace.ranks]
            row = f"{f'{strategy} {tp}x{dp}':11}"
            for kind in kinds:
                wrong = any(sent[kind] != right[kind] for sent, right in zip(counted, expected))
                row += f"{f'{counted[0][kind] / 2**20:.2f}' + (f' ({expected[0][kind] / 2**20:.2f})' if wrong else ''):>16}"
            print(f"{row}{sum(counted[0].values()) / 2**20:16.2f}  "
                  f"{'yes, on every rank' if counted == expected else 'NO'}", flush=True)


MANY = (("tpsp", 1, 16, 12, 64, 1, 32), ("tpsp", 1, 32, 12, 64, 1, 32), ("tpsp", 8, 1, 4, 128, 8, 128), ("up", 8, 1, 4, 128, 8, 128),
        ("tpsp", 4, 1, 4, 256, 4, 256), ("tpsp", 1, 4, 4, 256, 4, 256), ("tpsp", 2, 8, 4, 128, 2, 64))  # … layers, channels, heads, T


RANKS_MODES = "none", "slice", "ring", "direct", "once", "auto"


def bench_ranks(build, steps):
    """The default must not lose to any fixed mode, whatever the number of ranks."""
    print(f"ranks that take turns on {os.cpu_count()} cores, vocabulary 4096, micro-batch 4, {steps - 1} steps a mode in turns: "
          f"ms, median\n{'mesh':11}{'layers x C, T':>15}{''.join(f'{mode:>17}' for mode in RANKS_MODES)}  auto (quartiles)   auto / best")
    for strategy, tp, dp, layers, channels, heads, seq in MANY:
        text = run_ranks(tp * dp, f"{build}/tests/bench/bench_train", "--json", stdout=subprocess.PIPE, modes=",".join(RANKS_MODES),
                         strategy=strategy, tp=tp, dp=dp, layers=layers, channels=channels, heads=heads, seq=seq, vocab=4096,
                         micro_batch=4, threads=1, rounds=steps)
        _, rows = run_log.turns(text)
        times = {mode: [row["step_ms"] for row in rows if row["mode"] == mode] for mode in RANKS_MODES}
        middle = {mode: statistics.quantiles(ms, n=4) for mode, ms in times.items()}
        cells, auto = [f"{q[1]:17.1f}" for q in middle.values()], middle["auto"]
        ratio = auto[1] / min(q[1] for mode, q in middle.items() if mode != "auto")
        print(f"{f'{strategy} {tp}x{dp}':11}{f'{layers} x {channels}, {seq}':>15}{''.join(cells)}"
              f"{f'({auto[0]:.1f} - {auto[2]:.1f})':>18}{ratio:14.2f}", flush=True)


def bench_counts(build):
    print("\nd12, vocabulary 50257: what rank 0 posts in a step; exchanges of a unit travel at the same time\n"
          f"{'replicas':>8}{'auto: exchanges':>18}{'units':>8}{'collectives':>13}{'ring: exchanges':>22}{'units':>8}")
    for dp in (2, 4, 8, 16, 32, 64, 128, 256, 512):
        counts = [traffic.posted(f"{build}/train_gpt", "--dp", dp, "--vocab", VOCAB, "--overlap", name) for name in ("auto", "ring")]
        print(f"{dp:8}{counts[0][0]:18}{counts[0][1]:8}{counts[0][2]:13}{counts[1][0]:22}{counts[1][1]:8}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release", help="folder of the programs")
    parser.add_argument("--only", choices=("step", "layers", "fuse", "causal", "train", "bytes", "ranks", "torch", "busy", "collectives"))
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--torch", default=sys.executable, help="an interpreter that has torch")
    parser.add_argument("--torch-block", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--torch-model", nargs=3, default=("d12", str(B), str(T)), metavar=("d12|d6", "B", "T"))
    o = parser.parse_args()
    bench = f"{o.build}/tests/bench/bench_"
    parts = {"step": lambda: bench_step(o.build, o.steps),
             "layers": lambda: [subprocess.run([f"{o.build}/{'bf16/' * (dtype == 'bf16')}tests/bench/bench_layers"], check=True)
                                for dtype in types(o.build)],
             "fuse": lambda: run_ranks(o.ranks, f"{bench}fuse"),
             "causal": lambda: [run_ranks(ranks, f"{bench}causal") for ranks in (1, o.ranks)],
             "train": lambda: [bench_train(o.build, o.steps), bench_tail(o.build)], "bytes": lambda: bench_bytes(o.build),
             "ranks": lambda: [bench_ranks(o.build, o.steps), bench_counts(o.build)],
             "busy": lambda: bench_busy(o.build, o.steps),
             "torch": lambda: bench_torch(o.build, o.steps, o.torch, o.torch_block, o.torch_model[0], *map(int, o.torch_model[1:])),
             "collectives": lambda: run_ranks(o.ranks, f"{bench}collectives")}
    for part in [o.only] if o.only else parts:
        parts[part]()
        print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
