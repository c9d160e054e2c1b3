"""A rank that dies or stops takes the run down with it, soon and with a reason; nothing hangs, and every
survivor says itself why it ends, and which rank is to blame.

mpirun by itself ends all ranks when one is killed, so the program's own time-out is never put to the test:
SIGCONT, SIGTERM, and SIGKILL a while later. A rank answers SIGTERM with a line that says for whom it waits, and is
killed. With --enable-recovery the others live (orte_abort_on_non_zero_status is about exit codes only and changes
nothing here), and find out themselves.

mpirun's own exit status says little about the ranks, so a witness of each rank writes its status down.
"""
# limit: 180
import contextlib
import os
import re
import signal
import sys
import unittest

import harness
import launcher

TIMEOUT, GRACE = 3, 5
TERMINATED = r"{who}: SIGTERM: ends after this step; a second signal ends it at once"
WAITS = r".*; it waits for (?:rank \d|the other ranks): \S.*"
GIVES_UP = r"error: {who}: rank {rank} waits for (?:rank \d|the other ranks): " \
           r"(?:\S.*?, step \d+|all-gather of reports); nothing came for [\d.]+ s"
KILLED = 128 + signal.SIGKILL

# mpirun signals the process group of what it has started, and the program is in it as always. The witness is its
# parent but in a group of its own, so that it is there when the program has been killed. What mpirun has started
# waits for the witness and ends with 0 like a good rank, so that mpirun hears of nothing but signals.
WITNESS = [sys.executable, "-c", """
import os, signal, sys
folder, *program = sys.argv[1:]
group = os.getpgrp()
witness = os.fork()
if witness:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.waitpid(witness, 0)
    sys.exit(0)
os.setpgid(0, 0)
pid = os.fork()
if pid == 0:
    os.setpgid(0, group)
    os.execv(program[0], program)
for file in (0, 1, 2):
    os.close(file)
status = os.waitpid(pid, 0)[1]
with open(os.path.join(folder, os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]), "w") as file:
    file.write(str(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)))
"""]


class Death(harness.Case):
    def start(self, ranks, mpi=(), env=None, **more):
        """A run that is some steps into training."""
        log, self.statuses = self.fresh("log.jsonl"), self.fresh("statuses")
        os.mkdir(self.statuses)
        arguments = self.arguments(**dict(steps=1000000, timeout=TIMEOUT, log=log) | more)
        started = harness.Run(arguments, ranks, mpi=mpi, env=env, wrapper=[*WITNESS, self.statuses])
        self.addCleanup(started.close)
        harness.wait_until(lambda: started.ended() or len(harness.events(harness.read_log(log), "step")) >= 3, 30,
                           "three steps of training")
        processes = started.processes()
        self.assertEqual(sorted(processes), list(range(ranks)), str(started.result()))
        return started, processes

    def status(self, rank):
        """The exit status that a rank's witness has written down, as text: "" as long as it has not."""
        path = os.path.join(self.statuses, str(rank))
        if not os.path.exists(path):
            return ""
        with open(path, encoding="ascii") as file:
            return file.read()

    def ends(self, started, survivors, word, statuses=(1,)):
        """The survivors end in time, each with one of these statuses and a word of its own."""
        harness.wait_until(lambda: not set(started.processes()) & set(survivors), TIMEOUT + GRACE,
                           f"the end of ranks {survivors}: {started.processes()}{started.result()}")
        for rank in survivors:
            status = int(harness.wait_until(lambda: self.status(rank), GRACE, f"rank {rank}'s status"))
            self.assertIn(status, statuses, f"of rank {rank}{started.result()}")
            line = re.compile("^" + word.format(rank=rank, who=rf"rank {rank} of \d+ \(.+?\)"), re.MULTILINE)
            # mpirun passes on what a rank has written a moment after the rank's end.
            with contextlib.suppress(AssertionError):
                harness.wait_until(lambda: line.search(started.result().err) or started.ended(), GRACE, "")
            self.assertRegex(started.result().err, line, f"rank {rank} has not said why it ends{started.result()}")

    def leaves_nobody(self, started, seconds):
        result = started.wait(seconds)
        self.assertNotEqual(result.status, 0, str(result))
        started.leaves_nobody()

    @unittest.skipUnless(launcher.open_mpi(), "only Open MPI's mpirun lets ranks speak before it kills them")
    def test_mpirun_ends_everything_when_a_rank_is_killed(self):
        for victim in (1, 0):
            with self.subTest(victim=victim):
                started, processes = self.start(3, env=launcher.killing_after(4), tp=3, timeout=60)
                os.killpg(os.getpgid(processes[victim]), signal.SIGKILL)  # with what mpirun has started
                self.ends(started, {0, 1, 2} - {victim}, TERMINATED + WAITS, statuses=(KILLED,))
                self.assertNotEqual(started.wait(TIMEOUT + GRACE).status, 0)

    def survivors_give_up(self, ranks, victim, sent, **mesh):
        """Each says what it was waiting for, and what has become of the victim, also where it waits for another."""
        started, processes = self.start(ranks, mpi=launcher.sparing_survivors(), **mesh)
        os.kill(processes[victim], sent)
        fate = "is dead" if sent == signal.SIGKILL else "does not answer"
        self.ends(started, set(range(ranks)) - {victim}, rf"{GIVES_UP}.*; .*rank {victim} {fate}\b")
        if sent == signal.SIGKILL:
            started.wait(TIMEOUT + GRACE + 30)

    def test_own_timeout_tensor_parallel(self):
        self.survivors_give_up(3, 1, signal.SIGKILL, tp=3)

    def test_own_timeout_data_parallel(self):
        self.survivors_give_up(4, 0, signal.SIGKILL, tp=2, dp=2, micro_batch=4)

    def test_own_timeout_native_collectives(self):
        # The library cannot say which of the members is missing, and its calls block. The watch can.
        self.survivors_give_up(3, 2, signal.SIGKILL, tp=3, overlap="none")

    def test_own_timeout_when_a_rank_stands_still(self):
        self.survivors_give_up(3, 2, signal.SIGSTOP, tp=3)

    def test_a_rank_that_stands_still_under_plain_mpirun(self):
        started, processes = self.start(4, tp=4, overlap="direct")
        os.kill(processes[3], signal.SIGSTOP)
        self.ends(started, {0, 1, 2}, rf"{GIVES_UP}.*; .*rank 3 does not answer\b", statuses=(1, KILLED))
        # mpirun ends the stopped rank too.
        self.leaves_nobody(started, TIMEOUT + GRACE + 20)

    @unittest.skipUnless(launcher.open_mpi(), "only Open MPI's mpirun makes SIGTERM of SIGINT")
    def test_interrupt_from_the_keyboard(self):
        started, _ = self.start(3, tp=3)
        started.process.send_signal(signal.SIGINT)
        # Ranks that reach the end of the step before they have spoken end together, and rank 0 speaks for all.
        together = r"error: rank 0 of 3 \(.+?\): Terminated ends the run after"
        word = "" if launcher.falls_silent() else f"(?:{TERMINATED}|{together})"
        self.ends(started, {0, 1, 2}, word, statuses=(1, KILLED))
        self.leaves_nobody(started, TIMEOUT + GRACE)
