"""A checkpoint of any mesh and strategy is gone on with on any other: a hundred pairs, two more steps each.

That weights and moments arrive bit by bit is tests/layers/test_state.c's; here the whole program goes the whole way, and
the two steps must be those of the run that was never stopped: loss, and at the end weights and both moments of the
whole model, put together from the ranks' files by a reader of the test's own. On the same mesh they are the same bits.
"""
# quick: from_tpsp_2x2 from_up_4x1
# limit: 300
import shutil

import numpy as np

import checkpoints
import harness

AT = 8
OF_LOSS, OF_STATE = 1e-5, 2e-4  # relative; state: of a tensor's norm


class Reshard(checkpoints.Case):
    def losses(self, log):
        return np.array([s["loss"] for s in harness.events(harness.read_log(log), "step") if s["step"] >= AT])

    def assertSameState(self, out, expected):
        """Of the change since step AT, what another order of additions may move."""
        found, wanted, before = (checkpoints.assemble(*which, self.shape)
                                 for which in ((out, self.steps), (expected, self.steps), (expected, AT)))
        for kind in checkpoints.KINDS:
            for name, values in wanted[kind].items():
                with self.subTest(kind=kind, tensor=name):
                    ours = found[kind][name]
                    if name == "qkvb":  # keys' biases do not change the loss: what moves them is rounding
                        values, ours = (np.delete(x, slice(self.shape.C, 2 * self.shape.C), axis=1)
                                        for x in (values, ours))
                    self.assertTrue(np.isfinite(ours).all())
                    self.assertLess(np.linalg.norm(ours - values), OF_STATE * np.linalg.norm(values))
                    self.assertFalse((wanted[kind][name] == before[kind][name]).all(), "nothing has moved")

    def check_from(self, strategy, tp, dp):
        out, log = self.undisturbed(tp, dp, strategy=strategy, save_every=AT)
        self.assertEqual(checkpoints.steps_in(out), [AT, self.steps])
        for new_strategy in ("tpsp", "up"):
            for new_tp, new_dp in checkpoints.MESHES:
                with self.subTest(saved=(strategy, tp, dp), resumed=(new_strategy, new_tp, new_dp)):
                    again, path = self.with_only(out, AT), self.fresh("log.jsonl")
                    result = self.run_with(strategy=new_strategy, tp=new_tp, dp=new_dp, out=again, log=path)
                    self.assertRegex(result.out, rf"from step {AT} .* saved by {tp * dp} ranks \({strategy}, "
                                                 rf"tp {tp} x dp {dp}, ")
                    self.assertEqual(checkpoints.manifest(again, self.steps)["ranks"], new_tp * new_dp)
                    if (strategy, tp, dp) == (new_strategy, new_tp, new_dp):
                        self.assertSameRun(path, log, AT)
                        self.assertSameEnd(again, out)
                    self.assertLess(np.abs(self.losses(path) / self.losses(log) - 1).max(), OF_LOSS)
                    self.assertSameState(again, out)
                    shutil.rmtree(again)

    def test_from_tpsp_2x2(self):
        self.check_from("tpsp", 2, 2)

    def test_from_up_4x1(self):
        self.check_from("up", 4, 1)

    def test_from_any_other(self):
        for strategy in ("tpsp", "up"):
            for tp, dp in checkpoints.MESHES:
                if (strategy, tp, dp) not in (("tpsp", 2, 2), ("up", 4, 1)):
                    self.check_from(strategy, tp, dp)
