"""data/prepare.py with bytes as tokens: files, shards, split, errors. Needs nothing but Python itself."""
import os
import random
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from prepared import SCRIPT, PrepareCase, load_prepare

EVERY_BYTE = bytes(range(256)) * 5


class Files(PrepareCase):
    def test_round_trip(self):
        self.prepare("--input", self.write("a", EVERY_BYTE))
        self.assertEqual(self.listing(), ["train_000000.bin", "val_000000.bin"])
        train, val = self.tokens("train_000000.bin"), self.tokens("val_000000.bin")
        self.assertEqual(bytes(train + val), EVERY_BYTE)
        self.assertEqual(len(train), 1155)  # 1152, nine tenths, is within what looks like a character

    def test_larger_than_a_piece(self):
        text = random.Random(1).randbytes(3_000_001)
        self.prepare("--input", self.write("a", text), "--val-fraction", 0)
        self.assertEqual(self.listing(), ["train_000000.bin"])
        self.assertEqual(bytes(self.tokens("train_000000.bin")), text)

    def test_shards(self):
        for count, sizes in (2000, [1280]), (1280, [1280]), (1279, [1279, 1]), (500, [500, 500, 280]):
            with self.subTest(shard_tokens=count):
                text = self.write("a", EVERY_BYTE)
                self.prepare("--input", text, "--val-fraction", 0, "--shard-tokens", count)
                self.assertEqual(self.listing(), [f"train_{i:06d}.bin" for i in range(len(sizes))])
                self.assertEqual([len(self.tokens(name)) for name in self.listing()], sizes)
                self.assertEqual(bytes(self.all_tokens("train")), EVERY_BYTE)

    def test_several_inputs_are_one_text(self):
        sizes = {"b": 50, "a": 30, "c": 20, "empty": 0}
        paths = [self.write(name, name * size) for name, size in sizes.items()]
        for inputs in (["--input", *paths], ["--input", *paths[:1], "--input", *paths[1:]]):
            with self.subTest(inputs=inputs):
                self.prepare(*inputs, "--val-fraction", 0.3)
                self.assertEqual(bytes(self.all_tokens("train")), b"b" * 50 + b"a" * 20)
                self.assertEqual(bytes(self.all_tokens("val")), b"a" * 10 + b"c" * 20)

    def test_split_keeps_characters_whole(self):
        text = "€" * 100  # three bytes each
        for fraction in 0.1, 0.101, 0.104, 0.106:
            with self.subTest(fraction=fraction):
                self.prepare("--input", self.write("a", text), "--val-fraction", fraction)
                train, val = bytes(self.all_tokens("train")).decode(), bytes(self.all_tokens("val")).decode()
                self.assertEqual(train + val, text)
                self.assertGreater(len(val), 8)

    def test_an_earlier_data_set_is_replaced_whole(self):
        os.mkdir(self.out)
        for name in "tokenizer.bin", "notes.txt", "train_x.bin":
            self.write(f"tokens/{name}", "x")
        self.prepare("--input", self.write("a", EVERY_BYTE), "--shard-tokens", 100)
        self.assertEqual(len(self.listing()), 12 + 2 + 2)
        told = self.prepare("--input", self.write("a", "short text"), "--val-fraction", 0)
        self.assertEqual(self.listing(), ["notes.txt", "train_000000.bin", "train_x.bin"])
        self.assertEqual(bytes(self.tokens("train_000000.bin")), b"short text")
        self.assertIn("removed", told)
        self.assertIn("val_000000.bin", told)

    def test_summary(self):
        told = self.prepare("--input", self.write("a", "x" * 20000), "--shard-tokens", 10000)
        self.assertRegex(told, r"train +18,000 tokens in 2 files: .*train_\*\.bin")
        self.assertRegex(told, r"val +2,000 tokens in 1 file: .*val_\*\.bin")


