"""What keeps a run from saving or from going on: other options, another run, a directory that cannot be written, a full
disk. Nothing of what is there is lost, and what is wrong is named.
"""
# slow: killed_while_it_writes
# limit: 180
import dataclasses
import errno
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import unittest

import checkpoints
import harness
import launcher
import reference

AT = 4


def build_shim(case, source):
    """What LD_PRELOAD takes, of a file of tests/."""
    shim = case.path(os.path.basename(source).replace(".c", ".so"))
    subprocess.run([os.environ.get("CC", "cc"), "-std=gnu11", "-O1", "-shared", "-fPIC", "-o", shim,
                    os.path.join(harness.ROOT, "tests", source), "-ldl"], check=True)
    return shim


class Refusals(checkpoints.Case):
    def refused(self, *words, ranks=1, **values):
        """Ended with status 1 and these words; OUT is as it was."""
        out = values.setdefault("out", self.with_only(self.undisturbed(1, 1)[0], AT))
        log = self.fresh("log.jsonl")
        shutil.copy(self.undisturbed(1, 1)[1], log)
        before = checkpoints.saved_bytes(out, AT), checkpoints.read_bytes(log)
        values = self.recipe(log=log, **values)
        result = harness.run(harness.options(**values), ranks)
        self.assertFails(result, *words)
        self.assertEqual(result.err.count("error:"), 1, str(result))
        self.assertEqual(checkpoints.steps_in(out), [AT])
        self.assertTrue((checkpoints.saved_bytes(out, AT), checkpoints.read_bytes(log)) == before)
        self.assertFalse(os.path.exists(os.path.join(out, "model.bin")))

    def test_other_options(self):
        """One message names them all."""
        then = self.recipe(out=None)
        values = dict(lr=1e-3, min_lr=5e-4, warmup=2, schedule="linear", weight_decay=0.2, beta1=0.8, beta2=0.9, eps=1e-7, clip=1,
                      seed=7, steps=20, batch=4, seq=12, decay_steps=30)
        words = [f"--{name.replace('_', '-')} {value} (the checkpoint: {then.get(name, '')}" for name, value in values.items()]
        self.refused(*words, "--force", **values)
        self.refused("--seed 7 (the checkpoint: ", seed=7)

    def test_on_two_ranks(self):
        self.refused("--lr 0.001 (the checkpoint: 0.003)", ranks=2, tp=2, lr=1e-3)

    def test_other_data(self):
        self.refused("tokens of --train 289 (the checkpoint: 865)", train=self.tokens)

    def test_other_data_of_the_same_size(self):
        path = self.fresh("train.bin")
        reference.write_tokens(path, harness.random_tokens(3 * self.samples * self.T + 1, self.shape.V, seed=4))
        self.refused("content of --train", "(the checkpoint: ", "--force", train=path)

    def test_fewer_steps_than_are_done(self):
        out = self.with_only(self.undisturbed(1, 1, schedule="constant")[0], AT)
        self.refused("--steps 3", f"{AT} steps", out=out, schedule="constant", steps=3)

    def test_another_model(self):
        more = dict(init_from=None, layers=2, channels=96, heads=12, vocab=101, seq=self.T)
        self.refused("another model", "--layers 3 (the checkpoint: 2)", **more | dict(layers=3))
        for force in (False, True):
            with self.subTest(force=force):
                self.refused("another model", "--heads 6 (the checkpoint: 12)", "--channels 48 (the checkpoint: 96)",
                             force=force, **more | dict(heads=6, channels=48))
        self.refused("another model", "--vocab 120 (the checkpoint: 101)", force=True, **more | dict(vocab=120))
        padded = self.fresh("model.bin")
        shape = dataclasses.replace(self.shape, Vp=110)
        reference.write_model(padded, shape, reference.random_model(shape))
        self.refused("another model", "rows of the vocabulary with padding 110 (the checkpoint: 128)", init_from=padded)
        self.refused("--seq 49 is longer than the model's 48 positions", force=True, **more | dict(seq=49))

    def test_the_file_that_it_began_with_is_needed_no_more(self):
        """Gone, on one host or all, or not named any more: the checkpoint has all of it."""
        expected, _ = self.undisturbed(1, 2)
        gone = self.fresh("model.bin")
        for values in (dict(init_from=gone), dict(init_from=None), dict(init_from=None, layers=2, vocab=101)):
            with self.subTest(**values):
                out = self.with_only(expected, AT)
                self.assertIn(f"resume    from step {AT}", self.run_with(dp=2, out=out, **values).out)
                self.assertSameEnd(out, expected)
        with self.subTest("on one host"):
            out, folder = self.with_only(expected, AT), self.fresh("hosts")
            script = f'mkdir -p {folder}/{launcher.RANK} && cd {folder}/{launcher.RANK} && ' \
                     f'if [ {launcher.RANK} = 0 ]; then cp {self.model} model.bin; fi && exec "$@"'
            result = self.start(dp=2, out=out, init_from="model.bin", wrapper=("sh", "-c", script, "sh")).wait()
            self.assertEqual(result.status, 0, str(result))
            self.assertSameEnd(out, expected)
        out = self.with_only(expected, AT)
        checkpoints.damage(os.path.join(checkpoints.directory(out, AT), "rank_00001.safetensors"), 0.5)
        self.assertFails(self.start(dp=2, out=out, init_from=gone, force=True).wait(), gone, "cannot be opened")

    def test_forced(self):
        """Goes on with the new options: what it does then is what they say."""
        out = self.with_only(self.undisturbed(1, 1)[0], AT)
        log = self.fresh("log.jsonl")
        self.run_with(out=out, log=log, force=True, lr=1e-3, steps=12, clip=0.5)
        steps = harness.events(harness.read_log(log), "step")
        self.assertEqual([s["step"] for s in steps], list(range(AT, 12)))
        self.assertLess(steps[0]["lr"], 1e-3)
        old = harness.events(harness.read_log(self.undisturbed(1, 1)[1]), "step")
        self.assertEqual(steps[0]["loss"], old[AT]["loss"])
        self.assertNotEqual(steps[1]["loss"], old[AT + 1]["loss"])
        self.run_with(out=out, lr=1e-3, steps=12, clip=0.5)  # these are the run's options now

    def test_what_may_change(self):
        """The mesh, what is watched, how often is saved: no --force."""
        out = self.with_only(self.undisturbed(1, 1)[0], AT)
        self.run_with(out=out, tp=2, micro_batch=8, strategy="up", overlap="slice", val=None, val_every=0, save_every=5,
                      keep=1, timeout=20)
        self.assertEqual(checkpoints.steps_in(out), [self.steps])

    def test_what_decides_bits_is_kept(self):
        """On the same mesh, unless an option is given; on another mesh nothing is."""
        own = dict(strategy="up", overlap="direct:2", gradients="end", embedding="table", prefetch=1, recompute="1", micro_batch=2, reproducible=1, network_gbit=5)
        other = dict(overlap="auto", gradients="preset", embedding="preset", prefetch=-1, micro_batch=4, reproducible=0, network_gbit=0)
        expected, log = self.undisturbed(2, 1, **own)
        unsaid = dict.fromkeys((*own, "tp", "dp"))
        for given, now in (({}, own), (dict(tp=2, overlap="ring"), own), (dict(plan="new", recompute="0", reproducible=0), own | dict(overlap="auto")),
                           (dict(dp=2, strategy="up"), other), (dict(strategy="tpsp"), other)):
            with self.subTest(**given):
                out, path = self.with_only(expected, AT), self.fresh("log.jsonl")
                self.run_with(ranks=2, out=out, log=path, **unsaid | given)
                config = harness.read_log(path)[0]
                self.assertEqual({name: config[name.replace("_", "-")] for name in now | given}, now | given)
                if not given:
                    self.assertSameRun(path, log, AT)
                    self.assertSameEnd(out, expected)

    def test_a_schedule_that_ends_elsewhere_may_go_on_for_longer(self):
        recipe = dict(schedule="cosine", decay_steps=2 * self.steps)
        long, log = self.undisturbed(1, 1, **recipe)
        out, path = self.fresh("out"), self.fresh("log.jsonl")
        for steps in (3, self.steps):
            self.run_with(out=out, log=path, steps=steps, **recipe)
        found, expected = (harness.events(harness.read_log(which), "step") for which in (path, log))
        self.assertEqual([(s["loss"], s["lr"]) for s in found], [(s["loss"], s["lr"]) for s in expected])
        self.assertSameEnd(out, long)

    def test_a_constant_rate_may_go_on_for_longer(self):
        long, log = self.undisturbed(1, 1, schedule="constant")
        out, path = self.fresh("out"), self.fresh("log.jsonl")
        for steps in (3, 6, self.steps):
            self.run_with(out=out, log=path, schedule="constant", steps=steps)
        found, expected = (harness.events(harness.read_log(which), "step") for which in (path, log))
        self.assertEqual([s["loss"] for s in found], [s["loss"] for s in expected])
        self.assertSameEnd(out, long)

    def test_options_that_need_out(self):
        for values in (dict(save_every=2), dict(export=self.path("model"))):
            with self.subTest(**values):
                self.assertFails(harness.run(harness.options(**self.recipe(**values))), "--out")


