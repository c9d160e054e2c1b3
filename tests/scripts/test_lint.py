"""make lint and make format-check find nothing.

quick: none
limit: 300
"""
import pathlib
import shutil
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
KNOWN = "version 14."  # another one reports, and formats, something else


class Lint(unittest.TestCase):
    def finds_nothing(self, tool, target):
        version = shutil.which(tool) and subprocess.run([tool, "--version"], capture_output=True, text=True).stdout
        if not version or KNOWN not in version:
            self.skipTest(f"{tool} {KNOWN}x is not installed (scripts/install_deps.sh --lint)")
        result = subprocess.run(["make", "-s", target], cwd=ROOT, capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_analysis(self):
        self.finds_nothing("clang-tidy", "lint")

    def test_format(self):
        self.finds_nothing("clang-format", "format-check")
