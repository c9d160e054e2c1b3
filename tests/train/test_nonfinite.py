"""--skip-nonfinite N: steps whose loss or gradient is not finite are left out, N in a row and no more, over all starts of
the run.

What blows up is the learning rate with the weight decay: AdamW multiplies weights by 1 - lr * decay, that is by minus nine,
each step. Once too much overflows no step is finite again. What passes is one number on its way between two ranks.
"""
# limit: 120
import os
import re
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import checkpoints
import harness

SKIPS = 4
BLOWN = dict(lr=1, weight_decay=10, min_lr=1, warmup=0, schedule="constant", steps=40, val=None)


class Nonfinite(checkpoints.Case):
    def blown(self, ranks, skips, out, log, **more):
        """(result, steps, skips) of a run that ends by itself, since no step is finite any more."""
        values = self.recipe(tp=ranks, out=out, log=log, skip_nonfinite=skips, **BLOWN, **more)
        result = harness.run(harness.options(**values), ranks)
        self.assertFails(result, "not finite", "--lr")
        log = harness.read_log(log)
        return result, harness.events(log, "step"), harness.events(log, "skip")

    def assertNamed(self, result, step):
        """What is said at the end: step, rank, tensor."""
        self.assertRegex(result.err, rf"error: rank 0 of \d \(.*\): step {step}: loss \S+, gradient norm \S+: (?:the gradient "
                                     r"of \w+(?: of layer \d)? on rank \d is not finite|not finite, though)")

    def test_ends_at_once_by_itself(self):
        out = self.fresh("out")
        result, steps, skips = self.blown(2, 0, out, self.fresh("log.jsonl"))
        self.assertEqual(skips, [])
        self.assertGreater(len(steps), 2)
        self.assertTrue(all(s["loss"] is not None for s in steps))
        self.assertNamed(result, len(steps))
        self.assertEqual(checkpoints.steps_in(out, killed=True), [])
        self.assertFalse(os.path.exists(os.path.join(out, "model.bin")))

    def test_skips_as_many_as_it_may(self):
        for ranks in (1, 2):
            with self.subTest(ranks=ranks):
                out, log = self.fresh("out"), self.fresh("log.jsonl")
                result, steps, skips = self.blown(ranks, SKIPS, out, log, save_every=1, keep=0)
                first = len(steps) - SKIPS
                self.assertEqual([s["step"] for s in steps], list(range(len(steps))))
                self.assertEqual([s["step"] for s in skips], list(range(first, first + SKIPS)))
                self.assertEqual([s["in_a_row"] for s in skips], list(range(1, SKIPS + 1)))
                self.assertTrue(all(re.fullmatch(r"\w+( of layer \d)?|the loss alone", s["tensor"]) for s in skips), skips)
                self.assertNamed(result, len(steps))
                self.assertEqual(result.out.count("  skipped: "), SKIPS, str(result))
                self.assertFalse(os.path.exists(os.path.join(out, "model.bin")))
                # Steps that are left out change nothing: the state stays that of before.
                saved = checkpoints.steps_in(out, killed=True)
                self.assertGreaterEqual(saved[-1], first + SKIPS - 1)
                states = [checkpoints.saved_bytes(out, step) for step in saved if step >= first]
                self.assertTrue(all(state == states[0] for state in states))
                self.assertFalse(checkpoints.saved_bytes(out, first - 1) == states[0])

    def test_counts_over_all_starts(self):
        """Gone on with behind two skips, only the others are left."""
        out, log = self.fresh("out"), self.fresh("log.jsonl")
        _, steps, skips = self.blown(2, SKIPS, out, log, save_every=1, keep=0)
        first = skips[0]["step"]
        for step in range(first, first + SKIPS):
            if step not in checkpoints.steps_in(out, killed=True):
                continue
            with self.subTest(skipped=step - first):
                again, path = self.with_only(out, step), self.fresh("log.jsonl")
                shutil.copy(log, path)
                result, steps_again, skips_again = self.blown(2, SKIPS, again, path)
                self.assertEqual([(s["step"], s["in_a_row"]) for s in skips_again],
                                 [(s["step"], s["in_a_row"]) for s in skips])
                self.assertEqual(len(steps_again), len(steps))
                self.assertNamed(result, len(steps))

    def test_more_may_be_allowed_later(self):
        """It is no option that changes the run."""
        out, log = self.fresh("out"), self.fresh("log.jsonl")
        _, steps, _ = self.blown(1, SKIPS, out, log, save_every=1)
        _, again, skips = self.blown(1, SKIPS + 3, out, log, save_every=1)
        self.assertEqual(len(again), len(steps) + 3)
        self.assertEqual([s["in_a_row"] for s in skips], list(range(1, SKIPS + 4)))


