"""--dtype bf16 on CPUs: see halves.py; the program for the other type is found, and what cannot be is said.

limit: 300
"""
import os
import shutil
import struct
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import halves
import harness

REFUSED = "has no matrix product of bf16"


class Bf16(halves.Training):
    meshes = (2, 1), (1, 2), (2, 2)
    others = dict(overlap="none"), dict(overlap="slice", slices=3)

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        result = harness.run(cls().arguments(steps=1, dtype="bf16"))
        if REFUSED in result.err:
            raise unittest.SkipTest(result.err.strip())

    def arguments(self, **more):
        return super().arguments(**dict(dtype="bf16") | more)

    def test_two_threads(self):
        self.assertEqual(*(self.losses(1, 1, threads=threads) for threads in (2, 2)), "bits differ from run to run")

    def test_what_is_written_and_read(self):
        out = self.fresh("out")
        log, _ = self.train(out=out, dtype="bf16")
        self.assertEqual(harness.events(log, "config")[0]["dtype"], "bf16")
        path = os.path.join(out, "model.bin")
        with open(path, "rb") as file:
            self.assertEqual(struct.unpack("<3i", file.read(12))[:2], (20240326, 5), "llm.c's file of bf16")
        half, whole = (harness.events(self.train(init_from=path, dtype=dtype, steps=1)[0], "step")[0]["loss"]
                       for dtype in ("bf16", "fp32"))
        self.assertNotEqual(half, whole)
        self.assertLess(abs(half / whole - 1), halves.BAND)

    def test_the_other_program_is_missing(self):
        alone = shutil.copy(harness.PROGRAM, self.fresh("train_gpt"))
        self.assertFails(harness.run(self.arguments(), program=alone), "--dtype bf16", "train_gpt_bf16", "make")

    def test_processor_without_such_products(self):
        for ranks in (1, 2):
            result = harness.run(self.arguments(tp=ranks), ranks, env=dict(ONEDNN_MAX_CPU_ISA="AVX2"))
            self.assertFails(result, REFUSED, "--dtype fp32")


class Resume(halves.Resume):
    @classmethod
    def setUpClass(cls):
        Bf16.setUpClass()  # skips where Bf16 is skipped
        super().setUpClass()

    @classmethod
    def recipe(cls, *mesh, **more):
        return super().recipe(*mesh, **dict(dtype="bf16") | more)


if __name__ == "__main__":
    unittest.main()
