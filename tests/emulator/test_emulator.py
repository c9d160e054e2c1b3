"""The emulator itself (test_emulator.cc), and the GPU kernels on it against their CPU twins.

limit: 400
make: emulated-tests
"""
import os
import re
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build/release"))
COMPARE = os.path.join(ROOT, "tests", "layers", "kernels", "compare_twins.py")
TYPES = "fp32", "bf16"


def built(*parts):
    path = os.path.join(ROOT, *parts)
    if not os.path.exists(path):
        raise unittest.SkipTest(f"{path} is not built")
    return path


class Emulator(unittest.TestCase):
    def test_itself(self):
        for kind in TYPES:
            with self.subTest(type=kind):
                program = built("build", f"emulated-{kind}", "tests", "emulator", "test_emulator")
                result = subprocess.run([program], capture_output=True, text=True, timeout=100)
                self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
                plan = re.search(r"^1\.\.(\d+)$", result.stdout, re.MULTILINE)  # it speaks TAP
                self.assertTrue(plan, result.stdout)
                self.assertEqual(len(re.findall(r"^ok \d+ - ", result.stdout, re.MULTILINE)), int(plan.group(1)))


class Events(unittest.TestCase):
    """A step may take more events than are remembered: figures are lost, not the run."""

    def count(self, events):
        tool = built("build", "emulated-fp32", "tests", "commfuse", "tool_events")
        return subprocess.run([tool, str(events)], capture_output=True, text=True, timeout=100)

    def test_all_are_remembered(self):
        result = self.count(2 ** 18)
        self.assertEqual((result.returncode, result.stdout), (0, "remembered 1, events 3\n"), result.stderr)
        self.assertNotIn("note:", result.stderr)

    def test_the_first_is_forgotten(self):
        result = self.count(2 ** 18 + 1)
        self.assertEqual((result.returncode, result.stdout), (0, "remembered 0, events 1\n"), result.stderr)
        self.assertIn("note: step takes too many events for its figures: early of layer 3", result.stderr)


class Twins(unittest.TestCase):
    """Every function of the layers on random odd shapes; the order of threads and blocks is shuffled."""

    def write(self, tool, path, *words, refuses=0, algorithms=1, first=""):
        result = subprocess.run([tool, path, "--small", *words], capture_output=True, text=True, timeout=300,
                                env=dict(os.environ, EMULATOR_SEED="3", EMULATOR_REFUSES=str(refuses),
                                         EMULATOR_ALGORITHMS=str(algorithms), COMMFUSE_FIRST_ALGORITHM=first))
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual(algorithms > 1 and not first, "by another algorithm" in result.stdout, result.stdout)
        for note in "bias or GELU by kernels", "one by one, not at once":
            self.assertEqual(note in result.stderr, refuses > 0, result.stderr)

    def check(self, kind, *words, refuses=0, **more):
        with tempfile.TemporaryDirectory(prefix="commfuse-test-") as folder:
            found, expected = os.path.join(folder, "found"), os.path.join(folder, "expected")
            self.write(built("build", f"emulated-{kind}", "tests", "layers", "kernels", "tool_twins"), found, "--repeat", *words,
                       refuses=refuses, **more)
            self.write(built(BUILD, "tests", "layers", "kernels", "tool_twins"), expected, *words)
            result = subprocess.run([sys.executable, COMPARE, found, expected], capture_output=True, text=True)
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            self.assertIn(" 0 do not", result.stdout)

    def test_fp32(self):
        self.check("fp32")

    def test_bf16(self):
        self.check("bf16", "--round")

    def test_the_fastest_algorithm_with_the_bits_of_the_first(self):
        """Of three that are proposed the first is slow and the second wrong."""
        for first in "", "1":  # 1: it is not looked for
            self.check("bf16", "--round", "--only", "linear", algorithms=3, first=first)

    def test_few_calls_choose_an_algorithm(self):
        """Forty, and those of the cases themselves."""
        with mock.patch.dict(os.environ, EMULATOR_CALLS="80"):
            self.check("bf16", "--round", "--only", "linear", algorithms=200)

    def test_products_that_the_library_refuses(self):
        for refuses in 1, 2:
            with self.subTest(refuses=refuses):
                self.check("fp32", "--only", "linear", refuses=refuses)
                self.check("bf16", "--round", "--only", "linear", refuses=refuses)
        dies = self.assertRaisesRegex(AssertionError, "NOT_SUPPORTED: product [^\n]*\n[^\n]*multiples of 64")
        with tempfile.NamedTemporaryFile() as found, dies:
            self.write(built("build", "emulated-fp32", "tests", "layers", "kernels", "tool_twins"), found.name, "--only", "linear", refuses=3)
