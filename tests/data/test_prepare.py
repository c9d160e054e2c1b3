"""data/prepare.py with bytes as tokens: files, shards, split, errors. Needs nothing but Python itself."""
# limit: 240
import bz2
import codecs
import contextlib
import gzip
import io
import lzma
import os
import random
import re
import shlex
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import types
import unittest
import unittest.mock

from prepared import SCRIPT, PartOfBytes, PrepareCase, load_prepare

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

    def test_says_how_far_it_is(self):
        prepare = load_prepare()
        prepare.PIECE_BYTES, prepare.PROGRESS_S = 100, 0
        source = prepare.Source(self.write("a", "x" * 400), "auto")
        with contextlib.redirect_stderr(io.StringIO()) as said:
            parts = [prepare.Part(source, 0, 300), prepare.Part(source, 300, 400)]
            chunks = list(prepare.encoded("train", parts, prepare.Bytes(), 1))
        self.assertEqual(sum(map(len, filter(None, chunks))), 800)
        self.assertRegex(said.getvalue(), r"train: \d+% of the text read, ETA 0:00\n")
        self.assertIn("train: 75% of the text read", said.getvalue())
        part, prepare.PROGRESS_S = prepare.Part(source, 0, 400), 10
        with contextlib.redirect_stderr(io.StringIO()) as said, \
                unittest.mock.patch.object(prepare, "time", types.SimpleNamespace(monotonic=lambda: 100 if part.at >= 100 else 0)):
            list(prepare.encoded("val", [part], prepare.Bytes(), 1))
        self.assertEqual(said.getvalue(), "val: 25% of the text read, ETA 5:00\n")

    def test_threads_encode_at_the_same_time(self):
        """Each of two waits for the other; the tokens stay in their order."""
        prepare, both = load_prepare(), threading.Barrier(2)
        prepare.PIECE_BYTES = 10

        class Meeting(prepare.Bytes):
            def tokens(self, piece, at):
                both.wait(60)
                return super().tokens(piece, at)

        part = prepare.Part(prepare.Source(self.write("a", bytes(range(200))), "auto"), 0, 200)
        pieces = list(prepare.encoded("train", [part], Meeting(), 2))
        self.assertEqual(b"".join(filter(None, pieces))[::2], bytes(range(200)))

    def test_an_error_of_a_thread_names_its_input_alone(self):
        prepare = load_prepare()

        class Failing(prepare.Bytes):
            def tokens(self, piece, at):
                raise prepare.Problem(f"no tokens near byte {at}") if b"7" in piece else ZeroDivisionError
        for threads in 1, 3:
            parts = [prepare.Part(prepare.Source(self.write(name, name * 50), "auto"), 0, 50) for name in "789"]
            with self.assertRaises(prepare.Problem) as caught:
                list(prepare.encoded("train", parts, Failing(), threads))
            self.assertEqual(str(caught.exception), f"--input {self.path('7')}: no tokens near byte 0")

    def test_threads_that_may_not_be_started_are_an_error(self):
        prepare = load_prepare()
        with unittest.mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")), \
                self.assertRaisesRegex(prepare.Problem, "--threads 8: can't start new thread"):
            list(prepare.encoded("train", [prepare.Part(prepare.Source(self.write("a", "text"), "auto"), 0, 4)], prepare.Bytes(), 8))

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


