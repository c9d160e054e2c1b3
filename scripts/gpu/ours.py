"""Times of this program: a row of the table for a step of a model, where the GPU's memory holds it."""
import dataclasses
import math
import re
import statistics

from .check import FAIL
from .models import SEQ, VOCABULARY, Step
from .nvidia import MemoryWatch, smi
from .training import train, words_of

OUT_OF_MEMORY = re.compile("no memory:|out of memory|cudaErrorMemoryAllocation")  # an illegal access is something else
FIRST_LOSS_BAND = 0.5  # weights drawn at random know a little, and that wrong: C · 0.02² / 2, 0.32 for d48
MEMORY_SPARED_MIB = 1024  # by --dry-run's count, which knows nothing of libraries


def options_of(check, model, step):
    options = dict(model=model.name, seq=SEQ, vocab=VOCABULARY, micro_batch=step.batch)
    if step.accumulation > 1:
        options["batch"] = step.accumulation * step.batch
    if check.recomputes:
        options["recompute"] = step.recompute
    return options


def implausible(losses):
    """What is wrong with these losses, from random weights on; empty: nothing. A step that computes nonsense is no figure."""
    if any(loss is None or not math.isfinite(loss) for loss in losses):
        return f"a loss is not finite: {losses}"
    if abs(losses[0] - math.log(VOCABULARY)) > FIRST_LOSS_BAND:
        return f"the first loss is {losses[0]:.4f}, not near log {VOCABULARY} = {math.log(VOCABULARY):.4f}"
    return "" if losses[-1] < losses[0] else f"the loss has not fallen: {losses}"


def measure(check, program, model, step, tokens):
    """A row of the table, or None; and the Result."""
    before, counted = step.repeated
    with MemoryWatch() as memory:
        steps, config, result = train(check, program, limit=60, train=tokens, steps=before + counted,
                                      **options_of(check, model, step))
    if result.status or len(steps) < before + counted:
        return None, result
    if why := implausible([s["loss"] for s in steps]):
        return None, dataclasses.replace(result, output=f"error: {why}")
    for note in [line for line in result.output.splitlines() if re.match("note: .*(own|plain) kernel", line)]:
        check.verdict(f"{model.name}, {step.name}: the libraries' kernels", FAIL, note)
    return row_of(model, step, steps, config, result, memory), result


def row_of(model, step, steps, config, result, memory):
    timed = steps[step.repeated[0]:]
    times = [s["step_ms"] for s in timed]
    ms = statistics.median(times)
    at = min(timed, key=lambda s: abs(s["step_ms"] - ms))
    mfu, peak = at["mfu"] and at["mfu"] * at["step_ms"] / ms, config.get("peak_tflops_all_ranks")
    return {"model": model.name, "program": "commfuse", "batch": step.batch, "accumulation": step.accumulation,
            "recompute": step.recompute, "step_ms": ms, "spread": (max(times) - min(times)) / ms,
            "tokens_per_s": step.tokens / ms * 1e3, "mfu": mfu, "tflops": mfu and peak and mfu * peak,
            "memory_mib": memory.most, "first_step_ms": steps[0]["step_ms"],
            "start_s": result.seconds - sum(s["step_ms"] for s in steps) / 1e3, "peak_tflops": peak,
            "losses": [s["loss"] for s in steps]}


def memory_needed(check, program, model, batch):
    """MiB that a run will ask for; None: not known."""
    words = words_of(**options_of(check, model, Step(batch)))
    memory = re.search(r"^memory +([\d.]+) MiB per rank", check.runner.printed(program, "--dry-run", *words), re.M)
    return float(memory.group(1)) if memory else None


def too_large(check, program, model, batch):
    """Why a run need not be tried; empty: it may fit."""
    total = re.match(r"(\d+) MiB", *smi(check, "memory.total") or [""]) if batch > model.torch_batch else None
    needed = memory_needed(check, program, model, batch) if total else None
    if not needed or needed + MEMORY_SPARED_MIB <= int(total.group(1)):
        return ""
    return f"not tried: {needed / 1024:.1f} GiB, without libraries, of {int(total.group(1)) / 1024:.1f}"
