"""reference.py against central differences, closed forms and its own files."""
import dataclasses
import math
import os
import tempfile
import unittest

import numpy as np

import reference
from reference import Shape

SMALL = Shape(maxT=11, V=13, L=2, heads=3, C=12, Vp=16)
LLAMA = Shape(maxT=11, V=13, L=2, heads=4, C=16, Vp=16, KV=4, F=24)
# Keys and values that heads share. In 9 positions the first pair of four turns often, the last ones hardly.
STRETCHED = Shape(maxT=11, V=13, L=2, heads=4, C=32, Vp=16, KV=2, F=20, eps=1e-3, theta=100.0, stretch=(8.0, 1.0, 4.0, 20))


def batch(shape, B, T, seed=5):
    tokens = np.random.default_rng(seed).integers(0, shape.V, B * T + 1)
    return reference.samples(tokens, T)


class Gradients(unittest.TestCase):
    shape, z_loss = SMALL, 0

    def setUp(self):
        self.model = reference.random_model(self.shape, scale=0.3)
        self.inputs, self.targets = batch(self.shape, B=3, T=9)
        _, self.gradients = reference.loss_and_gradients(self.shape, self.model, self.inputs, self.targets, self.z_loss)

    def slope(self, name, direction, h=1e-5):
        def at(distance):
            moved = dict(self.model, **{name: self.model[name] + distance * direction})
            loss, (*_, lse, _) = reference.forward(self.shape, moved, self.inputs, self.targets)
            return loss + self.z_loss * (lse ** 2).mean()
        # Fourth order: the error is about h^4, far below the comparison's tolerance.
        return (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)

    def test_every_tensor_along_random_directions(self):
        random = np.random.default_rng(2)
        for name in self.shape.names():
            for _ in range(4):
                direction = random.normal(size=self.model[name].shape)
                expected = float((self.gradients[name] * direction).sum())
                found = self.slope(name, direction, h=1e-4)
                self.assertLess(abs(found - expected), 1e-7 * max(1, abs(expected)), name)

    def test_single_elements_of_every_tensor(self):
        random = np.random.default_rng(3)
        for name in self.shape.names():
            largest = np.abs(self.gradients[name]).max()
            self.assertGreater(largest, 1e-4, f"{name}: a dead gradient would prove nothing")
            for _ in range(12):
                place = tuple(int(random.integers(n)) for n in self.model[name].shape)
                direction = np.zeros_like(self.model[name])
                direction[place] = 1
                found = self.slope(name, direction, h=1e-3)
                self.assertLess(abs(found - self.gradients[name][place]), 1e-6 * largest + 1e-10, (name, place))

    def test_padding_rows_do_not_matter(self):
        self.assertFalse(self.gradients["wte"][self.shape.V:].any())
        self.assertFalse(self.gradients.get("wpe", np.zeros(9))[9:].any())
        changed = dict(self.model, wte=self.model["wte"].copy())
        changed["wte"][self.shape.V:] = 1e3
        before, after = (reference.forward(self.shape, m, self.inputs, self.targets)[0] for m in (self.model, changed))
        self.assertEqual(before, after)

    def test_attention_is_causal(self):
        changed = self.inputs.copy()
        changed[:, 6:] = (changed[:, 6:] + 1) % self.shape.V
        first = reference.forward(self.shape, self.model, self.inputs, self.targets)[1][3]
        second = reference.forward(self.shape, self.model, changed, self.targets)[1][3]
        self.assertTrue(np.array_equal(first[:, :6], second[:, :6]))
        self.assertFalse(np.array_equal(first[:, 6:], second[:, 6:]))


class GradientsOfZLoss(Gradients):
    z_loss = 0.1


class GradientsOfLlama(Gradients):
    shape = LLAMA


class GradientsOfStretchedLlama(Gradients):
    shape = STRETCHED


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


