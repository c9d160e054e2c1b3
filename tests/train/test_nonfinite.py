"""A loss or gradient that is not finite ends the run, which the same command continues.

What blows up is the learning rate with the weight decay: AdamW multiplies weights by 1 - lr * decay, that is by minus nine,
each step. Once too much overflows no step is finite again. What passes is one number on its way between two ranks.
"""
# limit: 120
import os
import re
import shutil
import subprocess
import unittest

import checkpoints
import harness

BLOWN = dict(lr=1, weight_decay=10, min_lr=1, warmup=0, schedule="constant", steps=40, val=None)


class Nonfinite(checkpoints.Case):
    def test_ends_by_itself(self):
        """What is said at the end: step, rank, tensor."""
        out, log = self.fresh("out"), self.fresh("log.jsonl")
        result = harness.run(harness.options(**self.recipe(tp=2, out=out, log=log, **BLOWN)), 2)
        steps = harness.events(harness.read_log(log), "step")
        step = len(steps)
        self.assertFails(result, "not finite", "--lr", f"hint:  --skip-steps {step}:{step + 1} ")
        self.assertRegex(result.err, rf"error: rank 0 of \d \(.*\): step {step}: loss \S+, gradient norm \S+: (?:the gradient "
                                     r"of \w+(?: of layer \d)? on rank \d is not finite|not finite, though)")
        self.assertGreater(len(steps), 2)
        self.assertTrue(all(s["loss"] is not None for s in steps))
        self.assertEqual(checkpoints.steps_in(out, killed=True), [])
        self.assertFalse(os.path.exists(os.path.join(out, "model.bin")))


    def test_a_resume_that_ends_again_names_what_to_leave_out(self):
        """And the option it names is taken by the same command, without --force."""
        out, skip = self.fresh("out"), None
        for times in range(3):
            result = harness.run(harness.options(**self.recipe(out=out, save_every=1, skip_steps=skip, **BLOWN)))
            self.assertFails(result, "not finite", "--skip-steps")
            step, = re.findall(r": step (\d+): loss", result.err)
            named, = re.findall(r"hint:  --skip-steps (\S+) ", result.err)
            step = int(step) + times
            self.assertEqual(named, f"{skip + ',' if skip else ''}{step}:{step + 1}")
            self.assertEqual("resume    from step" in result.out, times > 0, str(result))
            skip = named
        result = harness.run(harness.options(**self.recipe(skip_steps="0:1,90:91,95:99", **BLOWN)))  # among later ones
        step, = re.findall(r": step (\d+): loss", result.err)
        self.assertIn(f"hint:  --skip-steps 0:1,{int(step) + 1}:{int(step) + 2},90:91,95:99 ", result.err)


@unittest.skipUnless(shutil.which("mpicc"), "no mpicc")
class Transient(checkpoints.Case):
    """One activation that a rank sends in one step becomes a NaN (preload_wire.c)."""
    AT = 5
    RECIPE = dict(schedule="constant", val=None, overlap="ring")  # whose exchanges are sends

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.shim = cls.path("preload_wire.so")
        subprocess.run(["mpicc", "-std=gnu11", "-O1", "-shared", "-fPIC", "-o", cls.shim,
                        os.path.join(harness.ROOT, "tests/train/preload_wire.c")], check=True)

    def run_over(self, wire, tp=2, **values):
        wire = dict(LD_PRELOAD=self.shim, WIRE_RANK=1, WIRE_BYTES=256, WIRE_BIT=32 * 17, WIRE_NAN=1) | wire
        values = self.RECIPE | values
        wrapper = ["env", *(f"{name}={value}" for name, value in wire.items())]
        started = self.start(tp=tp, wrapper=wrapper, **values)
        return started.wait()

    def spoiled_send(self):
        """The number of an early send of step AT: those of the steps before, and the second."""
        result = self.run_over({}, steps=self.AT)
        return int(re.search(r"wire: (\d+) sends", result.err)[1]) + 2

    def test_names_the_rank(self):
        """That owns the part of the gradient which was spoiled on its way."""
        result = self.run_over(dict(WIRE_RANK=0, WIRE_NTH=1), tp=1, dp=2, overlap="auto")
        self.assertFails(result, "step 0: ", "--lr")
        self.assertRegex(result.err, r"the gradient of \w+ of layer 1 on rank 1 is not finite")

    def test_ends_the_run(self):
        nth, out = self.spoiled_send(), self.fresh("out")
        result = self.run_over(dict(WIRE_NTH=nth), out=out, save_every=1, keep=0)
        self.assertFails(result, f"step {self.AT}: ", "--lr")
        # It spoils the gradients of both ranks: the first one is named.
        self.assertRegex(result.err, r"the gradient of \w+(?: of layer \d)? on rank 0 is not finite")
        self.assertFalse(os.path.exists(os.path.join(out, "model.bin")))
        result = self.run_with(tp=2, out=out, **self.RECIPE)  # it was transient
        self.assertRegex(result.out, rf"resume    from step [{self.AT - 1}{self.AT}] ")
        self.assertSameEnd(out, self.undisturbed(2, 1, **self.RECIPE)[0])
