"""What test_resume.py and test_resume_up.py share: a run that was stopped after any of its steps and gone on with is the
run that was never stopped, the same bits in every loss, in the model and in the state at the end, on every mesh, in
every mode. Each file asks it of its strategy.

A run that saves after each step leaves a directory for every place at which it might have been stopped.
"""
import json
import os
import shutil

import checkpoints
import harness


class Resume(checkpoints.Case):
    strategy = None  # a subclass says

    def resumed(self, tp, dp, step, log_too, **more):
        out, log = self.undisturbed(tp, dp, strategy=self.strategy, **more)
        again, path = self.with_only(out, step), self.fresh("log.jsonl")
        if log_too:  # that of a run that had got further
            shutil.copy(log, path)
        result = self.run_with(tp=tp, dp=dp, strategy=self.strategy, out=again, log=path, **more)
        self.assertRegex(result.out, rf"resume +from step {step} in {again}, saved by {tp * dp} ranks")
        found = self.assertSameRun(path, log, 0 if log_too else step)
        told = harness.events(found, "resume")
        self.assertEqual(len(told), 1 if log_too else 0)
        for event in told:  # all that the first line says, of the run as it goes on
            self.assertEqual((event["step"], event["tp"], event["dp"], event["out"]), (step, tp, dp, again))
            self.assertEqual(set(event) - {"step"}, set(harness.events(found, "config")[0]))
        self.assertSameEnd(again, out)
        shutil.rmtree(again)

    def check_mesh(self, tp, dp, steps=(2, 3, 5, 9), **more):
        for step in steps:
            with self.subTest(tp=tp, dp=dp, step=step, **more):
                self.resumed(tp, dp, step, log_too=step % 3 > 0, **more)

    def test_the_run_is_worth_it(self):
        out, path = self.undisturbed(1, 1, strategy=self.strategy)
        log = harness.read_log(path)
        steps = harness.events(log, "step")
        self.assertTrue(any(s["grad_norm"] > 1.5 for s in steps) and any(s["grad_norm"] < 1.5 for s in steps))
        self.assertEqual(len({s["lr"] for s in steps}), self.steps)
        self.assertEqual([v["step"] for v in harness.events(log, "val")], [0, 3, 6, 9, 10])
        self.assertEqual(checkpoints.steps_in(out), list(range(1, 11)))
        self.assertEqual([s["step"] for s in harness.events(log, "save")], list(range(1, 11)))
        states = [checkpoints.assemble(out, step, self.shape) for step in (5, 6)]
        for kind in checkpoints.KINDS:  # nothing stands still
            for name in ("wte", "qkvw", "fcb", "lnfw"):
                self.assertFalse((states[0][kind][name] == states[1][kind][name]).all(), f"{kind} of {name}")

    def test_1x1(self):
        self.check_mesh(1, 1, range(1, checkpoints.STEPS))

    def test_2x1(self):
        self.check_mesh(2, 1)

    def test_1x2(self):
        self.check_mesh(1, 2)

    def test_2x2(self):
        self.check_mesh(2, 2)

    def test_4x1(self):
        self.check_mesh(4, 1)

    def test_other_modes(self):
        self.check_mesh(2, 1, (1, 5), overlap="none")
        self.check_mesh(1, 2, (5, 9), overlap="slice")
        self.check_mesh(2, 2, (5,), overlap="direct:2")

    def test_what_was_written_is_what_would_be_written_again(self):
        """Resumed at step 4, the checkpoints of steps 5 to 9 are the same files."""
        out, _ = self.undisturbed(2, 2, strategy=self.strategy)
        again = self.with_only(out, 4)
        self.run_with(tp=2, dp=2, strategy=self.strategy, out=again, save_every=1, keep=0)
        self.assertEqual(checkpoints.steps_in(again), list(range(4, 11)))
        for step in range(4, 11):
            self.assertTrue(checkpoints.saved_bytes(again, step) == checkpoints.saved_bytes(out, step), step)

    def test_a_run_that_is_done_stays_as_it_is(self):
        out, log = self.undisturbed(2, 1, strategy=self.strategy)
        again, path = self.fresh("out"), self.fresh("log.jsonl")
        shutil.copytree(out, again)
        os.remove(os.path.join(again, "model.bin"))
        shutil.copy(log, path)
        self.run_with(tp=2, dp=1, strategy=self.strategy, out=again, log=path, save_every=1, keep=0)
        self.assertSameRun(path, log)
        self.assertEqual(checkpoints.steps_in(again), list(range(1, 11)))
        self.assertSameEnd(again, out)

    def test_what_is_kept(self):
        for keep, keep_every, kept in (3, 4, [4, 8, 9, 10]), (0, 0, list(range(1, 11))):
            with self.subTest(keep=keep, keep_every=keep_every):
                out = self.fresh("out")
                self.run_with(strategy=self.strategy, out=out, save_every=1, keep=keep, keep_every=keep_every)
                self.assertEqual(checkpoints.steps_in(out), kept)
        out = self.fresh("out")
        self.run_with(strategy=self.strategy, out=out, save_every=4)
        self.assertEqual(checkpoints.steps_in(out), [8, 10])
        out = self.fresh("out")
        self.run_with(strategy=self.strategy, out=out)  # the last step in any case
        self.assertEqual(checkpoints.steps_in(out), [10])
        self.assertEqual(sorted(os.listdir(out)), ["lock", "model.bin", "step_00000010"])

    def test_a_trace(self):
        """Of the steps that are left of it; where none are, it stays as it is."""
        out, _ = self.undisturbed(2, 1, strategy=self.strategy)
        trace = self.fresh("trace.json")
        for step, steps in ((2, [4, 5]), (5, [5]), (6, [5]), (10, [5])):
            with self.subTest(resumed=step):
                self.run_with(tp=2, strategy=self.strategy, out=self.with_only(out, step), trace=trace, trace_steps="4:6")
                with open(trace, encoding="utf-8") as file:
                    found = {event["args"]["step"] for event in json.load(file)["traceEvents"]
                             if event.get("args", {}).get("step", -1) >= 0}
                self.assertEqual(sorted(found), steps)

    def test_a_run_without_out_saves_nothing(self):
        folder = self.fresh("empty")
        os.mkdir(folder)
        result = self.run_with()
        self.assertNotIn("saved", result.out)
