"""Checkpoints that are damaged: named, skipped, and never used.

One byte, anywhere in any file of a checkpoint, changes what the run was; so does a file that is cut short, missing or
another's. The run goes on from the checkpoint before, and comes to the same end. Of each kind of damage there is one here: every
bit and every length of every file is in tests/data/test_checkpoint.c.
"""
# limit: 180
import errno
import os
import shutil

import checkpoints
import harness
import test_saving

OLD, NEW = 4, 8


def flipped(share):
    return lambda path: checkpoints.damage(path, share)


def longer(path):
    with open(path, "ab") as file:
        file.write(b"\n")


def empty(path):
    os.truncate(path, 0)


def a_directory(path):
    os.remove(path)
    os.mkdir(path)


class Unread(checkpoints.Case):
    """What cannot be opened or read now may be sound: an error, on one rank of several too, and nothing is changed."""
    def refused(self, out, name, call, code, rank=0, **more):
        log, env = self.fresh("log.jsonl"), dict(LD_PRELOAD=self.shim, FULL_RANK=str(rank), FULL_PATH=name, **{call: str(code)})
        shutil.copy(self.undisturbed(2, 1)[1], log)
        def found():
            return sorted((f, d, [n for n in names if n != "lock"]) for f, d, names in os.walk(out)), checkpoints.read_bytes(log)
        before = found()
        result = harness.run(harness.options(**self.recipe(tp=2, out=out, log=log, **more)), 2, env=env)
        self.assertFails(result, name, os.strerror(code), f"rank {rank} of 2")
        self.assertEqual(result.status, 1, str(result))
        self.assertNotIn("is skipped", result.err)
        self.assertEqual(found(), before)

    def test_of_a_checkpoint(self):
        self.__class__.shim = test_saving.build_shim(self, "train/preload_disk.c")
        out = self.with_only(self.undisturbed(2, 1)[0], OLD, NEW)
        shutil.copytree(checkpoints.directory(out, OLD), checkpoints.directory(out, NEW) + ".damaged")
        step = os.path.basename(checkpoints.directory(out, NEW))
        manifest, rank_0, rank_1 = (0, "manifest.json"), (0, "rank_00000.safetensors"), (1, "rank_00001.safetensors")
        for call, code, (rank, name) in (
                ("OPEN_ERROR", errno.EACCES, manifest), ("OPEN_ERROR", errno.EIO, rank_0), ("OPEN_ERROR", errno.ESTALE, rank_1),
                ("OPEN_ERROR", errno.EMFILE, manifest), ("OPEN_ERROR", errno.ELOOP, rank_1), ("READ_ERROR", errno.EIO, manifest),
                ("READ_ERROR", errno.ESTALE, rank_1)):
            with self.subTest(call=call, code=os.strerror(code), name=name):
                self.refused(out, f"{step}/{name}", call, code, rank, force=code == errno.EIO)
        shutil.rmtree(checkpoints.directory(out, NEW) + ".damaged")
        self.run_with(tp=2, out=out)
        self.assertSameEnd(out, self.undisturbed(2, 1)[0])

    def test_of_a_plan(self):
        """With which a new run would begin: without it other bits come out."""
        self.__class__.shim = test_saving.build_shim(self, "train/preload_disk.c")
        out = self.fresh("out")
        os.mkdir(out)
        with open(os.path.join(out, "plan.json"), "w", encoding="utf-8") as file:
            file.write("{}")
        self.refused(out, "plan.json", "OPEN_ERROR", errno.EIO)