class Lock(checkpoints.Case):
    steps = 100000

    def test_two_runs_in_one_directory(self):
        out, log = self.fresh("out"), self.fresh("log.jsonl")
        first = self.start(tp=2, out=out, log=log, save_every=10)
        harness.wait_until(lambda: first.ended() or checkpoints.newest(out) >= 20, 30, "checkpoints")
        holder = first.processes()[0]
        for ranks in (1, 2):
            with self.subTest(ranks=ranks):
                begun = checkpoints.newest(out)
                other = self.fresh("other.jsonl")
                result = harness.run(harness.options(**self.recipe(out=out, tp=ranks, log=other)), ranks)
                self.assertFails(result, "another run saves to", out, f"process {holder}", socket.gethostname())
                self.assertFalse(os.path.exists(other))
                harness.wait_until(lambda: first.ended() or checkpoints.newest(out) >= begun + 20, 30, "more checkpoints")
        os.kill(holder, signal.SIGTERM)
        result = first.wait()
        self.assertEqual(result.status, checkpoints.STOPPED, str(result))
        self.assertNotIn("warning", result.err)
        taken = [s["step"] for s in harness.events(harness.read_log(log), "step")]
        self.assertEqual(taken, list(range(len(taken))))
        self.assertEqual(len(checkpoints.steps_in(out)), 2)

    def test_the_lock_of_a_dead_run_is_none(self):
        out = self.fresh("out")
        first = self.start(out=out, save_every=5)
        harness.wait_until(lambda: first.ended() or checkpoints.newest(out) >= 5, 30, "a checkpoint")
        first.kill()
        second = self.start(out=out)
        harness.wait_until(lambda: second.ended() or "MFU" in second.texts()[0], 30, "the first step")
        os.kill(second.process.pid, signal.SIGTERM)
        result = second.wait()
        self.assertEqual(result.status, checkpoints.STOPPED, str(result))
        self.assertIn("resume    from step", result.out)

    @unittest.skipUnless(os.geteuid() == 0 and shutil.which("setpriv"), "not root, or no setpriv")
    def test_a_second_user_of_a_group(self):
        """Resumes a finished run if files are the group's (umask 002); else is told what keeps him out."""
        others = ["setpriv", "--reuid", "65534", "--regid", "65534", "--groups", "65533", "sh", "-c", 'umask 002; exec "$@"', "sh"]
        for folder in (self.folder, os.path.dirname(self.folder)):
            os.chmod(folder, os.stat(folder).st_mode | 0o055)
        if subprocess.run([*others, "test", "-x", harness.PROGRAM], check=False).returncode != 0:
            self.skipTest("others cannot reach the program")
        for umask, mode in (("002", 0o660), ("022", 0o600)):
            with self.subTest(umask=umask):
                out, log = self.fresh("out"), self.fresh("log.jsonl")
                first = dict(out=out, log=log, steps=2, schedule="constant")
                os.mkdir(out)
                os.chown(out, 0, 65533)
                os.chmod(out, 0o2775)  # files in it get its group
                result = self.start(**first, wrapper=["sh", "-c", f'umask {umask}; exec "$@"', "sh"]).wait()
                self.assertEqual(result.status, 0, str(result))
                self.assertEqual(os.stat(f"{out}/lock").st_mode & 0o777, mode)
                result = self.start(**{**first, "log": None, "steps": 4}, wrapper=others).wait()
                if umask == "002":
                    self.assertEqual(result.status, 0, str(result))
                    self.assertIn("resume    from step 2", result.out)
                else:
                    self.assertFails(result, f"cannot open lock {out}/lock: it is of another user's run", "umask 002")

    def test_a_directory_that_only_rank_0_sees(self):
        """Found before the first step, as it is where the others have one of their own by that name, or may not write."""
        for others, words in (("rm -rf out", "no directory where it may write"), ("mkdir out", "no directory where it may write"),
                              ("mkdir out && echo host 7 >out/lock", "a directory with mark")):
            with self.subTest(others=others):
                folder = self.fresh("hosts")
                script = f'mkdir -p {folder}/{launcher.RANK} && cd {folder}/{launcher.RANK} && ' \
                         f'if [ {launcher.RANK} = 1 ]; then {others}; fi && exec "$@"'
                result = self.start(dp=2, out="out", steps=1, wrapper=("sh", "-c", script, "sh")).wait()
                self.assertFails(result, "rank 1 has another --out than rank 0", words, "all hosts share")
                self.assertEqual(result.err.count("error:"), 1, str(result))
                self.assertNotIn("loss", result.out)
                self.assertEqual(os.listdir(f"{folder}/0/out"), ["lock"])


