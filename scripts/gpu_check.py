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
the next ones. All stages but device imply build, which is done in a second where all is built. Several calls do
more than one: --only build,device,twins,losses,sanitizer, then --only ranks, --only times, --only kernels.

Nothing but a CUDA toolkit, a C compiler, make and Python is needed, and two small libraries that a machine without
network can be brought: scripts/install_deps.sh --carry, elsewhere, copies cJSON, OpenSSL, xxHash and make to build/deps.
numpy gives the reference, PyTorch the comparison, and both are left out, with a word, where they are missing. Ranks are
started by environment variables, so MPI is not needed. What PyTorch has compiled is kept in build/inductor for the next
call.

--out gets report.txt (what was printed), results.json (every figure, written anew after each stage and each line of a
table, so that nothing is lost if this script is killed) and commands.log (what every command printed). Failures and times
are printed once more at the end. The exit status is 1 if a check failed.
"""
import argparse
import collections
import dataclasses
import os
import signal
import sys
import time
import traceback

from gpu import kernels, machine, pytorch, ranks, times, training, twins
from gpu.check import FAIL, LATE, OK, SKIP, Check
from gpu.models import MODELS
from runner import ROOT, Late


@dataclasses.dataclass(frozen=True)
class Stage:
    name: str
    budget: float  # seconds of the default 540
    run: object
    slow: bool = False    # left out by --quick
    needed: bool = False  # by all others: nothing is checked without it
    runs_programs: bool = True


STAGES = (Stage("build", 75, machine.build, needed=True, runs_programs=False),
          Stage("device", 40, machine.device, runs_programs=False), Stage("twins", 50, twins.run),
          Stage("losses", 30, training.losses), Stage("ranks", 85, ranks.run), Stage("sanitizer", 35, twins.sanitize),
          Stage("times", 145, times.run, True), Stage("kernels", 80, kernels.run, True))


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


# --- the plan ---


def chosen(options):
    names = options.only.split(",") if options.only else [s.name for s in STAGES if not (options.quick and s.slow)]
    unknown = set(names) - {s.name for s in STAGES}
    if unknown:
        sys.exit(f"no such stage: {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in STAGES)}")
    if any(s.name in names and s.runs_programs for s in STAGES):
        names = ["build", *names]
    return [s for s in STAGES if s.name in names]


def plan_of(stages, budget):
    """(stage, seconds, second at which it should have ended)"""
    scale = budget / sum(s.budget for s in STAGES)
    at = budget - scale * sum(s.budget for s in stages)  # of stages that are not run
    plan = []
    for stage in stages:
        at += stage.budget * scale
        plan.append((stage, stage.budget * scale, at))
    return plan


def run_stage(check, stage, seconds, planned):
    """Until its planned end; if earlier stages were late, at least half of what it should have."""
    begin = time.monotonic()
    check.stage = stage.name
    last = check.begin + check.o.budget
    check.runner.deadline = min(last, max(check.begin + planned, begin + seconds / 2))
    check.say(f"\n{stage.name}: from second {begin - check.begin:.0f}, at most {max(0, check.runner.left()):.0f} s")
    try:
        stage.run(check)
    except Late:
        check.verdict(stage.name, FAIL if stage.needed else LATE, "cut short: its time is over")
    except Exception as error:  # one stage's accident must not cost the others
        check.verdict(stage.name, FAIL, f"{type(error).__name__}: {error}")
        traceback.print_exc(file=check.log)
    check.runner.close()
    check.data["stages"][stage.name] = time.monotonic() - begin
    check.save()
    if stage.name == "ranks" and check.torch.python and not check.o.quick:
        check.compiling = pytorch.Compiling(check.reaper, check, MODELS)


# --- what is printed last ---


def failures(check):
    found = [f"{verdict:<5} {stage}: {what}   {detail}".splitlines()[0][:200]
             for stage, what, verdict, detail in check.rows if verdict in (FAIL, LATE)]
    return found[:25] + ([f"and {len(found) - 25} more"] if len(found) > 25 else [])


def last_words(check):
    """What failed and the table of times, once more."""
    counts = collections.Counter(row[2] for row in check.rows)
    seconds = ", ".join(f"{name} {s:.0f} s" for name, s in check.data["stages"].items())
    parts = [[f"{time.monotonic() - check.begin:.0f} s: {seconds}"], failures(check), times.table(check) + times.ratios(check),
             [f"{counts[OK]} ok, {counts[FAIL]} failed, {counts[LATE]} late, {counts[SKIP]} skipped"]]
    return "\n" + "\n\n".join("\n".join(lines) for lines in parts if lines)


def conclude(check):
    """The exit status."""
    check.data["complete"] = True
    check.say(last_words(check))
    verdicts = {row[2] for row in check.rows}
    return 1 if FAIL in verdicts or OK not in verdicts else 0


def give_up(check, status):
    """Whatever runs in threads ends with its stage, so that nobody waits for what they would still begin."""
    check.runner.deadline = float("-inf")
    sys.exit(status)


def main():
    options = parse()
    os.chdir(ROOT)
    if options.reference:
        return training.reference(*options.reference)
    plan = plan_of(chosen(options), options.budget)
    if options.plan:
        for stage, seconds, planned in plan:
            print(f"{stage.name:<10} {seconds:5.0f} s, ends by second {planned:.0f}")
        return 0
    check = Check(options)
    for number in signal.SIGTERM, signal.SIGINT:
        signal.signal(number, lambda number, _: give_up(check, 128 + number))
    try:
        for stage, seconds, planned in plan:
            run_stage(check, stage, seconds, planned)
        return conclude(check)
    except SystemExit:
        check.say(last_words(check))
        raise
    finally:
        check.close()


if __name__ == "__main__":
    sys.exit(main())
