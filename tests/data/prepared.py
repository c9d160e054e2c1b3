"""What the tests of data/prepare.py share: running it, reading what it wrote."""
import array
import hashlib
import importlib.util
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import types
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCRIPT = os.path.join(ROOT, "data", "prepare.py")
SHARED = os.path.join(os.path.dirname(ROOT), "shared", "data")
BPE = os.path.join(SHARED, "gpt2_bpe")


def load_prepare():
    spec = importlib.util.spec_from_file_location("prepare", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def keep_vocabulary(folder):
    """Puts GPT-2's files where tiktoken looks for what it has downloaded."""
    for name in "vocab.bpe", "encoder.json":
        source = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        shutil.copy(os.path.join(BPE, name), os.path.join(folder, hashlib.sha1(source.encode()).hexdigest()))
    os.environ["TIKTOKEN_CACHE_DIR"] = folder


class PartOfBytes:
    """Like prepare.Part, of text in memory that comes in pieces of a given size."""

    def __init__(self, content, size, start=0):
        self.source, self.content, self.size, self.at = types.SimpleNamespace(name="x", lines=False), content, size, start
        self.end = start + len(content)

    def pieces(self):
        for i in range(0, len(self.content), self.size):
            piece = self.content[i:i + self.size]
            yield piece
            self.at += len(piece)


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

    def run_prepare(self, *arguments, env=None, given=b""):
        """Arguments may be bytes; `given` comes through standard input, a pipe."""
        command = [sys.executable, SCRIPT, *(a if isinstance(a, bytes) else str(a) for a in arguments)]
        result = subprocess.run(command, capture_output=True, env={**os.environ, **(env or {})}, input=given, timeout=100)
        return subprocess.CompletedProcess(command, result.returncode, result.stdout.decode(), result.stderr.decode())

    def prepare(self, *arguments, given=b"", noted=None):
        """Standard output of a run that must succeed and say `noted`, or no note, on standard error."""
        result = self.run_prepare(*arguments, "--out", self.out, given=given)
        self.assertEqual(result.returncode, 0, result.stderr)
        if noted:
            self.assertIn(noted, result.stderr)
        else:
            self.assertNotIn("note: ", result.stderr)
        return result.stdout

    def refused(self, *arguments, status=1, env=None, given=b""):
        """Standard error of a run that must fail and leave nothing behind."""
        before = self.listing()
        result = self.run_prepare(*arguments, "--out", self.out, env=env, given=given)
        self.assertEqual(result.returncode, status, result.stderr)
        self.assertNotIn("Traceback", result.stderr)
        self.assertEqual(self.listing(), before)
        return result.stderr

    def listing(self):
        return sorted(os.listdir(self.out)) if os.path.isdir(self.out) else []

    def tokens(self, name):
        """The tokens of one file, whose header and size must be right."""
        with open(os.path.join(self.out, name), "rb") as file:
            content = file.read()
        header = struct.unpack("<256i", content[:1024])
        tokens = array.array("I" if header[0] == 20240801 else "H", content[1024:])
        self.assertEqual(header, ((20240520, 1) if tokens.itemsize == 2 else (20240801, 7)) + (len(tokens),) + (0,) * 253)
        return tokens.tolist()

    def all_tokens(self, split):
        return sum((self.tokens(name) for name in self.listing() if name.startswith(split)), [])
