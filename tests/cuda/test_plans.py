"""cuDNN's own answer to the graphs of layers/kernels/attention_cudnn.cu, for GPUs that are not here: tool_plans.cu asks it.

On every GPU there must be a fused kernel for all shapes, odd ones and, forward, ranges of Query-Split included, and a workspace no
larger than the file says. A kernel of the GPU's own generation where there is one: others run as well, but slower.

quick: none
limit: 300
make: cuda-tests
"""
import concurrent.futures
import os
import re
import subprocess
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FOLDER = os.path.join(ROOT, "build", "cuda-bf16", "tests", "cuda")
TOOL, DRIVER = os.path.join(FOLDER, "tool_plans"), os.path.join(FOLDER, "driver")
LINE = re.compile(r"(\S+) (forward|backward) n=(\d+) keys=(\d+) B=(\d+) H=(\d+) KV=(\d+) D=(\d+) workspace=(\d+) (\S+) (\S+)$")
# The generation of forward's and backward's kernels for the shapes of GPT-2. (Of a B200's own backward kernels none adds up
# dQ in one order.)
GENERATIONS = {"A100": ("sm80", "sm80"), "H100": ("sm90", "sm90"), "B200": ("sm100", "sm80")}
ANSWERS = 16 + 2 * 10  # forward; backward, of shapes with as many queries as keys, alone in memory and among other sequences
MARGIN = 1 << 20  # bytes: tiles are padded


def asked(gpu):
    done = subprocess.run([TOOL, gpu], env={**os.environ, "LD_LIBRARY_PATH": DRIVER}, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@unittest.skipUnless(os.path.exists(TOOL), "no nvcc or no cuDNN here: make config")
class Plans(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            cls.answers = dict(zip(GENERATIONS, pool.map(asked, GENERATIONS)))

    def plans(self, gpu):
        status, output, errors = self.answers[gpu]
        if "needs cuDNN 9.8" in output:
            self.skipTest(output.strip())
        self.assertEqual(status, 0, output + errors)
        found = [LINE.match(line) for line in output.splitlines()]
        self.assertTrue(all(found), output)
        self.assertEqual(len(found), ANSWERS, output)
        return [(one[2], *map(int, one.groups()[2:9]), one[10], one[11]) for one in found]

    def test_every_shape_has_a_fused_kernel(self):
        for gpu in GENERATIONS:
            for pass_name, n, keys, B, H, KV, D, workspace, said, kernel in self.plans(gpu):
                with self.subTest(gpu=gpu, pass_name=pass_name, n=n, keys=keys, B=B, H=H, KV=KV, D=D):
                    self.assertEqual(said, "plan")
                    self.assertIn("sdpa", kernel)
                    self.assertIn({"forward": "fprop", "backward": "bprop"}[pass_name], kernel)

    def test_kernels_are_of_the_gpu_s_generation(self):
        for gpu, generations in GENERATIONS.items():
            for pass_name, n, keys, B, H, KV, D, workspace, said, kernel in self.plans(gpu):
                wanted = generations[pass_name == "backward"]
                if D in (64, 128) and n >= 256:
                    with self.subTest(gpu=gpu, pass_name=pass_name, n=n, keys=keys, B=B, H=H, KV=KV, D=D):
                        self.assertIn(f"_{wanted}_", kernel)

    def test_workspace(self):
        """Forward needs next to none; backward keeps dS, padded to tiles, so that dQ is added up in one order."""
        for gpu in GENERATIONS:
            for pass_name, n, keys, B, H, KV, D, workspace, said, kernel in self.plans(gpu):
                with self.subTest(gpu=gpu, pass_name=pass_name, n=n, keys=keys, B=B, H=H, KV=KV, D=D):
                    kept = 2 * B * H * n * keys if pass_name == "backward" else 0
                    self.assertLessEqual(workspace, kept + MARGIN)