class Llama(unittest.TestCase):
    """What central differences cannot see: that it is the right function."""

    def test_only_distances_count(self):
        """Rotated keys and queries have scores that depend on the distance of their positions."""
        random, by = np.random.default_rng(4), reference.angles(STRETCHED, 30)
        q, k = random.normal(size=(2, 1, 8))
        scores = reference.rotate(np.repeat(q, 30, 0), by) @ reference.rotate(np.repeat(k, 30, 0), by).T
        for distance in range(30):
            self.assertLess(np.ptp(np.diagonal(scores, distance)), 1e-12)
        self.assertGreater(np.ptp(scores[0]), 0.1)
        quarter = reference.rotate(np.array([[1.0, 0, 0, 0]]), np.array([[math.pi / 2, 0]]))
        np.testing.assert_allclose(quarter, [[0, 0, 1, 0]], atol=1e-15)

    def test_the_stretch(self):
        """Pairs that turn more than `high` times in the original positions are as they were, less than `low` times: by factor."""
        plain = reference.angles(dataclasses.replace(STRETCHED, stretch=(), C=256), 2)[1]
        ratio = reference.angles(dataclasses.replace(STRETCHED, C=256), 2)[1] / plain
        turns = 20 * plain / (2 * math.pi)
        np.testing.assert_allclose(plain, 100.0 ** (-np.arange(32) / 32))
        self.assertFalse((turns > 4).any())
        np.testing.assert_allclose(ratio[turns < 1], 1 / 8)
        np.testing.assert_allclose(ratio[turns > 1], 1 / 8 + (turns[turns > 1] - 1) / 3 * 7 / 8)
        self.assertGreater(len(set(ratio)), 5)

    def test_keys_of_their_own_that_are_equal(self):
        """A head reads the keys and values of its group: repeated, they give the same loss."""
        shared = dataclasses.replace(STRETCHED, stretch=())
        own, model = dataclasses.replace(shared, KV=4), reference.random_model(shared, scale=0.3)
        q, k, v = np.split(model["qkvw"], [32, 48], 1)
        k, v = (x.reshape(2, 2, 1, 8, 32).repeat(2, 2).reshape(2, 32, 32) for x in (k, v))
        data = batch(shared, 3, 9)
        self.assertAlmostEqual(reference.forward(shared, model, *data)[0],
                               reference.forward(own, dict(model, qkvw=np.concatenate([q, k, v], 1)), *data)[0], 13)

    def test_norm_and_activation(self):
        normal = reference.layernorm(np.array([[3.0, 4.0]]), np.array([2.0, 1.0]), eps=0, rms=True)[0]
        np.testing.assert_allclose(normal, [[6 / math.sqrt(12.5), 4 / math.sqrt(12.5)]])
        np.testing.assert_allclose(reference.swiglu(np.array([0.0, 2.0, 5.0, 3.0])), [0, 6 / (1 + math.exp(-2))])


class Files(unittest.TestCase):
    def test_round_trips_of_llama(self):
        for version in reference.FP32, reference.BF16:
            for shape in LLAMA, STRETCHED:
                with tempfile.TemporaryDirectory() as folder:
                    path, model = os.path.join(folder, "file"), reference.random_model(shape)
                    reference.write_model(path, shape, model, version)
                    found, again = reference.read_model(path)
                    self.assertEqual(found, shape)
                    self.assertEqual(list(again), ["wte", "ln1w", "qkvw", "attprojw", "ln2w", "fcw", "fcprojw", "lnfw"])
                    for name, values in model.items():
                        np.testing.assert_allclose(again[name], values, rtol=0 if version == reference.FP32 else 2 ** -8)

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
            reference.write_tokens(path, [1, 128255, 0], 20240801)
            self.assertEqual(reference.read_tokens(path).tolist(), [1, 128255, 0])

    def test_samples(self):
        inputs, targets = reference.samples(np.arange(9), 4)
        self.assertEqual(inputs.tolist(), [[0, 1, 2, 3], [4, 5, 6, 7]])
        self.assertEqual(targets.tolist(), [[1, 2, 3, 4], [5, 6, 7, 8]])
        self.assertEqual(len(reference.samples(np.arange(8), 4)[0]), 1)
