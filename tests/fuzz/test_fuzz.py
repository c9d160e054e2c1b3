"""A short run of each fuzz target, the same one every time; make fuzz runs long ones.

quick: none
limit: 300
"""
import os
import re
import shutil
import subprocess
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RUNS = 20000
CLANG = shutil.which(os.environ.get("FUZZ_CC", "clang"))


def has_libfuzzer():
    if not CLANG:
        return False
    with tempfile.TemporaryDirectory() as directory:
        source = "int LLVMFuzzerTestOneInput(const char *b, unsigned long n) { return b && n > 9; }\n"
        line = [CLANG, "-fsanitize=fuzzer,address,undefined", "-x", "c", "-", "-o", os.path.join(directory, "probe")]
        return subprocess.run(line, input=source, text=True, capture_output=True, check=False).returncode == 0


@unittest.skipUnless(has_libfuzzer(), "no clang with libFuzzer (Debian: clang libclang-rt-14-dev)")
class Fuzz(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
        built = subprocess.run(["make", "-s", "-f", "tests/fuzz/fuzz.mk", "fuzz-build"], cwd=ROOT, env=env, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        assert built.returncode == 0, built.stdout

    def fuzz(self, target):
        import seeds
        with tempfile.TemporaryDirectory() as directory:
            given = [*getattr(seeds, target)()]
            for i, seed in enumerate(given):
                with open(os.path.join(directory, str(i)), "wb") as file:
                    file.write(seed)
            # ASAN_OPTIONS and the like that are set for gcc's builds have files that clang's runtime need not know.
            env = {name: value for name, value in os.environ.items() if not name.endswith("SAN_OPTIONS")}
            done = subprocess.run([os.path.join(ROOT, "build/fuzz/fuzz_" + target), f"-runs={RUNS}", "-seed=1",
                                   "-max_len=4096", "-timeout=10", "-print_final_stats=1",
                                   f"-artifact_prefix={ROOT}/build/fuzz/{target}-", directory],
                                  env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
            self.assertEqual(done.returncode, 0, done.stdout[-6000:])
            executed = int(re.search(r"number_of_executed_units:\s*(\d+)", done.stdout)[1])
            self.assertGreaterEqual(executed, RUNS)
            # New paths beside the seeds' show that the inputs reach into the parser.
            self.assertGreater(len(os.listdir(directory)), len(given) + 10)
            print(target, *re.findall(r"Done .*", done.stdout))

    def test_tokens(self):
        self.fuzz("tokens")

    def test_state(self):
        self.fuzz("state")

    def test_model(self):
        self.fuzz("model")

    def test_manifest(self):
        self.fuzz("manifest")

    def test_options(self):
        self.fuzz("options")