@unittest.skipUnless(shutil.which("mpicc"), "no mpicc")
class Transient(checkpoints.Case):
    """One activation that a rank sends in one step becomes a NaN (preload_wire.c)."""
    AT = 5

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.shim = cls.path("preload_wire.so")
        subprocess.run(["mpicc", "-std=gnu11", "-O1", "-shared", "-fPIC", "-o", cls.shim,
                        os.path.join(harness.ROOT, "tests/train/preload_wire.c")], check=True)

    def run_over(self, wire, **values):
        wire = dict(LD_PRELOAD=self.shim, WIRE_RANK=1, WIRE_BYTES=256, WIRE_BIT=32 * 17, WIRE_NAN=1) | wire
        values = dict(schedule="constant", val=None) | values
        wrapper = ["env", *(f"{name}={value}" for name, value in wire.items())]
        started = self.start(tp=2, wrapper=wrapper, **values)
        return started.wait()

    def spoiled_send(self):
        """The number of an early send of step AT: those of the steps before, and the second."""
        result = self.run_over({}, steps=self.AT)
        return int(re.search(r"wire: (\d+) sends", result.err)[1]) + 2

    def test_is_left_out(self):
        nth, out, log = self.spoiled_send(), self.fresh("out"), self.fresh("log.jsonl")
        result = self.run_over(dict(WIRE_NTH=nth), out=out, log=log, save_every=1, keep=0, skip_nonfinite=1)
        self.assertEqual(result.status, 0, str(result))
        self.assertIn("is spoiled", result.err)
        log = harness.read_log(log)
        self.assertWhole(log)
        skip, = harness.events(log, "skip")
        self.assertEqual((skip["step"], skip["in_a_row"]), (self.AT, 1))
        losses = [s["loss"] for s in harness.events(log, "step")]
        self.assertIsNone(losses[self.AT])
        self.assertTrue(all(loss is not None for step, loss in enumerate(losses) if step != self.AT), losses)
        # Nothing but the count has changed in that step; and the next one sets it back.
        at = [checkpoints.saved_bytes(out, step) for step in (self.AT, self.AT + 1, self.AT + 2)]
        self.assertTrue(at[0] == at[1] and at[1] != at[2])
        self.assertEqual([checkpoints.manifest(out, step)["options"]["skipped"] for step in range(self.AT, self.AT + 3)],
                         ["0", "1", "0"])
        # Gone on with from behind it, the run is the same.
        again = self.with_only(out, self.AT + 1)
        self.run_with(tp=2, schedule="constant", val=None, out=again)
        self.assertSameEnd(again, out)

    def test_ends_the_run_where_none_may_be_left_out(self):
        nth, out = self.spoiled_send(), self.fresh("out")
        result = self.run_over(dict(WIRE_NTH=nth), out=out, save_every=1, keep=0)
        self.assertFails(result, f"step {self.AT}: ", "--skip-nonfinite")
        # It spoils the gradients of both ranks: the first one is named.
        self.assertRegex(result.err, r"the gradient of \w+(?: of layer \d)? on rank 0 is not finite")
        self.assertFalse(os.path.exists(os.path.join(out, "model.bin")))
        result = self.run_with(tp=2, schedule="constant", val=None, out=out)  # it was transient
        self.assertRegex(result.out, rf"resume    from step [{self.AT - 1}{self.AT}] ")
        self.assertSameEnd(out, self.undisturbed(2, 1, schedule="constant", val=None)[0])


if __name__ == "__main__":
    unittest.main()
