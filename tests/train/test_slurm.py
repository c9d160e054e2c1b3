"""Under Slurm: one is started here, of two nodes on this host (slurm.py). Runs by srun on one and on two of them, the batch
files of scripts/ as a user submits them, and what is said where srun or its --mpi was not what MPI needs.

Jobs are signalled by scancel --batch, which reaches the batch script as Slurm's own --signal=B: does, but at once.
"""
# limit: 240
# quick: one_node test_train_by killed Keeper
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import unittest
import uuid

import checkpoints
import harness
import launcher
import slurm

SCRIPTS = os.path.join(harness.ROOT, "scripts")
ONE_HOST = {"OMPI_MCA_btl": "self,tcp"}  # two nodes of it would give their shared memory the same names
DELAY_S = 120  # that Slurm waits after a requeue


def signalled(pid):
    """A signal waits for it to go on."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return int(re.search(r"^ShdPnd:\s*(\w+)", file.read(), re.MULTILINE).group(1), 16) >> (signal.SIGUSR1 - 1) & 1


class Case(checkpoints.Case):
    samples, steps = 16, 200

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.cluster = slurm.Cluster()
        cls.addClassCleanup(cls.cluster.close)

    def srun(self, *options, status=0, program=harness.PROGRAM, env=None, mpi=f"--mpi={slurm.MPI}", **values):
        """A run to its end by srun."""
        line = ["srun", *([mpi] if mpi else []), *options, program, *harness.options(**self.recipe(**values))]
        done = self.cluster.run(*line, timeout=120, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", **(env or {}))
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def submit(self, *script, options=(), **more):
        """(number, folder) of a job in a folder that looks like this tree's root."""
        folder = self.fresh("root")
        os.mkdir(folder)
        os.symlink(SCRIPTS, os.path.join(folder, "scripts"))
        os.symlink(harness.PROGRAM, os.path.join(folder, "train_gpt"))
        command = ["env", "-C", folder, "sbatch", "--parsable", "--ntasks-per-node=2", "--cpus-per-task=2", *options, *script]
        done = self.cluster.run(*command, **dict(MPI=slurm.MPI, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive",
                                                 OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1") | more)
        self.assertEqual(done.returncode, 0, done.stderr)
        return int(done.stdout), folder

    def until(self, job, state, what="", seconds=60):
        """Waits for a state of a job, which is returned with what its script has printed."""
        def there():
            nonlocal found
            found = self.cluster.job(job)
            return re.fullmatch(state, found["JobState"])
        found = {}
        harness.wait_until(there, seconds, lambda: f"{what} {found}\n{self.printed(found)}", interval=0.1)
        return found, self.printed(found)

    def printed(self, job):
        path = job.get("StdOut", "")
        if not os.path.exists(path):
            return ""
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()


class Srun(Case):
    steps = 10

    def test_one_node_and_two(self):
        """The same losses as by mpirun, to the last bit; and the ranks are where they should be."""
        for tp, dp in (2, 1), (1, 2):
            more = dict(tp=tp, dp=dp, overlap="commfuse")  # auto may choose otherwise where ranks have other cores
            expected = self.undisturbed(tp, dp, save_every=0, overlap="commfuse")[1]
            for nodes in 1, 2:
                with self.subTest(tp=tp, dp=dp, nodes=nodes):
                    log = self.fresh("log.jsonl")
                    self.srun("-n2", f"-N{nodes}", env=ONE_HOST, log=log, **more)
                    losses = [[s["loss"] for s in harness.events(harness.read_log(path), "step")] for path in (log, expected)]
                    self.assertEqual(*losses)
        nodes = self.cluster.asked("srun", "-N2", "-n2", "sh", "-c", "echo $SLURMD_NODENAME").split()
        self.assertEqual(sorted(nodes), list(slurm.NODES))

    def test_without_mpi(self):
        """One message, which says which --mpi; and one process alone needs none."""
        said = self.srun("-n2", "-N1", mpi=None, status=1)
        self.assertRegex(said, r"error: rank 0 of 2 .*: SLURM_STEP_NUM_TASKS is 2, but MPI sees this process alone")
        self.assertEqual(said.count("error: rank"), 1, said)
        self.assertIn(f"srun --mpi={slurm.MPI} ", said)
        self.assertNotIn("OPAL ERROR", said)
        self.srun("-n1", mpi=None)

    def test_ranks_that_outnumber_the_cores_do_not_spin(self):
        """What they use of the cores says so, however busy these are: waiting ranks that spin take 100 times a step's."""
        used = {}
        for overlap in "commfuse", "none":
            log = self.fresh("log.jsonl")
            said = self.srun("-n4", "-N1", "bash", "-c", 'time "$0" "$@"', tp=4, overlap=overlap, log=log, steps=60,
                             schedule="constant")
            self.assertIn(f"cores     {min(slurm.CORES, os.cpu_count())} for 4 ranks", said)
            spent = re.findall(r"(?:user|sys)\s+(\d+)m([\d.]+)s", said)
            self.assertEqual(len(spent), 8, said)
            used[overlap] = sum(60 * float(minutes) + float(seconds) for minutes, seconds in spent)
        self.assertLess(used["none"], 4 * used["commfuse"] + 2, used)

    def test_a_killed_rank(self):
        """The step ends at once, with the status that a shell gives to who was killed."""
        said = self.srun("-n2", "-N1", "sh", "-c", '[ $SLURM_PROCID = 0 ] || (sleep 2; kill -9 $$) & exec "$0" "$@"', tp=2,
                         steps=100000, schedule="constant", status=137)
        self.assertIn("Killed", said)


class Batch(Case):
    def goes_on(self, mpi):
        """Signalled, saved, status 75, queued again, and in the end the model of a run that nothing has stopped."""
        expected = self.undisturbed(2, 1, save_every=0)
        out, log = self.fresh("out"), self.fresh("log.jsonl")
        mark = uuid.uuid4().hex
        job, _ = self.submit("scripts/train.slurm", *harness.options(**self.recipe(tp=2, out=out, log=log)), **{harness.MARK: mark, "MPI": mpi})
        harness.wait_until(lambda: len(harness.events(harness.read_log(log), "step")) >= 5, 60,
                           lambda: f"some steps: {self.until(job, '.*')}")
        ranks = [pid for pid, _ in harness.marked(mark)]
        for pid in ranks:  # the signal shall not come too late
            os.kill(pid, signal.SIGSTOP)
        self.cluster.asked("scancel", "--batch", "--signal=USR1", job)
        harness.wait_until(lambda: all(map(signalled, ranks)), 60, "the signal")
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
        found, said = self.until(job, "PENDING", "queued again")
        self.assertEqual(found["Restarts"], "1", said)
        self.assertIn("stopped   by a signal (User defined signal 1)", said)
        self.assertEqual(harness.read_log(log)[-1]["event"], "end")
        first = harness.read_log(log)[-1]["steps"]
        self.assertEqual(checkpoints.newest(out), first)
        self.assertLess(first, self.steps)
        waits = time.mktime(time.strptime(found["StartTime"], "%Y-%m-%dT%H:%M:%S")) - time.time()
        self.assertTrue(DELAY_S / 2 < waits <= DELAY_S + 5, found)
        # What is started in the second in which its node ends it is refused there, hence the delay.
        harness.wait_until(lambda: self.cluster.idle(), 60, "idle nodes", interval=0.1)
        self.cluster.asked("scontrol", "update", f"JobId={job}", "StartTime=now+2")
        found, said = self.until(job, "COMPLETED|FAILED", "the end")
        self.assertEqual((found["JobState"], found["ExitCode"]), ("COMPLETED", "0:0"), said + self.cluster.logs())
        self.assertIn("stopped   by a signal", said)  # the same file, appended to
        self.assertSameRun(log, expected[1])
        self.assertSameEnd(out, expected[0])

    def test_train(self):
        self.goes_on(slurm.MPI)

    @unittest.skipUnless(launcher.tells_status_after_signals(), "this mpirun sometimes returns 0 after a signal")
    def test_train_by_mpirun(self):
        self.goes_on("mpirun")

    def test_an_error_ends_the_job(self):
        for mpi in slurm.MPI, "mpirun":
            with self.subTest(mpi=mpi):
                job, _ = self.submit("scripts/train.slurm", *harness.options(**self.recipe(tp=2, train="nowhere.bin")), MPI=mpi)
                found, said = self.until(job, "FAILED|COMPLETED", "the end")
                self.assertEqual((found["JobState"], found["ExitCode"], found["Restarts"]), ("FAILED", "1:0", "0"), said)
                self.assertIn("no token file matches", said)

    def sweep(self, *more, mpi=slurm.MPI):
        """What the sweep's job has printed, and its rows. The launcher says of each rank where it was and with which cores."""
        options = harness.options(layers=2, channels=96, heads=6, vocab=101, seq=self.T, micro_batch=2, threads=1,
                                  peak_tflops=1)
        mesh = ["--models", "d6", "--tp", "2", "--dp", "1", "--strategies", "tpsp", "--modes", "commfuse", "--steps", "2"]
        launcher = f"srun --mpi={mpi} --exact --ntasks={{ranks}} --cpus-per-task=2 --distribution=block,pack"
        command = shlex.join(["scripts/mfu_sweep", "--launcher", launcher, *mesh, "--train", self.tokens, "--out", "sweep.jsonl",
                              *more, "--", *map(str, options)])
        job, folder = self.submit("--wrap", command, options=["--nodes=2"])
        found, said = self.until(job, "COMPLETED|FAILED", "the end", 90)
        rows = harness.read_log(os.path.join(folder, "sweep.jsonl"))
        return found, said, rows

    def test_sweep(self):
        """A rank has its cores, two ranks share a node, and there is a table."""
        program, ranks = self.fresh("program"), self.fresh("ranks")
        with open(program, "w", encoding="utf-8") as file:
            file.write(f"""#!/bin/sh
echo $SLURM_STEP_NUM_TASKS $SLURM_PROCID $SLURMD_NODENAME $SLURM_CPUS_ON_NODE $SLURM_CPUS_PER_TASK >>{ranks}
exec {harness.PROGRAM} "$@"
""")
        os.chmod(program, 0o755)
        found, said, rows = self.sweep("--repeats", "1", "--program", program)
        self.assertEqual((found["JobState"], [row["mode"] for row in rows]), ("COMPLETED", ["commfuse"]), said)
        with open(ranks, encoding="utf-8") as file:
            lines = sorted(line for line in file.read().splitlines() if line.startswith("2 "))
        self.assertEqual(lines, ["2 0 n1 4 2", "2 1 n1 4 2"])
        self.assertIn("| d6 | tpsp 2x1 | 2 |", said)

    def test_sweep_with_the_wrong_mpi(self):
        """The line that says why, and nothing about a file that is not there. Without PMIx each rank is a singleton of Open MPI,
        whose daemon removes <TMPDIR>/ompi.<host> at its end, which another may be making just then: each has its own TMPDIR."""
        program, temporary = self.fresh("program"), self.fresh("temporary")
        os.mkdir(temporary)
        with open(program, "w", encoding="utf-8") as file:
            file.write(f'#!/bin/sh\nTMPDIR=$(mktemp -d -p {temporary}) exec {harness.PROGRAM} "$@"\n')
        os.chmod(program, 0o755)
        for mpi, tells in ("none", "SLURM_STEP_NUM_TASKS is 2, but MPI"), ("nonsense", "plugin name for mpi/nonsense"):
            with self.subTest(mpi=mpi):
                found, said, rows = self.sweep("--program", program, mpi=mpi)
                self.assertEqual((found["JobState"], rows), ("FAILED", []), said)
                self.assertRegex(said, rf"repeat 1: failed: .*{tells}")
        found, said, rows = self.sweep("--train", "nowhere.bin")
        self.assertEqual((found["JobState"], rows), ("FAILED", []), said)
        self.assertIn("failed: no token file matches 'nowhere.bin'", said)
        self.assertNotIn("No such file", said)


class Keeper(unittest.TestCase):
    def test_nothing_outlives_a_test_that_is_killed(self):
        code = (f"import sys, os; sys.path.insert(0, {os.path.dirname(slurm.__file__)!r}); import slurm\n"
                "c = slurm.Cluster(); print(c.keeper.pid, c.folder, flush=True)\n"
                "c.run('srun', '-N2', '-n2', 'sh', '-c', 'touch $SLURM_CONF.$SLURM_PROCID; sleep 100')")
        if slurm.missing():
            self.skipTest(f"no {', '.join(slurm.missing())}: scripts/install_deps.sh --slurm")
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as test:
            keeper, folder = test.stdout.readline().split()
            harness.wait_until(lambda: os.path.exists(f"{folder}/slurm.conf.1"), 60, "the step")
            started = slurm.descendants(int(keeper))
            self.assertGreaterEqual(len(started), 7)  # munge, the controller, two nodes, two steps, their tasks
            test.kill()
        harness.wait_until(lambda: not os.path.exists(folder), 30, "the end of all")
        for pid in started:
            self.assertFalse(os.path.exists(f"/proc/{pid}"), pid)
