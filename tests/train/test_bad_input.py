"""Errors that a user can make end the run within seconds: a message that says what and where, a status that is not 0, and on
several ranks one message, not one per rank. Of each kind there is one here; every field of a file and every form of an option is in
tests/data (test_tokens.c, test_model_file.c, run/test_options.c), schedules' names are in tests/commfuse/test_choice.c.
"""
# sanitizers: too
# limit: 400
import os
import pathlib
import re
import resource
import select
import shutil
import signal
import subprocess
import time

import numpy as np

import harness
import launcher
import reference

SOON = 10  # seconds; most take less than one
STRATEGIES = "tpsp", "up"


class BadInput(harness.Case):
    def fails(self, *words, ranks=1, **more):
        result = harness.run(self.arguments(**more), ranks, timeout=SOON)
        self.assertFails(result, *words)
        return result

    def fails_once(self, *words, **more):
        """One message, before anything is done."""
        result = self.fails(*words, **more)
        self.assertEqual(result.err.count("error:"), 1, str(result))
        self.assertEqual(result.out, "", str(result))

    def changed(self, source, offset=0, replacement=b"", cut=None):
        path, data = self.fresh("file.bin"), bytearray(pathlib.Path(source).read_bytes())
        data[offset:offset + len(replacement)] = replacement
        pathlib.Path(path).write_bytes(data[:cut])
        return path


