"""Loss and every gradient tensor of the C model against reference.py, on every kind of mesh and schedule.

tool_gradients runs one forward and backward pass over the first B * dp samples of a token file and writes
the gradients, summed over the mesh, as a model file. Each is compared tensor by tensor, so an error in one
bias or one layer cannot hide in a norm over all of them.
"""
# sanitizers: too
# slow: test_more_meshes
# limit: 180
import os
import re
import unittest

import numpy as np

import harness
import reference
import shapes
from reference import Shape

TOLERANCE = 1e-4, 1e-4  # of a tensor's norm, and of its largest element: fp32 against float64

# tp, dp
MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (4, 1)]


STRATEGIES = ("tpsp", "up")


class Gradients(unittest.TestCase):
    program, tolerance, of_loss = harness.GRADIENTS, TOLERANCE, 1e-5

    def prepare(self, shape, T, samples):
        folder = harness.temporary_directory(self)
        self.model, self.tokens, self.out = (os.path.join(folder, name) for name in ("model", "tokens", "gradients"))
        self.shape, self.T = shape, T
        self.parameters = reference.random_model(shape, seed=shape.C)
        tokens = np.random.default_rng(T).integers(0, shape.V, samples * T + 1)
        tokens[:2] = 0, shape.V - 1  # both ends of the vocabulary are in use
        reference.write_model(self.model, shape, self.parameters)
        reference.write_tokens(self.tokens, tokens)
        self.inputs, self.targets = reference.samples(tokens, T)
        self.expected = {}  # by batch: one reference pass serves every schedule

    def gradients(self, B, strategy, tp, dp, overlap, recompute, apart):
        command = [self.model, self.tokens, self.T, B, tp, dp, strategy, overlap, recompute, apart, self.out]
        if os.path.exists(self.out):
            os.remove(self.out)
        result = harness.run(command, ranks=tp * dp, program=self.program)
        self.assertEqual(result.status, 0, str(result))
        return result

    def check(self, B, strategy, tp, dp, overlap, recompute=1):
        with self.subTest(strategy=strategy, tp=tp, dp=dp, overlap=overlap, B=B, recompute=recompute):
            result = self.gradients(B, strategy, tp, dp, overlap, recompute, 0)
            if B * dp not in self.expected:
                batch = self.inputs[:B * dp], self.targets[:B * dp]
                self.expected[B * dp] = reference.loss_and_gradients(self.shape, self.parameters, *batch)
            loss, gradients = self.expected[B * dp]
            printed = re.findall(r"^loss (\S+)$", result.out, re.MULTILINE)
            self.assertEqual(len(printed), 1, str(result))
            self.assertLess(abs(float(printed[0]) - loss), self.of_loss * loss, f"expected loss {loss:.9f}{result}")
            shape, found = reference.read_model(self.out)
            self.assertEqual(shape, self.shape)
            worse = [line for name in self.shape.names()
                     for line in compare(name, found[name], gradients[name], self.tolerance)]
            self.assertFalse(worse, "\n" + "\n".join(worse) + str(result))

    def check_every_schedule(self, *meshes):
        # Matrices of a layer are buckets of their own for two replicas, and share one where owners get few rows.
        self.prepare(Shape(maxT=24, V=101, L=2, heads=12, C=96, Vp=128), T=24, samples=6)
        for strategy in STRATEGIES:
            for tp, dp in meshes:
                for row in harness.schedules("native", "exchanges") if tp * dp > 1 else harness.schedules(name="none"):
                    self.check(3, strategy, tp, dp, row.in_slices(3 if row.kind == "native" else 1))

    def test_every_schedule(self):
        self.check_every_schedule((1, 1), (2, 2), (3, 1))

    def test_more_meshes(self):
        self.check_every_schedule((2, 1), (1, 2), (4, 1))

    def test_other_shape(self):
        # Heads of 10 channels, 20 positions of 29, a vocabulary that no tp divides, one block.
        self.prepare(Shape(maxT=29, V=67, L=1, heads=6, C=60, Vp=67), T=20, samples=4)
        for strategy in STRATEGIES:
            for tp, dp, schedule in ((1, 1, "ring:2"), (2, 1, "ring:2"), (2, 2, "direct:3"), (2, 1, "slice:4"), (1, 2, "none")):
                self.check(2, strategy, tp, dp, schedule)

    def test_nothing_computed_again(self):
        self.prepare(Shape(maxT=24, V=101, L=2, heads=12, C=96, Vp=128), T=24, samples=6)
        for strategy in STRATEGIES:
            for tp, dp in MESHES:
                for schedule in ("none", "ring:2"):
                    self.check(3, strategy, tp, dp, schedule, recompute=0)

    def test_buffers_that_share_memory(self):
        """A weight gradient that moves behind the next use of its factor's memory is silently wrong: model.c's table of buffers."""
        self.prepare(Shape(maxT=24, V=101, L=2, heads=12, C=96, Vp=128), T=24, samples=6)
        self.check_shared_memory((1, 1, 0), (1, 1, 1), (2, 1, 0), (2, 1, 1), (1, 2, 1))

    def check_shared_memory(self, *meshes):
        for strategy in STRATEGIES:
            for tp, dp, recompute in meshes:
                with self.subTest(strategy=strategy, tp=tp, dp=dp, recompute=recompute):
                    found = []
                    for apart in (0, 1):
                        self.gradients(3, strategy, tp, dp, "ring", recompute, apart)
                        found.append(reference.read_model(self.out)[1])
                    differ = [name for name in self.shape.names() if not np.array_equal(found[0][name], found[1][name])]
                    self.assertEqual(differ, [], "these gradients were computed from memory that another buffer had taken")

    # Two heads of queries for each of keys and values. The gates' gradient is written where their input was.
    llama = Shape(maxT=24, V=101, L=2, heads=8, C=96, Vp=128, KV=4, F=144, eps=1e-3, theta=50.0, stretch=(4.0, 1.0, 3.0, 12))

    def test_llama(self):
        self.prepare(self.llama, T=24, samples=6)
        for strategy in STRATEGIES:
            for tp, dp, schedule, recompute in ((1, 1, "none", 0), (1, 1, "none", 1), (2, 1, "ring:2", 0), (2, 1, "slice:3", 1),
                                                (1, 2, "ring", 1), (2, 2, "direct:2", 0), (4, 1, "once", 1)):
                self.check(3, strategy, tp, dp, schedule, recompute)
        self.prepare(Shape(maxT=29, V=67, L=1, heads=6, C=60, Vp=67, KV=6, F=90), T=20, samples=4)
        self.check(2, "tpsp", 2, 1, "ring:2")

    def test_llama_s_buffers_that_share_memory(self):
        self.prepare(self.llama, T=24, samples=3)
        self.check_shared_memory((1, 1, 1), (2, 1, 0), (2, 1, 1))

    def test_large_vocabulary(self):
        # Fewer rows are looked up than the table has: the lookup's gradient travels as rows, straight to their owners.
        self.prepare(Shape(maxT=16, V=1001, L=2, heads=4, C=64, Vp=1024), T=16, samples=8)
        for strategy in STRATEGIES:
            for tp, dp in ((1, 2), (2, 1), (2, 2), (4, 1), (1, 4)):
                for schedule in ("direct", "ring:2"):
                    self.check(2, strategy, tp, dp, schedule)

    def test_more_slices_than_rows(self):
        # Four positions per rank, one sequence, and up to seven slices of them: some slices are empty.
        self.prepare(Shape(maxT=8, V=32, L=3, heads=2, C=16, Vp=64), T=8, samples=1)
        for strategy in STRATEGIES:
            for schedule in ("ring:7", "direct:7", "slice:7"):
                self.check(1, strategy, 2, 1, schedule)


