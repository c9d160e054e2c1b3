"""The plan: which stages there are, how long each may take, and how one runs."""
import dataclasses
import sys
import time
import traceback

from . import build, device, kernels, losses, pytorch, ranks, sanitizer, times, twins
from .check import FAIL, LATE
from .models import MODELS
from .runner import Late


@dataclasses.dataclass(frozen=True)
class Stage:
    name: str
    budget: float  # seconds of the default 540
    run: object
    slow: bool = False    # left out by --quick
    needed: bool = False  # by all others: nothing is checked without it
    runs_programs: bool = True


STAGES = (Stage("build", 75, build.run, needed=True, runs_programs=False), Stage("device", 40, device.run, runs_programs=False),
          Stage("twins", 50, twins.run), Stage("losses", 30, losses.run), Stage("ranks", 85, ranks.run),
          Stage("sanitizer", 35, sanitizer.run), Stage("times", 145, times.run, True),
          Stage("kernels", 80, kernels.run, True))


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
    scale, at, plan = budget / sum(s.budget for s in STAGES), 0.0, []
    for stage in stages:
        at += stage.budget * scale
        plan.append((stage, stage.budget * scale, at))
    spare = budget - at  # of stages that are not run
    return [(stage, seconds, planned + spare) for stage, seconds, planned in plan]


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
    check.runner.end_all()
    check.data["stages"][stage.name] = time.monotonic() - begin
    check.save()
    if stage.name == "ranks" and check.torch.python and not check.o.quick:
        check.compiling = pytorch.Compiling(check, MODELS)