class Tokens(BadInput):
    def test_missing(self):
        path = self.path("nothing_here*.bin")
        self.fails("no token file matches", path, train=path)

    def test_not_given(self):
        self.fails("--train", train=None)

    def test_truncated(self):
        path = self.changed(self.tokens, cut=-2)
        self.fails(path, "truncated", train=path)

    def test_model_file_as_tokens(self):
        self.fails(self.model, "not a token file", train=self.model)

    def test_token_beyond_the_vocabulary_is_found_before_the_first_step(self):
        """In a sample that the run would not take."""
        tokens = harness.random_tokens(1000 * self.T + 1, self.shape.V)
        tokens[500 * self.T] = 101
        path = self.fresh("tokens.bin")
        reference.write_tokens(path, tokens)
        place = f"{path}: token {500 * self.T} is 101, at byte {1024 + 1000 * self.T}"
        for given in (dict(train=path), dict(val=path), dict(train=path, dry_run=True)):
            with self.subTest(**given):
                self.fails_once(place, "--vocab", **given)

    def test_no_regular_file(self):
        """A pipe that nobody writes into holds up nobody."""
        folder = self.fresh("pipes")
        os.mkdir(folder)
        for name in ("train_0.bin", "model.bin"):
            os.mkfifo(os.path.join(folder, name))
        self.fails_once("train_0.bin", "not a regular file", train=os.path.join(folder, "train_*.bin"))
        self.fails_once("model.bin", "not a regular file", init_from=os.path.join(folder, "model.bin"))
        os.mkfifo(os.path.join(folder, "tokenizer.bin"))
        self.fails_once("tokenizer.bin", "not a regular file", train=os.path.join(folder, "train_*.bin"))
        for name in ("log", "trace", "plan", "predict"):
            with self.subTest(name):
                os.mkfifo(os.path.join(folder, name))
                self.fails(f"{folder}/{name}", **{name: os.path.join(folder, name)})

    def test_names_that_look_like_patterns(self):
        folder = self.fresh("wiki[en]")
        os.mkdir(folder)
        shutil.copy(self.tokens, os.path.join(folder, "train_[0].bin"))
        model = shutil.copy(self.model, os.path.join(folder, "model[1].bin"))
        for name in ("train_[0].bin", "train_*.bin"):
            log, _ = self.train(train=os.path.join(folder, name), init_from=model)
            self.assertEqual(len(harness.events(log, "step")), 3)
        for name in ("model*.bin", "model?1].bin"):
            self.fails("no such file", name, init_from=os.path.join(folder, name))

    def test_vocabularies_that_do_not_belong_together(self):
        """Tokens of other words than the model's train nonsense without an error: a note, and none where all is well."""
        def folder(words, name=b"w"):
            where = self.fresh("words")
            os.mkdir(where)
            for split in "train", "val":
                reference.write_tokens(os.path.join(where, f"{split}_0.bin"), harness.random_tokens(2 * self.T + 1, 100))
            if words:
                with open(os.path.join(where, "tokenizer.bin"), "wb") as file:
                    file.write(reference.header(20240328, 2, words, 7) + (bytes([len(name)]) + name) * words)
            return where
        none, some, others, gpt2 = folder(0), folder(512), folder(512, b"v"), folder(50257)
        bytes_, beside = "no tokenizer.bin beside it: 256 words, if it is bytes", "a tokenizer.bin beside it: {} words"
        for train, val, vocab, *said in (
                (none, None, 50257, f"--train has {bytes_}, but the model has 50257"), (none, None, 257, f"--train has {bytes_}"),
                (none, none, 256), (none, none, 101), (some, some, 512), (gpt2, gpt2, 50304), (gpt2, None, 50257),
                (gpt2, None, 256, "--train has " + beside.format(50257)), (some, None, 50257, "--train has " + beside.format(512)),
                (None, none, 50257, f"--val has {bytes_}"), (some, others, 512, "--train and that beside --val differ"),
                (some, none, 512, f"--val has {bytes_}", "differ, or one has none"), (none, gpt2, 256, "--val has", "differ")):
            with self.subTest(train=train, val=val, vocab=vocab):
                result = harness.run(self.arguments(init_from=None, layers=1, channels=32, heads=1, vocab=vocab, train=train, val=val,
                                                    steps=0, dry_run=True))
                self.assertEqual(result.status, 0, str(result))
                self.assertEqual(result.text.count("note:"), len(said), str(result))
                for words in said:
                    self.assertIn(words, result.out)
        _, result = self.train(2, init_from=None, layers=1, channels=32, heads=2, vocab=512, tp=2, train=none, steps=1)
        self.assertEqual(result.out.count("note: --train has"), 1, str(result))

    def test_a_directory(self):
        """Its train_*.bin and its val_*.bin, with the vocabulary beside them; never both, and a name in brackets is no pattern."""
        folder = self.fresh("wiki[en]")
        os.mkdir(folder)
        for count, name in ((3, "train_0.bin"), (5, "train_1.bin"), (7, "val_0.bin"), (9, "other.bin")):
            reference.write_tokens(os.path.join(folder, name), harness.random_tokens(count * self.T + 1, self.shape.V))
        for slash in ("", "/"):
            result = harness.run(self.arguments(train=folder + slash, val=folder + slash, val_every=1, steps=1))
            self.assertEqual(result.status, 0, str(result))
            self.assertIn("in 2 files, 8 samples", result.out)
            self.assertIn("7 sequences", result.out)
        with open(os.path.join(folder, "tokenizer.bin"), "wb") as file:
            file.write(b"no vocabulary")
        self.fails("tokenizer.bin", train=folder)
        empty = self.fresh("empty")
        os.mkdir(empty)
        for name in ("train", "val"):
            self.fails(f"no token file matches '{empty}/{name}_*.bin'", "directory", **{name: empty})

    def test_other_files_on_another_host(self):
        """Each rank opens tokens.bin of a folder of its own."""
        tokens = harness.random_tokens(self.samples * self.T + 1, self.shape.V)
        another = tokens.copy()
        another[-2] = (another[-2] + 1) % self.shape.V
        long = np.resize(tokens, 10001)
        middle = long.copy()
        middle[5000] = (middle[5000] + 1) % self.shape.V
        for name, here, there, words in (("shorter", tokens, tokens[:-self.T], "fingerprint of --train"),
                                         ("another", tokens, another, "fingerprint of --train"),
                                         ("middle", long, middle, "fingerprint of --train")):
            folder = self.fresh(name)
            for rank, found in enumerate((here, there)):
                os.makedirs(f"{folder}/{rank}")
                reference.write_tokens(f"{folder}/{rank}/tokens.bin", found)
            for mesh in (dict(tp=2), dict(dp=2, micro_batch=4)):
                with self.subTest(name, **mesh):
                    result = harness.run(self.arguments(train="tokens.bin", steps=1, **mesh), 2, timeout=SOON, wrapper=[
                        "sh", "-c", f'cd "{folder}/{launcher.RANK}" && exec "$@"', "sh"])
                    self.assertFails(result, "rank 1 has another", words, "the same files")
                    self.assertEqual(result.err.count("error:"), 1, str(result))

    def test_other_tokens_on_resume(self):
        tokens = harness.random_tokens(10001, self.shape.V)
        path, out = self.fresh("tokens.bin"), self.fresh("out")
        reference.write_tokens(path, tokens)
        self.train(train=path, out=out, schedule="constant")
        goes_on = dict(train=path, out=out, schedule="constant", steps=4)
        self.train(**goes_on)
        tokens[5000] = (tokens[5000] + 1) % self.shape.V
        reference.write_tokens(path, tokens)
        self.fails_once("would be changed by: content of --train", **goes_on)

    def test_other_model_file_on_another_host(self):
        """As large as rank 0's, with other weights."""
        folder, weights = self.fresh("models"), np.fromfile(self.model, dtype=np.float32, offset=1024)
        for rank, another in enumerate((weights, weights[::-1])):
            os.makedirs(f"{folder}/{rank}")
            shutil.copy(self.changed(self.model, 1024, another.tobytes()), f"{folder}/{rank}/model.bin")
        result = harness.run(self.arguments(init_from="model.bin", steps=1, tp=2), 2, timeout=SOON, wrapper=[
            "sh", "-c", f'cd "{folder}/{launcher.RANK}" && exec "$@"', "sh"])
        self.assertFails(result, "rank 1 has another hash of --init-from than rank 0")

    def test_other_end_of_text_on_another_host(self):
        """Of a vocabulary as large as rank 0's."""
        folder = self.fresh("vocabularies")
        words = b"".join(bytes([1, token]) for token in range(self.shape.V))
        for rank in range(2):
            os.makedirs(f"{folder}/{rank}")
            shutil.copy(self.model, f"{folder}/{rank}/model.bin")
            with open(f"{folder}/{rank}/tokenizer.bin", "wb") as file:
                file.write(reference.header(20240328, 2, self.shape.V, rank) + words)
        result = harness.run(self.arguments(train=None, init_from="model.bin", steps=0, tp=2), 2, timeout=SOON, wrapper=[
            "sh", "-c", f'cd "{folder}/{launcher.RANK}" && exec "$@"', "sh"])
        self.assertFails(result, "rank 1 has another token before a sample than rank 0: '1, the first of 1 ", "on rank 0 '0, the first of 1 ")

    def test_validation_missing(self):
        path = self.path("no_such_val.bin")
        self.fails(path, val=path, val_every=1)


