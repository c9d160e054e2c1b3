"""What a run tells: the log, the trace, the dry run, the help; and what it leaves behind in --out."""
# sanitizers: too
# slow: the_time_that_is_left
# limit: 180
import ctypes
import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

import numpy as np

import harness
import reference
import test_saving

OPTIONS = """model layers channels heads kv-heads ffn block norm-eps rope-theta seq init-from train val vocab tp dp strategy
    ranks-per-host network-gbit transport overlap gradients prefetch embedding plan reproducible batch micro-batch steps optimizer lr
    min-lr warmup schedule decay-steps weight-decay beta1 beta2 eps momentum clip z-loss seed skip-steps recompute dtype reduce-dtype
    val-every val-batches sample-every prompt prompt-tokens sample-tokens temperature top-k log trace trace-steps out save-every keep
    keep-every force export export-step threads peak-tflops timeout dry-run predict predict-ranks predict-all help""".split()
STEP_FIELDS = ["step", "loss", "grad_norm", "lr", "step_ms", "tokens_per_s", "mfu", "comm_ms", "exposed_comm_ms",
               "exposed_mean_ms", "slowest_rank", "lag_ms"]


class Log(harness.Case):
    def test_lines_and_fields(self):
        log, _ = self.train(2, tp=2, steps=6, val=self.tokens, val_every=2, val_batches=1, sample_every=3, seed=5)
        kinds = [entry["event"] for entry in log]
        self.assertEqual((kinds[0], kinds[-1]), ("config", "end"), kinds)
        self.assertEqual((kinds.count("config"), kinds.count("end")), (1, 1))
        self.assertLessEqual(set(kinds), {"config", "step", "val", "sample", "audit", "end"})

        steps = harness.events(log, "step")
        self.assertEqual([s["step"] for s in steps], list(range(6)))
        for step in steps:
            self.assertLessEqual(set(STEP_FIELDS), set(step), step)
            for name in STEP_FIELDS:
                self.assertIsInstance(step[name], (int, float), (name, step))
            mean, largest = step["exposed_mean_ms"], step["exposed_comm_ms"]  # of two ranks
            self.assertTrue(0.5 * largest * 0.999 <= mean <= largest * 1.001, step)
            self.assertTrue(0 <= step["exposed_comm_ms"] and 0 < step["comm_ms"], step)
            rate = self.samples * self.T / step["step_ms"] * 1e3
            self.assertAlmostEqual(step["tokens_per_s"], rate, delta=0.01 * rate)
        # A rank that begins a step sooner than rank 0, whose clock it is, has time for more.
        for name in "exposed_comm_ms", "comm_ms":
            self.assertLessEqual(sum(s[name] for s in steps), 2 * sum(s["step_ms"] for s in steps), name)
        validations, samples = harness.events(log, "val"), harness.events(log, "sample")
        # So many steps have been taken; the last is the trained model's.
        self.assertEqual([v["step"] for v in validations], [0, 2, 4, 6])
        self.assertTrue(all(0 < v["loss"] < 10 for v in validations), validations)
        self.assertEqual([s["step"] for s in samples], [3, 6])
        self.assertTrue(all(isinstance(s.get("text"), str) and s["text"] for s in samples), samples)

    def test_audit(self):
        """What operations waited adds up to what steps did; each has its bound, and what is not hidden an option to try."""
        for ranks, mesh in ((2, dict(tp=2)), (2, dict(dp=2, micro_batch=4)), (2, dict(tp=2, strategy="up")),
                            (2, dict(tp=2, overlap="none")), (2, dict(tp=2, overlap="slice"))):
            with self.subTest(**mesh):
                log, result = self.train(ranks, steps=6, **mesh)
                audit, steps = harness.events(log, "audit"), harness.events(log, "step")
                self.assertGreater(len(audit), 3)
                waited = sum(step["exposed_mean_ms"] for step in steps) / len(steps)
                self.assertAlmostEqual(sum(entry["exposed_ms"] for entry in audit), waited, delta=1e-6 * waited)
                longest = sum(step["comm_ms"] for step in steps) / len(steps)  # of the rank with the most, all operations at once
                for entry in audit:
                    self.assertLessEqual(entry["comm_ms"], longest * (1 + 1e-9), entry)
                    self.assertAlmostEqual(entry["hidden"], max(0, 1 - entry["exposed_ms"] / entry["comm_ms"]), delta=1e-9)
                    self.assertEqual(entry["try"] == "", entry["hidden"] >= 0.95, entry)
                    self.assertIn(entry["bound"], ("nothing", "blocking", "no core to spare", "latency", "chunking", "bandwidth"))
                    if mesh.get("overlap") == "none" and entry["try"]:
                        self.assertEqual((entry["bound"], entry["try"]), ("blocking", "--overlap auto"))
                worst = max(audit, key=lambda entry: entry["exposed_ms"])
                self.assertIn(worst["operation"], result.out)
        log, _ = self.train(1, steps=2)
        self.assertEqual(harness.events(log, "audit"), [])

    def test_each_moment_belongs_to_a_step_or_to_what_comes_between(self):
        """Steps are small here, so that what were left out of them would show. What others on this machine take of it between two
        readings of the clock is nobody's: of some runs that with the least is looked at."""
        def left_out(ranks, **mesh):
            log, _ = self.train(ranks, steps=60, micro_batch=2, batch=4, val=self.tokens, val_every=20, val_batches=1,
                                sample_every=30, **mesh)
            between = sum(entry["ms"] for kind in ("val", "sample") for entry in harness.events(log, kind))
            steps, wall = sum(s["step_ms"] for s in harness.events(log, "step")), 1e3 * log[-1]["total_s"]
            self.assertEqual([s["step"] for s in harness.events(log, "step")], list(range(60)))
            self.assertLessEqual(steps + between, 1.001 * wall)  # with other ranks: without waits until all are ready
            self.assertGreater(between, 0)
            return 1 - (steps + between) / wall

        left_out(4, tp=2, dp=2)
        self.assertTrue(any(left_out(1) < 0.01 for _ in range(6)))

    def test_the_time_that_is_left(self):  # of a run that goes on by hand: tests/data/run/test_audit.c
        """Has validations, samples and saves that are still due, each as long as those so far (on a slow disk, so that they take
        longer than the steps); in a run that goes on, before its first, a forward pass of as many sequences."""
        out, val, tokens = self.fresh("slow"), self.fresh("slow.bin"), 8
        env = dict(LD_PRELOAD=test_saving.build_shim(self, "train/preload_disk.c"), FULL_RANK="0", FULL_PATH="-slow", SLOW_MS="25")
        reference.write_tokens(val, harness.random_tokens(30 * self.T + 1, self.shape.V))
        every = dict(val=4, sample=5, save=1)
        for first, last in (0, 6), (6, 12):
            log = self.fresh("log.jsonl")
            result = harness.run(self.arguments(out=out, log=log, val=val, steps=last, val_every=4, sample_every=5, save_every=1,
                                                sample_tokens=tokens, schedule="constant"), env=env)
            self.assertEqual(result.status, 0, str(result))
            log, others = harness.read_log(log), []
            shown = re.findall(r"^step +(\d+)/\d+ .*  ETA (\d+):(\d\d)  ", result.out, re.M)
            self.assertEqual([int(step) for step, *_ in shown], list(range(first + 1, last + 1)))
            for done, minutes, seconds in ((int(number) for number in line) for line in shown):
                step = np.mean([e["step_ms"] for e in harness.events(log, "step") if e["step"] < done])
                guess = dict(val=30, sample=tokens * min(1, tokens / 2 / self.T), save=0)
                others.append(0)
                for kind, n in every.items():
                    so_far = [e["stall_ms" if kind == "save" else "ms"] for e in harness.events(log, kind) if first <= e["step"] < done]
                    left = sum(at % n == 0 or at == last for at in range(done, last + 1))
                    others[-1] += left * (np.mean(so_far) if so_far else guess[kind] * step / 3 / self.samples)
                left = (step * (last - done) + others[-1]) / 1e3 - 60 * minutes - seconds  # the fraction of a second
                self.assertTrue(-0.2 < left < 1.2, (done, left, result.out))
            self.assertGreater(max(others), 700)

    def test_a_file_that_the_shell_has_redirected(self):
        """Under whatever name: it is neither overwritten nor renamed."""
        shell = ("sh", "-c", 'f=$1 how=$2; shift 2; case $how in 1) exec "$@" >$f;; 2) exec "$@" 2>>$f;; 3) exec "$@" 3>>$f;; '
                 '*) exec "$@" >>$f;; esac', "sh")
        link = self.fresh("link")
        os.symlink("/proc/self/fd/1", link)
        for option, name, how in (
                ("log", "/dev/stdout", "1"), ("log", "/dev/stdout", "1a"), ("log", "/dev/stderr", "2"), ("log", "/dev/fd/3", "3"),
                ("log", None, "1a"), ("trace", None, "1a"), ("trace", link, "1a"), ("log", None, "mpirun"), ("trace", None, "mpirun")):
            with self.subTest(option=option, name=name, how=how):
                path = self.fresh("shown")
                pathlib.Path(path).write_text("earlier\n")
                words, program = self.arguments(**{option: name or path}), harness.PROGRAM
                if how == "mpirun":  # has the file itself, and gives the ranks a pipe
                    words, program = ["-np", 1, program, *words], harness.MPIRUN
                result = harness.run(words, program=program, wrapper=(*shell, path, how))
                text = pathlib.Path(path).read_text()
                self.assertEqual(result.status, 1, str(result) + text)
                self.assertIn("the shell has redirected this program to", result.err + text)
                self.assertEqual(text[:8], "" if how == "1" else "earlier\n")
                self.assertFalse(os.path.exists(path + ".1"))

    def test_config_has_every_option_and_the_place(self):
        log, _ = self.train(2, dp=2, micro_batch=4, steps=1, seed=77)
        config = {name.replace("_", "-"): value for name, value in log[0].items()}
        for name in OPTIONS:
            if name != "help":
                self.assertIn(name, config)
        for name in ("version", "host", "ranks"):
            self.assertIn(name, config)
        self.assertEqual((config["ranks"], int(config["dp"]), int(config["seed"])), (2, 2, 77))
        self.assertEqual(config["train"], self.tokens)

    def test_a_run_is_repeated_from_its_log(self):
        """By `given`: the arguments as they were typed, quotes, blanks and repeats too."""
        path, out = self.fresh("log.jsonl"), self.fresh("out")
        typed = [*self.arguments(log=path, out=out, lr="3.00e-3", schedule="constant", seed=77, sample_tokens=4), "--seed=0078",
                 "--prompt", ' "!\\ \n\u00e9']
        typed[typed.index("--init-from"):typed.index("--init-from") + 2] = "--layers 1 --channels 12 --heads 1 --vocab 256".split()
        for words in typed, [*typed, "--steps", "4"]:
            self.assertEqual(harness.run(words).status, 0)
        config, resume = (entry for entry in harness.read_log(path) if entry["event"] in ("config", "resume"))
        self.assertEqual(config["given"], typed)
        self.assertEqual(resume["given"], [*typed, "--steps", "4"])
        shutil.rmtree(out)
        first = harness.read_log(path)
        self.assertEqual(harness.run(resume["given"]).status, 0)
        losses, again = ([step["loss"] for step in harness.events(log, "step")] for log in (first, harness.read_log(path)))
        self.assertEqual((losses, len(again)), (again, 4))

    def test_config_says_what_was_run_wherever_it_came_from(self):
        def config(ranks=1, **more):
            unset = dict(train=None, seq=None, batch=None, micro_batch=None, threads=None, steps=0)
            return self.train(ranks, **{**unset, **more})[0][0]

        def found(config):
            return tuple(config[name] for name in ("layers", "channels", "heads", "vocab", "seq", "overlap", "batch"))
        s = self.shape
        cases = {"--init-from": (dict(), (s.L, s.C, s.heads, s.V, s.maxT, "auto", 4)),
                 "--model": (dict(init_from=None, model="d6", seq=64, overlap="slice"), (6, 384, 6, 256, 64, "slice", 4)),
                 "defaults": (dict(init_from=None, layers=1), (1, 768, 12, 256, 1024, "auto", 4)),
                 "options": (dict(init_from=None, layers=1, channels=48, heads=3, vocab=101, seq=9, overlap="ring:2", batch=6,
                                  micro_batch=3, threads=2), (1, 48, 3, 101, 9, "ring:2", 6))}
        for source, (more, expected) in cases.items():
            with self.subTest(source):
                said = config(**more)
                self.assertEqual(found(said), expected)
                self.assertEqual((said["tp"], said["dp"]), (1, 1))
                self.assertTrue(said["threads"] == 2 if "threads" in more else said["threads"] > 0, said["threads"])
        with self.subTest("a mesh"):
            said = config(4, tp=2)
            self.assertEqual((said["tp"], said["dp"], said["batch"]), (2, 2, 8))
            self.assertGreater(said["threads"], 0)

    def test_peak_memory_is_that_of_this_program(self):
        """Not that of a large one that starts it, such as a notebook."""
        log, large = self.fresh("log.jsonl"), "import os, sys; large = b'x' * (1 << 29); os.execv(sys.argv[1], sys.argv[1:])"
        own = self.train()[0][-1]["peak_rss_mib"]
        result = harness.run(self.arguments(log=log), wrapper=(sys.executable, "-c", large))
        self.assertEqual(result.status, 0, str(result))
        self.assertGreater(own, 1)
        self.assertLess(harness.read_log(log)[-1]["peak_rss_mib"], own + 256)

    def test_mfu_is_what_its_formula_says(self):
        # Peak 0.001 TFLOP/s per rank; tokens/s (6 P + 6 L C T) / peak. P is all parameters, without the vocabulary's
        # padding and the position embedding.
        log, _ = self.train(2, tp=2, steps=3, peak_tflops=0.001)
        s = self.shape
        P = s.V * s.C + s.L * (12 * s.C ** 2 + 13 * s.C) + 2 * s.C
        self.assertEqual(log[0]["parameters"], P + s.maxT * s.C)
        steps = harness.events(log, "step")
        self.assertEqual(len(steps), 3)
        for step in steps:
            expected = step["tokens_per_s"] * (6 * P + 6 * s.L * s.C * self.T) / 2e9
            self.assertAlmostEqual(step["mfu"], expected, delta=1e-9 * expected)

    def test_validation_covers_the_same_sequences_whatever_the_batch_and_the_mesh(self):
        """Of a set that no batch divides, of one smaller than a batch, and of one with more than it takes."""
        meshes = ((1, dict(micro_batch=4, batch=4)), (1, dict(micro_batch=3, batch=9)),
                  (2, dict(tp=2, strategy="up", micro_batch=7, batch=7)), (3, dict(dp=3, micro_batch=2, batch=6)),
                  (4, dict(tp=2, dp=2, micro_batch=3, batch=6)))
        for count, asked, taken in ((13, {}, 13), (1, {}, 1), (100, {}, 80), (100, dict(val_batches=9), None)):
            path = self.fresh("val.bin")
            reference.write_tokens(path, harness.random_tokens(count * self.T + 1, self.shape.V, seed=count))
            inputs, targets = reference.samples(reference.read_tokens(path), self.T)
            for ranks, mesh in meshes if count == 13 else meshes[::4]:
                with self.subTest(count=count, ranks=ranks, **asked, **mesh):
                    n = taken or min(9 * mesh["batch"], count)
                    expected = reference.forward(self.shape, self.parameters, inputs[:n], targets[:n])[0]
                    log, result = self.train(ranks, steps=1, lr=0, val=path, val_every=1, **asked, **mesh)
                    for said in harness.events(log, "val"):
                        self.assertEqual(said["sequences"], n)
                        self.assertLess(abs(said["loss"] / expected - 1), 1e-5)
                    self.assertIn(f"validation loss {expected:.4f}  {n} sequences\n", result.out)

    def test_steps_on_a_terminal(self):
        """A line each, as anywhere else; what matters most is in its first 80 columns."""
        ours, theirs = os.openpty()
        run = subprocess.Popen([harness.PROGRAM, *self.arguments(steps=10 ** 6)], stdout=theirs, stdin=theirs,
                               env=harness.environment())
        self.addCleanup(run.wait)
        self.addCleanup(run.kill)
        os.close(theirs)
        text = b""
        while text.count(b"tok/s") < 30 and (piece := os.read(ours, 4096)):
            text += piece
        os.close(ours)
        lines = [line.decode() for line in text.split(b"\r\n") if line.startswith(b"step") and b" lr " in line]
        self.assertGreater(len(lines), 10)
        for line in lines:
            for word in "loss norm lr ms tok/s MFU exposed ETA".split():
                self.assertIn(word, line)
            for word in "loss MFU exposed ETA".split():
                self.assertIn(word, line[:80])
            self.assertRegex(line, r"ETA \d+:[0-5]\d:[0-5]\d  ")  # hours

    def test_intervals_of_zero_mean_never(self):
        log, _ = self.train(steps=3, val=self.tokens, val_every=0, sample_every=0)
        self.assertEqual({entry["event"] for entry in log}, {"config", "step", "end"})

    def test_a_model_is_evaluated_without_a_step(self):
        for ranks in (1, 2):
            with self.subTest(ranks=ranks):
                log, _ = self.train(ranks, steps=0, tp=ranks, train=None, val=self.tokens, val_every=1, val_batches=1,
                                    sample_every=1)
                self.assertEqual([entry["event"] for entry in log], ["config", "val", "sample", "end"])
                self.assertEqual([entry["step"] for entry in log[1:3]], [0, 0])
                self.assertTrue(log[2]["text"])

    def test_a_sample_does_not_command_the_terminal(self):
        """Whatever bytes a model draws; weights at random draw all of them."""
        model, shape = self.fresh("model.bin"), dataclasses.replace(self.shape, V=256, Vp=256)
        reference.write_model(model, shape, reference.random_model(shape, seed=9))
        log, result = self.train(init_from=model, steps=0, train=None, val=self.tokens, val_every=1, val_batches=1,
                                 sample_every=1)
        text = harness.events(log, "sample")[0]["text"]
        for shown in (text, result.out):
            self.assertFalse([c for c in shown if ord(c) < 32 and c not in "\n\t" or ord(c) == 127], shown)


