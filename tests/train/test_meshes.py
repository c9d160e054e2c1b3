"""TPSP on every mesh (see meshes.py), and what does not depend on the strategy: order of samples, learning rates."""
# quick: learns 2x2 fewer_rows do_not_save Order Schedules
# sanitizers: too
# limit: 600

import numpy as np

import harness
import meshes
import reference


class Matrix(meshes.Matrix):
    strategy = "tpsp"


class Uneven(meshes.Uneven):
    strategy = "tpsp"


class Few(meshes.Few):
    strategy = "tpsp"


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
            np.testing.assert_allclose(self.losses(tp, dp), alone, meshes.BETWEEN_MESHES, err_msg=f"tp {tp} dp {dp}")
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
        """Of schedules that end with the run, before it, or behind it."""
        for schedule in ("cosine", "linear", "constant", "wsd"):
            for end in (None, 6, 40):
                with self.subTest(schedule=schedule, end=end):
                    log, _ = self.train(steps=10, batch=1, micro_batch=1, schedule=schedule, lr=1e-3, min_lr=1e-4, warmup=3,
                                        decay_steps=end)
                    found = [step["lr"] for step in harness.events(log, "step")]
                    expected = [reference.learning_rate(schedule, s, end or 10, 1e-3, 1e-4, 3) for s in range(10)]
                    np.testing.assert_allclose(found, expected, rtol=1e-6)