class OtherOptions(BadInput):
    """Rank 1 is started with options of its own: told before anything depends on them."""

    def one_rank_with(self, *more, **values):
        return harness.run(self.arguments(steps=1, **values), 2, timeout=SOON, wrapper=[
            "sh", "-c", f'if [ "{launcher.RANK}" = 1 ]; then exec "$@" {" ".join(more)}; else exec "$@"; fi', "sh"])

    def test_are_told(self):
        for name, value, fallback in (("lr", "0.01", "0.0003"), ("seed", "7", "1337"), ("overlap", "none", "auto"),
                                      ("val-every", "3", "20"), ("dp", "2", "0"), ("strategy", "up", "tpsp")):
            with self.subTest(name):
                result = self.one_rank_with(f"--{name}", value, tp=2, lr=None, val_every=None, dp=None)
                self.assertFails(result, f"rank 1 has another --{name} than rank 0: '{value}', on rank 0 '{fallback}'",
                                 "the same options")
                self.assertEqual(result.err.count("error:"), 1, str(result))

    def test_flags_are_told(self):
        self.assertFails(self.one_rank_with("--force", tp=2), "rank 1 has another --force than rank 0: 'yes'")

    def test_those_of_a_host_may_differ(self):
        result = self.one_rank_with("--threads", "2", "--log", "/dev/null", tp=2, threads=None, log=None)
        self.assertEqual(result.status, 0, str(result))


