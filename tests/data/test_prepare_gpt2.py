"""data/prepare.py --encoding gpt2, and tokenizers of Hugging Face: known tokens, documents, pieces, the vocabulary file."""
# python: venv
# limit: 240
import array
import codecs
import gzip
import importlib.util
import json
import os
import random
import re
import struct
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

from prepared import BPE, ROOT, SCRIPT, SHARED, PartOfBytes, PrepareCase, keep_vocabulary, load_prepare

try:
    import tiktoken
except ImportError:
    tiktoken = None

try:
    import tokenizers
except ImportError:
    tokenizers = None

try:
    import pyarrow
    import pyarrow.parquet
except ImportError:
    pyarrow = None

KNOWN = {  # as published with GPT-2
    "Hello world": [15496, 995],
    "Hello, world!": [15496, 11, 995, 0],
    "The quick brown fox jumps over the lazy dog": [464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290],
    "First Citizen:\n": [5962, 22307, 25, 198],
    "\n\n": [628],
    "a  b": [64, 220, 275],
    "<|endoftext|>": [27, 91, 437, 1659, 5239, 91, 29],  # in a text it is text
}


def needs_vocabulary(test):
    test = unittest.skipUnless(os.path.isdir(BPE), f"no GPT-2 vocabulary in {os.path.relpath(BPE)}")(test)
    return unittest.skipUnless(tiktoken, "no tiktoken: scripts/install_deps.sh --bpe")(test)


def uint16(tokens):
    return array.array("H", tokens).tobytes()


def encode(prepare, encoder, part):
    return b"".join(filter(None, prepare.encoded("train", [part], encoder, 2)))


def vocabulary(case, count, end_of_text):
    with open(os.path.join(case.out, "tokenizer.bin"), "rb") as file:
        content = file.read()
    header = struct.unpack("<256I", content[:1024])
    case.assertEqual(header, (20240328, 2, count, end_of_text) + (0,) * 252)
    words, at = [], 1024
    while at < len(content):
        words.append(content[at + 1:at + 1 + content[at]])
        case.assertEqual(len(words[-1]), content[at])
        at += 1 + content[at]
    case.assertEqual(len(words), count)
    return words


GPT_4O = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
          r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
          r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


