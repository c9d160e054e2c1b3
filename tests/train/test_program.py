"""The whole program at once, on one rank and on meshes: gradient accumulation, validation, samples, the trace and
saving in one run each. The other files look at each of these closely; this one is short enough for sanitizers.
"""
# sanitizers: too
# limit: 120
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import unittest

import numpy as np

import harness
import reference
from processor import needs_bf16

STEPS, ACCUMULATE = 4, 2
LOADER = "/lib64/ld-linux-x86-64.so.2"


class Program(harness.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.alone = None

    def everything(self, tp, dp, **more):
        """The run's losses, grad norms, validation losses, samples and last model."""
        out, trace = self.fresh("out"), self.fresh("trace.json")
        log, _ = self.train(tp * dp, tp=tp, dp=dp, steps=STEPS, micro_batch=self.samples // dp // ACCUMULATE, lr=1e-3,
                            val=self.tokens, val_every=2, val_batches=1, sample_every=2, out=out, save_every=3,
                            trace=trace, trace_steps="1:3", **more)
        steps, validations, samples = (harness.events(log, kind) for kind in ("step", "val", "sample"))
        self.assertEqual([s["step"] for s in steps], list(range(STEPS)))
        self.assertEqual([v["step"] for v in validations], [0, 2, 4])
        self.assertEqual([s["step"] for s in samples], [2, 4])
        self.assertEqual(sorted(os.listdir(out)), ["lock", "model.bin", "step_00000003", "step_00000004"])
        self.assertTraced(trace, tp, dp)
        shape, model = reference.read_model(os.path.join(out, "model.bin"))
        self.assertEqual(shape, self.shape)
        return dict(loss=[s["loss"] for s in steps], norm=[s["grad_norm"] for s in steps],
                    val=[v["loss"] for v in validations], samples=[s["text"] for s in samples], model=model)

    def assertTraced(self, path, tp, dp):
        """Each rank has computed in each of the steps, and sent something where there is somebody to send it to."""
        with open(path, encoding="utf-8") as file:
            intervals = [e for e in json.load(file)["traceEvents"] if e["ph"] == "X"]
        kinds = {(e["pid"], e["args"]["step"], e["cat"]) for e in intervals}
        for rank in range(tp * dp):
            for step in (1, 2):
                self.assertIn((rank, step, "compute"), kinds)
                if tp * dp > 1:
                    self.assertIn((rank, step, "comm"), kinds)

    def test_memory_is_what_the_control_group_allows(self):
        """With 200 MiB backward computes layer norms again, though the machine has more."""
        tokens = self.fresh("tokens.bin")
        reference.write_tokens(tokens, harness.random_tokens(4096, 256))
        options = harness.options(dry_run=True, train=tokens, layers=4, channels=256, heads=4, seq=512, micro_batch=4, vocab=256)

        def found(shell):
            line = ["sh", "-c", shell + 'exec "$@"', "sh", harness.PROGRAM, *options]
            return subprocess.run(line, capture_output=True, text=True, check=True).stdout
        group, limit = self.control_group("memory", "memory.limit_in_bytes", "memory.max")
        with open(limit, "w", encoding="ascii") as file:
            file.write(str(200 << 20))
        self.assertIn("layer norms again", found(f"echo $$ > {group}/cgroup.procs && "))
        self.assertNotIn("layer norms again", found(""))

    def control_group(self, controller, old, new):
        """A new group and its file for a limit, which is in one of two places."""
        for parent, limit in ((f"/sys/fs/cgroup/{controller}", old), ("/sys/fs/cgroup", new)):
            group = os.path.join(parent, f"commfuse_test_{os.getpid()}")
            try:
                os.mkdir(group)
            except OSError:
                continue
            self.addCleanup(harness.wait_until, lambda path=group: self.is_removed(path), 30, "the end of what is in the group")
            if os.path.exists(os.path.join(group, limit)):
                return group, os.path.join(group, limit)
        self.skipTest(f"only root can make a control group, where they limit {controller}")

    @staticmethod
    def is_removed(group):
        with contextlib.suppress(OSError):
            os.rmdir(group)
        return not os.path.exists(group)

    def test_too_few_threads_are_named_with_their_limit(self):
        """Whichever thread it is: of this program, of MPI, of OpenMP."""
        group, limit = self.control_group("pids", "pids.max", "pids.max")
        wrapper = ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
        for most, threads, words in (1, 1, "MPI"), (2, 1, "MPI"), (8, 1, "MPI"), (20, 32, "OpenMP"):
            with self.subTest(most=most), open(limit, "w", encoding="ascii") as file:
                file.write(str(most))
                file.flush()
                result = harness.run(self.arguments(threads=threads), wrapper=wrapper)
                self.assertFails(result, f"cannot start a thread of {words}: ", f"pids.max of a control group allows {most}",
                                 "raise that limit")

    @unittest.skipUnless(os.getuid() == 0 and shutil.which("setpriv"), "only root can become a user to whom limits apply")
    def test_too_few_threads_of_a_user(self):
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            program = shutil.copy(harness.PROGRAM, folder)
            line = ["setpriv", "--reuid", "54321", "--clear-groups", "prlimit", "--nproc=3", program, "--dry-run"]
            done = subprocess.run(line, capture_output=True, text=True, cwd=folder, env=harness.environment())
            self.assertEqual(done.returncode, 1, done)
            self.assertIn("ulimit -u allows all programs of this user 3 threads", done.stderr)

    def running(self, program, ranks, variables=(), **more):
        """The processes of a run of that program that has come to its second step."""
        log = self.fresh("log.jsonl")
        wrapper = ("env", "-u", "OMP_WAIT_POLICY", *variables)  # as users start it
        run = harness.Run(self.arguments(log=log, steps=1000000, micro_batch=1, **more), ranks, wrapper=wrapper)
        self.addCleanup(run.close)
        harness.wait_until(lambda: run.ended() or harness.events(harness.read_log(log), "step"), 30, "a step")
        processes = [pid for pid, _ in harness.marked(run.mark, program)]
        self.assertEqual(len(processes), ranks, str(run.result()))
        return processes

    @needs_bf16
    def test_a_process_has_the_programs_name_and_all_cores_that_it_was_given(self):
        """OpenMP binds the first thread to the first place before main(): nothing may stay there."""
        cores = os.sched_getaffinity(0)
        for name, ranks, variables in (("", 1, ["OMP_PROC_BIND=true"]), ("_bf16", 1, ["OMP_PLACES=cores"]),
                                       ("", 2, ["OMP_PROC_BIND=true"]), ("_bf16", 2, ["OMP_PLACES=threads"])):
            with self.subTest(name=name, ranks=ranks, variables=variables):
                program = harness.PROGRAM + name
                for pid in self.running(program, ranks, variables, dtype=name[1:] or None):
                    with open(f"/proc/{pid}/comm", encoding="utf-8") as file:
                        self.assertEqual(file.read(), os.path.basename(program)[:15] + "\n")
                    for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                        its = os.sched_getaffinity(thread)
                        self.assertTrue(its == cores or min(cores) not in its, its)

    def test_waiting_threads_sleep_soon(self):
        for variables, turns in ({}, "1000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "active"}, "30000000000"):
            env = {k: v for k, v in harness.environment(OMP_DISPLAY_ENV="verbose").items() if k != "OMP_WAIT_POLICY"}
            done = subprocess.run([harness.PROGRAM, "--help"], capture_output=True, text=True, check=True, env={**env, **variables})
            if "GOMP_SPINCOUNT" not in done.stderr:
                self.skipTest("not gcc's OpenMP")
            self.assertIn(f"GOMP_SPINCOUNT = '{turns}'", done.stderr)

    @needs_bf16
    @unittest.skipUnless(os.path.exists(LOADER), f"there is no {LOADER}")
    def test_started_by_the_dynamic_loader(self):
        for dtype in "fp32", "bf16":
            result = harness.run(self.arguments(dtype=dtype), wrapper=(LOADER,))
            self.assertEqual(result.status, 0, str(result))
            self.assertIn(f"CPU, {dtype}", result.out)

    def agrees(self, tp, dp, **mode):
        cls = type(self)
        if cls.alone is None:
            cls.alone = self.everything(1, 1)
        found = self.everything(tp, dp, **mode)
        for name, tolerance in (("loss", 1e-5), ("norm", 1e-3), ("val", 1e-5)):
            np.testing.assert_allclose(found[name], cls.alone[name], rtol=tolerance, err_msg=name)
        self.assertEqual(found["samples"], cls.alone["samples"])
        for name in reference.NAMES:
            if name == "qkvb":  # keys' biases do not change the loss: rounding alone moves them
                continue
            moved = np.linalg.norm(cls.alone["model"][name] - self.parameters[name])
            self.assertGreater(moved, 0, name)
            apart = np.linalg.norm(found["model"][name] - cls.alone["model"][name])
            self.assertLess(apart, 0.01 * moved, name)

    def test_one_rank(self):
        self.agrees(1, 1)
        inputs, targets = reference.samples(reference.read_tokens(self.tokens), self.T)
        expected = reference.forward(self.shape, self.parameters, inputs, targets)[0]
        self.assertAlmostEqual(self.alone["val"][0], expected, delta=1e-5 * expected)
        self.assertLess(self.alone["val"][-1], self.alone["val"][0])

    def test_tensor_parallel(self):
        self.agrees(2, 1, overlap="ring")

    def test_tensor_and_data_parallel(self):
        self.agrees(2, 2, overlap="direct:2")

    def test_tensor_and_data_parallel_with_native_collectives(self):
        self.agrees(2, 2, overlap="slice:3")

    def test_ulysses_parallel(self):
        self.agrees(2, 2, strategy="up", overlap="ring:2")
