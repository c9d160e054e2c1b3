"""The GPU program in bf16, on the emulator: what is saved are the masters in full precision, so a run that goes on is the
run that was never stopped, the same bits; on another mesh it is the same run within bf16.
"""
# limit: 600
# make: emulated-tests
import os
import sys
import unittest

os.environ["BUILD"] = "build/emulated-bf16"
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import numpy as np

import checkpoints
import harness
import reference

AT = 3


class Resume(checkpoints.Case):
    shape, T, steps = reference.Shape(maxT=23, V=101, L=2, heads=4, C=32, Vp=128), 20, 5

    @classmethod
    def recipe(cls, *mesh, **more):
        return super().recipe(*mesh, **dict(val=None, timeout=300) | more)

    def run_with(self, *arguments, **values):
        return super().run_with(*arguments, timeout=300, **values)

    def test_goes_on_as_if_never_stopped(self):
        for strategy, tp, dp in (("tpsp", 1, 1), ("tpsp", 2, 1), ("up", 1, 2)):
            with self.subTest(strategy=strategy, tp=tp, dp=dp):
                out, log = self.undisturbed(tp, dp, strategy=strategy)
                again, path = self.with_only(out, AT), self.fresh("log.jsonl")
                self.run_with(tp=tp, dp=dp, strategy=strategy, out=again, log=path)
                self.assertSameRun(path, log, AT)
                self.assertSameEnd(again, out)

    def test_masters_are_saved(self):
        """More digits than the weights have, which are the masters rounded."""
        out, _ = self.undisturbed(2, 1, strategy="tpsp")
        weights = checkpoints.assemble(out, self.steps, self.shape)["weight"]
        _, model = reference.read_model(os.path.join(out, "model.bin"))
        for name in ("wte", "qkvw", "fcprojw"):
            rounded = (reference.to_bf16_bits(weights[name]).astype("<u4") << 16).view("<f4")
            self.assertTrue((rounded == model[name]).all(), name)
            self.assertFalse((weights[name] == model[name]).all(), name)

    def test_on_another_mesh(self):
        out, log = self.undisturbed(2, 1, strategy="tpsp")
        expected = [s["loss"] for s in harness.events(harness.read_log(log), "step")][AT:]
        for strategy, tp, dp in (("tpsp", 1, 1), ("up", 2, 1), ("tpsp", 1, 2)):
            with self.subTest(strategy=strategy, tp=tp, dp=dp):
                again, path = self.with_only(out, AT), self.fresh("log.jsonl")
                self.run_with(tp=tp, dp=dp, strategy=strategy, out=again, log=path)
                found = [s["loss"] for s in harness.events(harness.read_log(path), "step")]
                np.testing.assert_allclose(found, expected, 0.01)


if __name__ == "__main__":
    unittest.main()
