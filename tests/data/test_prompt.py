"""The encoding of prompts in C is tiktoken's: on a vocabulary made here, and on GPT-2's where that is at hand.

    build/venv/bin/python tests/data/test_prompt.py --table      the table of data/vocabulary.c
"""
# python: venv
import collections
import itertools
import os
import pathlib
import random
import re
import string
import struct
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from prepared import ROOT, SHARED, load_prepare

try:
    import tiktoken
except ImportError:
    tiktoken = None

BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build/release"))
TOOL = os.path.join(BUILD, "tests/data/tool_prompt")
BPE = os.path.join(SHARED, "gpt2_bpe")
END_OF_TEXT = "<|endoftext|>"
DIGITS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"


def classes():
    """Of every character by tiktoken's library: a letter 1, a number 2, a blank 3, another 0; no character -."""
    def matches(pattern):
        encoding = tiktoken.Encoding(pattern, pat_str=pattern, mergeable_ranks={bytes([b]): b for b in range(256)},
                                     special_tokens={})
        everything = "".join(chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)
        return set(encoding.decode(encoding.encode_ordinary(everything)))
    letters, numbers, blanks = map(matches, (r"\p{L}", r"\p{N}", r"\s"))
    return "".join("-" if 0xD800 <= c < 0xE000 else "1" if (t := chr(c)) in letters else "2" if t in numbers else
                   "3" if t in blanks else "0" for c in range(0x110000))


def print_table():
    text = ""
    for kind, run in itertools.groupby(classes().replace("-", "0")):
        value = 4 * len(list(run)) + int(kind)
        while value > 31:
            text += DIGITS[value & 31 | 32]
            value >>= 5
        text += DIGITS[value]
    print("\n".join(f'    "{text[i:i + 120]}"' for i in range(0, len(text), 120)) + ";")


def learned(text, merges):
    """Ranks of a byte pair encoding of a text, over bytes in an order of no meaning."""
    order = random.Random(1).sample(range(256), 256)
    ranks = {bytes([byte]): rank for rank, byte in enumerate(order)}
    words = [[bytes([b]) for b in word.encode()] for word in re.findall(r" ?\w+| ?[^\w\s]+|\s+", text)]
    for _ in range(merges):
        pairs = collections.Counter(pair for word in words for pair in itertools.pairwise(word))
        joined = max((pair for pair in pairs if b"".join(pair) not in ranks), key=pairs.get)
        ranks[b"".join(joined)] = len(ranks)
        for word in words:
            i = 0
            while i + 1 < len(word):
                if (word[i], word[i + 1]) == joined:
                    word[i:i + 2] = [b"".join(joined)]
                i += 1
    return ranks


@unittest.skipUnless(tiktoken, "no tiktoken: scripts/install_deps.sh --bpe")
@unittest.skipUnless(os.path.exists(TOOL), f"{TOOL} is not built")
class Prompt(unittest.TestCase):
    def tool(self, *arguments, given=b""):
        done = subprocess.run([TOOL, *arguments], input=given, capture_output=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, b""))
        return done.stdout.decode()

    def test_classes_of_all_characters(self):
        found, expected = self.tool(), classes()
        self.assertEqual(len(found), len(expected))
        self.assertEqual([hex(c) for c in range(0x110000) if found[c] != expected[c]], [])

    def compare(self, encoding, words, end_of_text):
        draw = random.Random(2)
        letters = [*"      \n\t\r\x0b\x1c\x85\u00a0\u1680\u180e\u2000\u200b\u2028\u3000\ufeff", *"'slvetdm1²aBé日。-_<|>½🙂Ⅷ"]
        texts = ["", "Hello world", "I'll we've he's they'd 'tis it 's 'S", "  a \n\n b  c \t d\n", " ", "\n", "x ", "a'", "  '",
                 f"one{END_OF_TEXT}two{END_OF_TEXT}", f"{END_OF_TEXT} a", "naïve café — 日本語 🙂 \u3000 end  \n", "a" * 3000,
                 pathlib.Path(ROOT, "README.md").read_text(encoding="utf-8")]
        for _ in range(20):
            texts.append(END_OF_TEXT.join("".join(draw.choice(letters) * draw.choice([1, 1, 1, 2, 9])
                                                  for _ in range(draw.randrange(30))) for _ in range(100)))
            texts.append("".join(chr(draw.choice((draw.randrange(1, 0xD800), draw.randrange(0xE000, 0x20000)))) for _ in range(500)))
        with tempfile.NamedTemporaryFile() as file:
            file.write(struct.pack("<256I", 20240328, 2, len(words), end_of_text, *[0] * 252))
            file.write(b"".join(bytes([len(word)]) + word for word in words))
            file.flush()
            lines = self.tool(file.name, given="".join(text + "\0" for text in texts).encode()).split("\n")
        self.assertEqual(len(lines), len(texts) + 1)
        for text, line in zip(texts, lines):
            self.assertEqual([int(token) for token in line.split()], encoding.encode(text, allowed_special="all"), repr(text))

    def test_a_vocabulary_made_here(self):
        prepare = load_prepare()
        ranks = learned(pathlib.Path(ROOT, "README.md").read_text(encoding="utf-8"), merges=400)
        end = len(ranks)
        encoding = tiktoken.Encoding("made", pat_str=prepare.GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: end})
        self.compare(encoding, [*sorted(ranks, key=ranks.get), END_OF_TEXT.encode()], end)

    @unittest.skipUnless(os.path.isdir(BPE), f"no GPT-2 vocabulary in {os.path.relpath(BPE)}")
    def test_gpt2s_vocabulary(self):
        encoding = load_prepare().GPT2(BPE).encoding
        words = [encoding.decode_single_token_bytes(token) for token in range(50257)]
        self.compare(encoding, words, 50256)


if __name__ == "__main__":
    if sys.argv[1:] == ["--table"]:
        print_table()
    else:
        unittest.main()
