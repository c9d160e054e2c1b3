"""The stage kernels: which kernel takes which part of a step, at which share of the peak; what slicing and fusing cost."""
import collections
import contextlib
import json
import re
import statistics

from .models import CLOSER, SEQ, VOCABULARY_PADDED
from .times import plain_rows


def share_of_step(check, model, batch, rows):
    """Kernel by kernel, what part of the measured step its calls would take one after another."""
    times = [row["step_ms"] for row in plain_rows(check, model) if row["batch"] == batch]
    kernels = [r for r in rows if r.get("step_ms")]  # others are there to be compared
    groups = collections.Counter()
    for row in kernels:
        name = row["kernel"]
        gemm = re.search(r"forward|dgrad|wgrad", name) and re.match(r"qkv|attproj|fc|head", name)
        groups["products" if gemm else name.split()[0]] += row["step_ms"]
    shares = {"batch": batch, "kernels_ms": sum(groups.values()), "groups": dict(groups),
              "step_ms": statistics.mean(times) if times else None}
    check.data.setdefault("shares", {})[model.name] = shares
    whole = shares["step_ms"] or shares["kernels_ms"]
    took = f"{shares['step_ms']:.1f} ms" if shares["step_ms"] else "(not measured in this call)"
    check.show([f"{model.name}, micro-batch {batch}: kernels add up to {shares['kernels_ms']:.1f} ms, the step takes {took}",
                *(f"  {group:<24} {ms:>9.2f} ms {100 * ms / whole:>6.1f} %" for group, ms in groups.most_common())])


def kernel_rows(file):
    with contextlib.suppress(FileNotFoundError), open(file, encoding="utf-8") as lines:
        return [json.loads(re.sub(r":-?(nan|inf)", ":null", line)) for line in lines if line.endswith("\n")]
    return []


def run(check):
    bench = check.program("bf16", "tests/bench/bench_gpu")
    for model in CLOSER if bench else ():
        file, batch = check.path("kernels.jsonl"), model.torch_batch
        sizes = model.layers, model.channels, model.heads, batch, SEQ, VOCABULARY_PADDED
        try:
            result = check.runner.run([bench, *sizes, 10, file])
            check.show(result.output.splitlines())
            check.judge(f"{model.name}: kernels timed", result.status == 0, f"{result.seconds:.0f} s")
        finally:  # what it has measured, if it was late
            rows = kernel_rows(file)
            check.data.setdefault("kernels", {})[model.name] = rows
            if rows:
                share_of_step(check, model, batch, rows)
            check.save()
