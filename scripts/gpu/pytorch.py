"""The same models in PyTorch (tests/bench/torch_gpt.py)."""
import json
import os
import shutil
import sys

from runner import ROOT, Runner

from .machine import memory_in_use
from .models import SEQ, VOCABULARY_PADDED

INDUCTOR = os.path.join(ROOT, "build", "inductor")  # stays for the next call
ENVIRONMENT = dict(TORCHINDUCTOR_CACHE_DIR=INDUCTOR, TRITON_CACHE_DIR=os.path.join(INDUCTOR, "triton"),
                   TORCHINDUCTOR_FX_GRAPH_CACHE="1", TORCHINDUCTOR_AUTOGRAD_CACHE="1", TORCHINDUCTOR_COMPILE_THREADS="4")
LIMIT_S = 200  # of a run: without a cache, compiling takes most of it


def find():
    """A Python that has PyTorch, or None. PyTorch is not imported, which takes a minute from a cold disk."""
    for python in dict.fromkeys((sys.executable, shutil.which("python3"), "/usr/bin/python3")):
        if python and Runner().printed(python, "-c", "import importlib.metadata as m; print(m.version('torch'))"):
            return python
    return None


def measure(check, python, model, step, peak_tflops):
    """A row of the table, or None; and the Result."""
    before, counted = step.repeated
    command = [python, "tests/bench/torch_gpt.py", model.layers, model.channels, model.heads, step.batch, SEQ, "--vocab",
               VOCABULARY_PADDED, "--steps", counted, "--warmup", before, "--compile", check.o.torch_compile, "--accumulate",
               step.accumulation]
    with memory_in_use(check) as memory:
        result = check.runner.run(command, LIMIT_S, ENVIRONMENT)
    lines = [line for line in result.output.splitlines() if line.startswith("{")]
    if result.status or not lines:
        return None, result
    row = json.loads(lines[-1])
    tflops = row["tokens_per_s"] * row["flops_per_token"] * 1e-12
    return dict(row, model=model.name, program="torch", accumulation=step.accumulation, tflops=tflops,
                mfu=tflops / peak_tflops if peak_tflops else None, memory_mib=max(memory, default=None),
                start_s=result.seconds), result