class Links(checkpoints.Case):
    def setUp(self):
        self.out, self.dear = self.fresh("out"), self.fresh("dear")
        os.mkdir(self.out)
        os.mkdir(self.dear)
        for name in ("thesis", "manifest.json", "rank_00000.safetensors"):
            with open(os.path.join(self.dear, name), "w", encoding="utf-8") as file:
                file.write("x")

    def assertUntouched(self):
        self.assertEqual(sorted(os.listdir(self.dear)), ["manifest.json", "rank_00000.safetensors", "thesis"])
        self.assertEqual({checkpoints.read_bytes(self.dear, name) for name in os.listdir(self.dear)}, {b"x"})

    def test_in_the_place_of_what_is_removed(self):
        """At start what an earlier run has left, before a save, and an old checkpoint that its owner has moved and linked."""
        for step in (1, 2):
            os.symlink(self.dear, os.path.join(self.out, f"step_{step:08d}.tmp"))
        result = self.start(out=self.out, steps=3, save_every=1, keep=1).wait()
        self.assertEqual(result.status, 0, str(result))
        self.assertEqual(checkpoints.steps_in(self.out), [3])
        self.assertUntouched()
        moved = self.fresh("moved")
        shutil.move(checkpoints.directory(self.out, 3), moved)
        os.symlink(moved, checkpoints.directory(self.out, 3))
        before = sorted(os.listdir(moved))
        result = self.start(out=self.out, steps=5, save_every=1, keep=1, force=True).wait()
        self.assertEqual(result.status, 0, str(result))
        self.assertIn("resume    from step 3", result.out)
        self.assertEqual(checkpoints.steps_in(self.out), [5])
        self.assertEqual(sorted(os.listdir(moved)), before)

    def test_a_lock_that_is_another_file_too(self):
        os.link(os.path.join(self.dear, "thesis"), os.path.join(self.out, "lock"))
        self.assertFails(self.start(out=self.out).wait(), "cannot open lock", "remove this name")
        self.assertUntouched()


