#!/usr/bin/env python3
"""Text files to token files: DIR/train_000000.bin …, DIR/val_000000.bin …, and DIR/tokenizer.bin for gpt2.

    data/prepare.py --input shakespeare.txt --out tokens              each byte is a token
    data/prepare.py --input *.txt --out tokens --encoding gpt2        GPT-2's encoding, downloaded
             … --bpe-dir DIR                                          from DIR/vocab.bpe and DIR/encoder.json

The input files, in the order given, are one text; its last --val-fraction becomes validation data. For gpt2 a
token <|endoftext|> stands between two files; the same letters inside a file are ordinary text. Text is read
and encoded in pieces, cut where the encoding would have cut too, so memory does not grow with the input.

Nothing in DIR changes until everything is written: new files are written beside the old ones and renamed at
the end, then left-over shards of an earlier, larger run are removed, so that DIR is always one data set.

Formats (little-endian): a token file has 256 int32 (20240520, 1, count, 0 …), then count uint16 tokens;
tokenizer.bin has 256 uint32 (20240328, 2, count, end-of-text token, 0 …), then for each token one length byte
and its bytes.
"""
import argparse
import array
import codecs
import errno
import os
import re
import signal
import struct
import sys
import time

TOKENS_MAGIC, TOKENS_VERSION = 20240520, 1
TOKENIZER_MAGIC, TOKENIZER_VERSION = 20240328, 2
HEADER = 256  # 32-bit words
END_OF_TEXT = "<|endoftext|>"
GPT2_TOKENS = 50257
# How GPT-2 splits text before it merges bytes.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TO_UTF8 = "convert it to UTF-8, or use --encoding byte"
PIECE_BYTES = 1 << 20
PROGRESS_S = 2


class Problem(Exception):
    """What is wrong, and perhaps what to do about it."""

    def __init__(self, what, hint=""):
        super().__init__(what)
        self.hint = hint


# ---------------------------------------------------------------------------------------------- encodings


class Bytes:
    """Each byte is a token: no vocabulary, no separator."""

    separator = []

    @staticmethod
    def encode(pieces, _start):
        for piece in pieces:
            spread = bytearray(2 * len(piece))  # little-endian uint16
            spread[::2] = piece
            yield spread


class GPT2:
    def __init__(self, bpe_dir):
        self.encoding = load_gpt2(bpe_dir)
        self.separator = [self.encoding.eot_token]

    def encode(self, pieces, start):
        for text in whole_words(pieces, start):
            yield little_endian(self.encoding.encode_ordinary(text))

    def tokenizer_file(self):
        words = [TOKENIZER_MAGIC, TOKENIZER_VERSION, GPT2_TOKENS, self.encoding.eot_token]
        parts = [struct.pack(f"<{HEADER}I", *words, *[0] * (HEADER - len(words)))]
        for token in range(GPT2_TOKENS):
            text = self.encoding.decode_single_token_bytes(token)
            parts.append(bytes([len(text)]) + text)
        return b"".join(parts)


def load_gpt2(bpe_dir):
    try:
        import tiktoken
        import tiktoken.load
    except ImportError as error:
        raise Problem(f"--encoding gpt2 needs the package tiktoken, and {sys.executable} has none: {error}",
                      "scripts/install_deps.sh --bpe, then build/venv/bin/python data/prepare.py …") from None
    if bpe_dir is None:
        try:
            return tiktoken.get_encoding("gpt2")
        except Exception as error:  # whatever the network and its libraries raise
            raise Problem(f"GPT-2's vocabulary cannot be downloaded: {error}",
                          "give a directory with vocab.bpe and encoder.json: --bpe-dir DIR") from None
    files = [os.path.join(bpe_dir, name) for name in ("vocab.bpe", "encoder.json")]
    os.environ["TIKTOKEN_CACHE_DIR"] = ""  # it would remember local files by name, even if they change
    try:
        ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(*files)
    except OSError as error:
        raise Problem(f"--bpe-dir {bpe_dir}: {error.strerror}: {error.filename}") from None
    except (AssertionError, ValueError, LookupError) as error:
        raise Problem(f"--bpe-dir {bpe_dir}: vocab.bpe and encoder.json are damaged or do not belong together"
                      f" ({type(error).__name__} {error})") from None
    if len(ranks) != GPT2_TOKENS - 1:
        raise Problem(f"--bpe-dir {bpe_dir} holds {len(ranks)} tokens, GPT-2 has {GPT2_TOKENS - 1}")
    return tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                             special_tokens={END_OF_TEXT: GPT2_TOKENS - 1})


