"""Any rank, frozen at any moment of training: every other rank ends in time, and each of them says for which operation
it has waited and that the frozen rank does not answer, also where it waits for another one that waits for that rank. The frozen one,
should it wake, blames nobody.

Meshes, ranks and moments are drawn. FREEZES=50 draws as many of them, FREEZE_SEED=N the same ones again.
"""
# slow: names_the_frozen_one
# limit: 300
import os
import random
import re
import signal
import time

import harness

FREEZES = int(os.environ.get("FREEZES", "4"))
SEED = int(os.environ.get("FREEZE_SEED", str(random.randrange(1 << 31))))
TIMEOUT, GRACE = 6, 30  # on a busy machine a step may wait seconds for a rank that does its part
MESHES = (dict(strategy="tpsp", tp=3, dp=1), dict(strategy="tpsp", tp=2, dp=2, micro_batch=4),
          dict(strategy="up", tp=2, dp=1), dict(strategy="up", tp=1, dp=3, batch=9, micro_batch=3))
WORD = r"error: rank {rank} of \d \(.+?\): rank {rank} waits for (?:rank \d|the other ranks): " \
       r"(?:\S.*?, step \d+|all-gather of reports); nothing came for [\d.]+ s.*; .*rank {frozen} does not answer: frozen"


class Freeze(harness.Case):
    samples = 9

    def freeze(self, draw, mesh):
        """One run with one rank frozen. Returns what was done, in words."""
        ranks, log = mesh["tp"] * mesh["dp"], self.fresh("log.jsonl")
        frozen, steps, later_ms = draw.randrange(ranks), draw.randint(2, 12), draw.uniform(0, 60)
        options = dict(batch=8, micro_batch=8, steps=1000000, timeout=TIMEOUT, log=log)
        run = harness.Run(self.arguments(**{**options, **mesh}), ranks)
        self.addCleanup(run.close)
        harness.wait_until(lambda: run.ended() or len(harness.events(harness.read_log(log), "step")) >= steps, 90,
                           f"{steps} steps of training", interval=0.002)
        time.sleep(later_ms * 1e-3)
        processes = run.processes()
        self.assertEqual(sorted(processes), list(range(ranks)), str(run.result()))
        os.kill(processes[frozen], signal.SIGSTOP)
        begin = time.monotonic()
        others = set(range(ranks)) - {frozen}
        harness.wait_until(lambda: not set(run.processes()) & others, TIMEOUT + GRACE, f"the end of ranks {others}")
        seconds = time.monotonic() - begin
        result = run.wait(TIMEOUT + GRACE + 60)  # mpirun ends the frozen one too
        self.assertNotEqual(result.status, 0, str(result))
        for rank in others:
            word = re.compile("^" + WORD.format(rank=rank, frozen=frozen), re.MULTILINE)
            self.assertRegex(result.err, word, f"rank {rank}: {result}")
        said = re.findall(r"^error: .*", result.err, re.MULTILINE)
        for word in said:  # mpirun wakes it before it ends it: it must not blame others
            if word.startswith(f"error: rank {frozen} "):
                self.assertIn("this rank did not answer", word, str(result))
        return (f"{mesh} rank {frozen} frozen {later_ms:.0f} ms after step {steps}: all others ended after "
                f"{seconds:.1f} s\n    " + "\n    ".join(said))

    def test_a_stopped_run_goes_on_within_its_limit(self):
        """All ranks stop for longer than the limit, the first to go on in the middle of a wait: it does not count that time."""
        limit, log = 5, self.fresh("log.jsonl")
        run = harness.Run(self.arguments(batch=8, micro_batch=8, steps=1000000, timeout=limit, log=log, tp=2), 2)
        self.addCleanup(run.close)

        def goes_on():
            steps = len(harness.events(harness.read_log(log), "step"))
            harness.wait_until(lambda: run.ended() or len(harness.events(harness.read_log(log), "step")) > steps + 2, 90, "steps")
            self.assertFalse(run.ended(), str(run.result()))

        for waits in 0, 1:
            goes_on()
            processes = run.processes()
            for rank in 1 - waits, waits:
                os.kill(processes[rank], signal.SIGSTOP)
                time.sleep(0.5)  # the other one waits by now
            time.sleep(limit)
            for rank in waits, 1 - waits:
                os.kill(processes[rank], signal.SIGCONT)
                time.sleep(0.5)
        goes_on()

    def test_every_other_rank_names_the_frozen_one(self):
        draw, good = random.Random(SEED), 0
        print(f"FREEZE_SEED={SEED}")
        try:
            for i in range(FREEZES):
                mesh = MESHES[i % len(MESHES)]
                seed = draw.randrange(1 << 31)
                with self.subTest(i=i, seed=seed, **mesh):
                    print(self.freeze(random.Random(seed), mesh))
                    good += 1
        finally:
            print(f"frozen ranks named by every other rank in time: {good} of {FREEZES}")


if __name__ == "__main__":
    import unittest
    unittest.main()
