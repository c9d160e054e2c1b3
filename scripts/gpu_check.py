"""Check and measure the GPU program on a machine with one NVIDIA GPU, in stages with a time budget each.

A stage that exceeds its time is cut short and reported as such; the others still run. Unused time goes to later stages. All stages
but device imply build, which takes a second if everything is built.

The reference needs numpy, the comparison PyTorch; if one is missing, that part is skipped and reported. Environment variables
connect the ranks, so MPI is not needed. PyTorch's compiled code is kept in build/inductor for the next call.

--out gets report.txt (everything printed, as soon as it is) and commands.log (each command and its output). Failures and times are
printed again at the end. The exit status is 1 if a check failed.

The stages build (programs, tools and benchmarks, for both element types) and device (describes GPU, driver and libraries; measures
the facilities that the transports rely on).
"""
import collections
import os
import signal
import sys
import time
import traceback
from functools import partial

from command import Parser, some_of, status_of
from runner import ROOT, Late

sys.path.append(os.path.join(ROOT, "tests"))
from gpu import losses, ranks, times, twins
from gpu.check import FAIL, LATE, OK, SKIP, Check

WIRES = "tests/bench/bench_wires"


def build(check):
    names = "train_gpt", twins.TOOL, "tests/bench/bench_gpu"
    wanted = [twins.REFERENCE, *(f"{folder}/{name}" for folder in check.build.values() for name in names)]
    wires = f"{check.build['bf16']}/{WIRES}"  # builds other than nvcc's have no rule for it
    wanted += [wires] if check.runner.run(["make", "-n", wires]).status == 0 else []
    result = check.runner.run(["make", "-k", "-j", os.cpu_count(), "WERROR=", *wanted])  # a new compiler may have new warnings
    trouble = "\n".join(result.output.splitlines()[-20:])
    check.judge("make", result.status == 0, trouble if result.status else f"{result.seconds:.0f} s")


def device(check):
    properties = "name,driver_version,memory.total,power.limit,clocks.max.sm,compute_mode,persistence_mode"
    gpu = check.runner.printed("nvidia-smi", f"--query-gpu={properties}", "--format=csv,noheader").partition("\n")[0]
    check.show(check.runner.printed("make", "-s", "config").splitlines())
    check.judge("a GPU answers", bool(gpu), gpu or "nvidia-smi finds none")
    check.show_run("wires measured", check.runner.run([check.program("bf16", WIRES)], limit=40))


# What a stage runs, and its share of the time that is left for it and the later ones. What tells most comes first.
STAGES = {"build": (build, 130), "device": (device, 40), "twins": (twins.run, 60), "steps": (times.steps, 75),
          "kernels": (times.kernels, 60), "losses": (losses.run, 45),
          "accumulation": (partial(times.steps, accumulation=times.ACCUMULATION), 50), "ranks": (ranks.run, 80),
          "others": (partial(twins.run, cases=twins.OTHERS), 50), "clusters": (times.clusters, 30), "overlap": (ranks.overlap, 100),
          "sanitizer": (twins.sanitize, 35), "times": (times.run, 145)}
ASKED = "clusters", "overlap", "sanitizer", "times"  # run only if --only names them
MANY_SHAPES = "ranks", "others", "sanitizer"  # products take the first algorithm: to time all of each would take too long


def parse(words=None):
    parser = Parser("\n".join([__doc__, *(module.__doc__ for module in (twins, losses, ranks, times))]))
    parser.add_argument("--out", default="results/gpu", help="directory for the report (default results/gpu)")
    parser.add_argument("--budget", type=float, default=590, help="seconds for everything (default 590)")
    parser.add_argument("--only", default=[name for name in STAGES if name not in ASKED], type=some_of(STAGES), metavar="STAGES",
                        help=f"these stages, with commas between (all but {', '.join(ASKED)}); build comes with all but device")
    parser.add_argument("--builds", default="build/cuda", metavar="PREFIX",
                        help="folders of the programs, before -fp32 and -bf16 (default build/cuda; without a GPU: build/emulated)")
    return parser.parse_args(words)


def selected(only):
    return [name for name in STAGES if name in only or name == "build" and only != ["device"]]


def first_share(names, seconds):
    """The first stage's part of the seconds that are left."""
    return seconds * STAGES[names[0]][1] / sum(STAGES[name][1] for name in names)


def run_stage(check, name, seconds):
    check.stage, begin = name, time.monotonic()
    check.runner.deadline = begin + seconds
    check.runner.env = dict(COMMFUSE_FIRST_ALGORITHM="1") if name in MANY_SHAPES else {}
    check.say(f"\n{name}: from second {begin - check.begin:.0f}, at most {max(0, seconds):.0f} s")
    try:
        STAGES[name][0](check)
    except Late as late:  # a late build is a failure: nothing can be checked without programs
        for result in late.args:
            check.show(result.output.splitlines())
        check.verdict(name, FAIL if name == "build" else LATE, "cut short: its time is over")
    except Exception as error:  # the other stages still run
        check.verdict(name, FAIL, f"{type(error).__name__}: {error}")
        traceback.print_exc(file=check.log)
    check.seconds[name] = time.monotonic() - begin


def summary(check):
    """The failures and the table of times again."""
    seconds = ", ".join(f"{name} {s:.0f} s" for name, s in check.seconds.items())
    failures = [f"{verdict:<5} {stage}: {what}   {detail}".splitlines()[0][:200]
                for stage, what, verdict, detail in check.rows if verdict in (FAIL, LATE)]
    counts = collections.Counter(row[2] for row in check.rows)
    parts = [f"{time.monotonic() - check.begin:.0f} s: {seconds}", "\n".join(failures), times.table(check),
             f"{counts[OK]} ok, {counts[FAIL]} failed, {counts[LATE]} late, {counts[SKIP]} skipped"]
    return "\n" + "\n\n".join(filter(None, parts))


def main():
    options = parse()
    os.chdir(ROOT)
    stages, check = selected(options.only), Check(options)

    def give_up(number, _):
        check.runner.deadline = float("-inf")  # threads of a stage start no more commands, so the end does not wait for them
        sys.exit(128 + number)
    for number in signal.SIGTERM, signal.SIGINT:
        signal.signal(number, give_up)
    try:
        for i, stage in enumerate(stages):
            run_stage(check, stage, first_share(stages[i:], check.begin + options.budget - time.monotonic()))
    finally:  # also after a signal
        check.say(summary(check))
    return int({FAIL, OK} & {row[2] for row in check.rows} != {OK})


if __name__ == "__main__":
    sys.exit(status_of(main))