class Inputs(PrepareCase):
    """As people have them: every one gives the tokens of the plain text, or says what to do."""

    def setUp(self):
        super().setUp()
        self.text = ("naïve words, and more of them\n" * 400).encode()

    def expect(self, text, *arguments, **more):
        for fraction in 0, 0.1, 0.37:
            with self.subTest(val_fraction=fraction):
                self.prepare(*arguments, "--val-fraction", fraction, **more)
                train, val = bytes(self.all_tokens("train")), bytes(self.all_tokens("val"))
                self.assertEqual(train + val, text)
                self.assertAlmostEqual(len(val), fraction * len(text), delta=2)
                self.assertEqual(val.decode(errors="strict"), text[len(train):].decode())

    def test_standard_input(self):
        self.expect(self.text, "--input", "-", given=self.text)
        self.expect(self.text * 2, "--input", self.write("a", self.text), "-", given=self.text)
        self.expect(self.text, "--input", "-", given=gzip.compress(self.text))
        self.assertIn("the input is empty", self.refused("--input", "-"))

    def test_directory(self):
        for name in ("b", "a", "B/y", "B/x", ".hidden", ".git/x"):
            os.makedirs(os.path.dirname(self.path(f"corpus/{name}")), exist_ok=True)
            self.write(f"corpus/{name}", f"text of {name}\n")
        self.expect(b"text of B/x\ntext of B/y\ntext of a\ntext of b\n", "--input", self.path("corpus/"))
        os.mkdir(self.path("nothing"))
        self.assertIn("a directory without files", self.refused("--input", self.path("nothing")))

    def test_linked_directories_are_read_once(self):
        for name in "real/b/two", "elsewhere/c/three":
            os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
            self.write(name, f"text of {name}\n")
        self.write("one", "text of one\n")
        for link, target in {"data": "real", "real/linked": "../elsewhere", "real/again": "../elsewhere/c", "real/file": "../one",
                             "real/b/loop": "..", "elsewhere/c/back": "..", "real/nowhere": "gone"}.items():
            os.symlink(target, self.path(link))
        os.mkfifo(self.path("real/fifo"))
        os.mkdir(self.path("only"))
        os.symlink("../elsewhere", self.path("only/link"))
        self.expect(b"text of elsewhere/c/three\n", "--input", self.path("only"), noted="only/link/c/back is left out: it is ")
        result = self.run_prepare("--input", self.path("data"), "--out", self.out, "--val-fraction", 0)
        self.assertEqual(result.returncode, 0, result.stderr)
        text = bytes(self.all_tokens("train"))
        for name in "real/b/two", "elsewhere/c/three", "one":
            self.assertEqual(text.count(f"text of {name}\n".encode()), 1, text)
        for name, why in ("fifo", "not a regular file"), ("nowhere", "not a regular file"), ("linked", "which is read already"):
            self.assertRegex(result.stderr, f"note: {self.path('data')}/{name} is left out: it is .*{why}\n")

    def test_names_do_not_reach_the_terminal_as_they_are(self):
        evil = "a\x1b]0;title\x07\x9b31m\x7f\r"
        os.mkdir(self.path("in"))
        os.mkfifo(self.path(f"in/{evil}"))
        self.write(f"in/{evil}b", b"\xff\xfe")
        for inputs in ["--input", self.path("in")], ["--input", self.path(f"in/{evil}")], ["--input", "a", "--" + evil]:
            result = self.run_prepare(*inputs, "--out", self.path(evil))
            self.assertNotEqual(result.returncode, 0)
            self.assertNotRegex(result.stdout + result.stderr, "[\0-\x08\x0b-\x1f\x7f-\x9f]")
            self.assertIn(r"a\x1b]0;title\x07\x9b31m\x7f\r", result.stderr)
        result = self.run_prepare("--input", self.write("a", self.text), "--out", self.path(evil))
        self.assertEqual(result.returncode, 0)
        self.assertIn(r"a\x1b]0;title\x07\x9b31m\x7f\r", result.stdout)
        self.assertNotIn("\x1b", result.stdout)

    def test_its_own_output_is_no_input(self):
        self.write("a", self.text)
        self.prepare("--input", self.directory)
        self.assertIn("train_000000.bin: it is a token file", self.refused("--input", self.directory))

    def test_gzip(self):
        self.expect(self.text, "--input", self.write("a.gz", gzip.compress(self.text)))
        self.expect(self.text, "--input", self.write("a.txt", gzip.compress(self.text[:999]) + gzip.compress(self.text[999:])))
        packed = gzip.compress(random.Random(1).randbytes(100000))
        for damaged in packed[:-5], packed[:50000] + b"x" + packed[50001:], packed + b"and more":
            path = self.write("damaged.gz", damaged)
            self.assertIn(f"--input {path}: it is damaged, gzip cannot unpack it", self.refused("--input", path))

    def test_byte_order_mark(self):
        path = self.write("a", codecs.BOM_UTF8 + self.text)
        self.prepare("--input", path, noted=f"note: {path} begins with a byte-order mark, which is left out\n")
        self.assertEqual(bytes(self.all_tokens("train") + self.all_tokens("val")), self.text)
        self.prepare("--input", self.write("b", self.text + codecs.BOM_UTF8), "--val-fraction", 0)  # not at the beginning
        self.assertEqual(bytes(self.all_tokens("train")), self.text + codecs.BOM_UTF8)

    def test_what_is_no_text(self):
        tar = io.BytesIO()
        with tarfile.open(fileobj=tar, mode="w") as archive:
            archive.addfile(tarfile.TarInfo("x"))
        for what, content in {"packed by zstd": bytes.fromhex("28b52ffd"), "packed by xz": lzma.compress(b"x"), "Parquet": b"PAR1",
                              "packed by bzip2": bz2.compress(b"x"), "a zip archive": b"PK\3\4", "a tar archive": tar.getvalue(),
                              "UTF-16": "text".encode("utf-16"), "a token file": struct.pack("<I", 20240520),
                              "token file": struct.pack("<I", 20240801), "a vocabulary file": struct.pack("<I", 20240328)}.items():
            for form, data in (("", content), (".gz", gzip.compress(content))):
                path = self.write("a" + form, data)
                with self.subTest(what=what, path=path):
                    error = self.refused("--input", path)
                    if what == "Parquet" and not form:  # read where pyarrow is
                        self.assertRegex(error, f"--input {path}: (its column \"text\" cannot be read|a Parquet file needs the package pyarrow)")
                        continue
                    self.assertRegex(error, f"--input {path}: it is .*{what}.*, not text")
                    self.assertIn("--input -", error)

    def test_json_lines_have_no_bytes_between_them(self):
        for name in "a.jsonl", "a.json.gz", "a.ndjson", "A.JSONL", "A.Json.GZ":
            error = self.refused("--input", self.write(name, '{"text": "x"}'))
            self.assertIn("--encoding gpt2", error)
        self.prepare("--input", self.write("a.jsonl", '{"text": "x"}'), "--format", "text", "--val-fraction", 0)
        self.assertEqual(bytes(self.all_tokens("train")), b'{"text": "x"}')

    def test_text_that_looks_like_json(self):
        lines = b'{"text": "x"}\n{"text": "y"}\n'
        for name, content in (("a", lines), ("a.txt", b" \n" + lines), ("a.json.txt", b"\xef\xbb\xbf" + lines),
                              ("a.data.gz", gzip.compress(lines)), ("a.list", b'[{\n"text" : "x"}]')):
            self.prepare("--input", self.write(name, content), noted=f"{name} looks like JSON, but is read as text")
        self.prepare("--input", "-", given=lines, noted="--input - looks like JSON")
        for content in (b'{"quoted" text}', b"{x: 1}\n", b'a {"text": "x"}'):
            self.prepare("--input", self.write("a.txt", content))


