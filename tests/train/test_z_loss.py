"""--z-loss: gradients of the squared log-sum-exp of the logits too, as the reference's are; the loss that is printed stays."""
# limit: 120

import harness
import itertools
import reference

# A rank that has the whole vocabulary computes it in one pass, others in two.
MESHES = (1, dict()), (2, dict(tp=2)), (4, dict(tp=2, dp=2, micro_batch=2)), (2, dict(tp=2, strategy="up"))
RECIPE = dict(schedule="constant", lr=3e-3, steps=6)


class ZLoss(harness.Case):
    def expected(self, **more):
        batch = reference.samples(reference.read_tokens(self.tokens), self.T)
        model = {name: w.copy() for name, w in self.parameters.items()}
        return reference.train(self.shape, model, [batch] * RECIPE["steps"], schedule="constant", lr=RECIPE["lr"], **more)

    def test_losses_and_norms_are_the_references(self):
        expected, plain = self.expected(z_loss=0.05), self.expected()
        self.assertGreater(abs(expected[0][1] / plain[0][1] - 1), 0.01)
        self.assertGreater(abs(expected[-1][0] / plain[-1][0] - 1), 1e-3)
        self.assertEqual(expected[0][0], plain[0][0])
        for ranks, mesh in MESHES:
            with self.subTest(**mesh):
                log, _ = self.train(ranks, z_loss=0.05, **RECIPE | mesh)
                for step, (loss, norm, _) in itertools.zip_longest(harness.events(log, "step"), expected):
                    self.assertLess(abs(step["loss"] / loss - 1), 1e-5, step)
                    self.assertLess(abs(step["grad_norm"] / norm - 1), 1e-4, step)

    def test_a_resume_keeps_to_it(self):
        out = self.fresh("out")
        self.train(out=out, z_loss=0.05, **RECIPE)
        result = harness.run(self.arguments(out=out, z_loss=0.1, **RECIPE))
        self.assertFails(result, "would be changed by: --z-loss 0.1 (the checkpoint: 0.05)")