@unittest.skipUnless(tokenizers, "no tokenizers: build/venv/bin/pip install tokenizers")
class HuggingFace(PrepareCase):
    def made(self, name, pairs, end="<|endoftext|>", pattern=None):
        """Writes and returns a tokenizer: 256 bytes, pairs of them, an end of text."""
        letters = sorted(load_prepare().BYTE_OF)
        pairs = [(a, b) for a in letters for b in letters][:pairs]
        words = letters + [a + b for a, b in pairs]
        made = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, pairs))
        split = tokenizers.pre_tokenizers
        made.pre_tokenizer = split.Sequence([split.Split(tokenizers.Regex(pattern), "isolated"), split.ByteLevel(False, use_regex=False)]) \
            if pattern else split.ByteLevel(False)
        made.decoder = tokenizers.decoders.ByteLevel()
        if end:
            made.add_special_tokens([end])
        made.enable_truncation(7), made.enable_padding(length=9)  # as some models' files have it
        made.save(self.path(name))
        made.no_truncation(), made.no_padding()
        made.encode_special_tokens = True
        return made

    def test_as_wide_as_the_vocabulary(self):
        """65,536 words are tokens of 16 bits, 65,537 of 32; the trainer reads both, and knows the words."""
        text = "naïve café — 日本語 🙂\n\n\t  code_like(x) {  }\r\n I'll we've 12345 \u3000 end<|endoftext|>\n" * 20
        for pairs, width in (65536 - 257, 2), (65536 - 256, 4):
            made, words = self.made("t.json", pairs), pairs + 257
            self.prepare("--input", self.write("a", text), "--encoding", self.path("t.json"),
                         noted="<|endoftext|> is encoded as ordinary letters")
            tokens = self.all_tokens("train") + self.all_tokens("val")
            found = vocabulary(self, words, words - 1)
            self.assertEqual(found[-1], b"<|endoftext|>")
            self.assertEqual(b"".join(found[token] for token in tokens).decode(), text)
            self.assertEqual(self.all_tokens("train"), made.encode(b"".join(found[t] for t in self.all_tokens("train")).decode()).ids)
            self.assertGreater(max(tokens), 256)
            size = os.path.getsize(os.path.join(self.out, "train_000000.bin")) - 1024
            self.assertEqual(size, width * len(self.all_tokens("train")))
            program = os.environ.get("TRAIN_GPT")
            if program:
                shape = "--seq 100 --layers 1 --channels 16 --heads 1 --steps 1 --threads 1 --peak-tflops 1".split()
                done = subprocess.run([program, "--train", self.out, *shape], capture_output=True, text=True, timeout=100)
                self.assertIn(f"{words} tokens of vocabulary", done.stdout, done.stderr)
                self.assertRegex(done.stdout, r"step +1/1  loss 11\.[01]")  # ln 65536 is 11.09

    def test_documents_and_rows(self):
        for end in "<|end_of_text|>", "</s>":
            made = self.made("t.json", 0, end)
            lines = "".join(json.dumps({"text": text}) + "\n" for text in ("one", "", "two"))
            path = self.write("a.jsonl", lines)
            self.prepare("--input", path, "--encoding", self.path("t.json"), "--val-fraction", 0)
            self.assertEqual(self.all_tokens("train"), [*made.encode("one").ids, 256, *made.encode("two").ids])
            self.prepare("--input", path, "--encoding", self.path("t.json"), "--val-fraction", 0, "--pack", 4)
            self.assertEqual(self.all_tokens("train"), [256, *made.encode("two").ids, 256, *made.encode("one").ids, 256])

    def test_pieces_encode_like_the_whole(self):
        prepare, draw = load_prepare(), random.Random(1)
        for pattern in None, LLAMA3, GPT_4O:
            made = self.made("t.json", 65536, pattern=pattern)
            encoder = prepare.HuggingFace(self.path("t.json"))
            self.assertTrue(all(re.match(encoder.cut, text) for text in ("line\r\nline\r\n", "one.\na", "word\n\nword\n\n")))
            letters = [*"    \n\n\n\t\r\u00a0\u2028\u3000//", *"'slvetdm1²aBé日。-_<|>."]
            for _ in range(1000):
                text = "".join(draw.choice(letters) for _ in range(draw.randrange(60)))
                got = encode(prepare, encoder, PartOfBytes(text.encode(), draw.randrange(1, 12)))
                self.assertEqual(array.array("I", got).tolist(), made.encode(text).ids, repr(text))

    def test_what_puts_a_blank_before_each_text_gets_it_whole(self):
        prepare = load_prepare()
        made = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(["a", "b", "▁", "<0x0A>", "</s>"])}, [],
                                                          byte_fallback=True))
        made.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")])
        made.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback()])
        made.save(self.path("t.json"))
        encoder, text = prepare.HuggingFace(self.path("t.json")), "ab ba\nab a\n" * 9
        got = encode(prepare, encoder, PartOfBytes(text.encode(), 7))
        self.assertEqual(array.array("H", got).tolist(), made.encode(text).ids)
        self.assertEqual(encoder.word(3), b"\n")

    def test_a_text_of_nothing_replaces_nothing(self):
        self.made("t.json", 0)
        self.prepare("--input", self.write("a", "some text"), "--encoding", self.path("t.json"), "--val-fraction", 0)
        before = self.all_tokens("train")
        empty = self.write("b.jsonl", '{"text": ""}\n' * 9)
        self.assertIn("no text to train on", self.refused("--input", empty, "--encoding", self.path("t.json"), "--val-fraction", 0))
        self.assertEqual(self.all_tokens("train"), before)

    def test_words_of_sentencepiece(self):
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁é": 0, "</s>": 1, "long" * 99: 5}, "</s>"))
        made.save(self.path("t.json"))
        words = load_prepare().HuggingFace(self.path("t.json"))
        self.assertEqual(list(map(words.word, range(6))), [" é".encode(), b"</s>", b"", b"", b"", (b"long" * 99)[:255]])

    def test_files_that_are_none(self):
        self.made("t.json", 0, None)
        text = self.write("a", "some text")
        for path, why in (self.write("b.json", "{}"), "is not a tokenizer.json: "), (self.path("t.json"), "of its 256 words none is <|end"):
            self.assertIn(f"--encoding {path}", self.refused("--input", text, "--encoding", path))
            self.assertIn(why, self.refused("--input", text, "--encoding", path))


