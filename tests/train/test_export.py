"""--export: the model of any checkpoint that is kept, as the run would have written it had it ended there, by any number
of ranks, on whatever mesh it was saved.
"""
# limit: 120
import os
import shutil

import checkpoints
import harness
import reference

CONSTANT = dict(schedule="constant")  # a run of fewer steps takes the same ones


class Export(checkpoints.Case):
    def export(self, out, step=None, ranks=1, status=0, file=None, **more):
        """The bytes of a model file that is made with nothing but the directory."""
        file = file or self.fresh("model.bin")
        result = harness.run(harness.options(out=out, export=file, export_step=step, threads=1, timeout=30, **more), ranks)
        self.assertEqual(result.status, status, str(result))
        return checkpoints.read_bytes(file) if status == 0 else result

    def test_every_checkpoint_by_one_rank_and_by_two(self):
        for strategy, tp, dp in (("tpsp", 2, 1), ("up", 1, 2)):
            out, _ = self.undisturbed(tp, dp, strategy=strategy, **CONSTANT)
            for step in (1, 4, 7):
                with self.subTest(strategy=strategy, step=step):
                    ended = self.fresh("out")
                    self.run_with(tp=tp, dp=dp, strategy=strategy, out=ended, steps=step, **CONSTANT)
                    wanted = checkpoints.read_bytes(ended, "model.bin")
                    self.assertTrue(self.export(out, step) == wanted, "by one rank")
                    self.assertTrue(self.export(out, step, 2, tp=2) == wanted, "by tp 2")
                    self.assertTrue(self.export(out, step, 2, dp=2, strategy="up") == wanted, "by dp 2")

    def test_the_last_one_is_the_model(self):
        out, _ = self.undisturbed(2, 1, strategy="tpsp", **CONSTANT)
        before = sorted(os.listdir(out)), checkpoints.saved_bytes(out, self.steps)
        wanted = checkpoints.read_bytes(out, "model.bin")
        for values in (dict(), dict(step=self.steps), dict(ranks=4, tp=4), dict(ranks=4, tp=2, dp=2, strategy="up")):
            with self.subTest(**values):
                self.assertTrue(self.export(out, **values) == wanted)
        self.assertEqual((sorted(os.listdir(out)), checkpoints.saved_bytes(out, self.steps)), before)
        file = self.path("exported.bin")
        self.export(out, 4, file=file)
        shape, model = reference.read_model(file)
        self.assertEqual(shape, self.shape)
        state = checkpoints.assemble(out, 4, self.shape)["weight"]
        for name in reference.NAMES:
            self.assertTrue((model[name] == state[name]).all(), name)

    def test_shapes_with_odd_numbers(self):
        """Positions that do not divide among ranks, a vocabulary padded to another number than this program's own."""
        shape = reference.Shape(maxT=45, V=101, L=1, heads=4, C=32, Vp=103)
        file = self.path("odd.bin")
        reference.write_model(file, shape, reference.random_model(shape))
        out = self.fresh("out")
        self.run_with(init_from=file, out=out, steps=2)
        wanted = checkpoints.read_bytes(out, "model.bin")
        for values in (dict(), dict(ranks=2, tp=2), dict(ranks=2, tp=2, strategy="up"), dict(ranks=2, dp=2)):
            with self.subTest(**values):
                self.assertTrue(self.export(out, **values) == wanted)

    def test_beside_a_run(self):
        """It takes no lock, and waits for nobody."""
        out = self.fresh("out")
        started = self.start(out=out, save_every=50, keep=0, steps=100000, val=None)
        harness.wait_until(lambda: started.ended() or checkpoints.newest(out) >= 50, 30, "a checkpoint")
        first = self.export(out, 50)
        self.assertFalse(started.ended(), str(started.result()))
        self.assertTrue(self.export(out, 50) == first)
        started.kill()

    def test_what_another_has_left(self):
        """What an export that was killed has left is no hindrance, and goes."""
        out, _ = self.undisturbed(2, 1, strategy="tpsp", **CONSTANT)
        folder = self.fresh("folder")
        os.mkdir(folder)
        file = os.path.join(folder, "model.bin")
        with open(f"{file}.tmp.0123456789abcdef", "wb") as other:
            other.write(b"half a model")
        self.assertTrue(self.export(out, file=file) == checkpoints.read_bytes(out, "model.bin"))
        self.assertEqual(os.listdir(folder), ["model.bin"])

    def test_refusals(self):
        out = self.with_only(self.undisturbed(2, 1, strategy="tpsp", **CONSTANT)[0], 4, 7)
        self.assertFails(self.export(out, 5, status=1), "--export-step 5", out)
        self.assertFails(self.export(self.fresh("nowhere"), status=1), "no sound checkpoint")
        self.assertFails(self.export(out, 7, status=1, file=self.path("nowhere/model.bin")), "nowhere/model.bin")
        self.assertFails(self.export(out, 7, status=1, file="/dev/null"), "/dev/null", "not a regular file")
        checkpoints.damage(os.path.join(checkpoints.directory(out, 7), "rank_00001.safetensors"), 0.5)
        file = self.fresh("model.bin")
        for values in (dict(step=7), dict(), dict(step=7, ranks=2, tp=2)):  # the newest is damaged: not another one
            with self.subTest(**values):
                self.assertFails(self.export(out, status=1, file=file, **values), "step_00000007", "damaged")
                self.assertFalse(os.path.exists(file))
        shutil.rmtree(checkpoints.directory(out, 7))
        self.export(out)
        damaged = os.path.join(checkpoints.directory(out, 4), "rank_00001.safetensors")
        shutil.copytree(checkpoints.directory(self.undisturbed(2, 1, strategy="tpsp", **CONSTANT)[0], 7),
                        checkpoints.directory(out, 7))
        checkpoints.damage(damaged, 0.5)
        result = self.export(out, 4, status=1)
        self.assertFails(result, "--export-step 4", "no sound checkpoint", damaged)
        self.assertNotIn("none of", result.err)
        self.export(out)