class Logs(checkpoints.Case):
    def test_another_runs_log_is_set_aside(self):
        """Going on there would cut it."""
        theirs = self.fresh("log.jsonl")
        self.run_with(seed=5, log=theirs)
        lines = pathlib.Path(theirs).read_bytes()
        expected, expected_log = self.undisturbed(1, 1)
        for again in (1, 2):
            out = self.with_only(expected, AT)
            result = self.run_with(out=out, log=theirs)
            self.assertIn(f"log       of another run renamed to {theirs}.{again}" if again == 1 else "resume", result.out)
            self.assertEqual(pathlib.Path(f"{theirs}.1").read_bytes(), lines)
            self.assertSameRun(theirs, expected_log, AT)
            self.assertFalse(os.path.exists(f"{theirs}.2"))  # it is this run's log now
        own = self.fresh("log.jsonl")
        shutil.copy(expected_log, own)
        self.run_with(out=self.with_only(expected, AT), log=own)
        self.assertSameRun(own, expected_log)

    def test_a_new_run_in_the_same_directory_is_another(self):
        out, log = self.fresh("out"), self.fresh("log.jsonl")
        self.run_with(out=out, log=log, steps=6, schedule="constant")
        shutil.rmtree(out)
        self.run_with(out=out, steps=3, schedule="constant")
        lines = pathlib.Path(log).read_bytes()
        self.run_with(out=out, log=log, steps=6, schedule="constant")
        self.assertEqual(pathlib.Path(f"{log}.1").read_bytes(), lines)