class ControlCharacters(harness.Case):
    """A terminal obeys them: none that a file holds is printed, wherever it comes from."""
    evil = "\x1b]0;owned\x07\x7f\x9b2J\r\b"

    def shown(self, *arguments, **more):
        result = harness.run([*arguments, *harness.options(**more)])
        self.assertIsNone(re.search(r"[^\n\t -~\u00a0-\U0010ffff]", result.text), repr(result.text))
        return result

    def written(self, values):
        path = self.fresh("file.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(values, file)
        return path

    def test_names_of_files(self):
        folder = self.fresh("folder")
        os.mkdir(folder)
        names = {name: os.path.join(folder, name + self.evil) for name in ("out", "trace", "log")}
        for steps in (2, 4):  # saves, and resumes
            result = self.shown(*self.arguments(**names, trace_steps="0:1", plan="new", steps=steps, schedule="constant",
                                                save_every=1))
            self.assertEqual(result.status, 0, str(result))
            self.assertIn("saved " + names["out"][:-len(self.evil)] + "?]0;owned???", result.out)
        self.assertEqual(len(os.listdir(folder)), 3)
        for name in ("train", "val", "init-from", "log", "plan", "predict", "overlap", "export"):
            more = {name: os.path.join(folder, "none", self.evil), "out": names["out"]}
            self.assertFails(self.shown(*self.arguments(**{"train": None, "init_from": None, **more})), "error:")

    def test_a_manifest(self):
        xxhash = ctypes.CDLL("libxxhash.so.0")
        xxhash.XXH64.restype = ctypes.c_uint64
        out = self.fresh("out")
        self.train(out=out, schedule="constant", steps=1)
        path = os.path.join(out, "step_00000001", "manifest.json")
        with open(path, "rb") as file:
            text = file.read()
        for name in b"strategy", b"tp", b"dp", b"version":
            text = re.sub(b'"' + name + b'":\t"[^"]*"', b'"' + name + b'":\t"' + json.dumps(self.evil)[1:-1].replace(
                "\\", r"\\").encode() + b'"', text)
        text = text[:text.rindex(b'\t"xxh64"')]
        with open(path, "wb") as file:
            file.write(text + b'\t"xxh64":\t"%016x"\n}\n' % xxhash.XXH64(text, ctypes.c_size_t(len(text)), ctypes.c_uint64(0)))
        result = self.shown(*self.arguments(out=out, schedule="constant", steps=2))
        self.assertEqual(result.status, 0, str(result))
        self.assertEqual(result.out.count("owned"), 5, result.out)

    def test_a_machine(self):
        with open(os.path.join(harness.ROOT, "scripts", "machines", "h100x8.json"), encoding="utf-8") as file:
            machine = json.load(file)
        machine["name"], machine["links"][0]["name"] = "H" + self.evil, "N" + self.evil
        result = self.shown(predict=self.written(machine), tp=2, layers=1, channels=64, heads=2, seq=64)
        self.assertEqual(result.status, 0, str(result))
        self.assertEqual(result.out.count("owned"), 2, result.out)
        machine["x" + self.evil] = 1
        self.assertFails(self.shown(predict=self.written(machine)), "is no field of a machine")


class Traced(harness.Case):
    def traced(self, ranks, **more):
        path = self.fresh("trace.json")
        self.train(ranks, trace=path, **{**dict(steps=4, trace_steps="1:3"), **more})
        with open(path, encoding="utf-8") as file:
            trace = json.load(file)
        rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"]
                if e["ph"] == "M" and e["name"] == "thread_name"}
        intervals = [e for e in trace["traceEvents"] if e["ph"] == "X"]
        self.assertEqual({e["ph"] for e in trace["traceEvents"]}, {"M", "X"})
        return rows, intervals


