"""The stages twins (every kernel against the CPU's on the same random inputs, and twice for the same bits) and sanitizer (kernels
and a training step under compute-sanitizer)."""
import concurrent.futures
import os
import re
import shutil
import sys

from runner import ROOT, Late, words_of
from tokens import write_tokens

from .check import FAIL, LATE, SKIP, TYPES
from .machine import REFERENCE

# cuDNN takes up to a second to plan each shape, so attention may be late; it runs last, so that the others are not.
KERNELS, ATTENTION = ("--except", "attention"), ("--only", "attention")
# Reasons not to use cuDNN (layers/attention_cudnn.cu) that are expected for some shapes here.
EXPECTED = "address is not a multiple", "a range of one query", "before 9.15.1 its backward is wrong"


def run(check):
    works = [(kind, which, 1) for which in (KERNELS, ATTENTION) for kind in TYPES]
    works.append(("bf16", ATTENTION, 2))  # cuDNN refuses odd addresses, those of every second case: with this seed, of the others
    for kind, which, seed in works:
        name = f"{kind} {'kernels' if which == KERNELS else 'attention'}, seed {seed}"
        tool = check.program(kind, "tests/layers/tool_twins")
        if tool:
            twins(check, name, tool, ["--seed", seed, *["--round"] * (kind == "bf16"), *which])


def twins(check, name, tool, words):
    found, expected = check.path("twins.bin"), check.path("twins.bin")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ours = pool.submit(check.runner.run, [tool, found, *words, "--repeat"])
        theirs = pool.submit(check.runner.run, [os.path.join(ROOT, REFERENCE), expected, *words])
        made, cpu = ours.result(), theirs.result()
    faults = [line for line in made.output.splitlines() if line.startswith("FAULT")]
    notes = [line for line in made.output.splitlines() if line.startswith("note:")]
    check.judge(f"{name}: written where it should be, same bits twice", made.status == 0,
                "; ".join(faults[:5] + notes) or made.reason)
    refused = [note for note in notes if "cuDNN" in note and not any(reason in note for reason in EXPECTED)]
    if refused:
        check.verdict(f"{name}: by cuDNN", FAIL, "; ".join(refused))
    if cpu.status:
        check.verdict(f"{name}: the CPU's side", FAIL, cpu.reason)
        return
    compared = check.runner.run([sys.executable, "tests/layers/compare_twins.py", found, expected])
    check.show(compared.output.splitlines())
    check.judge(f"{name}: agrees with the CPU", compared.status == 0, (compared.output.splitlines() or ["no output"])[-1])
    os.remove(found)
    os.remove(expected)


def commands(check, sanitizer):
    """Yields the (name, command) of each run."""
    tokens = check.path("tokens.bin")
    write_tokens(tokens, 200, 101)
    for tool in ("memcheck", "racecheck"):  # initcheck is blind here: all memory is zeroed, then poisoned
        for kind in TYPES:
            twins_tool = check.program(kind, "tests/layers/tool_twins")
            if not twins_tool:
                continue
            line = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "5", "--launch-timeout", "60"]
            line += ["--report-api-errors", "no"] if tool == "memcheck" else []  # libraries make calls that may fail
            libraries = ["linear"] * (tool == "racecheck") + ["attention"] * (kind == "bf16")
            yield f"{tool}, {kind} kernels", [*line, twins_tool, check.path("twins.bin"), "--small",
                                              *["--round"] * (kind == "bf16"), "--except", ",".join(libraries)]
            if tool == "memcheck" and kind == "fp32":
                tiny = words_of(train=tokens, layers=1, channels=64, heads=1, vocab=101, seq=24, micro_batch=2, steps=1,
                                val_every=0)
                yield f"{tool}, a {kind} step", [*line, os.path.join(ROOT, check.build[kind], "train_gpt"), *tiny]


def judge(check, name, result):
    if "Device not supported" in result.output:  # as in some virtual machines
        check.verdict(name, SKIP, "compute-sanitizer says: Device not supported")
        return
    summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY.*)", result.output)
    check.judge(name, summary and result.status == 0, summary[-1] if summary else result.reason)
    if result.status:
        check.show(result.output.splitlines()[:25])


def judge_late(check, name, output):
    """The findings so far count."""
    found = [line for line in output.splitlines() if re.match(r"=+ (Invalid|Error: |Warning: |.*hazard)", line)]
    check.verdict(name, FAIL if found else LATE, "; ".join(["did not end in time", *found[:5]]))


def sanitize(check):
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