class Replacing(PrepareCase):
    """What is printed, or cannot be, does not matter to the data set; what is in the way is found before it is touched."""

    def earlier(self):
        self.prepare("--input", self.write("a", EVERY_BYTE), "--shard-tokens", 100)
        self.assertEqual(len(self.listing()), 12 + 2)

    def assertReplaced(self, out=None):
        self.assertEqual(sorted(os.listdir(out or self.out)), ["train_000000.bin", "val_000000.bin"])

    def test_nobody_reads_what_is_printed(self):
        text = self.write("b", b"some text " * 5)
        for buffered in "", "1":
            for where in "full", "pipe", "closed":
                with self.subTest(unbuffered=buffered, where=where):
                    self.earlier()
                    with contextlib.ExitStack() as stack:
                        if where == "pipe":
                            reader, writer = os.pipe()
                            os.close(reader)
                            stack.callback(os.close, writer)
                        else:
                            writer = stack.enter_context(open("/dev/full", "w"))
                        shell = ">&- 2>&-" if where == "closed" else ""
                        result = subprocess.run(["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, SCRIPT, "--input", text,
                                                 "--out", self.out], stdout=writer, stderr=writer, timeout=100,
                                                env={**os.environ, "PYTHONUNBUFFERED": buffered})
                    self.assertEqual(result.returncode, 0)
                    self.assertReplaced()

    def test_a_name_that_is_no_text(self):
        out, text = os.fsencode(self.path("n")) + b"\xff'[1]", self.write("a", EVERY_BYTE)
        for shards in 100, 10000:
            result = self.run_prepare("--input", text, "--out", out, "--shard-tokens", shards,
                                      env={"PYTHONIOENCODING": "utf-8:strict"})
            self.assertEqual(result.returncode, 0, result.stderr)
        self.assertReplaced(os.fsdecode(out))
        self.assertIn("removed", result.stdout)

    def test_what_is_printed_can_be_pasted(self):
        self.out = self.path("it's [1]")
        told = self.prepare("--input", self.write("a", EVERY_BYTE))
        pattern = shlex.split(told.split("file: ")[1].split("\n")[0])
        self.assertEqual(pattern, [f"{self.out}/train_*.bin"])

    def test_a_directory_in_the_way(self):
        self.earlier()
        os.mkdir(self.path("tokens/train_000500.bin"))
        before = {name: self.tokens(name) for name in self.listing() if "500" not in name}
        self.assertIn("train_000500.bin is a directory", self.refused("--input", self.write("b", "some text")))
        self.assertEqual({name: self.tokens(name) for name in before}, before)

    def test_links_are_not_followed(self):
        victim = self.write("victim", "precious")
        os.mkdir(self.out)
        os.symlink(victim, self.path("tokens/train_000000.bin"))
        for pid in range(os.getpid(), os.getpid() + 3000):  # a process number can be guessed
            os.symlink(victim, self.path(f"tokens/train_000000.bin.tmp.{pid}"))
        self.prepare("--input", self.write("a", EVERY_BYTE))
        self.assertFalse(os.path.islink(self.path("tokens/train_000000.bin")))
        with open(victim, encoding="utf-8") as file:
            self.assertEqual(file.read(), "precious")


    def test_what_others_left_is_not_followed(self):
        """Whoever can write --out could name any directory of its owner as one that a killed run has left."""
        os.makedirs(self.path("precious/.prepare-b"))
        os.mkdir(self.out)
        self.write("precious/thesis", "x")
        os.symlink(self.path("precious"), self.path("tokens/.prepare-a"))
        os.mkdir(self.path("tokens/.prepare-b"))
        os.symlink(self.path("precious"), self.path("tokens/.prepare-b/link"))
        os.mkdir(self.path("tokens/.prepare-c"))
        os.mkfifo(self.path("tokens/.prepare-c/lock"))
        self.prepare("--input", self.write("a", EVERY_BYTE))
        self.assertEqual(sorted(os.listdir(self.path("precious"))), [".prepare-b", "thesis"])
        self.assertNotIn(".prepare-b", self.listing())


