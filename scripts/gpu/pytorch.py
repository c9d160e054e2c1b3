"""The same models in PyTorch (tests/bench/torch_gpt.py): a Python that has it, its compiler's cache, and its times."""
import contextlib
import json
import os
import re
import shutil
import sys
import threading

from runner import ROOT, Late, Runner

from .nvidia import MemoryWatch
from .models import SEQ, VOCABULARY_PADDED, Step

INDUCTOR = os.path.join(ROOT, "build", "inductor")  # stays for the next call
ENVIRONMENT = dict(TORCHINDUCTOR_CACHE_DIR=INDUCTOR, TRITON_CACHE_DIR=os.path.join(INDUCTOR, "triton"),
                   TORCHINDUCTOR_FX_GRAPH_CACHE="1", TORCHINDUCTOR_AUTOGRAD_CACHE="1", TORCHINDUCTOR_COMPILE_THREADS="4")


class Background:
    """Work in a thread, with a runner whose commands end when it is stopped."""

    def __init__(self, reaper, *arguments):
        self.runner = Runner(reaper=reaper)
        self.thread = threading.Thread(target=self.until_stopped, args=arguments, daemon=True)
        self.thread.start()

    def until_stopped(self, *arguments):
        with contextlib.suppress(Late):
            self.work(*arguments)

    def stop(self):
        self.runner.deadline = float("-inf")
        self.thread.join()


class Search(Background):
    """A Python that has PyTorch. Importing it takes a minute on a cold disk: begun at once, waited for when needed."""
    python, found = None, ""

    def work(self):
        ask = "import torch; print('torch', torch.__version__, torch.version.cuda)"
        for python in dict.fromkeys((sys.executable, shutil.which("python3"), "/usr/bin/python3")):
            version = python and re.findall(r"^torch (.*)", self.runner.printed(python, "-c", ask, limit=120), re.M)
            if version:
                self.python, self.found = python, version[-1]
                return

    def version(self, patience):
        """Empty: there is none, or it has not been found yet."""
        self.thread.join(max(0, patience))
        return self.found


def command_of(check, model, layers, step, before, counted):
    words = (layers, model.channels, model.heads, step.batch, SEQ, "--vocab", VOCABULARY_PADDED, "--steps", counted,
             "--warmup", before, "--compile", check.o.torch_compile, "--accumulate", step.accumulation)
    return [check.torch.python, "tests/bench/torch_gpt.py", *map(str, words)]


class Compiling(Background):
    """PyTorch compiles every model once during checks that time nothing; timed runs, in this call or another, find it
    in the cache. A compiled block serves any number of layers, so that one is enough."""

    def work(self, check, models):
        for model in models:
            layers = 1 if check.o.torch_compile == "blocks" else model.layers
            self.runner.run(command_of(check, model, layers, Step(model.torch_batch), 0, 0), None, ENVIRONMENT)


def measure(check, model, step, peak_tflops):
    """A row of the table, or None; and the Result."""
    with MemoryWatch() as memory:
        result = check.runner.run(command_of(check, model, model.layers, step, *step.repeated), 200, ENVIRONMENT)
    lines = [line for line in result.output.splitlines() if line.startswith("{")]
    if result.status or not lines:
        return None, result
    row = json.loads(lines[-1])
    tflops = row["tokens_per_s"] * row["flops_per_token"] * 1e-12
    return dict(row, model=model.name, program="torch", accumulation=step.accumulation, tflops=tflops,
                mfu=tflops / peak_tflops if peak_tflops else None, memory_mib=memory.most,
                start_s=result.seconds), result