class ModelFiles(BadInput):
    def test_missing(self):
        path = self.path("no_such_model.bin")
        self.fails(path, "no such file", init_from=path)

    def test_truncated(self):
        path = self.changed(self.model, cut=-4)
        self.fails_once(path, "truncated", init_from=path)

    def test_token_file_as_model(self):
        self.fails(self.tokens, init_from=self.tokens)

    def test_sequence_longer_than_the_position_table(self):
        self.fails("--seq", "48", seq=49)

    def test_shape_options_against_the_file(self):
        self.fails("--layers", layers=3)
        self.fails("--channels", channels=48)


class Shapes(BadInput):
    def test_mesh_that_is_not_the_number_of_ranks(self):
        self.fails("2", "3", "ranks", ranks=2, tp=3, dp=1)
        self.fails("ranks", ranks=2, tp=1, dp=1)
        self.fails("ranks", tp=2, dp=2)

    def test_heads_not_divisible_by_tp(self):
        shape = reference.Shape(48, 101, 1, 3, 48, 128)
        path = self.fresh("model.bin")
        reference.write_model(path, shape, reference.random_model(shape))
        for strategy in STRATEGIES:
            with self.subTest(strategy=strategy):
                self.fails_once("3 heads", "--tp 2", ranks=2, tp=2, strategy=strategy, init_from=path)

    def test_sequence_not_divisible_by_tp(self):
        for strategy in STRATEGIES:
            with self.subTest(strategy=strategy):
                self.fails_once("--seq 35", "--tp 2", ranks=2, tp=2, strategy=strategy, seq=35)

    def test_batch_not_divisible(self):
        self.fails("batch", "8", "3", micro_batch=3)
        self.fails("batch", ranks=2, dp=2, batch=6, micro_batch=2)

    def test_heads_too_wide(self):
        """Told before memory is taken."""
        wide = dict(init_from=None, layers=1, channels=9000, heads=1, vocab=101)
        self.fails("9000 per head, at most", "--heads", **wide)
        self.fails("9000 per head, at most", "--heads", dry_run=True, **wide)

    def test_channels_not_divisible_by_heads(self):
        self.fails("heads", "channels", init_from=None, layers=1, channels=50, heads=3, vocab=101)


