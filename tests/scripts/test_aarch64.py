"""Hosts of aarch64: every C source of the program compiles for them, and under an emulator schedules are right and a training has the
reference's losses; bf16 is refused with a reason, or works.

quick: none
limit: 400
"""
import itertools
import os
import pathlib
import shutil
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
import harness
import reference

COMPILER, EMULATOR, LIBRARIES = "aarch64-linux-gnu-gcc", "qemu-aarch64", ROOT / "build/aarch64"
HOW = "scripts/install_deps.sh --aarch64"
RECIPE = dict(schedule="constant", lr=3e-3)
MESSAGE = "--dtype bf16: this oneDNN has no matrix product of bf16 for this processor"


@unittest.skipUnless(shutil.which(COMPILER), f"no {COMPILER}: {HOW}")
class Aarch64(harness.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
        if listed.returncode:
            raise unittest.SkipTest("git does not know the project's files")
        cls.tree = pathlib.Path(cls.path("tree"))
        for name in listed.stdout.split():
            (cls.tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, cls.tree / name)
        cls.whole = LIBRARIES.is_dir()
        where = LIBRARIES / "usr/lib/aarch64-linux-gnu"
        # Without libraries the objects of each program are joined to one.
        link = [f"LDFLAGS=-L{where} -Wl,-rpath-link,{where} -Wl,--allow-shlib-undefined",
                "MPI_LIBS=-l:" + next((path.name for path in where.glob("libmpi.so.??")), "none")] if cls.whole else [
                    "LDFLAGS=-r -nostdlib", "libs="]
        cls.made = subprocess.run(
            ["make", "-s", "-j2", f"CC={COMPILER}", "MARCH=armv8-a", *link, "all", *["build/release/tests/commfuse/test_schedule"] * cls.whole],
            cwd=cls.tree, capture_output=True, text=True, env={k: v for k, v in os.environ.items() if k != "MAKEFLAGS"})

    def emulated(self, *words, processor="max"):
        if not self.whole or not shutil.which(EMULATOR):
            self.skipTest(f"no {EMULATOR} or no libraries in build/aarch64: {HOW}")
        environment = harness.environment(OMPI_MCA_ess_singleton_isolated="1", QEMU_LD_PREFIX=str(LIBRARIES), QEMU_CPU=processor)
        return subprocess.run([EMULATOR, *words], cwd=self.tree, env=environment, capture_output=True, text=True, timeout=1200)

    def test_everything_compiles(self):
        self.assertEqual(self.made.returncode, 0, self.made.stderr[-4000:])
        for name in "", "_bf16", "_predict", "_predict_bf16":
            self.assertIn(b"\xb7", (self.tree / f"train_gpt{name}").read_bytes()[18:20])  # e_machine: EM_AARCH64

    def test_schedules(self):
        done = self.emulated("build/release/tests/commfuse/test_schedule")
        self.assertEqual(done.returncode, 0, done.stdout[-2000:] + done.stderr[-2000:])

    def test_a_training_has_the_losses_of_the_reference(self):
        batch = reference.samples(reference.read_tokens(self.tokens), self.T)
        expected = reference.train(self.shape, dict(self.parameters), [batch] * 3, **RECIPE)
        log = self.fresh("log.jsonl")
        done = self.emulated("./train_gpt", *self.arguments(log=log, **RECIPE))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        for step, (loss, norm, _) in itertools.zip_longest(harness.events(harness.read_log(log), "step"), expected):
            self.assertLess(abs(step["loss"] / loss - 1), 1e-5, step)
            self.assertLess(abs(step["grad_norm"] / norm - 1), 1e-4, step)

    def test_bf16_works_or_is_refused(self):
        """And the banner says whether the processor has instructions for it: Neoverse N1 has none."""
        for processor, slow in ("max", False), ("neoverse-n1", True):
            done = self.emulated("./train_gpt_bf16", *self.arguments(dtype="bf16", steps=1), processor=processor)
            self.assertEqual("no instructions for bf16" in done.stdout, slow, done.stdout)
            self.assertEqual(done.returncode, 1 if MESSAGE in done.stderr else 0, done.stderr)
