"""Ten steps of training are the same ten steps on every mesh, schedule and route, and the right ones.

The token file holds exactly one batch, so that every step sees every sample and the expected losses do not
depend on the order in which the program visits them: reference.py trains the same model on its own. What
the order is, and that it does not depend on the mesh, has a test of its own.

commfuse promises more than agreement: the same bits from run to run and from route to route.
"""
# sanitizers: too
# limit: 240
import json
import os
import sys
import unittest

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import harness
import reference

STEPS = 10
RECIPE = dict(schedule="cosine", lr=3e-3, min_lr=3e-4, warmup=3)
ADAMW = dict(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip=1.0)
BETWEEN_MESHES, TO_REFERENCE = 1e-5, 1e-4  # relative, of every loss

# Odd numbers of heads per rank (tp = 4: 3), T = 40: 10 rows of positions each.
MESHES = [(2, 1), (1, 2), (2, 2), (4, 1)]
NONE, SLICE = dict(overlap="none"), dict(overlap="slice", slices=3)


def commfuse(route, slices):
    return dict(overlap="commfuse", route=route, slices=slices)


class Training(harness.Case):
    T = 40

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.cache = {}
        batch = reference.samples(reference.read_tokens(cls.tokens), cls.T)
        cls.expected_model = {name: w.copy() for name, w in cls.parameters.items()}
        cls.expected = reference.train(cls.shape, cls.expected_model, [batch] * STEPS, **RECIPE, **ADAMW)

    def ten_steps(self, tp, dp, accumulate=1, **more):
        """The log's steps of one run."""
        log, _ = self.train(tp * dp, tp=tp, dp=dp, steps=STEPS, batch=self.samples,
                            micro_batch=self.samples // dp // accumulate, **RECIPE, **ADAMW, **more)
        return harness.events(log, "step")

    def one_rank(self):
        if "one rank" not in self.cache:
            self.cache["one rank"] = self.ten_steps(1, 1, overlap="none")
        return self.cache["one rank"]

    def assertSameTraining(self, steps):
        self.assertEqual(len(steps), STEPS)
        for step, alone, (loss, norm, lr) in zip(steps, self.one_rank(), self.expected):
            where = f"step {step['step']}: {json.dumps(step)}"
            self.assertLess(abs(step["loss"] / alone["loss"] - 1), BETWEEN_MESHES, where)
            self.assertLess(abs(step["loss"] / loss - 1), TO_REFERENCE, f"expected {loss}, {where}")
            self.assertLess(abs(step["grad_norm"] / norm - 1), 10 * TO_REFERENCE, f"expected {norm}, {where}")
            self.assertLess(abs(step["grad_norm"] / alone["grad_norm"] - 1), 100 * BETWEEN_MESHES, where)
            self.assertLess(abs(step["lr"] / lr - 1), 1e-6, f"expected {lr}, {where}")

    def assertSameModel(self, path):
        """The weights have moved as the reference's have. Relative to the movement, not to the weights."""
        shape, found = reference.read_model(path)
        self.assertEqual(shape, self.shape)
        for name in reference.NAMES:
            start, end = self.parameters[name], self.expected_model[name]
            if name == "qkvb":  # keys' biases do not change the loss: what moves them is rounding and AdamW's eps
                C = shape.C
                start, end, found[name] = (np.delete(x, slice(C, 2 * C), axis=1) for x in (start, end, found[name]))
            if name == "wte":  # padding rows: nothing but decay moves them, and nothing reads them
                start, end, found[name] = start[:shape.V], end[:shape.V], found[name][:shape.V]
            moved = np.linalg.norm(end - start)
            self.assertLess(np.linalg.norm(found[name] - end), 0.01 * moved, name)

    def test_learns_at_all(self):
        steps = self.one_rank()
        self.assertLess(steps[-1]["loss"], steps[0]["loss"] - 0.3)
        self.assertTrue(any(norm > ADAMW["clip"] for _, norm, _ in self.expected), "clipping is not exercised")

    def test_one_rank(self):
        self.assertSameTraining(self.one_rank())
        for more in (dict(overlap="none", accumulate=2), SLICE, commfuse("ring", 2)):
            with self.subTest(**more):
                self.assertSameTraining(self.ten_steps(1, 1, **more))

    def test_every_mesh_and_mode(self):
        for tp, dp in MESHES:
            for mode in (dict(NONE, accumulate=2), SLICE, dict(commfuse("ring", 1), accumulate=2)):
                with self.subTest(tp=tp, dp=dp, **mode):
                    self.assertSameTraining(self.ten_steps(tp, dp, **mode))

    def test_commfuse_gives_the_same_bits_by_every_route_and_every_time(self):
        for tp, dp in MESHES:
            for slices, accumulate, threads in ((1, 1, 2 if tp == 2 else 1), (2, 2, 1)):
                bits = []
                for route in ("ring", "ring", "direct") if slices == 1 else ("ring", "direct"):
                    with self.subTest(tp=tp, dp=dp, slices=slices, threads=threads, route=route, run=len(bits)):
                        out = self.fresh("out")
                        steps = self.ten_steps(tp, dp, accumulate, out=out, threads=threads, **commfuse(route, slices))
                        self.assertSameTraining(steps)
                        with open(os.path.join(out, "model.bin"), "rb") as file:
                            bits.append(([(s["loss"], s["grad_norm"]) for s in steps], file.read()))
                        self.assertEqual(bits[0][0], bits[-1][0], "losses differ")
                        self.assertTrue(bits[0][1] == bits[-1][1], "model.bin differs")

    def test_trained_weights(self):
        for tp, dp in ((1, 1), (4, 1), (2, 2)):
            with self.subTest(tp=tp, dp=dp):
                out = self.fresh("out")
                self.ten_steps(tp, dp, out=out, **commfuse("ring", 1))
                self.assertSameModel(os.path.join(out, "model.bin"))

    def test_nowire_says_that_it_is_wrong_and_does_not_save(self):
        log, result = self.train(2, tp=2, overlap="nowire")
        self.assertIn("wrong", result.text.lower(), str(result))
        self.assertEqual(len(harness.events(log, "step")), 3)
        out = self.fresh("out")
        result = harness.run(self.arguments(tp=2, overlap="nowire", out=out), 2)
        self.assertFails(result, "nowire", "--out")
        self.assertFalse(os.path.exists(os.path.join(out, "model.bin")))

    def test_nowire_goes_all_its_way_with_replicas(self):
        for tp, dp, accumulate in ((1, 2, 1), (1, 2, 2), (2, 2, 1)):
            for route in ("ring", "direct"):
                with self.subTest(tp=tp, dp=dp, accumulate=accumulate, route=route):
                    steps = self.ten_steps(tp, dp, accumulate, overlap="nowire", route=route)
                    self.assertEqual([step["step"] for step in steps], list(range(STEPS)))
                    for step in steps:
                        self.assertTrue(step["step_ms"] > 0 and step["mfu"] > 0, step)


class Order(harness.Case):
    """Which samples a step uses depends on seed and step alone."""
    samples = 24

    def losses(self, tp, dp, **more):
        log, _ = self.train(tp * dp, tp=tp, dp=dp, steps=8, batch=4, micro_batch=4 // dp, schedule="constant", lr=1e-4,
                            **more)
        return np.array([step["loss"] for step in harness.events(log, "step")])

    def test_is_the_same_on_every_mesh(self):
        alone = self.losses(1, 1)
        for tp, dp in ((2, 1), (1, 2), (1, 4), (2, 2)):
            np.testing.assert_allclose(self.losses(tp, dp), alone, rtol=BETWEEN_MESHES, err_msg=f"tp {tp} dp {dp}")
        other_seed = self.losses(1, 1, seed=11)
        self.assertGreater(np.abs(other_seed / alone - 1).max(), 1e-3, "the seed does not change the order")

    def test_an_epoch_visits_every_sample_once(self):
        # Without learning, the losses of one epoch average to that of all samples, and the next epoch's too.
        inputs, targets = reference.samples(reference.read_tokens(self.tokens), self.T)
        everything = reference.forward(self.shape, self.parameters, inputs, targets)[0]
        log, _ = self.train(2, dp=2, steps=12, batch=4, micro_batch=2, lr=0)
        losses = np.array([step["loss"] for step in harness.events(log, "step")])
        for epoch in (losses[:6], losses[6:]):
            self.assertAlmostEqual(epoch.mean(), everything, delta=1e-5 * everything)
            self.assertGreater(np.ptp(epoch), 1e-3)
        self.assertFalse(np.allclose(losses[:6], losses[6:], rtol=1e-5), "both epochs have the same order")


class Schedules(harness.Case):
    def test_learning_rates(self):
        for schedule in ("cosine", "linear", "constant", "wsd"):
            with self.subTest(schedule=schedule):
                recipe = dict(schedule=schedule, lr=1e-3, min_lr=1e-4, warmup=3)
                log, _ = self.train(steps=20, batch=1, micro_batch=1, **recipe)
                found = [step["lr"] for step in harness.events(log, "step")]
                expected = [reference.learning_rate(recipe["schedule"], s, 20, 1e-3, 1e-4, 3) for s in range(20)]
                np.testing.assert_allclose(found, expected, rtol=1e-6)


if __name__ == "__main__":
    unittest.main()