def compare(name, found, expected, tolerance=TOLERANCE):
    """Lines that say where a tensor differs; one for each layer, so that the place can be read off."""
    if not np.isfinite(found).all():
        return [f"{name}: {np.count_nonzero(~np.isfinite(found))} values are not finite"]
    lines = []
    layered = shapes.layered(name)
    for l, (a, b) in enumerate(zip(found, expected) if layered else [(found, expected)]):
        norm = np.linalg.norm(a - b) / np.linalg.norm(b)
        largest = np.abs(a - b).max() / np.abs(b).max()
        if not (norm < tolerance[0] and largest < tolerance[1]):
            at = np.unravel_index(np.abs(a - b).argmax(), a.shape)
            place = f"{name} of layer {l}" if layered else name
            lines.append(f"{place}: relative error {norm:.2e} (norm), {largest:.2e} (largest, "
                         f"at {tuple(int(i) for i in at)}: {a[at]:.6e}, expected {b[at]:.6e})")
    return lines


class Comparison(unittest.TestCase):
    """The comparison itself must be able to fail."""

    def test_sees_one_wrong_element(self):
        right = np.random.default_rng(1).normal(size=(2, 50, 50))
        wrong = right.copy()
        self.assertEqual(compare("fcw", wrong, right), [])
        wrong[1, 3, 4] += 0.01
        self.assertRegex(compare("fcw", wrong, right)[0], r"fcw of layer 1: .*\(3, 4\)")
        wrong[1, 3, 4] = np.nan
        self.assertTrue(compare("fcw", wrong, right))
