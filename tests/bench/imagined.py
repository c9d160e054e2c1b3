#!/usr/bin/env python3
"""Steps of the GPU program on several imagined GPUs: how much of its transfers it would expose, before there are such GPUs.

    make imagined                                                       the meshes below, over both transports
    tests/bench/imagined.py --ablation                                  the schedule alone, then the policy alone
    tests/bench/imagined.py --ablation -- --block llama --heads 16 --kv-heads 4                    the same of other blocks
    tests/bench/imagined.py --ranks 8 --gbps 50 -- --tp 4 --dp 2 --channels 2048 --heads 16 --layers 2 --micro-batch 16

bench_train's ranks run here, in the bf16 program for GPUs, with its streams, events and transports. Kernels, products and copies
compute nothing and take the time that an H100 would take by tests/emulator/clock.cc. So this is arithmetic over the program's order
of operations and over assumptions, which a table in tests/bench/README.md lists with their sources. --tflops and --gbps set the
rates of products and links (each way); --gbps 25 is a machine without NVLink. --host-gpus 2 puts two GPUs on a host, with
--hosts-gbps between hosts for each, and adds schedules of two levels. This machine needs memory for the weights and for one more copy of a tensor on the host.

For each mesh and transport it prints steps as multiples of ideal, which leaves out transfers and slices, and below them the exposed
milliseconds and the calls of CUDA and NCCL by rank 0's host; s4: slice in four, r2: ring in two slices a rank, d: direct, l: levels.
nowire leaves out only transfers, so it shows the cost of slices. auto is the plan that the program finds in its first steps; the
last column divides it by the best fixed mode.
"""
import argparse
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
import run_log
from runner import ROOT, Failed, Runner

FIXED = ("none", *(f"slice:{m}" for m in (1, 2, 4, 8)),
         *(f"{name}:{m}" for name in ("ring", "direct") for m in (1, 2, 4)), "once")
OTHERS = "auto", "nowire", "ideal"
WIDE = "--channels 4096 --heads 32 --layers 2 --micro-batch 8"     # as wide as the paper's layers
NARROW = "--channels 1280 --heads 20 --layers 4 --micro-batch 32"  # GPT-2 774M's
MESHES = ((4, "--tp 4 " + WIDE), (4, "--tp 4 " + NARROW), (4, "--tp 4 --strategy up " + NARROW),
          (4, "--dp 4 " + NARROW), (4, "--tp 2 --dp 2 " + NARROW), (8, "--tp 4 --dp 2 " + NARROW),
          (8, "--tp 8 " + WIDE), (8, "--tp 8 " + NARROW.replace("heads 20 --layers 4", "heads 40 --layers 2")))
# As scripts/experiments/ablation.py: one policy for all schedules, then one schedule with one part of the policy changed at a time.
POLICY = "--gradients ready --prefetch 4 --embedding table "
SCHEDULES = "none", "slice:4", "ring:4", "direct:4", "once", "auto"
POLICIES = "direct:4", *(f"direct:4+{word}" for word in ("end", "owners", "rows", "ahead0", "ahead4096"))
ABLATION = tuple((ranks, POLICY + mesh + NARROW) for ranks, mesh in
                 ((2, "--tp 2 "), (2, "--tp 2 --strategy up "), (2, "--dp 2 "), (4, "--tp 2 --dp 2 ")))
CLOCK = {"tflops": "of the best products", "gbps": "GB/s of a GPU's link, each way",
         "multiprocessors": "of a GPU", "memory_gbps": "GB/s of a GPU's memory", "host_gpus": "GPUs of a host, over NCCL",
         "hosts_gbps": "GB/s between hosts, a GPU, each way"}  # else as tests/emulator/clock.cc has it
COMMON = "--seq 1024 --vocab 8192 --recompute 0 --peak-tflops 989 --rounds 1 --timeout 600".split()


def fixed(o):
    return FIXED + tuple(f"levels:{m}" for m in (1, 2, 4) if o.host_gpus)


