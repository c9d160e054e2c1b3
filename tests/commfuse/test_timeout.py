"""A peer that goes silent: whoever waits for it gives up in time, says for whom and for what it has waited, and
takes all ranks with it.

sanitizers: too
limit: 180
"""
import os
import re
import subprocess
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("BUILD", "build/release")
TOOL = os.path.join(ROOT, BUILD, "tests/commfuse/tool_silent_peer")
TIMEOUT_S = 2
GRACE_S = 12  # start-up, and ten seconds at worst for a library that does not let go


@unittest.skipUnless(os.path.exists(TOOL), f"{TOOL} is not built: make build-tests")
class SilentPeer(unittest.TestCase):
    def wait(self, how, peer=True, ranks=2):
        start = time.monotonic()
        done = subprocess.run([os.path.join(ROOT, "scripts/mpirun.sh"), "-np", str(ranks), TOOL, how, str(TIMEOUT_S)],
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=60, check=False)
        seconds = time.monotonic() - start
        self.assertEqual(done.returncode, 1, done.stdout)
        message = re.search(r"^error: rank 0 of \d .*$", done.stdout, re.MULTILINE)
        self.assertIsNotNone(message, done.stdout)
        self.assertIn("reduce-scatter mlp.fc2", message[0])
        self.assertRegex(message[0], r"\blayer 7\b")
        self.assertRegex(message[0], r"\bstep 41\b")
        if peer:
            self.assertRegex(message[0], r"\brank 1\b")
        self.assertGreaterEqual(seconds, TIMEOUT_S, done.stdout)
        self.assertLess(seconds, TIMEOUT_S + GRACE_S, done.stdout)

    def test_exchange(self):
        self.wait("exchange")

    def test_exchange_that_has_received(self):
        self.wait("send", ranks=3)  # rank 2 has delivered: naming it alone is wrong

    def test_collective(self):
        self.wait("collective", peer=False)  # all others are waited for, together

    def test_blocking_collective(self):
        self.wait("blocking", peer=False)

    def test_barrier(self):
        self.wait("barrier", peer=False)

    def test_fused_operation(self):
        self.wait("fuse")


if __name__ == "__main__":
    unittest.main()
