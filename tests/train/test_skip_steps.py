"""--skip-steps leaves out the data of some steps, alike on every mesh and after a resume."""
# limit: 180
import itertools
import shutil

import checkpoints
import harness

SKIP = "2:4,6:7"
TAKEN = [0, 1, 4, 5, 7, 8, 9, 10, 11, 12]  # the steps whose data ten steps then take
MESHES = dict(), dict(tp=2), dict(dp=2), dict(tp=2, strategy="up")


class SkipSteps(checkpoints.Case):
    RECIPE = dict(overlap="ring")

    def steps_of(self, log, *fields):
        return [tuple(step[field] for field in fields) for step in harness.events(harness.read_log(log), "step")]

    def logged(self, **values):
        log = self.fresh("log.jsonl")
        self.run_with(log=log, **self.RECIPE | values)
        return log

    def test_later_data_is_taken(self):
        """With weights that stay the same a loss tells which."""
        for mesh in MESHES:
            with self.subTest(**mesh):
                still = dict(lr=0, min_lr=0, weight_decay=0, schedule="constant", **mesh)
                every = self.steps_of(self.logged(steps=TAKEN[-1] + 1, **still), "loss")
                self.assertEqual(len(set(every)), len(every))
                self.assertEqual(self.steps_of(self.logged(skip_steps=SKIP, **still), "loss"), [every[step] for step in TAKEN])

    def test_steps_and_learning_rates_go_on(self):
        self.assertEqual(self.steps_of(self.logged(skip_steps=SKIP), "step", "lr"), self.steps_of(self.logged(), "step", "lr"))

    def test_a_resumed_run_keeps_it(self):
        """On its mesh to the last bit, on another to 1e-5: without the option, and with it."""
        whole, log = self.undisturbed(2, 1, skip_steps=SKIP, **self.RECIPE)
        for mesh in dict(tp=2), dict(dp=2):
            for skip in None, SKIP:
                for step in 1, 5:
                    with self.subTest(**mesh, skip=skip, step=step):
                        out, copy = self.with_only(whole, step), self.fresh("log.jsonl")
                        shutil.copy(log, copy)
                        self.run_with(out=out, log=copy, skip_steps=skip, **self.RECIPE | mesh)
                        self.assertEqual(harness.events(harness.read_log(copy), "resume")[0]["skip-steps"], SKIP)
                        if "tp" in mesh:
                            self.assertSameRun(copy, log)
                            self.assertSameEnd(out, whole)
                        for (found,), (wanted,) in itertools.zip_longest(self.steps_of(copy, "loss"), self.steps_of(log, "loss")):
                            self.assertAlmostEqual(found, wanted, delta=1e-5 * wanted)

    def test_what_a_resume_may_add(self):
        plain, _ = self.undisturbed(1, 1, **self.RECIPE)
        skipped, _ = self.undisturbed(2, 1, skip_steps=SKIP, **self.RECIPE)
        later, _ = self.undisturbed(1, 1, skip_steps="40:50", **self.RECIPE)
        for whole, saved, step, skip, taken in (
                (later, "40:50", 3, "3:4,40:50", True), (later, "40:50", 3, "2:4,40:50", False), (later, "40:50", 3, "40:60", True),
                (plain, "none", 3, "3:4", True), (plain, "none", 3, "2:4", False), (plain, "none", 3, "1:2", False),
                (skipped, SKIP, 5, SKIP + ",8:9", True), (skipped, SKIP, 5, SKIP + ",7:8", False), (skipped, SKIP, 5, "2:4", False),
                (skipped, SKIP, 5, "2:3,6:7", False), (skipped, SKIP, 5, "1:4,6:7", False)):
            with self.subTest(saved=saved, skip=skip):
                values = dict(out=self.with_only(whole, step), skip_steps=skip, **self.RECIPE)
                result = self.run_with(**values, status=0 if taken else 1)
                if not taken:
                    self.assertFails(result, f"would be changed by: --skip-steps {skip} (the checkpoint: {saved})")
                    self.run_with(force=True, **values)

    def test_lists_that_are_refused(self):
        for skip in "3", "3:3", "4:3", "3:4,", "3:4,2:3", "3:5,4:6", "3:4;5:6", "-1:2", "3:4:5", "1:1000000001", "3:4,,5:6":
            with self.subTest(skip=skip):
                self.assertFails(self.run_with(status=1, skip_steps=skip), f"--skip-steps '{skip}' is not A:B,C:D with whole numbers")
