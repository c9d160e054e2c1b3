"""The stages twins (the main bf16 kernels against the CPU's on the same random inputs, and twice for the same bits), others (the
other kernels, and attention of another seed) and sanitizer (kernels and a training step under compute-sanitizer)."""
import concurrent.futures
import os
import re
import shutil
import sys

from runner import ROOT, Late, words_of
from tokens import write_tokens

from .check import FAIL, LATE, SKIP

TOOL = "tests/layers/kernels/tool_twins"
REFERENCE = f"build/ref/{TOOL}"  # the CPU's twins, without any library
# Of bf16, what takes most of a step. cuDNN takes up to a second to plan each shape, so attention comes after others. It refuses odd
# addresses, those of every second case: with another seed, of the others.
FIRST = "linear,layernorm,crossentropy,embedding"
MAIN = ("bf16", "--only", FIRST, 1), ("bf16", "--only", "attention", 1)
OTHERS = (("bf16", "--except", f"{FIRST},attention", 1), ("fp32", "--except", "attention", 1), ("fp32", "--only", "attention", 1),
          ("bf16", "--only", "attention", 2))


def at_once(check, commands):
    """The commands in turn with what their futures give: all start now."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        yield from [pool.submit(check.runner.run, command) for command in commands]


def run(check, cases=MAIN):
    for kind, which, names, seed in cases:
        twins(check, f"{kind}, {which[2:]} {names}, seed {seed}", check.program(kind, TOOL),
              ["--seed", seed, *["--round"] * (kind == "bf16"), which, names])


def twins(check, name, tool, words):
    found, expected = check.path("twins.bin"), check.path("twins.bin")
    made, cpu = (future.result() for future in at_once(check, [
        [tool, found, *words, "--repeat"], [os.path.join(ROOT, REFERENCE), expected, *words]]))
    faults = [line for line in made.output.splitlines() if line.startswith("FAULT")]
    notes = [line for line in made.output.splitlines() if line.startswith("note:")]
    check.judge(f"{name}: written where it should be, same bits twice", made.status == 0,
                "; ".join(faults[:5] + notes) or made.reason)
    if cpu.status:
        return check.verdict(f"{name}: the CPU's side", FAIL, cpu.reason)
    compared = check.runner.run([sys.executable, "tests/layers/kernels/compare_twins.py", found, expected])
    check.show(compared.output.splitlines())
    check.judge(f"{name}: agrees with the CPU", compared.status == 0, (compared.output.splitlines() or ["no output"])[-1])
    os.remove(found)
    os.remove(expected)


def commands(check, sanitizer):
    """The command of each run by its name."""
    def kernels(kind, left_out):
        words = ["--round"] * (kind == "bf16")
        return [check.program(kind, TOOL), check.path("twins.bin"), "--small", *words, "--except", left_out]

    tokens = check.path("tokens.bin")
    write_tokens(tokens, 200, 101)
    step = words_of(train=tokens, layers=1, channels=64, heads=1, vocab=101, seq=24, micro_batch=2, steps=1, val_every=0)
    line = [sanitizer, "--error-exitcode", "9", "--print-limit", "5", "--launch-timeout", "60", "--tool"]
    memory, races = [*line, "memcheck", "--report-api-errors", "no"], [*line, "racecheck"]  # libraries make calls that may fail
    return {"memcheck, fp32 kernels": memory + kernels("fp32", ""),  # initcheck is blind: all memory is zeroed, then poisoned
            "memcheck, a fp32 step": [*memory, check.program("fp32"), *step],
            "memcheck, bf16 kernels": memory + kernels("bf16", "attention"),
            "racecheck, fp32 kernels": races + kernels("fp32", "linear"),
            "racecheck, bf16 kernels": races + kernels("bf16", "linear,attention")}


def judge(check, name, result, late=False):
    """If it is late, the findings so far count."""
    found = re.findall(r"^=+ (?:Invalid|Error: |Warning: |.*hazard).*", result.output, re.M)
    summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY.*)", result.output)
    if "Device not supported" in result.output:  # as in some virtual machines
        check.verdict(name, SKIP, "compute-sanitizer says: Device not supported")
    elif late:
        check.verdict(name, FAIL if found else LATE, "; ".join(["did not end in time", *found[:5]]))
    else:
        check.judge(name, summary and result.status == 0, "; ".join(summary[-1:] + found[:5]) or result.reason)


def sanitize(check):
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if not sanitizer:
        return check.verdict("compute-sanitizer", SKIP, "not installed")
    work = commands(check, sanitizer)
    for name, future in zip(work, at_once(check, work.values())):
        try:
            judge(check, name, future.result())
        except Late as late:
            judge(check, name, late.args[0], late=True)
