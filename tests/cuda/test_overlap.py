"""tests/bench/overlap.py, the stage overlap of scripts/gpu_check.py, from start to end, where the emulator is the GPU, and MPS,
bench_wires and bench_beside are stand-ins. A CPU does not keep the clock's times: where it computes, what is checked is
that every mesh and mode is compared; where the clock is the GPU, too, that both agree."""
# quick: every_mesh processes without_mps
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
import overlap
from runner import Failed

SMALL = dict(channels=64, heads=4, layers=1, vocab=512, seq=16, embedding="table", recompute=0, peak_tflops=1, rounds=2, timeout=60)
MESHES = {name: (ranks, dict(words, micro_batch=2)) for name, (ranks, words) in overlap.MESHES.items()}
WIRES = """#!/bin/sh
echo "wires $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE in $CUDA_MPS_PIPE_DIRECTORY" >> {log}
printf '  %-57s %9.0f\\n  %-57s %9.1f us\\n  %-57s %9.1f GB/s\\n' multiprocessors 33 \\
    'ping-pong of 0 KiB, each way' {way} 'copy of 65536 KiB' $((CUDA_MPS_ACTIVE_THREAD_PERCENTAGE / 100 * 2450 + 350))
"""
CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then echo "begins in $CUDA_MPS_PIPE_DIRECTORY" >> {log}; else read word; echo "$word" >> {log}; fi
"""


class Overlap(unittest.TestCase):
    def prepare(self, way, control=CONTROL):
        """A folder with the stand-ins, and in it a build."""
        folder = tempfile.mkdtemp(prefix="commfuse-test-")
        self.addCleanup(shutil.rmtree, folder)
        self.log, build = os.path.join(folder, "log"), os.path.join(folder, "emulated-bf16")
        os.makedirs(f"{build}/tests/bench")
        os.symlink(f"{overlap.CLOCK}/tests/bench/bench_train", f"{build}/tests/bench/bench_train")
        for name, text in (("emulated-bf16/tests/bench/bench_wires", WIRES), ("nvidia-cuda-mps-control", control),
                           ("emulated-bf16/tests/bench/bench_beside", "#!/bin/sh\necho $*: a holder of 16 blocks\n")):
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write(text.format(log=self.log, way=way))
            os.chmod(file.name, 0o755)
        return folder, build, f"{folder}:{os.environ['PATH']}"

    def stage(self, way, control=CONTROL):
        _, build, path = self.prepare(way, control)
        out = io.StringIO()
        with contextlib.redirect_stdout(out), mock.patch.dict(os.environ, PATH=path, EMULATOR_DEVICES="1"), \
                mock.patch.multiple(overlap, SHAPE=SMALL, MESHES=MESHES), \
                mock.patch.object(sys, "argv", ["overlap.py", "--build", build, "--measured", f"{build}/measured.json"]):
            self.assertEqual(overlap.main(), 0)
        with contextlib.redirect_stdout(out), mock.patch.multiple(overlap, SHAPE=SMALL, MESHES=MESHES), \
                mock.patch.object(sys, "argv", ["overlap.py", "--compare", f"{build}/measured.json"]):
            return overlap.main(), out.getvalue()

    def test_every_mesh_and_mode_is_measured_and_imagined(self):
        status, text = self.stage(3.5)
        self.assertEqual(re.findall(r"^(\S+ \d): 33 .*; of ideal: none .*, ideal 1.000$", text, re.M), [*overlap.MESHES], text)
        found = re.findall(r"^(\S+ \d): 33 multiprocessors a rank, ideal [\d.]+ ms, by|^  (agree|DISAGREE) to", text, re.M)
        self.assertEqual([name for name, _ in found[::2]], [*overlap.MESHES], text)
        self.assertEqual(status, int("DISAGREE" in text))
        for mode in overlap.MODES:
            self.assertEqual(len(re.findall(rf"^ +{mode} +\d+\.\d+ +\d+\.\d+$", text, re.M)), len(overlap.MESHES), text)
        self.assertEqual(len(re.findall(r"^ +ideal +1\.000 +1\.000$", text, re.M)), len(overlap.MESHES), text)
        self.assertIn("says nothing of NVLink", text)
        with open(self.log, encoding="utf-8") as file:
            lines = file.read().split("\n")
        place = lines[0].partition(" in ")[2]
        self.assertEqual(lines, [f"begins in {place}", *(f"wires {share} in {place}" for share in (100, 50, 25)), "quit", ""])

    def test_the_whole_check_where_the_clock_is_the_gpu(self):
        """The second command of the plan for a GPU. The real shapes: what both compute is the same, so both must agree."""
        folder, build, path = self.prepare(3.5)
        for kind in "fp32", "bf16":
            for name in "train_gpt", "tests/layers/kernels/tool_twins", "tests/bench/bench_gpu":  # the stage build wants them
                os.makedirs(os.path.dirname(f"{folder}/emulated-{kind}/{name}"), exist_ok=True)
                os.symlink("/bin/true", f"{folder}/emulated-{kind}/{name}")
        gpu = dict(EMULATOR_CLOCK="1", EMULATOR_MULTIPROCESSORS="33", EMULATOR_MEMORY_GBPS="700", EMULATOR_TFLOPS="192")
        done = subprocess.run([os.path.join(ROOT, "scripts", "gpu_check.sh"), "--only", "clusters,overlap", "--out",
                               f"{folder}/out", "--builds", f"{folder}/emulated"],
                              env={**os.environ, **gpu, "PATH": path}, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"(?m)^ +clusters: a holder of 16 blocks\n  ok +clusters beside products$")
        self.assertRegex(done.stdout, r"(?m)^  ok +steps of ranks side by side$")
        done = subprocess.run([os.path.join(ROOT, "tests", "bench", "overlap.py"), "--compare", f"{folder}/out/overlap.json"],
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(len(re.findall(r"^ +agree to ", done.stdout, re.M)), len(overlap.MESHES), done.stdout)

    def test_processes_that_take_turns_are_not_measured(self):
        with self.assertRaisesRegex(Failed, "15.0 us, not less than 15"):
            self.stage(7.5)

    def test_a_machine_without_mps_is_told(self):
        with self.assertRaisesRegex(Failed, "no such thing"):
            self.stage(1, "#!/bin/sh\necho no such thing; exit 1\n")
