"""--check-wire: a bit that flips between two ranks is found before weights are written, and the message says where.
Without it the same run goes on as if nothing had happened; with it and without a flip, nothing changes.

preload_wire.c spoils the n-th send of a rank. How many sends a step has is counted in runs that it leaves alone.

limit: 300
"""
import os
import re
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import harness

FEW = 256      # bytes: fewer have reports, barriers and the checksums themselves
BIT = 21       # of a float: half of its leading digits, and never a NaN
STEPS, AT = 4, 2
RUNS = (("tpsp", 2, 1, "ring"), ("up", 2, 1, "direct"), ("tpsp", 1, 2, "direct"), ("tpsp", 4, 1, "ring"),
        ("tpsp", 4, 1, "direct"))
FOUND = re.compile(r"error: rank (?P<rank>\d+) of \d+ \(.*?\): rank (?P<named>\d+) got other bytes from "
                   r"rank (?P<peer>\d+) than (?:it|rank (?P<owner>\d+), the owner,) sent: "
                   r"(?P<operation>all-gather|reduce-scatter|all-to-all) [a-z][^:]*?, step (?P<step>\d+), "
                   r"slice (?P<slice>\d+) of (?P<slices>\d+), (?P<bytes>\d+) bytes: "
                   r"checksum [0-9a-f]{16}, expected [0-9a-f]{16}\n")


class CheckWire(harness.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if not shutil.which("mpicc"):
            raise unittest.SkipTest("no mpicc")
        cls.shim = cls.path("preload_wire.so")
        subprocess.run(["mpicc", "-std=gnu11", "-O1", "-shared", "-fPIC", "-o", cls.shim,
                        os.path.join(harness.ROOT, "tests/train/preload_wire.c")], check=True)

    def recipe(self, strategy, tp, dp, overlap, **more):
        return dict(strategy=strategy, tp=tp, dp=dp, overlap=f"{overlap}:2", steps=STEPS,
                    micro_batch=self.samples // dp) | more

    def spoil(self, ranks, wire, **more):
        """A run with preload_wire.c in between; keyword arguments are options, `wire` is its environment."""
        wire = {"WIRE_BYTES": FEW, "LD_PRELOAD": self.shim} | wire
        wrapper = ["env", *(f"{name}={value}" for name, value in wire.items())]
        return harness.run(self.arguments(**more), ranks, wrapper=wrapper)

    def sends(self, ranks, rank, until, **more):
        result = self.spoil(ranks, {"WIRE_RANK": rank}, **more | dict(steps=until))
        self.assertEqual(result.status, 0, str(result))
        return int(re.search(r"wire: (\d+) sends", result.err)[1])

    def assertFound(self, result, rank, step=AT):
        self.assertGreater(result.status, 0, f"nobody has noticed{result}")
        planted = re.search(r"wire: send \d+ from rank (\d+) to rank (\d+), (\d+) bytes, is spoiled", result.err)
        self.assertTrue(planted, str(result))
        sent, to, size = (int(word) for word in planted.groups())
        self.assertEqual(sent, rank)
        found = [message.groupdict() for message in FOUND.finditer(result.err)]
        self.assertTrue(found, str(result))
        self.assertIn("the last checkpoint is valid", result.err)
        for message in found:
            self.assertEqual((message["rank"], message["step"]), (message["named"], str(step)), str(result))
            self.assertEqual(int(message["bytes"]), size, str(result))
            self.assertLess(int(message["slice"]), int(message["slices"]))
        here = [message for message in found if int(message["rank"]) == to]
        for message in here:
            self.assertEqual(int(message["peer"]), sent, str(result))
        for message in found:  # elsewhere, what was passed on; and that rank may have ended this one before it spoke
            self.assertTrue(message in here or message["owner"], str(result))
        return found[0]["operation"]

    def check(self, strategy, tp, dp, overlap):
        ranks, rank = tp * dp, tp * dp - 1
        more = self.recipe(strategy, tp, dp, overlap)
        before, after = (self.sends(ranks, rank, until, **more) for until in (AT, AT + 1))
        each = after - before
        self.assertGreater(each, 3)
        kinds = set()
        # What is sent last for a step, up to half of it, are its weights, in the next forward.
        for nth, step in (before + 1, AT), (before + 1 + each // 4, AT), (after, AT + 1):
            wire = {"WIRE_RANK": rank, "WIRE_NTH": nth, "WIRE_BIT": 32 * 17 + BIT}
            result = self.spoil(ranks, wire, check_wire=True, **more)
            kinds.add(self.assertFound(result, rank, step))
        unseen = self.fresh("log.jsonl")
        result = self.spoil(ranks, wire, log=unseen, **more)
        self.assertEqual(result.status, 0, str(result))
        self.assertIn("is spoiled", result.err)
        steps = harness.events(harness.read_log(unseen), "step")
        self.assertEqual(len(steps), STEPS)
        return kinds

    def bits(self, ranks, **more):
        steps = harness.events(self.train(ranks, **more)[0], "step")
        return [(s["loss"], s["grad_norm"]) for s in steps]

    def test_a_flipped_bit_is_found(self):
        kinds = {}
        for run in RUNS:
            with self.subTest(strategy=run[0], tp=run[1], dp=run[2], overlap=run[3]):
                kinds.setdefault(run[0], set()).update(self.check(*run))
        self.assertLessEqual({"all-gather", "reduce-scatter"}, kinds["tpsp"])
        self.assertIn("all-to-all", kinds["up"])

    def test_checksums_change_no_bit(self):
        for strategy, tp, dp, overlap in RUNS:
            with self.subTest(strategy=strategy, tp=tp, dp=dp, overlap=overlap):
                more = self.recipe(strategy, tp, dp, overlap)
                self.assertEqual(self.bits(tp * dp, check_wire=True, **more), self.bits(tp * dp, **more))

    def test_the_cause_is_told_before_the_symptom(self):
        more = self.recipe("tpsp", 2, 1, "ring")
        before, after = (self.sends(2, 1, until, **more) for until in (AT, AT + 1))
        nth = before + 1 + (after - before) // 4  # of activations, which the other rank uses
        wire = {"WIRE_RANK": 1, "WIRE_NTH": nth, "WIRE_BIT": 32 * 17, "WIRE_NAN": 1}
        result = self.spoil(2, wire, **more)
        self.assertFails(result, f"step {AT}:", "not finite")
        result = self.spoil(2, wire, check_wire=True, **more)
        self.assertFound(result, 1)
        self.assertNotIn("not finite", result.err)


if __name__ == "__main__":
    unittest.main()
