"""The first command of the plan for a GPU (scripts/README.md), from start to end, where the emulator is the GPU: every stage runs, in
its order and within the command's time, on the smallest models. nvidia-smi and bench_wires are stand-ins."""
# quick: none
# limit: 600
# make: emulated-tests
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import gpu_check
from gpu import losses, ranks, times, twins

STAND_INS = {
    "nvidia-smi": "#!/bin/sh\necho an emulator\n",
    "emulated-bf16/tests/bench/bench_wires": "#!/bin/sh\necho words of streams: 0.0 us\n",
    "reference": f'#!/bin/sh\nexec {ROOT}/{twins.REFERENCE} "$@" --small\n',
    **{f"emulated-{kind}/{twins.TOOL}": f'#!/bin/sh\nexec {ROOT}/build/emulated-{kind}/{twins.TOOL} "$@" --small\n'
       for kind in ("fp32", "bf16")}}
BUILT = "emulated-fp32/train_gpt", "emulated-bf16/train_gpt", "emulated-bf16/tests/bench/bench_gpu"
MODELS = times.Model("d12", 2, 64, 1, (1, 2), 2), times.Model("d48", 1, 128, 2, (1, 2), 1)
SEQ, VOCABULARY, VOCABULARY_PADDED = 16, 101, 128


class Step(times.Step):
    """Of MODELS, in the first name of which no shape is hidden."""

    def options(self, model):
        more = super().options(model)
        del more["model"]
        return dict(more, layers=model.layers, channels=model.channels, heads=model.heads, lr=1e-2, peak_tflops=1)


class Plan(unittest.TestCase):
    def prepare(self):
        folder = tempfile.mkdtemp(prefix="commfuse-test-")
        self.addCleanup(shutil.rmtree, folder)
        for name, text in STAND_INS.items():
            os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(file.name, 0o755)
        for name, at in {**{name: f"{ROOT}/build/{name}" for name in BUILT},
                         "emulated-fp32/tests/bench/bench_gpu": "/bin/true"}.items():  # built, and not run
            os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
            os.symlink(at, os.path.join(folder, name))
        made = subprocess.run(["make", twins.REFERENCE], cwd=ROOT, capture_output=True, text=True)
        self.assertEqual(made.returncode, 0, made.stdout + made.stderr)
        return folder

    def test_the_first_command(self):
        folder, out = self.prepare(), io.StringIO()
        path = f"{folder}:{os.environ['PATH']}"
        with contextlib.redirect_stdout(out), mock.patch.dict(os.environ, PATH=path, EMULATOR_DEVICES="1"), \
                mock.patch.multiple(times, MODELS=MODELS, CLOSER=MODELS, SEQ=SEQ, VOCABULARY=VOCABULARY, Step=Step,
                                    VOCABULARY_PADDED=VOCABULARY_PADDED), \
                mock.patch.multiple(losses, MODELS=MODELS, VOCABULARY=VOCABULARY, LARGE=Step(4), PARTS=Step(1, 4), LARGE_BANDS=(1e-2, 1e-1),
                                    SMALL={"d1, T 16": (dict(layers=1, channels=32, heads=2, vocab=101, seq=16), 2, 3e-3)}), \
                mock.patch.multiple(ranks, MESHES=ranks.MESHES[:5], AUTO_MESHES=ranks.AUTO_MESHES[:2]), \
                mock.patch.object(twins, "REFERENCE", os.path.join(folder, "reference")), \
                mock.patch.object(sys, "argv", ["gpu_check.py", "--out", f"{folder}/1", "--budget", "590",
                                                "--builds", f"{folder}/emulated"]):
            status = gpu_check.main()
        text = out.getvalue()
        self.assertEqual(status, 0, text)
        self.assertNotRegex(text, r"(?m)^  (FAIL|LATE)", text)
        stages = re.findall(r"^(\w+): from second \d+, at most \d+ s$", text, re.M)
        self.assertEqual(stages, gpu_check.selected(gpu_check.parse([]).only), text)
        for line in ("a GPU answers   an emulator", "words of streams: 0.0 us", "d12: a second run has the same bits",
                     "bf16, only attention, seed 1: agrees with the CPU", "fp32, except attention, seed 1: agrees with the CPU",
                     "d48: kernels timed", "d1, T 16: fp32", "d12: micro-batch 4 and 4 micro-batches of 1",
                     "fp32 tpsp tp 2 dp 1 ipc ring", "bf16 up   tp 2 dp 1 auto auto"):
            self.assertRegex(text, rf"(?m)^ +(ok    )?{re.escape(line)}", text)
        self.assertEqual(len(re.findall(r"^\| d(12|48) \| commfuse \|", text, re.M)), 6, text)
        with open(f"{folder}/1/report.txt", encoding="utf-8") as file:
            self.assertEqual(file.read(), text)