class Errors(PrepareCase):
    def test_input(self):
        none = self.path("none")
        self.assertIn("No such file or directory: " + none, self.refused("--input", none))
        self.assertIn("is a directory", self.refused("--input", self.directory))
        self.assertIn("is not a file", self.refused("--input", os.devnull))
        self.assertIn("the input is empty", self.refused("--input", self.write("a", "")))
        self.assertIn("too small to split", self.refused("--input", self.write("a", "x")))
        self.assertEqual(self.listing(), [])

    def test_options(self):
        text = self.write("a", "some text")
        for wrong in (["--val-fraction", "1"], ["--val-fraction", "-0.1"], ["--val-fraction", "nan"],
                      ["--val-fraction", "x"], ["--shard-tokens", "0"], ["--shard-tokens", "2147483648"],
                      ["--shard-tokens", "1e8"], ["--encoding", "gpt3"], ["--bpe-dir", "."], ["--outt", "x"]):
            with self.subTest(wrong=wrong):
                self.assertIn(wrong[0], self.refused("--input", text, *wrong, status=2))
        self.assertEqual(self.run_prepare("--input", text).returncode, 2)
        self.assertEqual(self.listing(), [])

    def test_output_that_cannot_be(self):
        self.write("tokens", "a file where the directory should be")
        error = self.refused("--input", self.write("a", "some text"))
        self.assertIn("error: ", error)
        self.assertIn(self.out, error)

    def test_without_tiktoken(self):
        os.mkdir(self.path("fake"))
        self.write("fake/tiktoken.py", "raise ImportError('not here')")
        error = self.refused("--input", self.write("a", "text"), "--encoding", "gpt2",
                             env={"PYTHONPATH": self.path("fake")})
        self.assertIn("tiktoken", error)
        self.assertIn("scripts/install_deps.sh --bpe", error)
        self.assertIn("build/venv/bin/python", error)

    def test_a_failed_run_changes_nothing(self):
        self.prepare("--input", self.write("a", EVERY_BYTE))
        before = {name: self.tokens(name) for name in self.listing()}
        script = ("import resource, signal, runpy, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
                  "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)); sys.argv = sys.argv[1:];"
                  "runpy.run_path(sys.argv[0], run_name='__main__')")
        text = self.write("b", "x" * 100000)
        result = subprocess.run([sys.executable, "-c", script, SCRIPT, "--input", text, "--out", self.out],
                                capture_output=True, text=True, timeout=100)
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("error: File too large", result.stderr)
        self.assertEqual({name: self.tokens(name) for name in self.listing()}, before)

    def test_interrupted(self):
        text = self.write("a", EVERY_BYTE)
        script = ("import os, runpy, sys, time; sys.argv = sys.argv[1:];"
                  "os.fsync = lambda file: (print('written', flush=True), time.sleep(60));"
                  "runpy.run_path(sys.argv[0], run_name='__main__')")
        for number, status in (signal.SIGINT, 130), (signal.SIGTERM, 143):
            with self.subTest(number=number):
                child = subprocess.Popen([sys.executable, "-c", script, SCRIPT, "--input", text, "--out", self.out],
                                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                         # Tests in the background of a shell inherit that it ignores SIGINT.
                                         preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
                self.assertEqual(child.stdout.readline(), "written\n")
                self.assertNotEqual(self.listing(), [])  # a temporary file
                child.send_signal(number)
                _, error = child.communicate(timeout=60)
                self.assertEqual(child.returncode, status, error)
                self.assertEqual("nothing was changed" in error, number == signal.SIGINT)
                self.assertEqual(self.listing(), [])


class Pieces(unittest.TestCase):
    """The parts of whole_words() are the text; each but the first begins with a blank behind a non-blank."""

    def setUp(self):
        self.prepare = load_prepare()

    def parts(self, content, size):
        return list(self.prepare.whole_words(content[i:i + size] for i in range(0, len(content), size)))

    def test_cuts(self):
        texts = ["", "word", "two words", "  a \n\n b  c \t d\n", "nothing\u00adto€cut\u00adhere" * 9,
                 "\u3000 \u00a0 x \u2028 y z",
                 "日本語 の text。 \n次 の行", "a " * 50, " " * 50, "\n\nx" * 20]
        for text in texts:
            for size in range(1, 25):
                with self.subTest(text=text, size=size):
                    parts = self.parts(text.encode(), size)
                    self.assertEqual("".join(parts), text)
                    for before, part in zip(parts, parts[1:]):
                        if part and before:
                            self.assertIn(part[0], " \n")
                            self.assertFalse(before[-1].isspace())
        self.assertGreater(len(self.parts(b"a " * 50, 4)), 10)  # it does cut

    def test_no_text(self):
        cases = (b"good \xff bad", "byte 105"), (b"\xe2\x82 ", "byte 100"), (b"cut \xe2\x82", "ends within")
        for content, what in cases:
            for size in range(1, 9):
                with self.subTest(content=content, size=size):
                    pieces = (content[i:i + size] for i in range(0, len(content), size))
                    with self.assertRaises(self.prepare.Problem) as caught:
                        list(self.prepare.whole_words(pieces, 100))
                    self.assertIn(what, str(caught.exception))

    def test_progress_is_told(self):
        import contextlib
        import io
        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            progress = self.prepare.Progress(4_000_000)
            progress.add(1_000_000)
            self.assertEqual(told.getvalue(), "")
            progress.told = progress.start = time.monotonic() - 5
            progress.add(1_000_000)
        self.assertRegex(told.getvalue(), r"2\.0 of 4\.0 MB read, 0\.4 MB/s, 5 s left")


if __name__ == "__main__":
    unittest.main()
