"""The same failing peers for the transports between GPUs, on the emulator: what a rank says is word for word that of the
CPUs' transport.
"""
# limit: 600
# make: emulated-tests
import os
import sys
import unittest

os.environ["BUILD"] = "build/emulated-fp32"
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import test_timeout
from test_timeout import FROZEN, waits

GATHERS = "MPI gathers a few words of all"


class Ipc(test_timeout.SilentPeer):
    """Exchanges by ipc, collectives by nccl."""

    at_bind = at_end = GATHERS
    test_exchange_that_has_received = None  # a sender does not wait for its peer


class Nccl(test_timeout.SilentPeer):
    transport = "nccl"
    at_bind = at_end = GATHERS

    test_collective_with_a_rank_that_is_elsewhere = None  # on the emulator that is an error of the program

    def test_dead(self):
        text, seconds, _ = self.run_tool("exchange", "dead", 2)
        self.assertRegex(text, r"error: rank 0 of 2 \(.+?\): rank 0 waits for rank 1: reduce-scatter mlp.fc2, layer 7, step "
                               r"41; NCCL reports for the tp group: .*; rank 1 is dead: its process has ended\n")
        self.assertLess(seconds, test_timeout.TIMEOUT_S + test_timeout.GRACE_S, text)

    def test_exchange_that_has_received(self):
        # NCCL ends both halves together. The watch knows which of the two does not answer, and that the other does.
        done = r"rank 2 answers: it computes, for \d[\d.]* s now, after reduce-scatter mlp.fc2, layer 7, step 41: .*"
        self.told("send", "frozen", {0: waits(0, "rank 2 or 1", f"{FROZEN.format(1)}; {done}")}, ranks=3)


if __name__ == "__main__":
    unittest.main()
