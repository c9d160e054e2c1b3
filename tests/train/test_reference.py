"""reference.py against central differences, closed forms and its own files."""
import math
import os
import sys
import tempfile
import unittest

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import reference
from reference import Shape

SMALL = Shape(maxT=11, V=13, L=2, heads=3, C=12, Vp=16)


def batch(shape, B, T, seed=5):
    tokens = np.random.default_rng(seed).integers(0, shape.V, B * T + 1)
    return reference.samples(tokens, T)


class Gradients(unittest.TestCase):
    def setUp(self):
        self.model = reference.random_model(SMALL, scale=0.3)
        self.inputs, self.targets = batch(SMALL, B=3, T=9)
        _, self.gradients = reference.loss_and_gradients(SMALL, self.model, self.inputs, self.targets)

    def slope(self, name, direction, h=1e-5):
        def at(distance):
            moved = dict(self.model, **{name: self.model[name] + distance * direction})
            return reference.forward(SMALL, moved, self.inputs, self.targets)[0]
        # Fourth order: the error is about h^4, far below the comparison's tolerance.
        return (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)

    def test_every_tensor_along_random_directions(self):
        random = np.random.default_rng(2)
        for name in reference.NAMES:
            for _ in range(4):
                direction = random.normal(size=self.model[name].shape)
                expected = float((self.gradients[name] * direction).sum())
                found = self.slope(name, direction, h=2e-4)
                self.assertLess(abs(found - expected), 1e-7 * max(1, abs(expected)), name)

    def test_single_elements_of_every_tensor(self):
        random = np.random.default_rng(3)
        for name in reference.NAMES:
            largest = np.abs(self.gradients[name]).max()
            self.assertGreater(largest, 1e-4, f"{name}: a dead gradient would prove nothing")
            for _ in range(12):
                place = tuple(int(random.integers(n)) for n in self.model[name].shape)
                direction = np.zeros_like(self.model[name])
                direction[place] = 1
                found = self.slope(name, direction, h=1e-3)
                self.assertLess(abs(found - self.gradients[name][place]), 1e-6 * largest + 1e-10, (name, place))

    def test_padding_rows_do_not_matter(self):
        self.assertFalse(self.gradients["wte"][SMALL.V:].any())
        self.assertFalse(self.gradients["wpe"][9:].any())
        changed = dict(self.model, wte=self.model["wte"].copy())
        changed["wte"][SMALL.V:] = 1e3
        before, after = (reference.forward(SMALL, m, self.inputs, self.targets)[0] for m in (self.model, changed))
        self.assertEqual(before, after)

    def test_attention_is_causal(self):
        changed = self.inputs.copy()
        changed[:, 6:] = (changed[:, 6:] + 1) % SMALL.V
        first = reference.forward(SMALL, self.model, self.inputs, self.targets)[1][3]
        second = reference.forward(SMALL, self.model, changed, self.targets)[1][3]
        self.assertTrue(np.array_equal(first[:, :6], second[:, :6]))
        self.assertFalse(np.array_equal(first[:, 6:], second[:, 6:]))


class ClosedForms(unittest.TestCase):
    def test_zero_head_gives_uniform_loss(self):
        model = reference.random_model(SMALL)
        model["wte"][:] = 0
        self.assertAlmostEqual(reference.forward(SMALL, model, *batch(SMALL, 2, 5))[0], math.log(SMALL.V), 12)

    def test_first_adamw_step_moves_by_lr(self):
        # With bias correction and eps far below |g|, step one is lr * sign(g), plus decay.
        model = {name: np.array([1.0, -2.0]) for name in ("qkvw", "qkvb")}
        gradients = {name: np.array([0.3, -0.1]) for name in model}
        norm = reference.AdamW(model, eps=0, weight_decay=0.5, clip=0).update(model, gradients, lr=0.01)
        self.assertAlmostEqual(norm, math.sqrt(0.2), 12)
        np.testing.assert_allclose(model["qkvb"], [0.99, -1.99], rtol=1e-12)
        np.testing.assert_allclose(model["qkvw"], [0.99 - 0.005, -1.99 + 0.01], rtol=1e-12)

    def test_clip_bounds_the_norm(self):
        model = {"lnfw": np.zeros(2)}
        optimizer = reference.AdamW(model, clip=1.0)
        self.assertAlmostEqual(optimizer.update(model, {"lnfw": np.array([30.0, 40.0])}, lr=0.1), 50)
        np.testing.assert_allclose(optimizer.m["lnfw"], 0.1 * np.array([0.6, 0.8]), rtol=1e-12)

    def test_schedules(self):
        def rates(schedule):
            return [reference.learning_rate(schedule, s, 20, 1.0, 0.1, 4) for s in range(20)]
        for schedule in ("cosine", "linear", "constant", "wsd"):
            found = rates(schedule)
            np.testing.assert_allclose(found[:4], [0.25, 0.5, 0.75, 1.0])
            self.assertEqual(found[4], 1.0)
            self.assertTrue(all(a >= b for a, b in zip(found[4:], found[5:])), schedule)
        self.assertAlmostEqual(rates("cosine")[12], 0.55)
        self.assertAlmostEqual(rates("linear")[12], 0.55)
        self.assertEqual(rates("wsd")[15], 1.0)
        self.assertAlmostEqual(rates("wsd")[17], 0.1 + 0.9 * 0.5)

    def test_training_learns(self):
        model = reference.random_model(SMALL)
        history = reference.train(SMALL, model, [batch(SMALL, 3, 9)] * 30, lr=1e-2)
        self.assertLess(history[-1][0], 0.7 * history[0][0])


class Files(unittest.TestCase):
    def test_round_trips(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "file")
            model = reference.random_model(SMALL)
            reference.write_model(path, SMALL, model)
            shape, again = reference.read_model(path)
            self.assertEqual(shape, SMALL)
            self.assertTrue(all(np.array_equal(model[name], again[name]) for name in reference.NAMES))
            reference.write_model(path, SMALL, model, version=reference.BF16)
            rounded = reference.read_model(path)[1]
            for name in reference.NAMES:
                np.testing.assert_allclose(rounded[name], model[name], rtol=2 ** -8)
            reference.write_tokens(path, [1, 65535, 0])
            self.assertEqual(reference.read_tokens(path).tolist(), [1, 65535, 0])

    def test_samples(self):
        inputs, targets = reference.samples(np.arange(9), 4)
        self.assertEqual(inputs.tolist(), [[0, 1, 2, 3], [4, 5, 6, 7]])
        self.assertEqual(targets.tolist(), [[1, 2, 3, 4], [5, 6, 7, 8]])
        self.assertEqual(len(reference.samples(np.arange(8), 4)[0]), 1)


if __name__ == "__main__":
    unittest.main()
