"""The Makefile's own promise: what was compiled for another processor is compiled again, not mixed with the rest."""
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPILER = """#!/bin/sh
echo "$*" >>commands
while [ $# -gt 1 ]; do [ "$1" != -o ] || touch "$2"; shift; done
"""
FILES = ("Makefile", "tests/emulator/emulator.mk", "tests/fuzz/fuzz.mk", "scripts/find_python.sh", "scripts/find_cuda.sh",
         "commfuse/die.c")
KINDS = "release", "ref", "cuda-bf16", "emulated-fp32"


class Processor(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="commfuse-test-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        for name in FILES:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        (self.folder / "cc").write_text(COMPILER)
        (self.folder / "cc").chmod(0o755)

    def compiled(self, *words):
        """Processors that objects were compiled for by this call, in turn."""
        (self.folder / "commands").write_text("")
        variables = {name: value for name, value in os.environ.items() if name not in ("MARCH", "MAKEFLAGS")}
        subprocess.run(["make", "-s", "CC=./cc", *words, *(f"build/{kind}/commfuse/die.o" for kind in KINDS)],
                       cwd=self.folder, env=variables, check=True, capture_output=True)
        commands = (self.folder / "commands").read_text().splitlines()
        return [word.removeprefix("-march=") for line in commands for word in line.split() if word.startswith("-march=")]

    def test_every_object_is_of_one_processor(self):
        n = len(KINDS)
        self.assertEqual(self.compiled(), ["native"] * n)
        self.assertEqual(self.compiled(), [])
        self.assertEqual(self.compiled("MARCH=x86-64-v3"), ["x86-64-v3"] * n)
        self.assertEqual(self.compiled("MARCH=x86-64-v3"), [])
        self.assertEqual(self.compiled(), ["native"] * n)


if __name__ == "__main__":
    unittest.main()
