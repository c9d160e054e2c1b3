"""Check and measure the GPU program on a machine with one NVIDIA GPU, in stages with a time budget each.

    scripts/gpu_check.sh [--out results/gpu] [--budget 540] [--quick] [--only STAGE[,STAGE]] [--plan]

    build      make the programs, the twins tool and the benchmarks, for both element types; do they start?
    device     what this machine is: GPU, driver, CUDA, cuDNN, NCCL; what the transports rely on, measured
    twins      every kernel against the CPU's, on random odd shapes, fp32 and bf16, twice for the same bits
    losses     ten steps of training against an independent reference in float64, and the CPU program where it runs
    ranks      2 and 4 ranks on the one GPU, every transport, mode and route: losses as of one rank, the same bits again
    sanitizer  compute-sanitizer over kernels and a training step
    times      step times, MFU and memory of d12 to d48, each with the micro-batch that is best, and with four of them a
               step; then of the same models in PyTorch, each beside a run of ours
    kernels    which kernel takes which part of a step, at which share of the peak; what slicing and fusing cost

A stage that is over its time is cut short and reported so; the others still run. What a stage does not use goes to
those behind it. All stages but device imply build, which is done in a second where all is built. Several calls do
more than one: --only build,device,twins,losses,sanitizer, then --only ranks, --only times, --only kernels.

Nothing but a CUDA toolkit, a C compiler, make and Python is needed, and two small libraries that a machine without
network can be brought: scripts/install_deps.sh --carry, elsewhere, copies cJSON, OpenSSL, xxHash and make to build/deps.
numpy gives the reference, PyTorch the comparison, and both are left out, with a word, where they are missing. Ranks are
started by environment variables, so MPI is not needed. What PyTorch has compiled is kept in build/inductor for the next
call.

--out gets report.txt (what was printed), results.json (every figure, written anew after each stage and each line of a
table, so that nothing is lost if this script is killed) and commands.log (what every command printed). What counts
most is printed once more at the end. The exit status is 1 if a check failed.
"""
import argparse
import os
import signal
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "scripts"))  # the stages, and what they stand on, are in scripts/gpu, and run_log.py
from gpu import losses, plan, summary
from gpu.check import Check


def parse(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="results/gpu", help="directory for the report (default results/gpu)")
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything (default 540)")
    parser.add_argument("--quick", action="store_true", help="no times")
    parser.add_argument("--only", default="", metavar="STAGES",
                        help="these stages, with commas between them; build comes with all but device")
    parser.add_argument("--plan", action="store_true", help="print the stages and their times, run nothing")
    parser.add_argument("--seeds", default="1", help="of the twins' inputs (default 1)")
    parser.add_argument("--transports", default="ipc,auto,nccl", help="of several ranks (default ipc,auto,nccl)")
    parser.add_argument("--torch-compile", choices=("blocks", "model"), default="blocks",
                        help="what PyTorch compiles: the repeated block, and head with loss (default); or all at once")
    parser.add_argument("--fp32-build", default="build/cuda-fp32")
    parser.add_argument("--bf16-build", default="build/cuda-bf16")
    parser.add_argument("--ref-build", default="build/ref", help="the CPU's twins, without any library")
    parser.add_argument("--reference", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--cpu-program", default="train_gpt", help="compared with where it runs")
    return parser.parse_args(words)


def give_up(check, status):
    """Whatever runs in threads ends with its stage, so that nobody waits for what they would still begin."""
    check.runner.deadline = float("-inf")
    sys.exit(status)


def main():
    options = parse()
    os.chdir(ROOT)
    if options.reference:
        number, tokens, model = options.reference
        return losses.reference(losses.SMALL[int(number)], tokens, model)
    stages = plan.plan_of(plan.chosen(options), options.budget)
    if options.plan:
        for stage, seconds, planned in stages:
            print(f"{stage.name:<10} {seconds:5.0f} s, ends by second {planned:.0f}")
        return 0
    check = Check(options)
    for number in signal.SIGTERM, signal.SIGINT:
        signal.signal(number, lambda number, _: give_up(check, 128 + number))
    try:
        for stage, seconds, planned in stages:
            plan.run_stage(check, stage, seconds, planned)
        return summary.conclude(check)
    except SystemExit:
        check.say(summary.last_words(check))
        raise
    finally:
        check.close()


if __name__ == "__main__":
    sys.exit(main())
