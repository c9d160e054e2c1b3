"""Ranks killed at random, six times in sixty steps (see chaos.py, which does more of it): the same model, the same log."""
# limit: 180
# quick: none
import os
import random
import shutil
import tempfile
import unittest

import chaos
import test_saving

STEPS, KILLS = 60, 6


class Chaos(unittest.TestCase):
    def path(self, name):
        return os.path.join(self.folder, name)

    def check(self, tp, dp):
        seed = random.SystemRandom().randrange(10**6)
        self.folder = tempfile.mkdtemp(prefix="commfuse-test-")
        self.addCleanup(shutil.rmtree, self.folder, True)
        print(f"tp {tp}, dp {dp}, seed {seed}")
        # Of a small model on a fast machine all steps may be over before a kill comes: each waits for its line of the log.
        env = dict(LD_PRELOAD=test_saving.build_shim(self, "train/preload_disk.c"), FULL_RANK="0", FULL_PATH=".jsonl",
                   SLOW_MS="20")
        result = chaos.run(self.folder, STEPS, KILLS, tp, dp, seed, env=env)
        print(chaos.describe(result))
        self.assertGreaterEqual(sum(result.kills.values()), KILLS - 2)  # one may come when all is done
        self.assertGreater(result.kills["training"] + result.kills["saving"], 0)
        self.assertGreater(result.starts, 1)

    def test_two_by_two(self):
        self.check(2, 2)

    def test_one_rank(self):
        self.check(1, 1)