def measure(o, ranks, words, transport):
    """A step of each mode, the same every time, in three runs: modes of one share the memory of the GPUs, and where no baseline
    runs auto has the communicators that it has in training."""
    half = len(fixed(o)) // 2
    return {mode: step for modes in (fixed(o)[:half], fixed(o)[half:], OTHERS)
            for mode, step in measure_modes(o, ranks, words, transport, modes).items()}


def measure_modes(o, ranks, words, transport, modes):
    program = f"{o.build}/tests/bench/bench_train"
    if not os.path.exists(f"{ROOT}/{program}"):
        sys.exit(f"error: {program} is not built\nhint:  make {program}")
    text = Runner().output(["scripts/mpirun.sh", "-np", ranks, program, *COMMON, "--transport", transport, "--modes",
                            ",".join(modes), "--json", *(("--ranks-per-host", o.host_gpus) if o.host_gpus else ()), *words], OMP_NUM_THREADS="1", EMULATOR_CLOCK="1", EMULATOR_DEVICES=str(ranks),
                           **{f"EMULATOR_{name.upper()}": str(value) for name, value in vars(o).items() if name in CLOCK and value})
    (_, steps), found = run_log.turns(text), {}
    for mode in modes:
        mine = sorted((step for step in steps if step["mode"] == mode), key=lambda step: step["step_ms"])
        found[mode] = mine[len(mine) // 2]
    return found


def short(mode):
    """slice:4 → s4, once → once"""
    name, _, slices = mode.partition(":")
    return name[0] + slices if slices else name


def print_line(name, cells, rest=""):
    print(f"{name:<22}" + "".join(f"{cell:>6}" for cell in cells) + rest, flush=True)


def print_row(name, steps, modes):
    ms = {mode: step["step_ms"] for mode, step in steps.items()}
    best = min(modes, key=ms.get)
    print_line(name, (f"{ms[mode] / ms['ideal']:.3f}" for mode in (*modes, "auto")),
               f"{ms['nowire'] / ms['ideal']:8.3f}{ms['ideal']:8.2f}{ms['auto'] / ms[best]:9.3f} {short(best)}")
    print_line("  exposed, ms", (f"{steps[mode]['exposed_comm_ms']:.2f}" for mode in (*modes, "auto")))
    print_line("  host calls", (steps[mode]["host_calls"] for mode in (*modes, "auto")))


def ablation(o):
    for modes in SCHEDULES, POLICIES:
        for transport in o.transports.split(","):
            print("%-22s" % "step / ideal, exposed" + "".join(f"{mode:>20}" for mode in modes))
            for ranks, words in ABLATION:
                steps = measure_modes(o, ranks, (*words.split(), *o.options), transport, (*modes, "ideal"))
                cells = (f"{steps[m]['step_ms'] / steps['ideal']['step_ms']:.3f} {steps[m]['exposed_comm_ms']:8.2f} ms" for m in modes)
                print(f"{name_of(words, transport):<22}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


def name_of(words, transport):
    given = dict(zip(words.split()[::2], words.split()[1::2]))
    mesh = f"{given.get('--strategy', 'tpsp')} {given.get('--tp', 1)}x{given.get('--dp', 1)}, {given.get('--channels', '')}"
    return f"{mesh}, {'ipc' if transport == 'auto' else transport}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/emulated-bf16")
    parser.add_argument("--ranks", type=int, help="with bench_train's options after --")
    for name, what in CLOCK.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, help=what)
    parser.add_argument("--transports", default="nccl,auto")
    parser.add_argument("--ablation", action="store_true", help="what the schedule alone, and what the policy alone, changes")
    parser.add_argument("options", nargs="*", help="of bench_train")
    o = parser.parse_args()
    if (o.ranks is None) != (not o.options or o.ablation):
        parser.error("--ranks and options of bench_train belong together")
    print("imagined GPUs: bf16, T 1024")
    if o.ablation:
        return ablation(o)
    print_line("", map(short, (*fixed(o), "auto")), "  nowire   ideal  auto / best")
    for ranks, words in [(o.ranks, " ".join(o.options))] if o.ranks else MESHES:
        for transport in o.transports.split(","):
            print_row(name_of(words, transport), measure(o, ranks, words.split(), transport), fixed(o))


if __name__ == "__main__":
    try:
        main()
    except Failed as error:
        sys.exit(f"error: {error}")
