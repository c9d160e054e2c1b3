"""The same models in PyTorch (tests/bench/torch_gpt.py): a Python that has it, its compiler's cache, and its times."""
import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

from .models import SEQ, VOCABULARY_PADDED, Step
from .nvidia import MemoryWatch
from .runner import ROOT, end

INDUCTOR = os.path.join(ROOT, "build", "inductor")  # stays for the next call


class Search:
    """A Python that has PyTorch. Importing it takes a minute on a cold disk: begun at once, waited for when needed."""

    def __init__(self, runner):
        self.python, self.found, self.process = None, "", None
        self.thread = threading.Thread(target=self.work, args=(runner,), daemon=True)
        self.thread.start()

    def work(self, runner):
        ask = "import torch; print('torch', torch.__version__, torch.version.cuda)"
        for python in dict.fromkeys((sys.executable, shutil.which("python3"), "/usr/bin/python3")):
            with contextlib.suppress(OSError), tempfile.TemporaryFile() as output:
                self.process = runner.start([python, "-c", ask], output)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(120)
                runner.end(self.process)
                output.seek(0)
                version = re.findall(r"^torch (.*)", output.read().decode(errors="replace"), re.M)
                if self.process.returncode == 0 and version:
                    self.python, self.found = python, version[-1]
                    return

    def version(self, patience):
        """Empty: there is none, or it has not been found yet."""
        self.thread.join(max(0, patience))
        return self.found

    def stop(self):
        while self.thread.is_alive():
            if self.process:
                end(self.process)
            self.thread.join(0.1)


def environment():
    return dict(TORCHINDUCTOR_CACHE_DIR=INDUCTOR, TRITON_CACHE_DIR=os.path.join(INDUCTOR, "triton"),
                TORCHINDUCTOR_FX_GRAPH_CACHE="1", TORCHINDUCTOR_AUTOGRAD_CACHE="1", TORCHINDUCTOR_COMPILE_THREADS="4")


def command_of(check, model, layers, step, before, counted):
    words = (layers, model.channels, model.heads, step.batch, SEQ, "--vocab", VOCABULARY_PADDED, "--steps", counted,
             "--warmup", before, "--compile", check.o.torch_compile, "--accumulate", step.accumulation)
    return [check.torch.python, "tests/bench/torch_gpt.py", *map(str, words)]


class Compiling:
    """PyTorch compiles every model once behind checks that time nothing; timed runs, in this call or another, find it
    in the cache. A compiled block serves any number of layers, so that one is enough."""

    def __init__(self, check, models):
        self.check, self.running, self.stopped = check, set(), False
        self.pool = concurrent.futures.ThreadPoolExecutor(2)
        self.futures = [self.pool.submit(self.work, model) for model in models]

    def work(self, model):
        layers = 1 if self.check.o.torch_compile == "blocks" else model.layers
        if self.stopped:
            return
        command = command_of(self.check, model, layers, Step(model.torch_batch), 0, 0)
        process = self.check.runner.start(command, subprocess.DEVNULL, environment())
        self.running.add(process)
        process.wait()
        self.check.runner.end(process)
        self.running.discard(process)

    def stop(self):
        self.stopped = True
        self.pool.shutdown(wait=False, cancel_futures=True)
        while not all(future.done() for future in self.futures):  # one may just have begun
            end(*list(self.running))
            time.sleep(0.05)


def measure(check, model, step, peak_tflops):
    """A row of the table, or None; and the Result."""
    with MemoryWatch() as memory:
        result = check.runner.run(command_of(check, model, model.layers, step, *step.repeated), 200, environment())
    lines = [line for line in result.output.splitlines() if line.startswith("{")]
    if result.status or not lines:
        return None, result
    row = json.loads(lines[-1])
    tflops = row["tokens_per_s"] * row["flops_per_token"] * 1e-12
    return dict(row, model=model.name, program="torch", accumulation=step.accumulation, tflops=tflops,
                mfu=tflops / peak_tflops if peak_tflops else None, memory_mib=memory.most,
                start_s=result.seconds), result
