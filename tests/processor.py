"""What this machine's processor can do."""
import pathlib
import re
import unittest

FLAGS = set(re.findall(r"\w+", pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")))
needs_bf16 = unittest.skipUnless("avx512bw" in FLAGS, "this processor has no AVX-512, without which oneDNN multiplies no bf16")
