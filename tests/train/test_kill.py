"""A rank that dies or stops takes the run down with it, soon and with a reason; nothing hangs.

mpirun by itself ends all ranks when one is killed, so the program's own time-out is never put to the test.
With --enable-recovery Open MPI 4.1 lets the others live (orte_abort_on_non_zero_status is about exit
codes only and changes nothing here). Its own exit status then says nothing about the ranks, so a shell
around each rank writes the status down.
"""
# limit: 180
import os
import signal
import sys
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import harness

TIMEOUT, GRACE = 3, 5
STATUSES = ["sh", "-c", 'trap : TERM; folder=$1; shift; "$@"; echo $? > $folder/status.$OMPI_COMM_WORLD_RANK', "sh"]


class Death(harness.Case):
    def start(self, ranks, mpi=(), wrapper=(), **more):
        """A run that is some steps into training."""
        log = self.fresh("log.jsonl")
        arguments = self.arguments(steps=1000000, timeout=TIMEOUT, log=log, **more)
        started = harness.Run(arguments, ranks, mpi=mpi, wrapper=wrapper)
        self.addCleanup(started.close)
        harness.wait_until(lambda: started.ended() or len(harness.events(harness.read_log(log), "step")) >= 3, 30,
                           "three steps of training")
        processes = started.processes()
        self.assertEqual(sorted(processes), list(range(ranks)), str(started.result()))
        return started, processes

    def ends(self, started, victim):
        """Waits until no other rank is left and returns how long that took, in seconds."""
        begin = time.monotonic()
        harness.wait_until(lambda: not set(started.processes()) - {victim}, TIMEOUT + GRACE,
                           f"the other ranks' end: {started.processes()}{started.result()}")
        return time.monotonic() - begin

    def assertTold(self, text, whom):
        """Somebody says what it was waiting for when it gave up, and for whom."""
        self.assertRegex(text, rf"error: rank \d.* waits? for {whom}\b")
        self.assertRegex(text, r"error: .*\bstep \d+")

    def test_mpirun_ends_everything_when_a_rank_is_killed(self):
        started, processes = self.start(3, tp=3)
        os.kill(processes[1], signal.SIGKILL)
        self.ends(started, 1)
        result = started.wait(TIMEOUT + GRACE)
        self.assertNotEqual(result.status, 0)
        self.assertTrue(result.err.strip(), "no message at all")

    def survivors_give_up(self, ranks, victim, sent, named=True, **mesh):
        folder = self.fresh("statuses")
        os.mkdir(folder)
        started, processes = self.start(ranks, mpi=["--enable-recovery"], wrapper=[*STATUSES, folder], **mesh)
        os.kill(processes[victim], sent)
        took = self.ends(started, victim)
        if sent == signal.SIGKILL:
            started.wait(TIMEOUT + GRACE + 30)
        text = started.result().text
        self.assertTold(text, f"rank {victim}" if named else "the other ranks")
        self.assertLess(took, (TIMEOUT + GRACE) * harness.PATIENCE)

        def statuses():
            found = {}
            for name in os.listdir(folder):
                with open(os.path.join(folder, name), encoding="ascii") as file:
                    written = file.read()
                if written:
                    found[int(name.split(".")[1])] = int(written)
            return found
        others = set(range(ranks)) - {victim}
        harness.wait_until(lambda: others <= set(statuses()), GRACE, f"the shells' notes{started.result()}")
        for rank in others:
            self.assertNotEqual(statuses()[rank], 0, f"rank {rank} ended as if all were well{started.result()}")

    def test_own_timeout_tensor_parallel(self):
        self.survivors_give_up(3, 1, signal.SIGKILL, tp=3)

    def test_own_timeout_data_parallel(self):
        self.survivors_give_up(4, 0, signal.SIGKILL, tp=2, dp=2, micro_batch=4)

    def test_own_timeout_native_collectives(self):
        # A library's collective cannot say which of its members is missing; it is enough that it ends and says so.
        self.survivors_give_up(3, 2, signal.SIGKILL, named=False, tp=3, overlap="none")

    def test_own_timeout_when_a_rank_stands_still(self):
        self.survivors_give_up(3, 2, signal.SIGSTOP, tp=3)

    def test_a_rank_that_stands_still_under_plain_mpirun(self):
        started, processes = self.start(4, tp=4, route="direct")
        os.kill(processes[3], signal.SIGSTOP)
        self.ends(started, 3)
        # The first that gives up ends the others, and need not be the one that waited for rank 3 itself.
        self.assertTold(started.result().text, r"rank \d")
        # mpirun ends the stopped rank too.
        result = started.wait(TIMEOUT + GRACE + 20)
        self.assertNotEqual(result.status, 0, str(result))
        self.assertFalse(started.processes())

    def test_interrupt_from_the_keyboard(self):
        started, processes = self.start(3, tp=3)
        started.process.send_signal(signal.SIGINT)
        result = started.wait(TIMEOUT + GRACE)
        self.assertNotEqual(result.status, 0, str(result))
        self.assertFalse(started.processes(), f"ranks {processes} live on")


if __name__ == "__main__":
    unittest.main()