def little_endian(tokens):
    words = array.array("H", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def whole_words(pieces, start=0):
    """Bytes of a file, from byte `start` on, to text in parts that encode to the same tokens as the whole.

    GPT-2's pattern never matches across a non-blank followed by a blank, and never looks back, so cutting in
    front of that blank is exact. Everything behind the last such place waits for the next piece.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    pending, fed = [], start
    for piece in pieces:
        try:
            text = decoder.decode(piece)
        except UnicodeDecodeError as error:
            at = fed - len(decoder.getstate()[0]) + error.start
            raise Problem(f"it is not UTF-8 text at byte {at}: {error.reason}", TO_UTF8) from None
        fed += len(piece)
        before = pending[-1][-1:] if pending else ""
        cut = last_cut(before + text) - len(before)
        if cut < 0:
            pending.append(text)
            continue
        yield "".join(pending) + text[:cut]
        pending = [text[cut:]]
    try:
        decoder.decode(b"", True)
    except UnicodeDecodeError:
        raise Problem("it ends within a UTF-8 character", TO_UTF8) from None
    yield "".join(pending)


def last_cut(text):
    """Index of the last blank behind a non-blank, or −1."""
    at = len(text)
    while True:
        at = max(text.rfind(" ", 0, at), text.rfind("\n", 0, at))
        if at <= 0:
            return -1
        if not text[at - 1].isspace():
            return at


# ---------------------------------------------------------------------------------------------- input


def split_input(paths, val_fraction):
    """Parts (path, from, to) in bytes for training and for validation."""
    sizes = []
    for path in paths:
        if os.path.isdir(path):
            raise Problem(f"--input {path} is a directory", "name the text files in it")
        if os.path.exists(path) and not os.path.isfile(path):
            raise Problem(f"--input {path} is not a file, and has no size to split", "write it to a file first")
        sizes.append(os.path.getsize(path))
    cut, train, val = int(sum(sizes) * (1 - val_fraction)), [], []
    if sum(sizes) == 0:
        raise Problem("the input is empty")
    for path, size in zip(paths, sizes):
        here = character_start(path, min(max(cut, 0), size), size)
        train.append((path, 0, here))
        val.append((path, here, size))
        cut -= size
    train, val = [[part for part in parts if part[1] < part[2]] for parts in (train, val)]
    if not train:
        raise Problem(f"the input is too small to split with --val-fraction {val_fraction}")
    return train, val


def character_start(path, at, size):
    """`at`, or the first start of a UTF-8 character behind it."""
    if at in (0, size):
        return at
    with open(path, "rb") as file:
        file.seek(at)
        continuation = re.match(rb"[\x80-\xBF]*", file.read(3))
    return at + continuation.end()


def read_pieces(part, progress):
    path, at, end = part
    with open(path, "rb") as file:
        file.seek(at)
        while at < end:
            piece = file.read(min(PIECE_BYTES, end - at))
            if not piece:
                raise Problem("it became shorter while it was read")
            yield piece
            at += len(piece)
            progress.add(len(piece))


class Progress:
    """A line on standard error every other second, so that nothing runs long in silence."""

    def __init__(self, total):
        self.total, self.done, self.start, self.told = total, 0, time.monotonic(), time.monotonic()

    def add(self, count):
        self.done += count
        now = time.monotonic()
        if now - self.told < PROGRESS_S:
            return
        self.told = now
        rate = self.done / (now - self.start)
        print(f"{self.done / 1e6:.1f} of {self.total / 1e6:.1f} MB read, {rate / 1e6:.1f} MB/s, "
              f"{(self.total - self.done) / rate:.0f} s left", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------- output


class Output:
    """Files of a directory that appear all at once: written as NAME.tmp.PID, renamed by commit()."""

    def __init__(self, directory):
        self.directory, self.names = directory, []
        os.makedirs(directory, exist_ok=True)

    def temporary(self, name):
        return os.path.join(self.directory, f"{name}.tmp.{os.getpid()}")

    def create(self, name):
        self.names.append(name)
        return open(self.temporary(name), "wb")

    def commit(self):
        """Old and new files do not belong together: who interrupts now is too late."""
        before = [(number, signal.signal(number, signal.SIG_IGN)) for number in (signal.SIGINT, signal.SIGTERM)]
        try:
            self.replace()
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def replace(self):
        old = [name for name in os.listdir(self.directory)
               if re.fullmatch(r"(train|val)_\d{6}\.bin|tokenizer\.bin", name)]
        for name in self.names:
            os.replace(self.temporary(name), os.path.join(self.directory, name))
        for name in sorted(set(old) - set(self.names)):
            os.remove(os.path.join(self.directory, name))
            print(f"removed {os.path.join(self.directory, name)}, left from an earlier run")
        sync_directory(self.directory)
        self.names = []

    def abandon(self):
        for name in self.names:
            if os.path.exists(self.temporary(name)):
                os.remove(self.temporary(name))


def sync_directory(directory):
    """New names last only once their directory is on the disk."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system whose directories have no sync
            raise
    finally:
        os.close(opened)


def close_synced(file):
    file.flush()
    os.fsync(file.fileno())
    file.close()


class Shards:
    """Token files SPLIT_000000.bin, SPLIT_000001.bin, …, each of shard_tokens tokens but the last."""

    def __init__(self, output, split, shard_tokens):
        self.output, self.split, self.shard_tokens = output, split, shard_tokens
        self.file, self.files, self.count, self.total = None, 0, 0, 0

    def write(self, tokens):  # bytes of little-endian uint16
        tokens = memoryview(tokens)
        while len(tokens) > 0:
            if self.file is None:
                self.file = self.output.create(f"{self.split}_{self.files:06d}.bin")
                self.file.write(bytes(HEADER * 4))
                self.files, self.count = self.files + 1, 0
            taken = min(len(tokens) // 2, self.shard_tokens - self.count)
            self.file.write(tokens[:2 * taken])
            tokens = tokens[2 * taken:]
            self.count += taken
            self.total += taken
            if self.count == self.shard_tokens:
                self.close()

    def close(self):
        if self.file is None:
            return
        self.file.seek(0)
        self.file.write(struct.pack("<3i", TOKENS_MAGIC, TOKENS_VERSION, self.count))
        close_synced(self.file)
        self.file = None


def write_split(output, split, parts, encoder, shard_tokens, progress):
    shards = Shards(output, split, shard_tokens)
    for i, part in enumerate(parts):
        if i > 0:
            shards.write(little_endian(encoder.separator))
        try:
            for tokens in encoder.encode(read_pieces(part, progress), part[1]):
                shards.write(tokens)
        except Problem as problem:
            raise Problem(f"--input {part[0]}: {problem}", problem.hint) from None
    shards.close()
    return shards


# ---------------------------------------------------------------------------------------------- command line


def number(convert, low, high, what):
    def parse(text):
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"'{text}' is not {what}")
        return value
    return parse


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--input", nargs="+", action="extend", required=True, metavar="FILE", help="text files, in this order")
    parser.add_argument("--out", required=True, metavar="DIR", help="directory of the token files")
    parser.add_argument("--encoding", choices=["byte", "gpt2"], default="byte", help="what a token is")
    parser.add_argument("--bpe-dir", metavar="DIR",
                        help="where GPT-2's vocab.bpe and encoder.json are; else downloaded")
    parser.add_argument("--val-fraction", metavar="X", default=0.1,
                        type=number(float, 0, 0.999, "a fraction from 0 to 0.999"),
                        help="part of the text, from its end, that is for validation")
    parser.add_argument("--shard-tokens", metavar="N", default=100_000_000,
                        type=number(int, 1, 2**31 - 1, "a whole number from 1 to 2^31 - 1"),
                        help="most tokens in one file")
    options = parser.parse_args(arguments)
    if options.bpe_dir is not None and options.encoding != "gpt2":
        parser.error("--bpe-dir is for --encoding gpt2")
    return options


def prepare(options):
    train, val = split_input(options.input, options.val_fraction)
    encoder = GPT2(options.bpe_dir) if options.encoding == "gpt2" else Bytes()
    progress = Progress(sum(end - start for _, start, end in train + val))
    output = Output(options.out)
    try:
        written = [write_split(output, split, parts, encoder, options.shard_tokens, progress)
                   for split, parts in (("train", train), ("val", val))]
        if options.encoding == "gpt2":
            file = output.create("tokenizer.bin")
            file.write(encoder.tokenizer_file())
            close_synced(file)
        output.commit()
    finally:
        output.abandon()
    for shards in written:
        if shards.files > 0:
            print(f"{shards.split:5s} {shards.total:>13,} tokens in {shards.files} "
                  f"file{'s' * (shards.files > 1)}: {os.path.join(options.out, shards.split)}_*.bin")


def status_of(work, out):
    """Does it. What goes wrong is told, with OUT where no other name is known; the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what has been written goes
    try:
        work()
    except Problem as problem:
        print(f"error: {problem}", file=sys.stderr)
        if problem.hint:
            print(f"hint:  {problem.hint}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.strerror or error}: {error.filename or out}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was changed", file=sys.stderr)
        return 130
    return 0


def main(arguments=None):
    options = parse_arguments(arguments)
    return status_of(lambda: prepare(options), options.out)


if __name__ == "__main__":
    sys.exit(main())
