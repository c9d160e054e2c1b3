"""The GPU program in bf16, on the emulator: losses within a band of the float64 reference, commfuse with the same bits
by every route and over either transport, and what it saves can be trained on.

The band: bf16 keeps eight bits, so a weight or an activation is off by up to 2^-9, 0.2 %; six steps of a tiny model
differ by less than 1 % in the loss.
"""
# limit: 600
# make: emulated-tests
import os
import sys
import unittest

os.environ["BUILD"] = "build/emulated-bf16"
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import harness
import meshes

BAND = 0.01


class Bf16(meshes.Training):
    strategy, steps = "tpsp", 6

    def train(self, ranks=1, timeout=400, **more):
        return super().train(ranks, timeout, **more)

    def losses(self, *mesh, **more):
        steps = self.steps_of(*mesh, **more)
        for step, (loss, *_) in zip(steps, self.expected):
            self.assertLess(abs(step["loss"] / loss - 1), BAND, f"expected {loss}: {step}")
        return [step["loss"] for step in steps]

    def test_one_rank(self):
        losses = self.losses(1, 1)
        self.assertGreater(max(abs(found / loss - 1) for found, (loss, *_) in zip(losses, self.expected)), 1e-6,
                           "this is not bf16")

    def test_meshes(self):
        for strategy in meshes.STRATEGIES:
            for mesh in ((2, 1), (1, 2)):
                first = None
                for transport, route in (("nccl", "ring"), ("ipc", "direct")):
                    with self.subTest(strategy=strategy, mesh=mesh, transport=transport):
                        found = self.losses(*mesh, 2, strategy=strategy, transport=transport,
                                            **meshes.commfuse(route, 2))
                        first = first or found
                        self.assertEqual(found, first, "bits differ")
                self.losses(*mesh, strategy=strategy, transport="nccl", overlap="none")

    def test_goes_on_from_what_it_saved(self):
        out = self.fresh("out")
        losses = self.losses(2, 1, out=out)
        log, _ = self.train(init_from=os.path.join(out, "model.bin"), steps=1, lr=0)
        self.assertLess(harness.events(log, "step")[0]["loss"], losses[-1] * (1 + BAND))

    def test_the_other_type_is_another_program(self):
        result = harness.run(self.arguments(dtype="fp32"))
        self.assertFails(result, "make cuda", "--dtype fp32")


if __name__ == "__main__":
    unittest.main()