class Trace(Traced):
    def test_rows_and_intervals(self):
        rows, intervals = self.traced(2, tp=2)
        for rank in (0, 1):
            names = [name for (pid, _), name in rows.items() if pid == rank]
            self.assertTrue(any("compute" in name for name in names) and any("comm" in name for name in names), names)
            kinds = {e["cat"] for e in intervals if e["pid"] == rank}
            self.assertLessEqual({"compute", "comm"}, kinds)
        self.assertEqual({e["args"]["step"] for e in intervals}, {1, 2}, "--trace-steps 1:3")
        for e in intervals:
            self.assertIn((e["pid"], e["tid"]), rows)
            # A transfer that began before the first traced step may end in it.
            self.assertTrue((e["ts"] >= 0 or e["cat"] == "comm") and e["dur"] >= 0 and e["name"], e)
            self.assertTrue(math.isfinite(e["ts"] + e["dur"]), e)
        for (rank, row), name in rows.items():
            if "compute" in name or "wait" in name:
                self.assertNested([e for e in intervals if (e["pid"], e["tid"]) == (rank, row)])
        sent = [e["args"].get("bytes", 0) for e in intervals if e["cat"] == "comm"]
        self.assertGreater(sum(sent), 0)

    def test_one_owner_updates_in_few_calls(self):
        """Vectors, the token table, and the matrices of all layers at once, however many there are."""
        for ranks, more in ((1, {}), (2, {"tp": 2})):
            with self.subTest(ranks=ranks):
                intervals = self.traced(ranks, **more)[1]
                updates = [e for e in intervals if e["name"] == "update" and e["pid"] == 0 and e["args"]["step"] == 2]
                self.assertEqual(len(updates), 3 + (ranks > 1), updates)  # split vectors are apart

    def assertNested(self, intervals):
        """Two intervals of one thread are apart or one contains the other, as far as the clock's digits go."""
        open_until, slack = [], 0.01  # microseconds
        for e in sorted(intervals, key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= e["ts"] + slack:
                open_until.pop()
            if open_until:
                self.assertLessEqual(e["ts"] + e["dur"], open_until[-1] + slack, e)
            open_until.append(e["ts"] + e["dur"])


SCHEDULES = ("ring", 1), ("direct", 1), ("ring:2", 2), ("once", 1)


class Tails(Traced):
    shape, T, samples = reference.Shape(maxT=64, V=256, L=1, heads=8, C=128, Vp=256), 64, 8

    def tails(self, parts, **more):
        """Of all reduce-scatters after computation in this many parts, the share with a transfer that is asked for when the
        last part is computed."""
        found = {}  # (rank, step, layer, place in the model) -> kind -> [(begin, end)]
        for e in self.traced(2, tp=2, steps=2, trace_steps="1:2", **more)[1]:
            if e["cat"] == "wait":  # named after the transfer
                continue
            kind, name = (e["cat"], e["name"]) if e["cat"] == "compute" else e["name"].partition(" ")[::2]
            key = e["pid"], e["args"]["step"], e["args"].get("layer"), name
            at = e["args"]["posted"] if e["cat"] == "comm" else e["ts"]
            found.setdefault(key, {}).setdefault(kind, []).append((at, e["ts"] + e["dur"]))
        late = []
        for key, kinds in found.items():
            computes, scatters = sorted(kinds.get("compute", ())), kinds.get("reduce-scatter")
            if not scatters or len(computes) < parts or key[-1] == "embedding":  # a look-up takes no time
                continue
            # Row-parallel layers scatter in forward, which comes first. Column-parallel ones scatter in backward,
            # after dgrad: before it comes forward, which has as many parts, and after it wgrad.
            forward = min(scatters) < min(kinds.get("all-gather", [(math.inf, 0)]))
            own = computes[:parts] if forward else computes[parts:2 * parts]
            late.append(max(scatters)[0] > max(end for _, end in own))
        self.assertEqual(len(late), 10, f"head and four linear layers on 2 ranks; there are {list(found)}")
        return sum(late) / len(late)

    def test_commfuse_has_no_tail_and_slicing_has(self):
        self.assertEqual(self.tails(4, overlap="slice:4"), 1, "the control: data slicing must show its tail")
        for overlap, slices in SCHEDULES:
            with self.subTest(overlap=overlap):
                self.assertEqual(self.tails(2 * slices, overlap=overlap), 0)


class DryRun(harness.Case):
    def dry(self, **more):
        result = harness.run(self.arguments(dry_run=True, **more), timeout=10)
        self.assertEqual(result.status, 0, str(result))
        return result.out

    def test_memory_by_purpose_and_schedules(self):
        text = self.dry(tp=4, dp=2, micro_batch=4).lower()
        for purpose in ("weight", "gradient", "optimizer", "activation", "total"):
            self.assertIn(purpose, text)
        self.assertRegex(text, r"\b\d+(\.\d+)? ?[kmgt]i?b\b")
        for operation in ("all-gather", "reduce-scatter"):
            self.assertIn(operation, text)

    def test_gradients_travel_whole(self):
        """In whatever slices the other operations travel: one product for each owner."""
        text = self.dry(dp=2, micro_batch=4, overlap="ring:3")
        found = re.findall(r"^\w+ \(gradient computed owner by owner.*\n(reduce-scatter, .*)\n((?:    .*\n)*)", text, re.M)
        self.assertGreater(len(found), 0, text)
        for head, steps in found:
            self.assertTrue(head.endswith(" 1 slice per shard"), head)
            self.assertEqual(steps.count(" compute "), 2, steps)

    def test_owners_where_sending_takes_longer_than_what_is_left(self):
        """Of T tokens: at 4e9 bytes/s and 60e9 flop/s where all matrices up to this one are more than T / 7.5 times those before."""
        matrices = dict(qkvw=3, attprojw=1, fcw=4, fcprojw=4)  # in C²
        for T in 6, 12, 24:
            text = self.dry(init_from=None, model="d6", vocab=256, dp=2, batch=2, micro_batch=1, seq=T)
            lines = re.findall(r"^  (\w+) .* over \w+ +(?:from layer (\d) on )?2 owners.*(owner by owner|sent when)",
                               text[text.index("Gradients and"):], re.M)
            sums, expected, before = 0, [], {}
            for layer in range(6):
                for name, size in matrices.items():
                    how = "owner by owner" if sums + size > T / 7.5 * sums else "sent when"
                    expected += [(name, f"{layer or ''}", how)] * (before.get(name) != how)
                    sums, before[name] = sums + size, how
            self.assertEqual(lines, expected, f"{T}: {text}")

    def test_every_gradient_and_weight_has_its_schedules(self):
        for mesh in dict(dp=2), dict(tp=2, dp=2), dict(tp=2, strategy="up"):
            text = self.dry(init_from=None, layers=3, channels=256, heads=4, vocab=256, micro_batch=4, **mesh)
            names = re.findall(r"^  (\w[\w, ]*?) +[\d.]+ MiB over .*(?:owners of|owners;)", text, re.M)
            self.assertGreaterEqual(len(set(names)), 5, text)
            for name in names:
                self.assertRegex(text, rf"(?m)^{name} \(gradient")
                self.assertRegex(text, rf"(?m)^{name} \(weights, during update and forward")

    def test_the_table_has_owners_where_its_rows_are_sent(self):
        """Where it is sent whole, its gradient is complete at the end of backward alone."""
        for embedding, says in ("rows", "2 owners of 128 rows: wgrad owner by owner"), ("table", "2 owners; complete only at the end"):
            text = self.dry(init_from=None, model="d6", vocab=256, dp=2, micro_batch=4, gradients="owners", embedding=embedding)
            self.assertIn(says, re.search("^  wte .*", text, re.M)[0])

    def test_reductions_share_memory(self):
        """Of each kind as many have their own as are begun during the table's: 2 and the table's size in layers."""
        for vocab, window in (200, 3), (6000, 4), (12000, 6):
            staging = []
            for layers in range(window - 1, window + 3):
                text = self.dry(init_from=None, layers=layers, channels=256, heads=4, vocab=vocab, dp=2, micro_batch=4, overlap="ring",
                                gradients="ready", embedding="table")
                staging.append(float(re.search(r"^communication staging +([\d.]+)", text, re.M)[1]))
            self.assertLess(staging[0], staging[1], vocab)
            self.assertEqual(len(set(staging[1:])), 1, staging)

    def test_threads_are_what_is_allowed(self):
        """And the banner says what allows fewer; --threads may ask for more."""
        here, cores = sorted(os.sched_getaffinity(0)), os.cpu_count()
        one, places = f" (affinity allows 1 of {cores} cores)", f" (OpenMP's places allow 1 of {cores} cores)"
        if "thread" in harness.BUILD or len(here) < 2:
            self.skipTest("one thread anyway")
        for variables, threads, limit in (
                ("OMP_PROC_BIND=true", len(here), None), ("OMP_PLACES=cores", None, None), ("OMP_DYNAMIC=true", len(here), None),
                (f"GOMP_CPU_AFFINITY={here[0]}-{here[-1]}", len(here), None), (f"GOMP_CPU_AFFINITY={here[-1]}", 1, places),
                (f"OMP_PLACES={{{here[0]}}}", 1, places), (f"OMP_PLACES={{{here[0]}}} OMP_PROC_BIND=false", len(here), None),
                ("OMP_NUM_THREADS=1", 1, " (OMP_NUM_THREADS)"), ("OMP_THREAD_LIMIT=1", 1, " (OMP_THREAD_LIMIT)"),
                (f"OMP_NUM_THREADS={4 * cores}", len(here), None), (f"taskset -c {here[0]}", 1, one),
                (f"taskset -c {here[0]} env OMP_PROC_BIND=true", 1, places)):
            with self.subTest(variables=variables):
                wrapper = ("env", "-u", "OMP_NUM_THREADS", "-u", "OMP_WAIT_POLICY", *variables.split())
                result = harness.run(self.arguments(dry_run=True, threads=None), wrapper=wrapper, mpi=())
                found, said = re.search(r"(\d+) threads? of the host a rank(.*)", result.out).groups()
                if threads:
                    self.assertEqual(int(found), threads)
                if limit or len(here) == cores:
                    self.assertEqual(said, limit or "")
        asked = harness.run(self.arguments(dry_run=True, threads=2), wrapper=("env", "OMP_NUM_THREADS=1"))
        self.assertIn(" 2 threads of the host a rank", asked.out)
        self.assertFails(harness.run(self.arguments(threads=2), wrapper=("env", "OMP_THREAD_LIMIT=1")), "OMP_THREAD_LIMIT")

    def test_any_mesh_on_one_process(self):
        for tp, dp in ((1, 1), (2, 1), (1, 8), (12, 4)):
            with self.subTest(tp=tp, dp=dp):
                self.assertNotIn("\ncores ", self.dry(tp=tp, dp=dp, batch=8 * dp))  # of which mesh?

    def test_large_model_takes_no_memory_and_no_time(self):
        result = harness.run(harness.options(model="d48", tp=5, dp=64, seq=1000, vocab=50257, micro_batch=8,
                                             dry_run=True), timeout=5)
        self.assertEqual(result.status, 0, str(result))

    def test_the_largest_meshes(self):
        """A million ranks: products of sizes need 64 bits."""
        shape = dict(layers=2, channels=64, heads=16, seq=64, dry_run=True)
        for more in (dict(overlap="none"), dict(overlap="slice:1024")):
            for strategy in "tpsp", "up":
                with self.subTest(strategy=strategy, **more):
                    result = harness.run(harness.options(tp=16, dp=65536, strategy=strategy, **shape, **more), timeout=20)
                    self.assertEqual(result.status, 0, str(result)[:4000])

    @unittest.skipIf("san-" in harness.BUILD, "sanitizers reserve addresses themselves")
    def test_a_limit_on_addresses(self):
        """What only plans takes none; what trains names the limit."""
        wrapper, model = ("sh", "-c", 'ulimit -v 3000000; exec "$@"', "sh"), dict(model="d48", vocab=50257)
        machine = os.path.join(harness.ROOT, "scripts/machines/h100x8.json")
        for more in dict(dry_run=True), dict(predict=machine, dp=2):
            result = harness.run(harness.options(**model, **more), wrapper=wrapper)
            self.assertEqual(result.status, 0, str(result))
        result = harness.run(harness.options(**model, steps=0), wrapper=wrapper)
        self.assertFails(result, "no memory", "ulimit -v or -d allows 2929.7 MiB in all", "raise a limit")

    def test_reads_no_tokens(self):
        # A header and a hole of two gigabytes.
        path = self.fresh("huge.bin")
        count = 2 ** 30
        with open(path, "wb") as file:
            file.write(reference.header(20240520, 1, count))
            file.truncate(1024 + 2 * count)
        self.dry(train=path)

    def test_checks_what_the_run_would_check(self):
        for more, word in ((dict(tp=5), "--tp"), (dict(train=self.path("none.bin")), "none.bin"),
                           (dict(micro_batch=3), "batch")):
            with self.subTest(**more):
                self.assertFails(harness.run(self.arguments(dry_run=True, **more), timeout=10), word)

    def test_writes_nothing(self):
        log, out, trace = (self.fresh(name) for name in ("log", "out", "trace"))
        self.dry(log=log, out=out, trace=trace)
        self.assertFalse(os.path.exists(os.path.join(out, "model.bin")))


class Help(unittest.TestCase):
    def test_every_choice_is_whole(self):
        """Of options that have choices, each word that is taken."""
        shown = harness.run(["--help"]).out
        self.assertIn("|smollm2-1.7b|llama3.2-1b\n", shown)
        for line in shown.splitlines():
            for word in re.findall(r"^  --\S+ (\w\S*\|\S+)", line):
                option = line.split()[0]
                for choice in word.split("|"):
                    result = harness.run([option, choice, "--threads", "zero"])
                    self.assertIn("--threads 'zero' is not a whole number", result.err, (option, choice))

    def test_lists_every_option(self):
        result = harness.run(["--help"], timeout=10)
        self.assertEqual(result.status, 0, str(result))
        listed = re.findall(r"^ {1,4}--([a-z0-9-]+)", result.out, re.MULTILINE)
        self.assertEqual(sorted(listed), sorted(OPTIONS))
        schedules = re.search(r"^  --overlap.*\n((?:    .*\n)+)", result.out, re.MULTILINE)[1]
        self.assertEqual(re.findall(r"^    (\w+)", schedules, re.MULTILINE), [row.name for row in harness.schedules()])

    def test_is_printed_once(self):
        for words, ranks in (["--help"], 2), (["-h"], 1), (["-h"], 2):
            with self.subTest(words=words, ranks=ranks):
                result = harness.run(words, ranks, timeout=10)
                self.assertEqual(result.status, 0, str(result))
                self.assertEqual(result.out.count("--micro-batch N"), 1, str(result))

    def test_without_arguments_says_what_is_missing(self):
        result = harness.run([], timeout=10)
        self.assertNotEqual(result.status, 0)
        self.assertIn("--train", result.text, str(result))


class Saving(harness.Case):
    def saved(self, ranks=1, **more):
        out = self.fresh("out")
        log, _ = self.train(ranks, out=out, **more)
        self.assertFalse([name for name in os.listdir(out) if ".tmp" in name])
        with open(os.path.join(out, "model.bin"), "rb") as file:
            return os.path.join(out, "model.bin"), file.read(), log

    def without_padding(self, parameters):
        """What is to be left of rows that only pad the vocabulary: zeros."""
        table = parameters["wte"].copy()
        table[self.shape.V:] = 0
        return parameters | dict(wte=table)

    def test_a_model_file_survives_unchanged(self):
        expected = self.fresh("expected.bin")
        reference.write_model(expected, self.shape, self.without_padding(self.parameters))
        original = pathlib.Path(expected).read_bytes()
        for ranks, mesh in ((1, {}), (2, dict(tp=2)), (2, dict(dp=2, micro_batch=4)), (3, dict(tp=3)),
                            (4, dict(tp=2, dp=2, micro_batch=4)), (2, dict(tp=2, strategy="up")), (4, dict(tp=4, strategy="up"))):
            with self.subTest(**mesh):
                self.assertTrue(self.saved(ranks, steps=0, **mesh)[1] == original, "bytes differ")

    def test_bf16_model_file_is_read(self):
        path = self.fresh("bf16.bin")
        reference.write_model(path, self.shape, self.parameters, version=reference.BF16)
        expected = self.without_padding(reference.read_model(path)[1])
        found = reference.read_model(self.saved(2, tp=2, steps=0, init_from=path)[0])[1]
        for name in reference.NAMES:
            self.assertTrue(np.array_equal(found[name], expected[name]), name)

    def test_training_continues_from_a_saved_model(self):
        path, _, log = self.saved(2, tp=2, steps=6, schedule="constant", lr=3e-3)
        inputs, targets = reference.samples(reference.read_tokens(self.tokens), self.T)
        expected = reference.forward(self.shape, reference.read_model(path)[1], inputs, targets)[0]
        again, _ = self.train(2, dp=2, micro_batch=4, init_from=path, schedule="constant", lr=3e-3)
        losses = [step["loss"] for step in harness.events(again, "step")]
        self.assertAlmostEqual(losses[0], expected, delta=1e-5 * expected)
        self.assertLess(losses[0], harness.events(log, "step")[-1]["loss"])
        self.assertLess(losses[-1], losses[0])

    def test_save_every_leaves_the_last_model(self):
        _, every, _ = self.saved(steps=3, save_every=1)
        _, end, _ = self.saved(steps=3)
        self.assertTrue(every == end)

    def test_initial_weights_do_not_depend_on_the_mesh(self):
        fresh = dict(init_from=None, layers=2, channels=96, heads=12, vocab=101, steps=0)
        models = [self.saved(ranks, **fresh, **mesh)[1] for ranks, mesh in
                  ((1, {}), (2, dict(tp=2)), (3, dict(tp=3)), (4, dict(tp=2, dp=2, micro_batch=4)))]
        self.assertTrue(all(model == models[0] for model in models))
        self.assertFalse(self.saved(seed=2, **fresh)[1] == models[0])

    def test_initial_weights_are_gpt2s(self):
        # N(0, 0.02), residual projections scaled by 1/sqrt(2 L), layer norms one, biases zero.
        path, _, _ = self.saved(init_from=None, layers=2, channels=96, heads=12, vocab=101, steps=0)
        shape, model = reference.read_model(path)
        self.assertEqual((shape.maxT, shape.V, shape.L, shape.heads, shape.C), (self.T, 101, 2, 12, 96))
        for name, values in model.items():
            values = values[:shape.V] if name == "wte" else values
            if name in ("ln1w", "ln2w", "lnfw"):
                self.assertTrue((values == 1).all(), name)
            elif name.endswith("b"):
                self.assertFalse(values.any(), name)
            else:
                expected = 0.02 / math.sqrt(2 * shape.L) if name in ("attprojw", "fcprojw") else 0.02
                self.assertTrue(0.95 < values.std() / expected < 1.05, (name, values.std()))
                self.assertLess(abs(values.mean()), 5 * expected / math.sqrt(values.size), name)
                self.assertGreater(len(np.unique(values)), 0.98 * values.size, f"{name}: values repeat")
