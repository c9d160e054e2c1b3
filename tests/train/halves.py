"""What the tests of bf16 share, for CPUs and for the emulator: losses within a band of the float64 reference, the same bits
by every schedule that shares them and over every transport; and what is saved are the masters in full precision, so a run that
goes on is the run that was never stopped, the same bits, and on another mesh the same run within bf16.

The band: bf16 keeps eight bits, so a weight or an activation is off by up to 2^-9, 0.2 %; six steps of a tiny model
differ by less than 1 % in the loss, and by less than 5 % in the norm of the gradient. Losses of two steps hardly show the moments
with which they began, so where weights have moved to is compared, too: to 2 % of the way.
"""
import os

import numpy as np

import checkpoints
import harness
import meshes
import reference
import traffic

BAND, NORM_BAND, MOVED, AT = 0.01, 0.05, 0.02, 3


class Training(meshes.Training):
    strategy, steps = "tpsp", 6
    meshes = (2, 1), (1, 2)
    others = dict(overlap="none"),  # runs that need only be within the band

    def wires(self):
        """Options of runs between which no bit may differ."""
        return [dict(overlap=f"{row.name}:2") for row in harness.schedules("exchanges", bits="ring") if row.most >= 2]

    def losses(self, *mesh, **more):
        steps = self.steps_of(*mesh, **more)
        self.assertEqual(len(steps), self.steps)
        for step, (loss, norm, _) in zip(steps, self.expected):
            self.assertLess(abs(step["loss"] / loss - 1), BAND, f"expected {loss}: {step}")
            self.assertLess(abs(step["grad_norm"] / norm - 1), NORM_BAND, f"expected {norm}: {step}")
        return [step["loss"] for step in steps]

    def test_one_rank(self):
        losses = self.losses(1, 1)
        self.assertGreater(max(abs(found / loss - 1) for found, (loss, *_) in zip(losses, self.expected)), 1e-6,
                           "this is not bf16")

    def test_meshes(self):
        for strategy in meshes.STRATEGIES:
            for mesh in self.meshes:
                first = None
                for wire in self.wires():
                    with self.subTest(strategy=strategy, mesh=mesh, **wire):
                        found = self.losses(*mesh, 2, strategy=strategy, **wire)
                        first = first or found
                        self.assertEqual(found, first, "bits differ")
                for other in self.others:
                    with self.subTest(strategy=strategy, mesh=mesh, **other):
                        self.losses(*mesh, strategy=strategy, **other)

    def test_gradients_travel_in_bf16(self):
        """The same bits by every schedule that shares them, and of gradients half the bytes: as many as of weights."""
        for mesh in self.meshes:
            first = None
            for wire in self.wires():
                with self.subTest(mesh=mesh, **wire):
                    found = self.losses(*mesh, 2, reduce_dtype="bf16", **wire)
                    first = first or found
                    self.assertEqual(found, first, "bits differ")
            whole, half = (self.logged(*mesh, gradients="ready", embedding="table", overlap="ring", reduce_dtype=dtype)
                           for dtype in ("fp32", "bf16"))
            saved = harness.events(whole, "end")[0]["bytes_sent_rank0"] - harness.events(half, "end")[0]["bytes_sent_rank0"]
            elements = sum((members - 1) * shard for members, shard in traffic.bucket_shards(self.shape, "tpsp", *mesh))
            self.assertEqual(saved, self.steps * 2 * elements)

    def test_goes_on_from_what_it_saved(self):
        out = self.fresh("out")
        losses = self.losses(2, 1, out=out)
        log, _ = self.train(init_from=os.path.join(out, "model.bin"), steps=1, lr=0)
        self.assertLess(harness.events(log, "step")[0]["loss"], losses[-1] * (1 + BAND))


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
                out, log = self.undisturbed(tp, dp, strategy=strategy, reduce_dtype="bf16")
                again, path = self.with_only(out, AT), self.fresh("log.jsonl")
                self.run_with(tp=tp, dp=dp, strategy=strategy, out=again, log=path)  # keeps --reduce-dtype
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
        start, end = (checkpoints.assemble(out, step, self.shape)["weight"] for step in (AT, self.steps))
        for strategy, tp, dp in (("tpsp", 1, 1), ("up", 2, 1), ("tpsp", 1, 2)):
            with self.subTest(strategy=strategy, tp=tp, dp=dp):
                again, path = self.with_only(out, AT), self.fresh("log.jsonl")
                self.run_with(tp=tp, dp=dp, strategy=strategy, out=again, log=path)
                found = [s["loss"] for s in harness.events(harness.read_log(path), "step")]
                np.testing.assert_allclose(found, expected, BAND)
                ours = checkpoints.assemble(again, self.steps, self.shape)["weight"]
                for name in set(end) - {"qkvb"}:  # keys' biases move by rounding alone
                    off = np.linalg.norm(ours[name] - end[name]) / np.linalg.norm(end[name] - start[name])
                    self.assertLess(off, MOVED, name)