class Errors(PrepareCase):
    def test_input(self):
        none = self.path("none")
        self.assertIn("No such file or directory: " + none, self.refused("--input", none))
        self.assertIn("is a directory", self.refused("--input", self.directory))
        self.assertIn("is not a regular file", self.refused("--input", os.devnull))
        self.assertIn("the input is empty", self.refused("--input", self.write("a", "")))
        self.assertIn("too small to split", self.refused("--input", self.write("a", "x")))
        self.assertEqual(self.listing(), [])

    def test_options(self):
        text = self.write("a", "some text")
        for wrong in (["--val-fraction", "1"], ["--val-fraction", "-0.1"], ["--val-fraction", "nan"],
                      ["--val-fraction", "x"], ["--shard-tokens", "0"], ["--shard-tokens", "2147483648"],
                      ["--shard-tokens", "1e8"], ["--encoding", "gpt3"], ["--outt", "x"],
                      ["--documents", "file"], ["--errors", "replace"], ["--format", "json"]):
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

    def test_without_tokenizers(self):
        os.mkdir(self.path("fake"))
        self.write("fake/tokenizers.py", "raise ImportError('not here')")
        error = self.refused("--input", self.write("a", "text"), "--encoding", self.write("t.json", "{}"),
                             env={"PYTHONPATH": self.path("fake")})
        self.assertIn("t.json needs the package tokenizers", error)
        self.assertIn(f"hint:  {sys.executable} -m pip install tokenizers\n", error)

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

    def started(self):
        """A run that has written, but not yet renamed."""
        script = ("import os, runpy, sys, time; sys.argv = sys.argv[1:];"
                  # naps, because a signal just before a long sleep would be handled after it
                  "os.fsync = lambda file: (print('written', flush=True), [time.sleep(0.05) for nap in range(1200)]);"
                  "runpy.run_path(sys.argv[0], run_name='__main__')")
        child = subprocess.Popen([sys.executable, "-c", script, SCRIPT, "--input", self.write("a", EVERY_BYTE), "--out", self.out],
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                 # Tests in the background of a shell inherit that it ignores SIGINT.
                                 preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        self.assertEqual(child.stdout.readline(), "written\n")
        return child

    def test_killed(self):
        """What it has left goes with the next run; what one that lives has written does not."""
        names = set()
        for _ in range(2):
            child = self.started()
            left = [name for name in self.listing() if not name.endswith(".bin")]
            self.assertEqual(len(left), 1)
            self.assertEqual(os.stat(os.path.join(self.out, left[0])).st_mode & 0o777, 0o700)
            error = self.refused("--input", self.path("a"))
            self.assertIn(f"another prepare.py writes into {self.out}", error)
            child.kill()
            child.communicate(timeout=60)
            self.assertIn(left[0], self.listing())
            names.update(left)
            self.prepare("--input", self.path("a"))
            self.assertEqual(self.listing(), ["train_000000.bin", "val_000000.bin"])
        self.assertEqual(len(names), 2)  # nobody can guess them

    def test_its_own_directory_is_not_anothers(self):
        """Since Python 3.12 mkdtemp() gives the whole path, whatever --out is."""
        script = ("import os, runpy, sys, tempfile; sys.argv = sys.argv[1:]; made = tempfile.mkdtemp;"
                  "tempfile.mkdtemp = lambda *names, **more: os.path.abspath(made(*names, **more));"
                  "runpy.run_path(sys.argv[0], run_name='__main__')")
        result = subprocess.run([sys.executable, "-c", script, SCRIPT, "--input", self.write("a", EVERY_BYTE), "--out", "tokens"],
                                cwd=self.directory, capture_output=True, text=True, timeout=100)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(self.listing(), ["train_000000.bin", "val_000000.bin"])

    def test_interrupted(self):
        for number, status in (signal.SIGINT, 130), (signal.SIGTERM, 143):
            with self.subTest(number=number):
                child = self.started()
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
        part = PartOfBytes(content, size)
        return list(self.prepare.whole_words(self.prepare.decoded(part, "strict"), part))

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
                            self.assertTrue(part[0].isspace())
                            self.assertFalse(before[-1].isspace())
        self.assertGreater(len(self.parts(b"a " * 50, 4)), 10)  # it does cut

    def test_no_text(self):
        cases = (b"good \xff bad", "byte 105"), (b"\xe2\x82 ", "byte 100"), (b"cut \xe2\x82", "ends within")
        for content, what in cases:
            for size in range(1, 9):
                with self.subTest(content=content, size=size):
                    with self.assertRaises(self.prepare.Problem) as caught:
                        list(self.prepare.decoded(PartOfBytes(content, size, 100), "strict"))
                    self.assertIn(what, str(caught.exception))

    def test_a_cut_is_found_within_blanks(self):
        """In time that grows with the text alone: a ratio within this run, of which the earlier way took thousands."""
        words, blanks = "word " * 200_000, "x" + " " * 1_000_000
        times = []
        for text in words, blanks:
            start = time.process_time()
            for _ in range(3):
                self.assertEqual(re.match(self.prepare.GPT2.cut, text).end(), 1 if text is blanks else len(text) - 1)
            times.append(time.process_time() - start)
        self.assertLess(times[1], 100 * times[0] + 1)

    def test_nowhere_to_cut(self):
        for letter in "x", " ":
            with self.assertRaises(self.prepare.Problem) as caught:
                self.parts(letter.encode() * ((1 << 22) + 5_000_000), 1_000_000)
            self.assertRegex(str(caught.exception), "the 5000000 characters up to about byte 4000000")

    def test_no_cut_within_an_end_of_text(self):
        text = b"ab<|endoftext|>cd<|endoftext|>" + b"x<|endoftext" * 2
        with tempfile.NamedTemporaryFile() as file:
            file.write(text)
            file.flush()
            source = self.prepare.Source(file.name, "text")
            self.assertEqual([source.boundary(at) for at in range(len(text) + 1)],
                             [0, 1, 2, *[15] * 13, 16, 17, *[30] * 13, *range(31, len(text) + 1)])

    def test_long_lines_are_refused_before_they_fill_the_memory(self):
        self.prepare.LONGEST_LINE, self.prepare.PIECE_BYTES = 100, 7
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
            file.write(b"12345678\n" + b"x" * 98 + b"\n" + b"y" * 99 + b"\n")
            file.flush()
            source = self.prepare.Source(file.name, "auto")
            self.assertEqual([source.boundary(at) for at in (0, 1, 9, 10, 107, 109)], [0, 9, 9, 108, 108, 208])
            pieces = []
            with self.assertRaisesRegex(self.prepare.Problem, "the line at byte 108 has 100 bytes or more"):
                pieces.extend(self.prepare.Part(source, 0, 208).pieces())
            self.assertLessEqual(max(map(len, self.prepare.Part(source, 0, 108).pieces())), 99)
