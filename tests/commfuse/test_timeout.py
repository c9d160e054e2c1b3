"""A peer that fails: each rank that waits for it gives up in time, prints the ranks and the operation that it waits for and what
has happened to that peer, and all ranks end.
"""
# sanitizers: too
# limit: 300
# quick: dead chain test_collective fused start_and_end
import os
import re
import signal
import subprocess
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import launcher

BUILD = os.environ.get("BUILD", "build/release")
TOOL = os.path.join(ROOT, BUILD, "tests/commfuse/tool_silent_peer")
TIMEOUT_S = 2
GRACE_S = 30  # others may use the machine; far below what a launcher or a default time-out would take
START_S = 60

FC2, QKV = "reduce-scatter mlp.fc2, layer 7, step 41", "all-gather att.qkv, layer 2, step 42"
FROZEN = "rank {} does not answer: frozen, or its host is dead or cut off"
COMPUTES = r"rank {} answers: it computes, for \d[\d.]* s now, after barrier, step 41: it is slow, or stuck there"
APART = r": the ranks are not at the same operation \(desynchronised\)"


def waits(rank, peer, verdict, operation=FC2):
    return rf"rank {rank} waits for {peer}: {operation}; nothing came for \d[\d.]* s(; rank \d has given up)?; {verdict}"


class SilentPeer(unittest.TestCase):
    transport = "auto"
    at_bind, at_end = "MPI makes a group", "MPI ends"  # where the library does not name the rank it waits for

    def run_tool(self, how, peer, ranks, timeout_s=TIMEOUT_S):
        """The output of all ranks, the seconds since the peer failed (or a little later), and the exit status."""
        mpi = launcher.sparing_survivors() if peer == "dead" else []  # otherwise mpirun ends the others at once
        command = [os.path.join(ROOT, "scripts/mpirun.sh"), "-np", str(ranks), *mpi, TOOL, how, peer, str(timeout_s),
                   self.transport]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, start_new_session=True) as process:
            before = []
            for line in process.stdout:
                before.append(line)
                if line == "ready\n":
                    break
            start = time.monotonic()
            try:
                rest, _ = process.communicate(timeout=TIMEOUT_S + START_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                self.fail(f"does not end: {''.join(before)}{process.communicate()[0]}")
            return "".join(before) + rest, time.monotonic() - start, process.returncode

    def check(self, how, peer, expected, ranks=2, timeout_s=TIMEOUT_S):
        """expected: the message of each rank that waits."""
        text, seconds, status = self.run_tool(how, peer, ranks, timeout_s)
        if peer != "dead":  # mpirun was asked to ignore a death
            self.assertNotEqual(status, 0, text)
        for rank, message in expected.items():
            said = re.findall(rf"^error: rank {rank} of {ranks} \(.+?\): (.*)$", text, re.MULTILINE)
            self.assertEqual(len(said), 1, f"rank {rank}: {text}")
            self.assertRegex(said[0], f"^{message}$", text)
        for waited in map(float, re.findall(r"nothing came for (\d[\d.]*) s; (?!rank \d has given up)", text)):
            self.assertGreaterEqual(waited, timeout_s, text)
        self.assertLess(seconds, TIMEOUT_S + GRACE_S, text)

    def test_dead(self):
        self.check("exchange", "dead", {0: waits(0, "rank 1", "rank 1 is dead: its process has ended")})

    def test_frozen(self):
        self.check("exchange", "frozen", {0: waits(0, "rank 1", FROZEN.format(1))})

    def test_computes(self):
        self.check("exchange", "computes", {0: waits(0, "rank 1", COMPUTES.format(1))})

    def test_waits_elsewhere(self):
        self.check("exchange", "elsewhere",
                  {0: waits(0, "rank 1", f"rank 1 answers: it waits for rank 0: {QKV}{APART}"),
                   1: waits(1, "rank 0", f"rank 0 answers: it waits for rank 1: {FC2}{APART}", QKV)})

    def test_chain(self):
        self.check("exchange", "chain", {0: waits(0, "rank 1", FROZEN.format(2)),
                                        1: waits(1, "rank 2", FROZEN.format(2), QKV)}, ranks=3)

    def test_who_begins_to_wait_later_gives_up_with_the_others(self):
        self.check("late", "frozen", {0: waits(0, "rank 1", FROZEN.format(1)),
                                     2: waits(2, "rank 1", FROZEN.format(1))}, ranks=3)

    def test_exchange_that_has_received(self):
        # Rank 2 has delivered: naming it is wrong.
        self.check("send", "frozen", {0: waits(0, "rank 1", FROZEN.format(1))}, ranks=3)

    def test_collective(self):
        for how in ("collective", "blocking", "barrier"):
            with self.subTest(how):
                others = {rank: waits(rank, "the other ranks", FROZEN.format(1)) for rank in (0, 2)}
                self.check(how, "frozen", others, ranks=3)

    def test_collective_with_a_rank_that_is_elsewhere(self):
        there = f"rank 1 answers: it waits for rank 0: {QKV}{APART}"
        self.check("barrier", "elsewhere", {0: waits(0, "the other ranks", there),
                                           1: waits(1, "rank 0", "rank 0 answers: it waits for the other ranks: "
                                                                 f"{FC2}{APART}", QKV),
                                           2: waits(2, "the other ranks", there)}, ranks=3)

    def test_blocking_collective_with_a_rank_that_computes(self):
        self.check("blocking", "computes", {rank: waits(rank, "the other ranks", COMPUTES.format(1))
                                           for rank in (0, 2)}, ranks=3)

    def test_start_and_end(self):
        for how, what in ("bind", self.at_bind), ("end", self.at_end):
            with self.subTest(how):
                self.check(how, "frozen", {0: f"rank 0 waits for the other ranks: {what}; nothing came for 2 s"})

    def test_time_outs_have_fractions_of_seconds(self):
        self.check("end", "frozen", {0: f"rank 0 waits for the other ranks: {self.at_end}; nothing came for 0.5 s"}, timeout_s=0.5)

    def test_fused_operation(self):
        self.check("fuse", "frozen", {0: waits(0, "rank 1", FROZEN.format(1))})
