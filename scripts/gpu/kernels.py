"""The stage kernels: which kernel takes which part of a step, at which share of the peak."""
import collections
import contextlib
import json
import re
import statistics

from . import table
from .check import FAIL, OK
from .models import CLOSER, SEQ, VOCABULARY_PADDED


def share_of_step(check, model, batch, rows):
    """Kernel by kernel, what part of the measured step its calls would take one after another."""
    times = [row["step_ms"] for row in table.plain_rows(check, model) if row["batch"] == batch]
    kernels = [r for r in rows if r.get("step_ms")]  # others are there to be compared
    total = sum(r["step_ms"] for r in kernels)
    step = statistics.mean(times) if times else None
    groups = collections.Counter()
    for row in kernels:
        name = row["kernel"]
        gemm = re.search(r"forward|dgrad|wgrad", name) and re.match(r"qkv|attproj|fc|head", name)
        group = "products" if gemm else name.split()[0]
        groups[group] += row["step_ms"]
    shares = {"batch": batch, "kernels_ms": total, "groups": dict(groups), "step_ms": step}
    check.data.setdefault("shares", {})[model.name] = shares
    check.show(share_lines(model.name, shares))


def share_lines(name, shares):
    whole = shares["step_ms"] or shares["kernels_ms"]
    took = f"{shares['step_ms']:.1f} ms" if shares["step_ms"] else "(not measured in this call)"
    lines = [f"{name}, micro-batch {shares['batch']}: kernels add up to {shares['kernels_ms']:.1f} ms, "
             f"the step takes {took}"]
    for group, ms in collections.Counter(shares["groups"]).most_common():
        lines.append(f"  {group:<24} {ms:>9.2f} ms {100 * ms / whole:>6.1f} %")
    return lines


def kernel_rows(file):
    rows = []
    with contextlib.suppress(FileNotFoundError), open(file, encoding="utf-8") as lines:
        rows = [json.loads(re.sub(r":-?(nan|inf)", ":null", line)) for line in lines if line.endswith("\n")]
    return rows


def run(check):
    bench = check.program("bf16", "tests/bench/bench_gpu")
    if not bench:
        return
    for model in CLOSER:
        file, batch = check.path("kernels.jsonl"), model.torch_batch
        sizes = model.layers, model.channels, model.heads, batch, SEQ, VOCABULARY_PADDED
        try:
            result = check.runner.run([bench, *sizes, 10, file])
            check.show(result.output.splitlines())
            check.verdict(f"{model.name}: kernels timed", FAIL if result.status else OK, f"{result.seconds:.0f} s")
        finally:  # what it has measured, if it was late
            rows = kernel_rows(file)
            check.data.setdefault("kernels", {})[model.name] = rows
            if rows:
                share_of_step(check, model, batch, rows)
            check.save()