class Options(BadInput):
    def test_unknown(self):
        result = harness.run(self.arguments() + ["--overlp", "none"], timeout=SOON)
        self.assertFails(result, "unknown option --overlp", "--help lists all options")

    def test_given_twice(self):
        """The last one counts."""
        result = harness.run(self.arguments() + ["--steps", "4"], timeout=SOON)
        self.assertEqual(result.status, 0, str(result))
        self.assertIn("4/4", result.out)

    def test_unknown_schedule(self):
        """Refused with the names that there are, before anything else is done."""
        for ranks in (1, 2):
            for text in ("nonsense", "none:3"):
                with self.subTest(overlap=text, ranks=ranks):
                    self.fails_once(f"--overlap {text}: no schedule has that name, or that many slices", ranks=ranks,
                                    tp=ranks, overlap=text)
        result = harness.run(self.arguments(overlap="nonsense"), timeout=SOON)
        hint = result.err.partition("hint:")[2]
        for name in ("auto", *(row.name for row in harness.schedules())):
            self.assertRegex(hint, rf"\b{name}\b")

    def test_trace_of_steps_that_never_come(self):
        trace = self.fresh("trace.json")
        self.fails("--trace-steps", "7:9", "--steps", trace=trace, trace_steps="7:9", steps=3)

    def test_what_this_build_cannot_do(self):
        self.fails("fp16", dtype="fp16")
        self.fails("nccl", transport="nccl", ranks=2, tp=2)

    def test_unknown_strategy(self):
        for ranks in (1, 2):
            with self.subTest(ranks=ranks):
                self.fails_once("--strategy 'UP' is none of tpsp|up", ranks=ranks, tp=ranks, strategy="UP")

    def test_saving_without_a_place(self):
        self.fails("--save-every", "--out", save_every=1)

    def test_exporting_something_else(self):
        out = dict(out=self.fresh("out"), export=self.fresh("model.bin"))
        self.fails_once("--export", "--dry-run", init_from=None, dry_run=True, **out)
        self.fails_once("--export", "--init-from", **out)
        self.fails_once("--export-step needs --export", export_step=1)

    def test_a_launcher_that_mpi_does_not_know(self):
        """Two runs of one rank each, both called rank 0 of one, would not be what was asked for."""
        result = harness.run(self.arguments(), timeout=SOON, env=dict(RANK="0", WORLD_SIZE="2"))
        self.assertFails(result, "WORLD_SIZE is 2, but MPI sees this process alone", "mpirun")
        self.assertEqual(harness.run(self.arguments(), timeout=SOON, env=dict(RANK="0", WORLD_SIZE="1")).status, 0)

    def test_srun_without_mpi(self):
        """Seen before MPI is asked: that of Open MPI 4 ends the process with a message about how it was built."""
        library = "pmix" if launcher.open_mpi() else "pmi2"
        step = dict(SLURM_STEP_NUM_TASKS="2", SLURM_STEP_ID="0", SLURM_STEPID="0", SLURM_JOB_ID="1")
        result = harness.run(self.arguments(), timeout=SOON, env=dict(step, SLURM_PROCID="0"))
        self.assertFails(result, "rank 0", "SLURM_STEP_NUM_TASKS is 2, but MPI sees this process alone", f"--mpi={library} ")
        self.assertNotIn("OMPI", result.err)
        others = harness.run(self.arguments(), timeout=SOON, env=dict(step, SLURM_PROCID="1"))
        self.assertEqual((others.status, others.err), (1, ""))  # rank 0 speaks for all
        self.assertEqual(harness.run(self.arguments(), timeout=SOON, env=dict(step, SLURM_STEP_NUM_TASKS="1")).status, 0)


class Output(BadInput):
    def unwritable(self):
        """Paths that cannot be written, for root too."""
        below_a_file = os.path.join(self.tokens, "below")
        yield below_a_file, "not a directory"
        yield "/proc/nowhere/below", "no such file"
        if os.geteuid() != 0:
            locked = self.fresh("locked")
            os.mkdir(locked, 0o555)
            yield os.path.join(locked, "below"), "permission"

    def test_said_before_any_work_is_done(self):
        for option in ("log", "out", "trace"):
            for path, why in self.unwritable():
                with self.subTest(option=option, path=path):
                    result = self.fails(path, why, **{option: path})
                    self.assertNotRegex(result.out, r"(?m)^step\s+\d", str(result))

    def test_out_is_a_file(self):
        self.fails(self.tokens, out=self.tokens)

    def test_out_is_made_with_its_parents(self):
        out = os.path.join(self.fresh("out"), "of", "this")
        self.train(out=out)
        self.assertTrue(os.path.exists(os.path.join(out, "model.bin")))

    def test_log_is_a_directory(self):
        self.fails(self.folder, "directory", log=self.folder)


