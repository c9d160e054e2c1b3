"""A new optimizer is a file and a row of layers/optimizer/optimizers.h: in a copy of the sources, SGD with momentum trains as numpy
does, is saved, resumed on the same mesh with equal bits and on another, and is listed, predicted and proved by tests that were
not told of it."""
# limit: 300
# quick: none
import pathlib
import re
import shutil

import numpy as np

import checkpoints
import grown
import harness
import reference

ROWS = "layers/optimizer/optimizers.h"
SGD = """// SGD with momentum: m = beta1 m + g; w -= lr (m + decay w)
#pragma once

typedef struct sgd_factors {
    accum scale, momentum, rate, decay;
} sgd_factors;

static inline sgd_factors sgd_factors_of(optimizer_settings s) {
    sgd_factors f = {(accum)s.scale, (accum)s.beta1, (accum)s.lr, (accum)(s.lr * s.weight_decay)};
    return f;
}

FUNCTION void sgd_element(sgd_factors f, accum *w, accum g, accum *m, accum *none) {
    (void)none;
    *m = f.momentum * *m + f.scale * g;
    *w -= f.rate * *m + f.decay * *w;
}
"""
LINES = 60  # that a new optimizer may take
TOOL = "tests/layers/kernels/tool_twins"


def add_row(source):
    text = source.replace('ROW(adamw, 2, "m", "v")', 'ROW(adamw, 2, "m", "v") ROW(sgd, 1, "m")', 1)
    return text.replace('#include "adamw.h"', '#include "adamw.h"\n#include "sgd.h"', 1)


def of_numpy(shape, model, batch, steps, lr, momentum, decay, clip):
    """Losses of SGD by the reference's gradients."""
    losses, m = [], {name: np.zeros_like(w) for name, w in model.items()}
    for _ in range(steps):
        loss, gradients = reference.loss_and_gradients(shape, model, *batch)
        norm = np.sqrt(sum(float((g ** 2).sum()) for g in gradients.values()))
        for name, w in model.items():
            m[name] = momentum * m[name] + gradients[name] * min(1, clip / norm)
            w -= lr * (m[name] + (decay * w if name in reference.DECAYED else 0))
        losses.append(loss)
    return losses


class NewOptimizer(grown.Case):
    OPTIONS = dict(optimizer="sgd", lr=0.3, beta1=0.8, schedule="constant", weight_decay=0.01, clip=1, dtype="fp32", overlap="ring",
                   steps=6, save_every=3, micro_batch=4)

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.grow({"layers/optimizer/sgd.h": lambda _: SGD, ROWS: add_row}, f"{grown.B}/train_gpt", f"{grown.B}/train_gpt_predict_bf16",
                 f"{grown.B}/{TOOL}")

    def trained(self, ranks, out=None, **more):
        out, log = out or self.fresh("out"), self.fresh("log.jsonl")
        self.run_grown(ranks, out=out, log=log, **{**self.OPTIONS, **more})
        return out, [s["loss"] for s in harness.events(harness.read_log(log), "step")]

    def test_it_takes_few_lines_and_one_row(self):
        self.assertLessEqual(self.lines, LINES)

    def test_it_is_told_of(self):
        result = harness.run(["--help"], program=self.program)
        self.assertRegex(result.out, r"--optimizer adamw\|sgd\|muon ")
        state = [float(re.search(r"optimizer state +([0-9.]+)", self.run_grown(optimizer=name, dry_run=True).out)[1])
                 for name in ("adamw", "sgd")]
        self.assertGreater(state[0], 1.5 * state[1])
        shape = dict(model="d6", tp=2, dp=4, micro_batch=4)
        predicted = [harness.run(harness.options(predict="h100x8", optimizer=name, **shape), program=self.program)
                     for name in ("adamw", "sgd")]
        self.assertEqual([one.status for one in predicted], [0, 0], str(predicted))
        self.assertNotEqual(predicted[0].out, predicted[1].out, "less memory is moved")

    def test_it_trains_as_numpy_does(self):
        batch = reference.samples(reference.read_tokens(self.tokens), self.T)
        expected = of_numpy(self.shape, {name: w.copy() for name, w in self.parameters.items()}, batch, 6, 0.3, 0.8, 0.01, 1)
        for ranks, mesh in (1, {}), (2, dict(tp=2)), (4, dict(tp=2, dp=2)):
            with self.subTest(**mesh):
                _, losses = self.trained(ranks, **mesh)
                np.testing.assert_allclose(losses, expected, rtol=1e-5)
        self.assertLess(expected[-1], 0.97 * expected[0])

    def test_it_is_saved_and_resumed(self):
        out, losses = self.trained(2, tp=2)
        self.assertNotIn(b'"v"', checkpoints.read_bytes(checkpoints.directory(out, 3), "rank_00000.safetensors")[:512])
        whole = checkpoints.saved_bytes(out, 6)
        shutil.rmtree(checkpoints.directory(out, 6))
        copies = [shutil.copytree(out, self.fresh("copy")) for _ in range(2)]
        self.assertEqual(self.trained(2, out=out, tp=2)[1], losses[3:])
        self.assertTrue(checkpoints.saved_bytes(out, 6) == whole, "other bits on the same mesh")
        others = [self.trained(2, out=copy, dp=2)[1] for copy in copies]
        self.assertEqual(others[0], others[1])
        self.assertTrue(checkpoints.saved_bytes(copies[0], 6) == checkpoints.saved_bytes(copies[1], 6))
        np.testing.assert_allclose(others[0], losses[3:], rtol=1e-5)

    def test_another_optimizer_needs_force(self):
        out, losses = self.trained(1, steps=3)
        more = {**self.OPTIONS, "optimizer": "adamw", "lr": 1e-3}
        self.assertFails(harness.run(self.arguments(out=out, **more), program=self.program), "--optimizer adamw (the checkpoint: sgd)")
        _, again = self.trained(1, out=out, optimizer="adamw", lr=1e-3, force=True)
        self.assertEqual(len(again), 3)
        self.assertLess(again[0], losses[0], "the weights are the checkpoint's")

    def test_the_tests_prove_it(self):
        """That is: the tool whose outputs they compare writes the new row's."""
        written = self.fresh("twins.bin")
        result = harness.run([written, "--small", "--only", "update"], program=str(self.tree / grown.B / TOOL))
        self.assertEqual(result.status, 0, str(result))
        self.assertIn(b'"sgd_update"', pathlib.Path(written).read_bytes())
