"""The same failing peers with the transports between GPUs, on the emulator: the messages are those of the transport of CPUs."""
# quick: Ipc.test_dead Ipc.test_collective Nccl.test_chain Nccl.test_fused_operation
# limit: 600
# make: emulated-tests
import os
import subprocess
import tempfile
import unittest
import unittest.mock

os.environ["BUILD"] = "build/emulated-fp32"
import test_timeout
from test_timeout import FROZEN, waits

GATHERS = "MPI gathers reports of all ranks"


class Ipc(test_timeout.SilentPeer):
    """Exchanges by ipc, collectives by nccl."""

    at_bind = at_end = GATHERS

    def test_a_killed_start_leaves_no_shared_memory(self):
        """Rank 0 is killed as it makes what the group shares."""
        with tempfile.TemporaryDirectory() as folder:
            shim, tool, started = f"{folder}/shim.so", f"{folder}/tool", f"{folder}/started"
            subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, f"{test_timeout.ROOT}/tests/data/preload_kill.c", "-ldl"],
                           check=True)
            with open(tool, "w", encoding="utf-8") as file:
                file.write(f'#!/bin/sh\necho $$ >>{started}\nexport LD_PRELOAD={shim} CALLS_ABOUT=commfuse- KILL_AT=1\n'
                           f'exec {test_timeout.TOOL} "$@"\n')
            os.chmod(tool, 0o755)
            with unittest.mock.patch.object(test_timeout, "TOOL", tool):
                text, _, status = self.run_tool("exchange", "frozen", 2)
            self.assertNotIn("error: rank 0", text)  # it had no time to say anything
            self.assertNotEqual(status, 0)
            with open(started, encoding="utf-8") as file:
                ours = file.read().split()
        self.assertEqual(len(ours), 2)
        self.assertEqual([name for name in os.listdir("/dev/shm") if any(f"commfuse-{pid}-" in name for pid in ours)], [])


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
        # NCCL ends both halves together. The watch knows which of the two does not answer.
        self.check("send", "frozen", {0: waits(0, "rank 2 or 1", FROZEN.format(1))}, ranks=3)
