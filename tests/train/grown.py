"""A copy of the sources to which a test adds an idea: a schedule, an optimizer."""
import os
import pathlib
import shutil
import subprocess
import unittest

import harness

ROOT, B = pathlib.Path(harness.ROOT), "build/release"


class Case(harness.Case):
    @classmethod
    def grow(cls, changes, *programs):
        """changes: by file, a function from its text (of a new file: "") to another. Builds the programs. Sets cls.tree, cls.lines
        that were added, cls.made by make, cls.program."""
        if not (ROOT / B / "program.a").exists():
            raise unittest.SkipTest(f"{B}/program.a is not built")
        cls.tree, cls.lines = pathlib.Path(cls.path("tree")), 0
        for folder in "commfuse", "data", "layers", "scripts", "tests":
            shutil.copytree(ROOT / folder, cls.tree / folder, ignore=shutil.ignore_patterns("results", "__pycache__"))
        for file in "Makefile", "train_gpt.cu":
            shutil.copy2(ROOT / file, cls.tree)
        # Objects keep their times, so what includes no changed header is not compiled again.
        for folder in "commfuse", "data", "layers":
            shutil.copytree(ROOT / B / folder, cls.tree / B / folder)
        shutil.copy2(ROOT / "build/machine", cls.tree / "build/machine")
        if (ROOT / "build/deps").exists():
            (cls.tree / "build/deps").symlink_to(ROOT / "build/deps")
        for file, change in changes.items():
            path = cls.tree / file
            before = path.read_text(encoding="utf-8") if path.exists() else ""
            path.write_text(change(before), encoding="utf-8")
            cls.lines += len(path.read_text(encoding="utf-8").splitlines()) - len(before.splitlines())
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        cls.made = subprocess.run(["make", "-j2", *programs], cwd=cls.tree, env=environment, text=True, check=False,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert cls.made.returncode == 0, cls.made.stdout
        cls.program = str(cls.tree / B / "train_gpt")

    def run_grown(self, ranks=1, **more):
        result = harness.run(self.arguments(**more), ranks, program=self.program)
        self.assertEqual(result.status, 0, str(result))
        return result
