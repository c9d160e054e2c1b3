"""tests/bench/overlap.py, the stage overlap of scripts/gpu_check.py, from start to end, where the emulator is the GPU, and MPS and
bench_wires are stand-ins that note what they are asked. A CPU does not keep the clock's times, so what is checked is that every
mesh and mode is compared."""
# limit: 400
# make: emulated-tests
import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
import unittest
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [os.path.join(ROOT, "scripts"), os.path.join(ROOT, "tests", "bench")]
import overlap
from runner import Failed

SMALL = dict(channels=64, heads=4, layers=1, vocab=512, seq=16, embedding="table", recompute=0, peak_tflops=1, rounds=2, timeout=60)
MESHES = {name: (ranks, dict(words, micro_batch=2)) for name, (ranks, words) in overlap.MESHES.items()}
WIRES = """#!/bin/sh
echo "wires $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE in $CUDA_MPS_PIPE_DIRECTORY" >> {log}
printf '  %-57s %9.0f\\n  %-57s %9.1f us\\n  %-57s %9.1f GB/s\\n' multiprocessors 33 \\
    'ping-pong of 0 KiB, each way' {way} 'copy of 65536 KiB' 350
"""
CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then echo "begins in $CUDA_MPS_PIPE_DIRECTORY" >> {log}; else read word; echo "$word" >> {log}; fi
"""


class Overlap(unittest.TestCase):
    def stage(self, way, control=CONTROL):
        folder = tempfile.mkdtemp(prefix="commfuse-test-")
        self.addCleanup(shutil.rmtree, folder)
        self.log = os.path.join(folder, "log")
        for name, text in ("wires", WIRES), ("nvidia-cuda-mps-control", control):
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write(text.format(log=self.log, way=way))
            os.chmod(file.name, 0o755)
        out, path = io.StringIO(), f"{folder}:{os.environ['PATH']}"
        build = os.path.join(folder, "emulated-bf16")
        os.makedirs(f"{build}/tests/bench")
        shutil.move(os.path.join(folder, "wires"), f"{build}/tests/bench/bench_wires")
        os.symlink(f"{overlap.CLOCK}/tests/bench/bench_train", f"{build}/tests/bench/bench_train")
        with contextlib.redirect_stdout(out), mock.patch.dict(os.environ, PATH=path, EMULATOR_DEVICES="1"), \
                mock.patch.multiple(overlap, SHAPE=SMALL, MESHES=MESHES), \
                mock.patch.object(sys, "argv", ["overlap.py", "--build", build]):
            return overlap.main(), out.getvalue()

    def test_every_mesh_and_mode_is_measured_and_imagined(self):
        status, text = self.stage(3.5)
        found = re.findall(r"^(\S+ \d): 33 multiprocessors|^  (agree|DISAGREE) to", text, re.M)
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

    def test_processes_that_take_turns_are_not_measured(self):
        with self.assertRaisesRegex(Failed, "15.0 us, not less than 15"):
            self.stage(7.5)

    def test_a_machine_without_mps_is_told(self):
        with self.assertRaisesRegex(Failed, "no such thing"):
            self.stage(1, "#!/bin/sh\necho no such thing; exit 1\n")


if __name__ == "__main__":
    unittest.main()
