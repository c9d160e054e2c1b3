"""The GPU program as nvcc builds it, where there is no GPU to run it on: it starts, and says what is missing."""
# make: cuda-tests
import os
import shutil
import unittest

import harness

PROGRAMS = "train_gpt_cuda", "train_gpt_cuda_fp32"


class Program(harness.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if not all(os.path.exists(os.path.join(harness.ROOT, name)) for name in PROGRAMS):
            raise unittest.SkipTest("no CUDA toolkit here: make cuda has not been built")

    def start(self, name, *more, **env):
        return harness.run([*self.arguments(), *more], program=os.path.join(harness.ROOT, name), env=env)

    def test_help_needs_no_gpu(self):
        for name in PROGRAMS:
            result = harness.run(["--help"], program=os.path.join(harness.ROOT, name))
            self.assertEqual(result.status, 0, str(result))
            self.assertIn("--transport", result.out)

    @unittest.skipIf(shutil.which("nvidia-smi"), "this machine has a GPU")
    def test_without_a_gpu_it_says_so(self):
        for name in PROGRAMS:
            self.assertFails(self.start(name), "no CUDA device", "driver", "./train_gpt, the CPU program")
        self.assertFails(self.start(PROGRAMS[0], "--dtype", "fp32"), "no CUDA device")

    @unittest.skipIf(shutil.which("nvidia-smi"), "this machine has a GPU")
    def test_benchmarks_say_so_too(self):
        for name in ("bench_gpu", "bench_wires"):
            path = os.path.join(harness.ROOT, "build", "cuda-bf16", "tests", "bench", name)
            self.assertFails(harness.run([], program=path), "no CUDA device", "driver")

    @unittest.skipIf(shutil.which("nvidia-smi"), "this machine has a GPU")
    def test_ranks_started_by_environment_say_it_once(self):
        result = self.start(PROGRAMS[0], RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
        self.assertFails(result, "no CUDA device")
        self.assertEqual(result.err.count("error:"), 1, str(result))

    def test_mpi_is_not_a_way_between_gpus(self):
        result = self.start(PROGRAMS[0], "--transport", "mpi")
        self.assertFails(result, "transport mpi" if "mpi moves" in result.err else "no CUDA device")