@needs_vocabulary
class GPT2(PrepareCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        keep_vocabulary(folder.name)

    def encode(self, *arguments, **more):
        return self.prepare(*arguments, "--encoding", "gpt2", **more)

    def vocabulary(self):
        return vocabulary(self, 50257, 50256)

    def test_known_tokens(self):
        for text, tokens in KNOWN.items():
            with self.subTest(text=text):
                noted = f"{text} is encoded as ordinary letters; --documents end-of-text" if text == "<|endoftext|>" else None
                self.encode("--input", self.write("a", text), "--val-fraction", 0, noted=noted)
                self.assertEqual(self.all_tokens("train"), tokens)

    def test_end_of_text_between_documents(self):
        paths = [self.write(name, "Hello world") for name in "abc"]
        self.encode("--input", *paths, "--val-fraction", 0)
        self.assertEqual(self.all_tokens("train"), [15496, 995, 50256, 15496, 995, 50256, 15496, 995])
        self.encode("--input", *paths, "--val-fraction", 1 / 3)
        self.assertEqual(self.all_tokens("train"), [15496, 995, 50256, 15496, 995])
        self.assertEqual(self.all_tokens("val"), [15496, 995])

    def test_decodes_to_the_text(self):
        text = "naïve café — 日本語 🙂\n\n\t  code_like(x) {  }\r\n I'll we've 12345 \u3000 end  \n" * 20
        self.encode("--input", self.write("a", text))
        words = self.vocabulary()
        self.assertEqual(words[50256], b"<|endoftext|>")
        self.assertEqual(len(set(words)), 50257)
        tokens = self.all_tokens("train") + self.all_tokens("val")
        self.assertEqual(b"".join(words[token] for token in tokens).decode(), text)

    def test_pieces_encode_like_the_whole(self):
        prepare = load_prepare()
        encoder = prepare.GPT2()
        texts = ["  a \n\n b  c \t d\n", "I'll we've he's they'd 'tis it 's\n" * 3,
                 "x\u3000 y \u00a0 z \u2028\n w",
                 "日本語 の text。 \n次 の行 🙂 🙂", "   lead and trail   ", "1 22 333  4444   55555"]
        for text in texts:
            whole = encoder.encoding.encode_ordinary(text)
            content = text.encode()
            for size in range(1, 20):
                with self.subTest(text=text, size=size):
                    got = encode(prepare, encoder, PartOfBytes(content, size))
                    self.assertEqual(got, uint16(whole))

    def test_random_pieces_encode_like_the_whole(self):
        """With every character that is a blank to Python or to the pattern."""
        prepare, draw = load_prepare(), random.Random(1)
        encoder = prepare.GPT2()
        letters = [*"      \n\t\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\u00a0\u1680\u180e\u2000\u200b\u2028\u2029\u202f\u205f\u3000\ufeff",
                   *"'slvetdm1²aBé日。-_<|>"]
        for _ in range(3000):
            text = "".join(draw.choice(letters) * draw.choice([1, 1, 1, 2, 9]) for _ in range(draw.randrange(30)))
            whole = uint16(encoder.encoding.encode_ordinary(text))
            got = encode(prepare, encoder, PartOfBytes(text.encode(), draw.randrange(1, 12)))
            self.assertEqual(got, whole, repr(text))

    def test_long_runs_of_blanks(self):
        """As many as the library's pattern can take; more are refused, and the place is named."""
        text = "x" + " " * 200_000 + "y z"
        self.encode("--input", self.write("a", text), "--val-fraction", 0)
        words = self.vocabulary()
        self.assertEqual(b"".join(words[token] for token in self.all_tokens("train")).decode(), text)
        error = self.refused("--input", self.write("a", "x" + " " * 2_000_000 + "y z"), "--encoding", "gpt2", "--val-fraction", 0)
        self.assertIn("the tokenizer fails near byte", error)
        self.assertIn("blanks", error)

    def test_whatever_the_library_throws(self):
        prepare = load_prepare()

        class Panic(BaseException):
            pass

        def panic(_):
            raise Panic("in Rust")

        encoder = prepare.GPT2()
        encoder.encoding = unittest.mock.Mock(encode_to_numpy=lambda *_, **__: panic(0))
        with self.assertRaises(prepare.Problem) as caught:
            encode(prepare, encoder, PartOfBytes(b"some text", 100, 4000))
        self.assertIn("--input x: the tokenizer fails near byte 4000: Panic in Rust", str(caught.exception))

    HELLO = [15496, 995]

    def test_documents(self):
        text = "Hello world\n\nHello world\r\n \r\n\n\nHello world<|endoftext|><|endoftext|>Hello world"
        path, literal = self.write("a", text), KNOWN["<|endoftext|>"]
        self.encode("--input", path, "--val-fraction", 0, "--documents", "blank-line")
        self.assertEqual(self.all_tokens("train"), [*self.HELLO, 50256] * 2 + self.HELLO +
                         literal[:-1] + [6927] + literal[1:] + self.HELLO)
        self.encode("--input", path, path, "--val-fraction", 0, "--documents", "end-of-text")
        tokens = self.all_tokens("train")
        self.assertEqual(tokens.count(50256), 3)
        self.assertEqual(tokens[-3:], [50256, *self.HELLO])
        self.encode("--input", path, "--val-fraction", 0, noted="--documents end-of-text makes it the token")
        self.assertNotIn(50256, self.all_tokens("train"))

    def test_documents_in_pieces(self):
        prepare = load_prepare()
        content = b"Hello world\n\nHello world\r\n\t\n \r\n\nHello world"
        encoder = prepare.GPT2(documents="blank-line")
        for size in range(1, len(content)):
            documents = [b""]
            for tokens in prepare.encoded("train", [PartOfBytes(content, size)], encoder, 2):
                if tokens is None:
                    documents.append(b"")
                else:
                    documents[-1] += tokens
            self.assertEqual(documents.pop(), b"")  # behind the end
            self.assertEqual(documents, [uint16(self.HELLO)] * 3)

    def test_json_lines(self):
        lines = "".join(json.dumps({"id": i, "text": "Hello world"}) + "\n" for i in range(9)) + "\n"
        for path in (self.write("a.jsonl", lines), self.write("A.JSONL", lines), self.write("b.json.gz", gzip.compress(lines.encode())),
                     self.write("c.jsonl", codecs.BOM_UTF8 + lines.encode())):
            for fraction in 0, 0.2, 0.5:
                noted = "byte-order" if path.endswith("c.jsonl") else None
                self.encode("--input", path, "--val-fraction", fraction, noted=noted)
                train, val = self.all_tokens("train"), self.all_tokens("val")
                self.assertEqual(train.count(995) + val.count(995), 9)
                for tokens in filter(None, (train, val)):
                    self.assertEqual(tokens, ([*self.HELLO, 50256] * tokens.count(995))[:-1])
        self.encode("--input", "-", "--format", "jsonl", "--val-fraction", 0, given=lines.encode())
        self.assertEqual(self.all_tokens("train"), ([*self.HELLO, 50256] * 9)[:-1])

    def test_json_lines_that_are_none(self):
        good = b'{"text": "Hello world"}\n'
        for bad in (b"[", b"7", b'{"txt": 1}', b'{"text": 1}', b'{"text": null}', b'["text"]', b'{"text": "\\ud800"}',
                    b'{"text": "\xff"}', b"[" * 100_000):
            with self.subTest(bad=bad[:20]):
                path = self.write("a.jsonl", good + bad + b"\n" + good)
                error = self.refused("--input", path, "--encoding", "gpt2", "--val-fraction", 0)
                self.assertIn(f"{path}: the line at byte {len(good)} is not a JSON object with a \"text\"", error)
                self.assertEqual("--errors replace" in error, b"ud800" in bad or b"\xff" in bad, error)
        self.encode("--input", self.write("a.jsonl", good), "--documents", "blank-line", "--val-fraction", 0)  # of other inputs
        self.assertEqual(self.all_tokens("train"), [15496, 995])

    def test_threads_change_no_token(self):
        """Of plain text in many pieces, and of many documents."""
        draw = random.Random(5)
        text = "".join(draw.choice(["word", " the", "\n", "  ", "é", "日本", " 123", "'ll", ".", "\n\n"]) for _ in range(300_000))
        lines = "".join(json.dumps({"text": text[i:i + draw.randrange(200)]}) + "\n" for i in range(0, 200_000, 100))
        for path in self.write("a", text), self.write("b.jsonl", lines):
            found = []
            for threads in 1, 2, 7:
                self.encode("--input", path, "--threads", threads)
                found.append((self.all_tokens("train"), self.all_tokens("val")))
            self.assertGreater(len(found[0][0]), 40_000)
            self.assertTrue(found[0] == found[1] == found[2])

    def pack(self, texts, T, *more):
        """Packs documents; returns the rows that training with --seq T reads of each file, and what was said."""
        path = self.write("a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
        told = self.encode("--input", path, "--val-fraction", 0, "--pack", T, *more)
        rows = []
        for name in self.listing()[1:]:
            tokens = self.tokens(name)
            self.assertEqual(len(tokens) % T, 1)
            samples = (len(tokens) - 1) // T  # as tokens_open() counts them; tokens_load() takes T and the one behind
            rows += [tokens[i * T:i * T + T + 1] for i in range(samples)]
        return rows, told

    def test_rows_begin_with_documents(self):
        draw, words = random.Random(3), "one two three four five six seven eight nine ten".split()
        texts = [" ".join(draw.choice(words) for _ in range(int(draw.expovariate(1 / 30)) + 1)) for _ in range(3000)]
        documents = [[50256, *tiktoken.get_encoding("gpt2").encode_ordinary(text)] for text in texts]
        whole = {tuple(document) for document in documents}
        beginnings = {document[:i] for document in whole for i in range(1, len(document) + 1)}
        for T, more in (64, ()), (100, ("--shard-tokens", "1500")), (2, ("--shard-tokens", "20000")):
            rows, told = self.pack(texts, T, *more)
            kept = 0
            for number, row in enumerate(rows):
                self.assertEqual((row[0], row[-1]), (50256, 50256))
                starts = [i for i in range(T) if row[i] == 50256] + [T]
                parts = [row[a:b] for a, b in zip(starts, starts[1:])]
                if number == len(rows) - 1:  # which separators fill
                    parts = [part for part in parts if len(part) > 1]
                for part in parts[:-1]:
                    self.assertIn(tuple(part), whole)
                self.assertIn(tuple(parts[-1]), beginnings)
                kept += sum(map(len, parts))
            total = sum(map(len, documents))
            cut = int(re.search(r"train ([\d,]+) tokens \(", told)[1].replace(",", ""))
            self.assertAlmostEqual(kept + cut, total, delta=T)
            self.assertIn(f"tokens ({cut / total:.1%}) cut from ends of documents to fill {len(rows):,} rows of {T}\n", told)
            program = os.environ.get("TRAIN_GPT")
            if T == 100 and program:
                shape = "--seq 100 --layers 1 --channels 16 --heads 1 --steps 1 --threads 1 --peak-tflops 1".split()
                done = subprocess.run([program, "--train", self.out, *shape], capture_output=True, text=True, timeout=100)
                self.assertIn(f"{sum(len(self.tokens(name)) for name in self.listing()[1:])} tokens in {len(self.listing()) - 1} files, "
                              f"{len(rows)} samples an epoch\n", done.stdout)
            if T == 64:
                self.assertLess(cut / total, 0.2)  # cut where they come, they would lose more: a third of a document a row

    def test_the_longest_document_that_fits_is_taken(self):
        say = {count: "Hello" + " world" * (count - 2) for count in range(2, 9)}  # and the separator before: count tokens
        rows, told = self.pack([say[4], say[6], say[3], say[2], say[8]], 8)
        self.assertEqual([row[:-1].count(50256) for row in rows], [1, 2, 3])
        self.assertEqual([sum(token in (15496, 995) for token in row) for row in rows], [7, 6, 5])
        self.assertIn("train 0 tokens (0.0%) cut from ends of documents to fill 3 rows of 8\n", told)
        rows, told = self.pack([say[8], say[7]] * 2, 5)  # longer than a row: their first tokens
        self.assertEqual([len(row) for row in rows], [6] * 4)
        self.assertEqual({tuple(row) for row in rows}, {(50256, 15496, 995, 995, 995, 50256)})
        self.assertIn("train 10 tokens (33.3%) cut", told)

    def test_nowhere_to_pack(self):
        path = self.write("a.jsonl", '{"text": "x"}')
        for words in ["--encoding", "gpt2", "--pack", "9", "--shard-tokens", "9"], ["--pack", "9"]:
            self.assertIn("--pack", self.refused("--input", path, *words, status=2))

    @unittest.skipUnless(importlib.util.find_spec("datasets"), "no datasets: build/venv/bin/pip install datasets")
    def test_a_data_set_of_hugging_face_through_a_pipe(self):
        """As data/README has it, of a folder in place of a name on their hub."""
        with open(os.path.join(ROOT, "data/README.md"), encoding="utf-8") as file:
            line, = re.findall(r"^ {4}(.*load_dataset.*)$", file.read(), re.MULTILINE)
        os.mkdir(self.path("stories"))
        self.write("stories/a.jsonl", '{"text": "Hello world", "id": 1}\n{"id": 2, "text": "Hello\\nworld"}\n')
        for here, there in (("roneneldan/TinyStories", self.path("stories")), ("build/venv/bin/python", sys.executable),
                            ("data/prepare.py", SCRIPT), ("--out tokens", f"--out {self.out} --val-fraction 0")):
            self.assertIn(here, line)
            line = line.replace(here, there)
        done = subprocess.run(["bash", "-o", "pipefail", "-c", line], cwd=self.directory, capture_output=True, text=True, timeout=400,
                              env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": self.path("cache")})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.all_tokens("train"), [15496, 995, 50256, 15496, 198, 6894])

    @unittest.skipUnless(pyarrow, "no pyarrow: build/venv/bin/pip install pyarrow")
    def test_parquet(self):
        """Rows are documents, whatever their groups; the split falls between two rows, beside other files too."""
        texts = [f"Hello world{' and more' * (i % 7)} {i}" for i in range(100)]
        lines = self.write("a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
        self.encode("--input", lines, "--val-fraction", 0)
        expected = self.all_tokens("train")
        path, empty = self.path("a.parquet"), self.path("b.parquet")
        table = pyarrow.table({"id": range(101), "text": pyarrow.array([*texts, None], pyarrow.large_string()), "url": ["x" * 50] * 101})
        for group in 7, 1000:
            pyarrow.parquet.write_table(table, path, row_group_size=group)
            pyarrow.parquet.write_table(table.slice(0, 0), empty)
            for fraction in 0, 0.003, 0.37:
                self.encode("--input", empty, path, empty, "--val-fraction", fraction)
                train, val = self.all_tokens("train"), self.all_tokens("val")
                self.assertEqual(train + [50256] * bool(val) + val, expected)
                self.assertAlmostEqual(val.count(50256) + bool(val), 100 * fraction, delta=1)
            self.encode("--input", path, lines, "--val-fraction", 0)
            self.assertEqual(self.all_tokens("train"), expected + [50256] + expected)
            with open(path, "rb") as file:
                self.encode("--input", "-", "--val-fraction", 0, given=file.read())
            self.assertEqual(self.all_tokens("train"), expected)
        self.assertIn("bytes have no token", self.refused("--input", path))

    @unittest.skipUnless(pyarrow, "no pyarrow: build/venv/bin/pip install pyarrow")
    def test_parquet_that_is_none(self):
        path = self.path("a.parquet")
        for column, why in ({"texts": ["a"]}, 'its column "text" cannot be read: KeyError'), \
                ({"text": [1, 2]}, "the line at byte 0 is not a JSON object with a \"text\""):
            pyarrow.parquet.write_table(pyarrow.table(column), path)
            self.assertIn(f"--input {path}: {why}", self.refused("--input", path, "--encoding", "gpt2", "--val-fraction", 0))
        pyarrow.parquet.write_table(pyarrow.table({"text": ["some text"] * 1000}), path, compression="zstd", use_dictionary=False)
        with open(path, "rb") as file:
            whole = file.read()
        for damaged in whole[:-40], whole[:-8] + b"\xff\xff\xff\x7fPAR1", whole[:40] + b"x" * 60 + whole[100:], b"PAR1":
            error = self.refused("--input", self.write("a.parquet", damaged), "--encoding", "gpt2", "--val-fraction", 0)
            self.assertIn(f"--input {path}: its column \"text\" cannot be read: ", error)

    def test_errors_replaced(self):
        path = self.write("a", b"Hello\xff world\xe2\x82")
        self.encode("--input", path, "--val-fraction", 0, "--errors", "replace")
        words = self.vocabulary()
        self.assertEqual(b"".join(words[t] for t in self.all_tokens("train")).decode(), "Hello\ufffd world\ufffd")
        path = self.write("a.jsonl", b'{"text": "Hello\xff \\ud800"}\n{"text": "\\ude00?\\ud83d\\ude00"}')
        self.encode("--input", path, "--val-fraction", 0, "--errors", "replace")
        self.assertEqual(b"".join(words[t] for t in self.all_tokens("train")).decode(),
                         "Hello\ufffd \ufffd<|endoftext|>\ufffd?\U0001f600")

    def test_tiny_shakespeare(self):
        text = os.path.join(SHARED, "tinyshakespeare.txt")
        if not os.path.exists(text):
            self.skipTest(f"no {os.path.relpath(text)}")
        self.encode("--input", text, "--shard-tokens", 100_000)
        train, val = self.all_tokens("train"), self.all_tokens("val")
        self.assertEqual((len(train), len(val)), (301_966, 36_059))  # the figures that nanoGPT gives
        self.assertEqual(len(self.listing()), 4 + 1 + 1)
        words = self.vocabulary()
        with open(text, "rb") as file:
            self.assertEqual(b"".join(words[token] for token in train + val), file.read())

    def test_no_utf8(self):
        path = self.write("a", b"fine so far \xff not")
        error = self.refused("--input", path, "--encoding", "gpt2", "--val-fraction", 0)
        self.assertIn(f"{path}: it is not UTF-8 text at byte 12", error)
        self.assertIn("--encoding byte", error)
        self.assertEqual(self.listing(), [])

    def test_no_vocabulary_and_no_network(self):
        proxy = "http://127.0.0.1:9"  # where nobody listens
        error = self.refused("--input", self.write("a", "text"), "--encoding", "gpt2",
                             env={"TIKTOKEN_CACHE_DIR": self.path("empty"), "https_proxy": proxy, "HTTPS_PROXY": proxy})
        self.assertIn("GPT-2's vocabulary cannot be downloaded", error)
        self.assertIn("TIKTOKEN_CACHE_DIR=DIR", error)