class Damage(checkpoints.Case):
    def damaged(self, name, how, steps=(NEW,)):
        """A new OUT with checkpoints OLD and NEW, files of these steps damaged; and the files."""
        out = self.with_only(self.undisturbed(2, 1)[0], OLD, NEW)
        paths = [os.path.join(checkpoints.directory(out, step), name) for step in steps]
        for path in paths:
            how(path)
        return out, paths

    def goes_on(self, out, first, *words, ranks=2, **more):
        """From step `first` to the same end, with a warning that has these words."""
        result = self.run_with(tp=ranks, out=out, **more)
        if first:
            self.assertIn(f"resume    from step {first} in {out}", result.out)
        else:
            self.assertNotIn("resume ", result.out)
        warnings = "".join(line for line in result.err.splitlines(True) if line.startswith("warning: rank "))
        for word in words:
            self.assertIn(word, warnings, str(result))
        expected = self.undisturbed(ranks, 1)[0]
        if ranks == 2:
            self.assertSameEnd(out, expected)
        shutil.rmtree(out)
        return result

    def test_one_byte_of_the_manifest(self):
        out, (path,) = self.damaged("manifest.json", flipped(0.3))
        self.goes_on(out, OLD, path, "is skipped")

    def test_one_byte_of_a_rank(self):
        for rank, share in (0, 0), (1, 1):
            with self.subTest(rank=rank):
                out, (path,) = self.damaged(f"rank_{rank:05d}.safetensors", flipped(share))
                self.goes_on(out, OLD, path, "is damaged", "hash")

    def test_one_rank_reads_all(self):
        out, (path,) = self.damaged("rank_00001.safetensors", flipped(0.5))
        self.goes_on(out, OLD, path, "is damaged", ranks=1)

    def test_more_ranks_than_files(self):
        out, (path,) = self.damaged("rank_00001.safetensors", flipped(0.5))
        self.goes_on(out, OLD, path, "warning: rank 1", ranks=4)

    def test_other_damage(self):
        for name, how in (("manifest.json", empty), ("manifest.json", a_directory), ("rank_00000.safetensors", longer),
                          ("rank_00001.safetensors", os.remove), ("rank_00001.safetensors", a_directory)):
            with self.subTest(name=name, how=how.__name__):
                out, (path,) = self.damaged(name, how)
                self.goes_on(out, OLD, path, "is skipped")

    def test_files_of_another_step(self):
        """Each file is sound, but not of this checkpoint."""
        for name in ("manifest.json", "rank_00001.safetensors"):
            with self.subTest(name=name):
                out, (path,) = self.damaged(name, lambda path: shutil.copy(path.replace(
                    f"{NEW:08d}", f"{OLD:08d}"), path))
                self.goes_on(out, OLD, path)

    def test_what_is_no_checkpoint(self):
        """Somebody's files, names that are nearly right, what a killed run has left unfinished."""
        out, _ = self.damaged("manifest.json", lambda path: None)
        os.mkdir(checkpoints.directory(out, 9))
        os.mkdir(os.path.join(out, "step_9"))
        shutil.copytree(checkpoints.directory(out, NEW), os.path.join(out, "step_00000012.tmp"))
        shutil.copytree(checkpoints.directory(out, NEW), os.path.join(out, "step_00000009 (copy)"))
        with open(os.path.join(out, "step_00000011"), "w", encoding="ascii") as file:
            file.write("a file\n")
        result = self.run_with(tp=2, out=out, keep=0)
        self.assertIn(f"resume    from step {NEW}", result.out)
        for step in (9, 11):
            self.assertIn(checkpoints.directory(out, step), result.err)
        self.assertSameEnd(out, self.undisturbed(2, 1)[0])
        self.assertFalse(os.path.exists(os.path.join(out, "step_00000012.tmp")))
        self.assertTrue(os.path.exists(os.path.join(out, "step_00000009 (copy)")))
        self.assertTrue(os.path.exists(os.path.join(out, "step_9")))

    def test_all_are_damaged(self):
        """It is for a person to say that a new run begins; nothing is touched before."""
        out, paths = self.damaged("rank_00000.safetensors", flipped(0.5), (OLD, NEW))
        found, log = {step: checkpoints.saved_bytes(out, step) for step in (OLD, NEW)}, self.fresh("log.jsonl")
        with open(log, "w", encoding="ascii") as file:
            file.write("the log so far\n")
        result = harness.run(self.arguments(tp=2, out=out, log=log), 2)
        self.assertFails(result, f"no valid checkpoint in {out}")
        self.assertEqual({step: checkpoints.saved_bytes(out, step) for step in (OLD, NEW)}, found)
        with open(log, encoding="ascii") as file:
            self.assertEqual(file.read(), "the log so far\n")
        result = self.goes_on(out, 0, *paths, force=True)
        self.assertIn(f"no valid checkpoint in {out}: a new run begins there", result.err, str(result))

    def test_what_was_skipped_counts_no_more(self):
        """A checkpoint that looks complete and is not is set aside, for a person to look at: the sound ones are kept until
        there are as many newer ones, however often the run ends."""
        more = dict(schedule="constant", save_every=1, tp=2)  # may be made longer
        before, log = self.undisturbed(2, 1, schedule="constant")
        out = self.with_only(before, OLD, NEW)
        for step in (OLD, NEW):
            checkpoints.damage(os.path.join(checkpoints.directory(out, step), "rank_00001.safetensors"), 0.5)
        damaged = {step: checkpoints.saved_bytes(out, step) for step in (OLD, NEW)}
        path = self.fresh("log.jsonl")
        result = self.run_with(out=out, log=path, steps=3, force=True, **more)
        for step, content in damaged.items():
            aside = checkpoints.directory(out, step) + ".damaged"
            self.assertIn(f"note: it is kept as {aside}\n", result.err)
            found = {name: checkpoints.read_bytes(aside, name) for name in content}
            self.assertTrue(found == content, step)
        self.assertEqual(checkpoints.steps_in(out), [2, 3])
        result = self.run_with(out=out, log=path, steps=NEW, **more)
        self.assertIn(f"resume    from step 3 in {out}", result.out)
        self.assertNotIn("is skipped", result.err)
        self.assertEqual(checkpoints.steps_in(out), [NEW - 1, NEW])
        checkpoints.damage(os.path.join(checkpoints.directory(out, NEW), "rank_00000.safetensors"), 0.5)
        result = self.run_with(out=out, log=path, steps=NEW + 1, **more | dict(save_every=0))
        self.assertIn(f"resume    from step {NEW - 1} in {out}", result.out)
        self.assertEqual(checkpoints.steps_in(out), [NEW - 1, NEW + 1], "two that are sound")
        self.run_with(out=out, log=path, **more)
        self.assertEqual(checkpoints.steps_in(out), [9, 10])
        self.assertEqual([s["loss"] for s in harness.events(harness.read_log(path), "step")],
                         [s["loss"] for s in harness.events(harness.read_log(log), "step")])
        self.assertSameEnd(out, before)