class ModelFile(checkpoints.Case):
    def killed_at(self, call, old, shim):
        """One run that has only its model left to write, killed before that call on it, and then another. False: there
        is no such call, it has come to its end."""
        expected, _ = self.undisturbed(1, 1)
        out = self.with_only(expected, self.steps)
        path = os.path.join(out, "model.bin")
        if old:
            shutil.copy(self.model, path)
        killed = self.start(out=out, env=dict(LD_PRELOAD=shim, CALLS_ABOUT=path, KILL_AT=str(call))).wait()
        if killed.status == 0:
            return False
        self.assertEqual(killed.status, -signal.SIGKILL, str(killed))
        self.assertEqual(os.path.exists(path), old)  # it takes its name in the last call
        if old:
            self.assertTrue(checkpoints.read_bytes(path) == checkpoints.read_bytes(self.model), "not as it was")
        self.run_with(out=out)
        self.assertSameEnd(out, expected)
        self.assertEqual(sorted(os.listdir(out)),
                         ["lock", "model.bin", os.path.basename(checkpoints.directory(out, self.steps))])
        return True

    def test_a_run_killed_while_it_writes_its_model(self):
        """At any call: what was there stays, and the next run leaves nothing but the model."""
        shim = build_shim(self, "data/preload_kill.c")
        for old in (False, True):
            calls = 0
            for call in range(1, 20):
                with self.subTest(call=call, old=old):
                    if not self.killed_at(call, old, shim):
                        break
                    calls = call
            self.assertGreaterEqual(calls, 4)  # it is created, written, synced and renamed

    def calls_of(self, **values):
        """What a run does to the disk: lists of call, path and, of a rename, the new path."""
        calls = self.fresh("calls")
        env = dict(LD_PRELOAD=build_shim(self, "data/preload_kill.c"), CALLS_LOG=calls, CALLS_ABOUT=self.folder)
        result = self.start(**values, env=env).wait()
        self.assertEqual(result.status, 0, str(result))
        with open(calls, encoding="utf-8") as file:
            return result, [line.split() for line in file]

    def assertSynced(self, calls, log):
        """What gets a name is on the disk by then, and the name before anything else is made or named: else a power cut
        could leave a name without what it stands for. A run that goes on from a checkpoint needs the log up to it. Returns the new
        names."""
        written, unsynced, named = set(), {}, []  # unsynced: directories, and what has been renamed in them
        for call, path, *to in calls:
            aside = to and to[0].endswith(".damaged")  # several of these are one step
            if call in ("create", "mkdir", "rename") and not aside:
                for directory, name in unsynced.items():
                    self.assertFalse(path.startswith(directory + "/"), f"{call} {path}: {name} has no name on the disk")
            if call in ("write", "truncate"):
                written.add(path)
            elif call == "mkdir" and path.endswith(".tmp"):  # a checkpoint
                written.add(f"the log before {path}")
            elif call == "fsync":
                written = {other for other in written if other != path and (path != log or not other.startswith("the log before"))}
                unsynced.pop(path, None)
            elif call == "rename" and not to[0].endswith(".tmp"):  # else it is about to be removed
                self.assertNotIn(path, written)
                self.assertNotIn(f"the log before {path}", written)
                unsynced[os.path.dirname(path)] = to[0]
                named += [os.path.basename(to[0])]
        self.assertEqual(unsynced, {})
        return named

    def test_order_of_syncs(self):
        """Of a run that saves; and of one that goes on, with a log that had got further, from an older checkpoint."""
        out, log, trace = self.fresh("out"), self.fresh("log.jsonl"), self.fresh("trace.json")
        _, calls = self.calls_of(out=out, log=log, save_every=3, keep=3)
        named = self.assertSynced(calls, log)
        self.assertEqual([name for name in named if name.startswith("step_")], [f"step_{step:08d}" for step in (3, 6, 9, 10)])
        for step in (9, 10):
            checkpoints.damage(os.path.join(checkpoints.directory(out, step), "rank_00000.safetensors"), 0.5)
        result, calls = self.calls_of(out=out, log=log, trace=trace, trace_steps="8:9")
        self.assertIn("resume    from step 6", result.out)
        aside = [f"step_{step:08d}.damaged" for step in (9, 10)]
        self.assertLessEqual({*aside, "step_00000010", "model.bin", *map(os.path.basename, (log, trace))},
                             set(self.assertSynced(calls, log)))


