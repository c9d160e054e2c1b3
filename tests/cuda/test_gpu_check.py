"""What scripts/gpu_check.py does before and after a GPU is asked: its plan, its figures, its judgement.

limit: 60
"""
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCRIPT = os.path.join(ROOT, "scripts", "gpu_check.sh")
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import gpu_check


class Recorder:
    """Takes verdicts in place of a whole check."""

    def __init__(self):
        self.verdicts = []

    def verdict(self, what, verdict, detail=""):
        self.verdicts.append(verdict)
        return verdict == gpu_check.OK


class Plan(unittest.TestCase):
    def run_plan(self, *words):
        return subprocess.run([SCRIPT, "--plan", *words], capture_output=True, text=True)

    def test_all_stages_end_within_the_budget(self):
        result = self.run_plan("--budget", "540")
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = result.stdout.splitlines()
        self.assertEqual([line.split()[0] for line in lines], [s.name for s in gpu_check.STAGES])
        self.assertEqual(lines[-1].split()[-1], "540")

    def test_quick_leaves_times_out(self):
        names = [line.split()[0] for line in self.run_plan("--quick").stdout.splitlines()]
        self.assertIn("twins", names)
        self.assertNotIn("times", names)

    def test_an_unknown_stage_is_named(self):
        result = self.run_plan("--only", "twins,nonsense")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("nonsense", result.stderr)

    def test_every_mesh_is_there_once(self):
        plan = gpu_check.meshes(["ipc", "nccl"])
        self.assertEqual(len(plan), len(set(plan)))
        for transport in ("ipc", "nccl"):
            modes = {m.overlap + m.route * (m.overlap == "commfuse") for m in plan if m.transport == transport}
            self.assertEqual(modes, {"none", "slice", "commfusering", "commfusedirect"})
            self.assertEqual({m.tp * m.dp for m in plan if m.transport == transport}, {2, 4})


class Judgement(unittest.TestCase):
    mesh = gpu_check.Mesh("ipc", "tpsp", 2, 1, "commfuse")
    expected = [4.0, 3.0]

    def judge(self, losses, status=0, output="", mesh=mesh, bits=None):
        recorder = Recorder()
        steps = [{"loss": loss, "grad_norm": 1.0} for loss in losses]
        gpu_check.judge_mesh(recorder, mesh, steps, gpu_check.Result(status, output, 1.0), self.expected,
                             {} if bits is None else bits)
        return recorder.verdicts[-1]

    def test_losses_of_one_rank_pass(self):
        self.assertEqual(self.judge([4.00001, 3.00001]), gpu_check.OK)

    def test_other_losses_fail(self):
        for losses in ([4.0, 3.001], [4.0], [], [4.0, float("nan")], [4.0, None]):
            self.assertEqual(self.judge(losses), gpu_check.FAIL, losses)

    def test_another_route_must_give_the_same_bits(self):
        bits, direct = {}, dataclasses.replace(self.mesh, route="direct")
        self.assertEqual(self.judge([4.0, 3.0], bits=bits), gpu_check.OK)
        self.assertEqual(self.judge([4.0, 3.0], mesh=direct, bits=bits), gpu_check.OK)
        self.assertEqual(self.judge([4.0, 3.000001], mesh=direct, bits=bits), gpu_check.FAIL)

    def test_a_refusal_is_no_failure_but_a_crash_is(self):
        refusal = "error: rank 0 of 2: native collectives need NCCL\nhint:  use --overlap commfuse\n"
        blocking = dataclasses.replace(self.mesh, overlap="none")
        self.assertEqual(self.judge([], 1, refusal, mesh=blocking), gpu_check.SKIP)
        self.assertEqual(self.judge([], 1, refusal), gpu_check.FAIL)  # commfuse asks for none
        broken = "error: a stream cannot wait for a word of memory\nhint:  use --transport nccl\n"
        self.assertEqual(self.judge([], 1, broken, mesh=blocking), gpu_check.FAIL)
        self.assertEqual(self.judge([], -11, "segmentation fault"), gpu_check.FAIL)


class Running(unittest.TestCase):
    def setUp(self):
        self.log = tempfile.TemporaryFile("w")
        self.addCleanup(self.log.close)
        self.runner = gpu_check.Runner(self.log)

    def test_a_rank_that_fails_is_told_and_the_others_are_ended(self):
        commands = [["sh", "-c", "echo error: no device; exit 3"], ["sleep", "60"]]
        begin = time.monotonic()
        result = self.runner.ranks(commands, [{"RANK": "0"}, {"RANK": "1"}])
        self.assertEqual(result.status, 3)
        self.assertEqual(result.last, "error: no device")
        self.assertLess(time.monotonic() - begin, 30)

    def test_a_command_over_its_limit_fails_and_over_the_stage_is_late(self):
        self.assertNotEqual(self.runner.run(["sleep", "60"], limit=0.2).status, 0)
        self.runner.deadline = time.monotonic() + 0.2
        with self.assertRaises(gpu_check.Late):
            self.runner.run(["sleep", "60"])
        with self.assertRaises(gpu_check.Late):
            self.runner.run(["true"])

    def test_ranks_know_each_other(self):
        first, second = (gpu_check.environment(rank, 2, 1234, "nccl") for rank in range(2))
        self.assertEqual((first["RANK"], second["RANK"], first["WORLD_SIZE"]), ("0", "1", "2"))
        self.assertNotEqual(first["NCCL_HOSTID"], second["NCCL_HOSTID"])
        self.assertNotIn("NCCL_HOSTID", gpu_check.environment(0, 2, 1234, "ipc"))


if __name__ == "__main__":
    unittest.main()
