"""The stage sanitizer: compute-sanitizer over the kernels and over a training step."""
import concurrent.futures
import os
import re
import shutil

from .check import FAIL, LATE, OK, SKIP, TYPES
from .runner import ROOT, Late
from tokens import write_tokens
from .training import words_of
from .twins import ATTENTION, KERNELS


def tiny_step(check):
    """Options of a step that even a sanitizer ends soon."""
    tokens = check.path("tokens.bin")
    write_tokens(tokens, 200, 101)
    return words_of(train=tokens, layers=1, channels=64, heads=1, vocab=101, seq=24, micro_batch=2, steps=1,
                    val_every=0)


def commands(check, sanitizer):
    """(name, command) of everything that is run."""
    tiny = tiny_step(check)
    for tool in ("memcheck", "racecheck"):  # initcheck is blind here: all memory is zeroed, then poisoned
        for kind in TYPES:
            twins = check.program(kind, "tests/layers/tool_twins")
            if not twins:
                continue
            rounding = ["--round"] if kind == "bf16" else []
            line = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "5", "--launch-timeout", "60"]
            line += ["--report-api-errors", "no"] if tool == "memcheck" else []  # libraries try things that may fail
            own = KERNELS if tool == "memcheck" else KERNELS.replace("linear,", "")  # which is the library's
            only = ["--only", f"{own},{ATTENTION}" if kind == "fp32" else own]  # in bf16 it is cuDNN's
            yield f"{tool}, {kind} kernels", [*line, twins, check.path("twins.bin"), "--small", *rounding, *only]
            if tool == "memcheck" and kind == "fp32":
                program = os.path.join(ROOT, check.build[kind], "train_gpt")
                yield f"{tool}, a {kind} step", [*line, program, *tiny]


def judge(check, name, result):
    if "Device not supported" in result.output:  # as in some virtual machines
        check.verdict(name, SKIP, "compute-sanitizer says: Device not supported")
        return
    summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY.*)", result.output)
    check.verdict(name, FAIL if result.status or not summary else OK, summary[-1] if summary else result.last)
    if result.status:
        check.show(result.output.splitlines()[:25])


def judge_late(check, name, output):
    """What it has found by then counts."""
    found = [line for line in output.splitlines() if re.match(r"=+ (Invalid|Error: |Warning: |.*hazard)", line)]
    check.verdict(name, FAIL if found else LATE, "; ".join(["did not end in time", *found[:5]]))


def run(check):
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.access(sanitizer, os.X_OK):
        check.verdict("compute-sanitizer", SKIP, "not installed")
        return
    work = list(commands(check, sanitizer))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for (name, _), future in zip(work, [pool.submit(check.runner.run, command) for _, command in work]):
            try:
                judge(check, name, future.result())
            except Late as late:
                judge_late(check, name, late.output)
