"""The stage twins: every kernel against the CPU's on the same random inputs, and twice for the same bits."""
import concurrent.futures
import os
import sys

from .check import FAIL, LATE, OK, SKIP, TYPES
from .runner import ROOT, Late

# cuDNN takes up to a second to plan each shape, so that attention may be late; the others must not be late with it.
KERNELS, ATTENTION = "linear,layernorm,elementwise,embedding,crossentropy,adamw,device", "attention"
# Why cuDNN is not asked (layers/attention_cudnn.cu): of some shapes here that is meant to be.
MEANT = "address is not a multiple", "a range of one query"


def twins_file(check, tool, *words):
    out = check.path("twins.bin")
    result = check.runner.run([tool, out, *words])
    return out, result


def run(check):
    reference = os.path.join(ROOT, check.o.ref_build, "tests/layers/tool_twins")
    if not os.access(reference, os.X_OK):
        return check.verdict("twins", SKIP, f"{reference} is not built")
    seeds = [int(seed) for seed in check.o.seeds.split(",")]
    for only, what in (KERNELS, "kernels"), (ATTENTION, "attention"):
        for seed in seeds:
            for kind in TYPES:
                twins_of(check, kind, seed, only, f"{kind} {what}, seed {seed}", reference)
    # Addresses of every second case are odd, with another seed those of the others; odd ones cuDNN does not take.
    for seed in {seed + 1 for seed in seeds} - set(seeds):
        twins_of(check, "bf16", seed, ATTENTION, f"bf16 attention, seed {seed}", reference)
    return None


def twins_of(check, kind, seed, only, name, reference):
    tool = check.program(kind, "tests/layers/tool_twins")
    words = ["--seed", str(seed), *(["--round"] if kind == "bf16" else []), "--only", only]
    try:
        if tool:
            twins(check, name, tool, reference, words)
    except Late:
        check.verdict(name, LATE, "cut short: the stage's time is over")


def twins(check, name, tool, reference, words):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ours = pool.submit(twins_file, check, tool, *words, "--repeat")
        theirs = pool.submit(twins_file, check, reference, *words)
        (found, made), (expected, cpu) = ours.result(), theirs.result()
    faults = [line for line in made.output.splitlines() if line.startswith("FAULT")]
    notes = [line for line in made.output.splitlines() if line.startswith("note:")]
    refused = [note for note in notes if "cuDNN" in note and not any(reason in note for reason in MEANT)]
    check.verdict(f"{name}: written where it should be, same bits twice", FAIL if made.status else OK,
                  "; ".join(faults[:5] + notes) or made.last)
    if refused:
        check.verdict(f"{name}: by cuDNN", FAIL, "; ".join(refused))
    if cpu.status:
        check.verdict(f"{name}: the CPU's side", FAIL, cpu.last)
        return
    compared = check.runner.run([sys.executable, "tests/layers/compare_twins.py", found, expected])
    check.show(compared.output.splitlines())
    check.verdict(f"{name}: agrees with the CPU", FAIL if compared.status else OK,
                  compared.output.splitlines()[-1] if compared.output else "no output")
    os.remove(found)
    os.remove(expected)
