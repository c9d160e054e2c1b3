"""What the tests of data/prepare.py share: running it, reading what it wrote."""
import array
import importlib.util
import os
import struct
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCRIPT = os.path.join(ROOT, "data", "prepare.py")
SHARED = os.path.join(os.path.dirname(ROOT), "shared", "data")


def load_prepare():
    spec = importlib.util.spec_from_file_location("prepare", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class PrepareCase(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name
        self.out = self.path("tokens")

    def path(self, name):
        return os.path.join(self.directory, name)

    def write(self, name, content):
        with open(self.path(name), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        return self.path(name)

    def run_prepare(self, *arguments, env=None):
        return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True,
                              env={**os.environ, **(env or {})}, timeout=100)

    def prepare(self, *arguments):
        result = self.run_prepare(*arguments, "--out", self.out)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def refused(self, *arguments, status=1, env=None):
        """Standard error of a run that must fail and leave no temporary file."""
        result = self.run_prepare(*arguments, "--out", self.out, env=env)
        self.assertEqual(result.returncode, status, result.stderr)
        self.assertNotIn("Traceback", result.stderr)
        self.assertEqual([name for name in self.listing() if ".tmp." in name], [])
        return result.stderr

    def listing(self):
        return sorted(os.listdir(self.out)) if os.path.isdir(self.out) else []

    def tokens(self, name):
        """The tokens of one file, whose header and size must be right."""
        with open(os.path.join(self.out, name), "rb") as file:
            content = file.read()
        header = struct.unpack("<256i", content[:1024])
        self.assertEqual(header, (20240520, 1, (len(content) - 1024) // 2) + (0,) * 253)
        self.assertEqual(len(content) % 2, 0)
        words = array.array("H", content[1024:])
        if sys.byteorder == "big":
            words.byteswap()
        return words.tolist()

    def all_tokens(self, split):
        return sum((self.tokens(name) for name in self.listing() if name.startswith(split)), [])