class DiskFull(BadInput):
    """A save that fails leaves what was there before as it was, and no half file beside it; the run goes on, and says at
    its end that its last state is not saved."""

    def check(self, out, result):
        self.assertFails(result, "was not saved")
        self.assertFalse([name for name in os.listdir(out) if ".tmp" in name], "left behind")

    def file_system(self, size):
        """A directory that holds at most `size` bytes."""
        if os.geteuid() != 0:
            self.skipTest("only root can mount a small file system")
        folder = self.fresh("small")
        os.mkdir(folder)
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
        if mounted.returncode != 0:
            self.skipTest("cannot mount a tmpfs here: " + mounted.stderr.decode().strip())
        self.addCleanup(subprocess.run, ["umount", folder], check=True)
        return folder

    def test_file_system_full(self):
        out = self.file_system(os.path.getsize(self.model) * 9 // 2)  # room for one checkpoint, not for two
        result = harness.run(self.arguments(out=out, save_every=1, steps=5), timeout=SOON)
        self.assertIn("no space left", result.err.lower(), str(result))
        self.check(out, result)
        self.assertEqual([name for name in os.listdir(out) if name.startswith("step_")], ["step_00000001"])
        shape, _ = reference.read_model(os.path.join(out, "model.bin"))  # it is smaller, and fits
        self.assertEqual(shape, self.shape)

    def test_file_size_limit(self):
        # The first save succeeds, then the limit falls below a checkpoint's while the run goes on. SIGXFSZ is
        # ignored, as Python does and passes on, so that write() fails as on a full quota.
        out = self.fresh("out")
        started = harness.Run(self.arguments(out=out, save_every=1, steps=1000000), restore_signals=False)
        self.addCleanup(started.close)
        def saved():
            return [name for name in os.listdir(out) if re.fullmatch(r"step_\d+", name)] if os.path.exists(out) else []

        harness.wait_until(lambda: saved() or started.ended(), SOON, "the first save")
        resource.prlimit(started.process.pid, resource.RLIMIT_FSIZE, (100000, 100000))
        harness.wait_until(lambda: "too large" in started.result().err.lower() or started.ended(), SOON, "a failed save")
        self.assertFalse(started.ended(), f"it goes on{started.result()}")
        os.kill(started.process.pid, signal.SIGTERM)
        result = started.wait(SOON)
        self.assertIn("too large", result.err.lower(), str(result))
        self.check(out, result)
        self.assertNotEqual(saved(), [])

    def test_first_save_into_nothing(self):
        # Not even one file fits: no model.bin at all, rather than a part of one.
        out = self.file_system(65536)
        result = harness.run(self.arguments(out=out), timeout=SOON)
        self.assertFails(result, "no space left")
        self.assertFalse(set(os.listdir(out)) - {"lock"})


class Numbers(BadInput):
    def check(self, ranks, **more):
        out = self.fresh("out")
        result = harness.run(self.arguments(out=out, save_every=1, steps=50, clip=0, **more), ranks, timeout=2 * SOON)
        self.assertFails(result, "step")
        self.assertRegex(result.err.lower(), r"\bnan\b|\binf|not finite|non-finite", str(result))
        self.assertRegex(result.err.lower(), r"rank \d", str(result))
        # What was saved before is a model of numbers: the optimizer has not written.
        path = os.path.join(out, "model.bin")
        if os.path.exists(path):
            _, model = reference.read_model(path)
            for name, values in model.items():
                self.assertTrue(np.isfinite(values).all(), f"{name} in {path} holds NaN or infinity")
        return result

    def test_exploding_learning_rate(self):
        with self.subTest("within the range of --lr"):
            self.check(1, lr=100, schedule="constant", weight_decay=100)
        with self.subTest("outside of it"):
            self.fails("--lr", "range", lr="1e30")

    def poisoned(self, name, value):
        model = {key: w.copy() for key, w in self.parameters.items()}
        model[name].flat[-1] = value
        path = self.fresh("model.bin")
        reference.write_model(path, self.shape, model)
        return path

    def test_nan_in_the_model_file(self):
        for name in ("fcprojw", reference.NAMES[-1]):
            with self.subTest(name):
                result = self.check(1, init_from=self.poisoned(name, np.nan))
                self.assertIn("step 0", result.err, str(result))

    def test_padding_of_the_vocabulary_does_not_matter(self):
        """NaN in the file's rows that only pad the table: training is what it is without."""
        for ranks, mesh in ((1, {}), (2, dict(tp=2)), (2, dict(tp=2, strategy="up"))):
            with self.subTest(ranks=ranks, **mesh):
                logs = [self.train(ranks, init_from=path, val=self.tokens, val_every=1, **mesh)[0]
                        for path in (self.model, self.poisoned("wte", np.nan))]
                steps, poisoned = ([(e["step"], e["loss"]) for e in log if "loss" in e] for log in logs)
                self.assertEqual(steps, poisoned)

    def test_infinity_on_two_ranks(self):
        for strategy in STRATEGIES:
            for mesh in (dict(tp=2), dict(dp=2, micro_batch=4)):
                with self.subTest(strategy=strategy, **mesh):
                    self.check(2, init_from=self.poisoned("qkvw", np.inf), strategy=strategy, **mesh)

    def overflowing(self, tensor):
        """A model whose loss is huge but finite, because a projection of the last block is 0; its gradient is about
        1e28 (from lnfw) times 1e12 (from the bias before it), more than fp32 holds, and no other's is."""
        model = {key: w.copy() for key, w in self.parameters.items()}
        model["lnfw"][:] = 1e32
        model["fcprojw"][-1] = 0
        if tensor == "fcprojw":
            model["fcw"][-1], model["fcb"][-1] = 0, 1e12
        else:
            model["attprojw"][-1], model["qkvb"][-1, 2 * self.shape.C:] = 0, 1e12  # the values'
        path = self.fresh("model.bin")
        reference.write_model(path, self.shape, model)
        return path

    def test_gradient_that_overflows_is_named(self):
        # One owner of all of it, or two: of parts of a bucket of its own (attprojw with UP and tp = 2: 192 rows)
        # or of one that tensors share.
        for tensor in ("fcprojw", "attprojw"):
            path = self.overflowing(tensor)
            for strategy in STRATEGIES:
                for ranks, mesh in ((1, {}), (2, dict(tp=2)), (2, dict(dp=2, micro_batch=4))):
                    with self.subTest(tensor=tensor, strategy=strategy, ranks=ranks, **mesh):
                        result = self.check(ranks, init_from=path, strategy=strategy, **mesh)
                        self.assertIn(f"the gradient of {tensor} of layer {self.shape.L - 1} on rank", result.err,
                                      str(result))
                        self.assertIn("step 0", result.err, str(result))


class Stacks(BadInput):
    """Too small a stack is raised or refused, before a product writes beyond it."""

    def test_of_threads(self):
        for name, size in ("OMP_STACKSIZE", "1M"), ("OMP_STACKSIZE", "1200"), ("GOMP_STACKSIZE", "100k"):
            for threads in (1, 2):
                with self.subTest(size=size, threads=threads):
                    result = harness.run(self.arguments(threads=threads, peak_tflops=0), env={name: size}, timeout=SOON)
                    self.assertFails(result, "a thread has a stack of", "OMP_STACKSIZE")
        self.assertEqual(harness.run(self.arguments(threads=2, peak_tflops=0), env=dict(OMP_STACKSIZE="2M")).status, 0)

    def test_of_the_first_thread(self):
        for limit in "-S -s 256", "-S -s 1024", "-S -s unlimited", "-s 1024":
            with self.subTest(limit=limit):
                wrapper = ("sh", "-c", f'ulimit {limit}; exec "$@"', "sh")
                result = harness.run(self.arguments(threads=2, peak_tflops=0), wrapper=wrapper)
                if result.status == 0 or "-S" in limit:
                    self.assertEqual(result.status, 0, str(result))
                else:
                    self.assertFails(result, "a thread has a stack of", "ulimit -s")


class Once(BadInput):
    """What all ranks find, rank 0 says."""

    def test_one_message_for_all_ranks(self):
        cases = [dict(train=self.path("nothing.bin")), dict(init_from=self.path("nothing.bin")), dict(lr="fast"),
                 dict(seq=35), dict(init_from=self.tokens), dict(transport="nccl"), dict(micro_batch=3)]
        for more in cases:
            with self.subTest(**more):
                result = self.fails(ranks=2, **{"tp": 2, **more})
                self.assertEqual(result.err.count("error:"), 1, str(result))
                self.assertIn("rank 0", result.err, str(result))

    def test_hint(self):
        self.fails("hint:", train=self.path("nothing.bin"))

    def test_the_end_waits_until_the_message_is_read(self):
        """A launcher that is told to end the ranks may drop what it has not read."""
        with subprocess.Popen([harness.PROGRAM, "--lr", "fast"], stderr=subprocess.PIPE, text=True) as process:
            select.select([process.stderr], [], [], SOON)
            time.sleep(0.3)
            self.assertIsNone(process.poll())
            self.assertIn("--lr 'fast'", process.stderr.read())
            self.assertEqual(process.wait(SOON), 1)