class Disk(checkpoints.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.bytes = 3 * os.path.getsize(cls.model)  # of a checkpoint: weights and two moments
        cls.shim = build_shim(cls, "train/preload_disk.c")

    def full(self, rank, path):
        return dict(LD_PRELOAD=self.shim, FULL_RANK=str(rank), FULL_PATH=path)

    def test_no_checkpoint_can_be_written(self):
        """The run goes on to its end, and says each time that it could not save; what was there stays."""
        expected, expected_log = self.undisturbed(1, 1)
        out, log = self.with_only(expected, AT), self.fresh("log.jsonl")
        before = checkpoints.saved_bytes(out, AT)
        shutil.copy(expected_log, log)
        result = self.start(out=out, log=log, save_every=2, env=self.full(0, "/step_")).wait()
        self.assertEqual(result.status, 1, str(result))
        for step in (6, 8, 10):
            self.assertRegex(result.err, rf"warning: rank 0 of 1: no checkpoint of step {step}: cannot write .*"
                                         rf"step_{step:08d}.tmp/rank_00000.safetensors.*: No space left on device")
        self.assertRegex(result.err, "error: .*the state after step 10 was not saved")
        self.assertEqual(checkpoints.steps_in(out), [AT])
        self.assertTrue(checkpoints.saved_bytes(out, AT) == before)
        self.assertEqual([s["step"] for s in harness.events(harness.read_log(log), "step")], list(range(10)))
        self.run_with(out=out, log=log)
        self.assertSameRun(log, expected_log)
        self.assertSameEnd(out, expected)

    def test_one_rank_cannot_write(self):
        """Of two ranks one fails, at its own file, or rank 0 at the manifest: there is no checkpoint, and both know it."""
        expected, _ = self.undisturbed(1, 2)
        for rank, path in ((0, "rank_00000.safetensors"), (1, "rank_00001.safetensors"), (0, "manifest.json")):
            with self.subTest(path=path):
                out = self.with_only(expected, AT)
                result = self.start(dp=2, out=out, save_every=3, env=self.full(rank, path)).wait()
                self.assertEqual(result.status, 1, str(result))
                for step in (6, 9, 10):
                    self.assertRegex(result.err, rf"warning: rank {rank} of 2: no checkpoint of step {step}: cannot write "
                                                 rf".*/{path}")
                self.assertNotIn(f"warning: rank {1 - rank} of 2", result.err)
                self.assertEqual(checkpoints.steps_in(out), [AT])
                self.run_with(dp=2, out=out)
                self.assertSameEnd(out, expected)

    def test_a_model_file_that_cannot_be_written(self):
        """The last checkpoint is there all the same, and the next start has only the model to write."""
        expected, _ = self.undisturbed(1, 2)
        out = self.with_only(expected, AT)
        result = self.start(dp=2, out=out, env=self.full(0, "model.bin")).wait()
        self.assertFails(result, "model.bin", "No space left on device")
        result = self.run_with(dp=2, out=out)
        self.assertIn(f"resume    from step {self.steps}", result.out)
        self.assertSameEnd(out, expected)

    def test_a_log_that_cannot_be_written(self):
        """Training is worth more than its log: all is trained and saved, and the status says that something is missing."""
        expected, _ = self.undisturbed(1, 2)
        out, log = self.fresh("out"), self.fresh("log.jsonl")
        result = self.start(dp=2, out=out, log=log, env=self.full(0, "log.jsonl")).wait()
        self.assertEqual(result.status, 1, str(result))
        self.assertEqual(result.err.count(f"warning: log {log} cannot be written: No space left on device"), 1, str(result))
        self.assertRegex(result.err, rf"error: log {log} lacks lines")
        self.assertSameEnd(out, expected)
        self.assertEqual(checkpoints.read_bytes(log), b"")

    def test_directories_without_sync(self):
        """As on some network and FUSE file systems: all is saved, with one note. Where the disk fails, nothing is."""
        shim, text = build_shim(self, "data/preload_kill.c"), self.fresh("text")
        pathlib.Path(text).write_text("some words\n" * 20)
        for code in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL, errno.EIO):
            with self.subTest(code=os.strerror(code)):
                out, tokens = os.path.join(self.fresh("new"), "out"), self.fresh("tokens")
                env = dict(LD_PRELOAD=shim, DIRECTORY_SYNC=str(code))
                result = self.start(dp=2, out=out, log=self.fresh("log"), save_every=4, steps=6, env=env).wait()
                prepared = subprocess.run([sys.executable, os.path.join(harness.ROOT, "data/prepare.py"), "--input", text, "--out",
                                           tokens], env=dict(os.environ, **env), capture_output=True, text=True, check=False)
                if code == errno.EIO:
                    self.assertFails(result, "Input/output error")
                    self.assertNotEqual(prepared.returncode, 0)
                    continue
                self.assertEqual((result.status, prepared.returncode), (0, 0), str(result) + prepared.stderr)
                self.assertEqual((result.err.count("note:"), result.err.count("warning:")), (1, 0), str(result))
                self.assertIn(f"cannot be synced ({os.strerror(code)})", result.err)
                self.assertEqual((checkpoints.steps_in(out), prepared.stderr.count("note:")), ([4, 6], 1), prepared.stderr)

    def test_a_trace_that_cannot_be_written(self):
        """The one of an earlier run stays."""
        expected, _ = self.undisturbed(1, 2)
        out, trace = self.fresh("out"), self.fresh("trace.json")
        pathlib.Path(trace).write_text("earlier")
        result = self.start(dp=2, out=out, trace=trace, env=self.full(0, "trace.json")).wait()
        self.assertEqual(result.status, 1, str(result))
        self.assertRegex(result.err, rf"warning: cannot write {trace}.*: No space left on device; training continues")
        self.assertEqual(pathlib.Path(trace).read_text(), "earlier")
        self.assertSameEnd(out, expected)
        self.assertFails(self.start(trace="/dev/full").wait(), "--trace: cannot create /dev/full", "not a regular file")

    def test_a_signal_and_no_space(self):
        """What a signal stops cannot be saved: status 1, not the one that says that it was."""
        out, log = self.fresh("out"), self.fresh("log.jsonl")
        started = self.start(out=out, log=log, steps=100000, env=self.full(0, "/step_"))
        harness.wait_until(lambda: started.ended() or len(harness.read_log(log)) > 5, 30, "some steps")
        os.kill(started.process.pid, signal.SIGTERM)
        result = started.wait()
        self.assertEqual(result.status, 1, str(result))
        self.assertFails(result, "was not saved")
        self.assertNotIn("stopped  ", result.out)
        self.assertEqual(checkpoints.steps_in(out), [])

    @unittest.skipUnless(shutil.which("unshare"), "no unshare")
    def test_full_disk(self):
        """Room for two checkpoints, not for three: those of steps 2 and 4 are saved, then there is none but what was, and
        the next run, with more room, goes on from there."""
        expected, expected_log = self.undisturbed(1, 1)
        disk, after, log = self.fresh("disk"), self.fresh("after"), self.fresh("log.jsonl")
        os.mkdir(disk)
        values = self.recipe(out=os.path.join(disk, "out"), save_every=2)
        size = int(2.4 * self.bytes) // 4096 * 4096
        script = f'mount -t tmpfs -o size={size} tmpfs "$1" || exit 77; shift; "$@"; status=$?; ' \
                 f'cp -r "{disk}/out" "{after}"; exit $status'
        done = subprocess.run(["unshare", "-rm", "sh", "-c", script, "sh", disk, harness.PROGRAM,
                               *harness.options(**values, log=log)], capture_output=True, text=True, timeout=600,
                              env=harness.environment())
        if "unshare:" in done.stderr or done.returncode == 77:
            self.skipTest("no file system can be mounted here: " + done.stderr.strip())
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertRegex(done.stderr, r"no checkpoint of step 6: cannot write .*, which needs \d+ bytes where \d+ are "
                                      "free: No space left on device")
        self.assertRegex(done.stderr, "hint: .*earlier checkpoints stay as they are")
        self.assertEqual(checkpoints.steps_in(after), [2, 4])
        result = self.run_with(out=after, log=log)
        self.assertIn(f"resume    from step 4 in {after}", result.out)
        self.assertSameRun(log, expected_log)
        self.assertSameEnd(after, expected)

    @unittest.skipUnless(shutil.which("unshare"), "no unshare")
    def test_a_disk_that_was_full(self):
        """Room is made meanwhile: the next checkpoint that is due is written."""
        disk, after = self.fresh("disk"), self.fresh("after")
        os.mkdir(disk)
        values = self.recipe(out=os.path.join(disk, "out"), save_every=2, schedule="constant", steps=400, val=None)
        size = int(5 * self.bytes) // 4096 * 4096
        script = f'mount -t tmpfs -o size={size} tmpfs "$1" || exit 77; shift; ' \
                 f'head -c {int(4.5 * self.bytes)} /dev/zero > {disk}/ballast; "$@" 2> {after}.err & run=$!; ' \
                 f'until grep -q "no checkpoint of step" {after}.err || ! kill -0 $run 2>/dev/null; do sleep 0.01; done; ' \
                 f'rm {disk}/ballast; wait $run; status=$?; cp -r "{disk}/out" "{after}"; exit $status'
        done = subprocess.run(["unshare", "-rm", "sh", "-c", script, "sh", disk, harness.PROGRAM,
                               *harness.options(**values)], capture_output=True, text=True, timeout=600,
                              env=harness.environment())
        if "unshare:" in done.stderr or done.returncode == 77:
            self.skipTest("no file system can be mounted here: " + done.stderr.strip())
        said = checkpoints.read_bytes(f"{after}.err").decode()
        self.assertEqual(done.returncode, 0, done.stdout + said)
        self.assertIn("no checkpoint of step 2: ", said)
        self.assertNotIn("no checkpoint of step 398", said)
        self.assertEqual(checkpoints.steps_in(after), [398, 400])
        self.assertTrue(os.path.exists(os.path.join(after, "model.bin")))

    @unittest.skipUnless(os.geteuid() == 0 and shutil.which("setpriv"), "not root, or no setpriv")
    def test_directories_that_cannot_be_written(self):
        nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        os.chmod(self.folder, 0o755)
        if subprocess.run([*nobody, "test", "-x", harness.PROGRAM], check=False).returncode != 0:
            self.skipTest("others cannot reach the program")
        locked = self.with_only(self.undisturbed(1, 1)[0], AT)
        os.chmod(locked, 0o555)
        below = os.path.join(locked, "out")
        a_file = self.fresh("file")
        shutil.copy(self.model, a_file)
        for out, said in ((locked, "Permission denied"), (below, "Permission denied"), (a_file, "Not a directory")):
            with self.subTest(out=out):
                started = self.start(out=out, wrapper=nobody)
                result = started.wait()
                self.assertFails(result, out, said, "--out")
                self.assertNotIn("another user's run", result.err)
        self.assertEqual(checkpoints.steps_in(locked), [AT])
