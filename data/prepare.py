#!/usr/bin/env python3
"""Text to token files: DIR/train_000000.bin …, DIR/val_000000.bin …, and DIR/tokenizer.bin unless bytes are tokens.

    data/prepare.py --input shakespeare.txt --out tokens              each byte is a token
    data/prepare.py --input *.txt --out tokens --encoding gpt2        GPT-2's encoding, downloaded once
    TIKTOKEN_CACHE_DIR=DIR data/prepare.py …                          into DIR, which may come from another machine
    data/prepare.py … --encoding tokenizer.json                       a tokenizer of Hugging Face's library, as models have it
    zstdcat a.jsonl.zst | data/prepare.py --input - --format jsonl --out tokens --encoding gpt2

The inputs (data/README.md), in the order given, are one text; its last --val-fraction becomes validation data. Text is read and
encoded in pieces, cut at places where the encoding cuts too, so memory does not grow with the input.

Files are written to a temporary directory in DIR and renamed when all are complete; shards of an earlier, larger run are then
removed. The formats: data/tokens.h and data/vocabulary.h.
"""
import argparse
import array
import bisect
import codecs
import collections
import concurrent.futures
import contextlib
import fcntl
import gzip
import importlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import struct
import sys
import tempfile
import time
import zlib

sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "scripts"))
from command import Parser, Problem, at_least, close_synced, note, opened, say, status_of, sync_directory, whole

FORMATS = {2: (20240520, 1), 4: (20240801, 7)}  # bytes of a token → magic number and version of its files
TOKENIZER_MAGIC, TOKENIZER_VERSION = 20240328, 2
HEADER = 256  # 32-bit words
END_OF_TEXT = "<|endoftext|>"
ENDS_OF_TEXT = END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>"  # of GPT-2 and many; Llama 3; Llama 2; Gemma
GPT2_TOKENS = 50257
BLANK = r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"  # \s of GPT-2's pattern; Python's has more
PLAIN = *range(33, 127), *range(161, 173), *range(174, 256)  # bytes that are letters where GPT-2 writes bytes; others are some above
BYTE_OF = dict(zip(map(chr, [*PLAIN, *range(256, 324)]), [*PLAIN, *sorted({*range(256)} - {*PLAIN})]))
DOCUMENTS = {"file": None, "blank-line": r"\r?\n(?:[^\S\n]*\n)+", "end-of-text": re.escape(END_OF_TEXT)}
TO_UTF8 = "convert it to UTF-8 (iconv), or --errors replace, or --encoding byte"
# What files that are not text begin with, and their kind.
NO_TEXT = {rb"\x28\xb5\x2f\xfd": "packed by zstd", rb"\xfd7zXZ": "packed by xz", b"BZh91AY": "packed by bzip2",
           b"PK\3\4": "a zip archive", rb"(?s).{257}ustar": "a tar archive", b"PAR1": "a Parquet file",
           b"\xff\xfe|\xfe\xff": "UTF-16", b"|".join(struct.pack("<I", magic) for magic, _ in FORMATS.values()): "a token file",
           struct.pack("<I", TOKENIZER_MAGIC): "a vocabulary file"}
JSON = rb'(?:\xef\xbb\xbf)?\s*\[?\s*\{\s*"[^"\n]*"\s*:'  # what files of JSON begin with
PIECE_BYTES = 1 << 18
MOST_WORDS = 1 << 24  # of a vocabulary, as in data/vocabulary.c
LONGEST_WORD = 1 << 22  # characters between two places to cut
LONGEST_LINE = 1 << 26  # bytes of JSON, which need several times as much memory
AHEAD = 8  # texts that wait, for each thread
PROGRESS_S = 10.0
WAITING = 1000  # documents among which --pack chooses


@contextlib.contextmanager
def about(name):
    """Adds the name of the input to errors."""
    try:
        yield
    except Problem as problem:
        raise Problem(f"--input {name}: {problem}", problem.hint) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Problem(f"--input {name}: it is damaged, gzip cannot unpack it: {error}", "copy it again") from None


class Bytes:
    """Each byte is a token: no vocabulary, no separator."""

    separator, pack, width = b"", 0, 2

    def texts(self, part):
        return part.pieces()

    def tokens(self, piece, _):
        spread = bytearray(2 * len(piece))  # little-endian uint16
        spread[::2] = piece
        return spread


class GPT2:
    """Words of a vocabulary: their number, and the one that ends a text."""

    cut = f"(?s).*(?!{BLANK}).(?={BLANK})"  # up to the last place where a long text may be cut

    def __init__(self, path=None, documents="file", errors="strict", pack=0):
        self.load(path)
        self.width = 2 if self.words <= 1 << 16 else 4
        self.separator = self.last.to_bytes(self.width, "little")
        self.documents = DOCUMENTS[documents] and re.compile(DOCUMENTS[documents])
        self.errors, self.pack, self.warned = errors, pack, False

    def texts(self, part):
        """What can be encoded by itself; None between two documents."""
        if part.source.lines:
            for line in part.pieces():
                yield text_of(line, part.at, self.errors) if line.strip() else ""
                yield None
            return
        for text in whole_words(decoded(part, self.errors), part, self.cut):
            if not self.documents and not self.warned and END_OF_TEXT in text:
                note(f"note: {part.source.name}: {END_OF_TEXT} is encoded as ordinary letters; "
                     "--documents end-of-text makes it the token between two documents")
                self.warned = True
            for i, words in enumerate(self.documents.split(text) if self.documents else [text]):
                if i > 0:
                    yield None
                yield words

    def tokens(self, text, at):
        """As bytes. Python's lock is free meanwhile, so that threads encode at the same time."""
        try:
            return self.numbers(text)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            raise Problem(f"the tokenizer fails near byte {at}: {type(error).__name__} {error}",
                          "its pattern fails at a million blanks in a row: shorten them, or leave out that part") from None

    def tokenizer_file(self):
        header = struct.pack("<4I", TOKENIZER_MAGIC, TOKENIZER_VERSION, self.words, self.last)
        words = map(self.word, range(self.words))
        return header.ljust(4 * HEADER, b"\0") + b"".join(bytes([len(word)]) + word for word in words)

    def load(self, _):
        self.encoding = load_gpt2()
        self.words, self.last, self.word = GPT2_TOKENS, self.encoding.eot_token, self.encoding.decode_single_token_bytes

    def numbers(self, text):
        return self.encoding.encode_to_numpy(text, disallowed_special=()).astype("<u2").tobytes()


class HuggingFace(GPT2):
    """A tokenizer.json. No pattern of GPT-2, GPT-4, GPT-4o, Llama 3 or Qwen matches across the end of a letter before a blank, or of a
    line feed between a non-blank and one that is no slash."""

    cut = r"(?s).*(?:[^\W\d_](?=\s)|\S\n(?=[^\s/]))"

    def load(self, path):
        tokenizers = imported("tokenizers", f"--encoding {path}", f"{sys.executable} -m pip install tokenizers")
        try:
            self.encoding = tokenizers.Tokenizer.from_file(path)
            self.encoding.no_truncation(), self.encoding.no_padding()
            whole, *parts = (self.encoding.encode(text, add_special_tokens=False).ids for text in ("a b\nc", "a", " b\n", "c"))
        except Exception as error:  # it raises nothing else
            raise Problem(f"--encoding {path} is not a tokenizer.json: {error}") from None
        self.encoding.encode_special_tokens = True  # as ordinary letters
        found, self.in_bytes = self.encoding.get_vocab(), "ByteLevel" in str(self.encoding.decoder)
        self.cut = self.cut if whole == sum(parts, []) else "(?!)"  # SentencePiece puts a blank before whatever it is given
        self.words, self.last = max(found.values(), default=0) + 1, next((found[end] for end in ENDS_OF_TEXT if end in found), None)
        if self.last is None or self.words > MOST_WORDS:
            raise Problem(f"--encoding {path}: of its {self.words} words none is {' or '.join(ENDS_OF_TEXT)}, or they are too many")

    def numbers(self, text):
        (found,) = self.encoding.encode_batch([text], add_special_tokens=False)  # which lets other threads run; encode() does not
        return array.array("H" if self.width == 2 else "I", found.ids).tobytes()

    def word(self, token):
        """Its bytes, as many as a vocabulary file can hold; SentencePiece writes a blank as U+2581."""
        text = self.encoding.id_to_token(token) or ""
        if re.fullmatch("<0x[0-9A-F]{2}>", text) and "ByteFallback" in str(self.encoding.decoder):
            return bytes.fromhex(text[3:5])
        known = self.in_bytes and BYTE_OF.keys() >= set(text)
        return (bytes(map(BYTE_OF.get, text)) if known else text.replace("\u2581", " ").encode())[:255]


def imported(package, what, hint):
    """A package that may not be there."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise Problem(f"{what} needs the package {package}, and {sys.executable} has none: {error}", hint) from None


def load_gpt2():
    tiktoken = imported("tiktoken", "--encoding gpt2", "scripts/install_deps.sh --bpe, then build/venv/bin/python data/prepare.py …")
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # network libraries raise all kinds
        raise Problem(f"GPT-2's vocabulary cannot be downloaded: {error}",
                      "where there is a network, TIKTOKEN_CACHE_DIR=DIR keeps it in DIR: carry that here, and say the same") from None


def text_of(line, at, errors):
    """The text of a line of JSON; half a surrogate pair is an error."""
    try:
        text = json.loads(line.decode("utf-8", errors))["text"]
        text = re.sub("[\ud800-\udfff]", "\ufffd", text) if errors == "replace" else text
        return text.encode().decode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Problem(f'the line at byte {at} is not a JSON object with a "text": {type(error).__name__} {error}',
                      "correct it, or --errors replace puts U+FFFD there" if isinstance(error, UnicodeError) else
                      "one object a line, for instance {\"text\": \"…\"}; --format text takes the file as it is") from None


def decoded(part, errors):
    """Bytes to text."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    for piece in itertools.chain(part.pieces(), [b""]):
        try:
            yield decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            at = part.at - len(decoder.getstate()[0]) + error.start
            raise Problem(f"it is not UTF-8 text at byte {at}: {error.reason}" if piece else "it ends within a UTF-8 character",
                          TO_UTF8) from None


def whole_words(texts, part, places=GPT2.cut):
    """The same text, cut at other places, where the parts encode to the same tokens as the whole.

    GPT-2's pattern never matches across a non-blank followed by a blank, and never looks back, so a cut before that blank is exact.
    The text after the last such place waits for the next piece.
    """
    pending = ""
    for text in texts:
        pending += text
        found = re.match(places, pending)
        if found:
            yield found[0]
            pending = pending[found.end():]
        if len(pending) > LONGEST_WORD:
            raise Problem(f"the {len(pending)} characters up to about byte {part.at} have no place where words are sure to end",
                          "put blanks or line feeds there, give documents as JSON lines, or leave out that part")
    if pending:
        yield pending


class Source:
    """A file of text or of lines of JSON, packed by gzip or not. Offsets are in the unpacked text."""

    def __init__(self, path, form, name=None):
        self.path, self.name = path, name or path
        self.lines = form == "jsonl" or (form == "auto" and bool(re.search(r"(?i)\.(jsonl|ndjson|json)(\.gz)?$", path)))
        with opened(path) as file:
            self.packed = file.read(2) == b"\x1f\x8b"
        with about(self.name), self.open() as file:
            begin = file.read(512)
            for kind in (kind for magic, kind in NO_TEXT.items() if re.match(magic, begin)):
                raise Problem(f"it is {kind}, not text", "unpack or convert it: … | data/prepare.py --input -")
            self.taken_for_text = form == "auto" and not self.lines and re.match(JSON, begin)
            self.size = file.seek(0, os.SEEK_END)

    def open(self):
        return gzip.open(self.path) if self.packed else open(self.path, "rb")

    def boundary(self, at):
        """`at`, or the first start of a UTF-8 character, or of a line of JSON, after it, which is not within END_OF_TEXT."""
        if at in (0, self.size):
            return at
        with self.open() as file:
            if self.lines:
                file.seek(at - 1)
                file.readline(LONGEST_LINE)
                return file.tell()
            begin = max(0, at + 1 - len(END_OF_TEXT))
            file.seek(begin)
            found = file.read(at - begin + len(END_OF_TEXT) - 1).find(END_OF_TEXT.encode())
            at = at if found < 0 else begin + found + len(END_OF_TEXT)
            file.seek(at)
            return at + re.match(rb"[\x80-\xBF]*", file.read(3)).end()


class Part:
    """Bytes [start, end) of a source."""

    def __init__(self, source, start, end):
        self.source, self.at, self.end = source, start, end

    def pieces(self):
        """Bytes, or whole lines, which begin at self.at."""
        with self.source.open() as file:
            file.seek(self.at)
            while self.at < self.end:
                piece = file.readline(LONGEST_LINE) if self.source.lines else file.read(min(PIECE_BYTES, self.end - self.at))
                if not piece:
                    raise Problem("it became shorter while it was read")
                if len(piece) == LONGEST_LINE:
                    raise Problem(f"the line at byte {self.at} has {LONGEST_LINE} bytes or more", "put its text into several lines")
                if self.at == 0 and piece.startswith(codecs.BOM_UTF8):
                    note(f"note: {self.source.name} begins with a byte-order mark, which is left out")
                    self.at, piece = self.at + 3, piece[3:]
                yield piece
                self.at += len(piece)


def texts_of_parquet(path):
    """The column "text"."""
    parquet = imported("pyarrow.parquet", "a Parquet file", f"{sys.executable} -m pip install pyarrow; "
                       "or where it is, print one JSON object a line: … | data/prepare.py --input -")
    try:
        for batch in parquet.ParquetFile(path).iter_batches(WAITING, columns=["text"]):
            yield from ("" if text is None else text for text in batch.column("text").to_pylist())
    except Exception as error:  # pyarrow raises all kinds
        raise Problem(f'its column "text" cannot be read: {type(error).__name__} {error}') from None


def files_below(top):
    """The paths of its files, without hidden ones. Links are followed, but no directory is read twice. Names what it leaves out."""
    def leave_out(path, why):
        note(f"note: {path} is left out: {why}")

    known = {}  # the real path of a directory → its first path
    for folder, folders, files in os.walk(top, followlinks=True, onerror=lambda error: leave_out(error.filename, error.strerror)):
        folders[:], files = (sorted(name for name in names if not name.startswith(".")) for names in (folders, files))
        first = known.setdefault(os.path.realpath(folder), folder)
        if first != folder:
            folders.clear()
            leave_out(folder, f"it is {first}, which is read already")
            continue
        for path in (os.path.join(folder, name) for name in files):
            if os.path.isfile(path):
                yield path
            else:
                leave_out(path, "it is not a regular file")


def find_sources(names, form, own):
    """Standard input, and the texts of Parquet files as lines of JSON, are written into `own`."""
    def source(path, name):
        with opened(path) as file:
            if file.read(4) != b"PAR1":
                return Source(path, form, name)
        with about(name), tempfile.NamedTemporaryFile("w", dir=own, encoding="utf-8", delete=False) as lines:
            lines.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts_of_parquet(path))
        return Source(lines.name, "jsonl", name)

    sources = []
    for name in names:
        if name == "-":
            with open(os.path.join(own, f"input{len(sources)}"), "xb") as file, open(0, "rb", closefd=False) as given:
                shutil.copyfileobj(given, file, PIECE_BYTES)
            sources.append(source(file.name, name))
        elif os.path.isdir(name):
            found = [source(path, path) for path in sorted(files_below(name))]
            if not found:
                raise Problem(f"--input {name} is a directory without files", "name the text files")
            sources += found
        else:
            sources.append(source(name, name))
    return sources


def split_input(sources, val_fraction):
    """Parts for training and for validation."""
    total = sum(source.size for source in sources)
    cut, train, val = int(total * (1 - val_fraction)), [], []
    if total == 0:
        raise Problem("the input is empty")
    for source in sources:
        here = source.boundary(min(max(cut, 0), source.size))
        train += [Part(source, 0, here)] if here > 0 else []
        val += [Part(source, here, source.size)] if here < source.size else []
        cut -= source.size
    if not train:
        raise Problem(f"the input is too small to split with --val-fraction {val_fraction}")
    return train, val


@contextlib.contextmanager
def workplace(directory):
    """A temporary directory in it, which is locked meanwhile. What killed runs have left goes first."""
    os.makedirs(directory, exist_ok=True)
    with contextlib.ExitStack() as at_end:
        locked = os.open(directory, os.O_RDONLY)
        at_end.callback(os.close, locked)
        try:
            fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in (entry for entry in os.scandir(directory) if entry.name.startswith(".prepare-")):
                if left.is_dir(follow_symlinks=False):
                    shutil.rmtree(left.path, ignore_errors=True)
        except BlockingIOError:
            raise Problem(f"another prepare.py writes into {directory}", "wait for its end, or choose another --out") from None
        except OSError:  # a file system without locks: who has left something may be alive
            pass
        yield at_end.enter_context(tempfile.TemporaryDirectory(prefix=".prepare-", dir=directory))


def replace_data_set(own, directory):
    """Renames the new files and returns the old ones that it has removed. Ignores signals, because old and new files do not
    belong together."""
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)
    old, new = ({name for name in os.listdir(where) if re.fullmatch(r"(train|val)_\d{6}\.bin|tokenizer\.bin", name)}
                for where in (directory, own))
    for name in old:
        path = os.path.join(directory, name)
        if os.path.isdir(path):
            raise Problem(f"{path} is a directory, but a file of the data set has this name", "remove it")
    for name in new:
        os.replace(os.path.join(own, name), os.path.join(directory, name))
    gone = [os.path.join(directory, name) for name in sorted(old - new)]
    for path in gone:
        os.remove(path)
    sync_directory(directory)
    return gone


def encoded(split, parts, encoder, threads):
    """Tokens of all parts in their order, as bytes; None after each document. Threads encode ahead, which changes no token. Says
    from time to time how far it is."""
    def texts():
        for part in parts:
            with about(part.source.name):
                for text in encoder.texts(part):
                    yield part, text
            yield part, None

    def tokens(name, text, at):
        with about(name):
            return encoder.tokens(text, at)

    ahead, size, begin = collections.deque(), sum(part.end - part.at for part in parts), time.monotonic()
    said = begin
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for part, text in texts():
            try:
                ahead.append(text if text is None else pool.submit(tokens, part.source.name, text, part.at))
            except RuntimeError as error:
                raise Problem(f"--threads {threads}: {error}", "give fewer, or raise the limit of processes (ulimit -u)") from None
            if len(ahead) > AHEAD * threads:
                first = ahead.popleft()
                yield first and first.result()
            if time.monotonic() >= said + PROGRESS_S:
                said, done = time.monotonic(), 1 - sum(part.end - part.at for part in parts) / size
                seconds = round((said - begin) * (1 / done - 1)) if done else 0
                note(f"{split}: {done:.0%} of the text read, ETA {seconds // 60}:{seconds % 60:02}")
        yield from (first and first.result() for first in ahead)


def joined(pieces, separator):
    """With a separator between two documents that are not empty."""
    begun, between = False, b""
    for tokens in pieces:
        if tokens is None:
            between = separator if begun else b""
        elif tokens:
            yield between + tokens
            begun, between = True, b""


def documents_of(pieces, separator, most):
    """Each that is not empty, behind a separator: its first `most` bytes, and how many it has."""
    document, size = bytearray(), 0
    for tokens in pieces:
        if tokens is None and size:
            yield bytes(document), size
            document, size = bytearray(), 0
        elif tokens:
            tokens = tokens if size else separator + tokens
            document += tokens[:most - len(document)]
            size += len(tokens)


def packed(split, pieces, separator, T, rows_of_file):
    """Rows of T tokens that begin with a document, as nanochat packs them: of those that wait the longest that fits into what is left
    of the row; if none fits, the first tokens of the shortest. Separators fill the last row, and one more ends each file, because the
    last target of a row is the token behind it."""
    most, row, rows, waiting, total, cut = T * len(separator), b"", 0, [], 0, 0
    coming = enumerate(documents_of(pieces, separator, most))
    while True:
        for number, (document, size) in itertools.islice(coming, WAITING - len(waiting)):
            bisect.insort(waiting, (len(document), number, document))
            total, cut = total + size, cut + size - len(document)
        if not waiting and not row:
            break
        left, padding = most - len(row), separator * (T - len(row) // len(separator))
        document = waiting.pop(max(bisect.bisect(waiting, (left + 1,)) - 1, 0))[2] if waiting else padding
        row, cut = row + document[:left], cut + max(len(document) - left, 0)
        if len(row) == most:
            rows += 1
            yield row + separator * (rows % rows_of_file == 0)
            row = b""
    yield separator * (rows % rows_of_file > 0)
    if total:
        say(f"{split:5s} {cut // len(separator):,} tokens ({cut / total:.1%}) cut from ends of documents to fill {rows:,} rows of {T:,}")


def write_split(own, split, chunks, shard_tokens, width):
    """Writes SPLIT_000000.bin, SPLIT_000001.bin, …, all but the last of shard_tokens tokens. Returns split, files and tokens."""
    total = 0
    for tokens in map(memoryview, chunks):
        while len(tokens) > 0:
            if total % shard_tokens == 0:
                file = open(os.path.join(own, f"{split}_{total // shard_tokens:06d}.bin"), "xb")
                file.write(struct.pack("<3i", *FORMATS[width], shard_tokens).ljust(4 * HEADER, b"\0"))
            count = min(len(tokens) // width, shard_tokens - total % shard_tokens)
            file.write(tokens[:width * count])
            tokens = tokens[width * count:]
            total += count
            if total % shard_tokens == 0:
                close_synced(file)
    if total % shard_tokens > 0:
        file.seek(8)
        file.write(struct.pack("<i", total % shard_tokens))
        close_synced(file)
    return split, -(-total // shard_tokens), total


def parse_arguments(arguments):
    parser = Parser(__doc__.split("\n")[0], argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--input", nargs="+", action="extend", required=True, metavar="FILE",
        help="files, directories, or - for standard input, in this order")
    add("--out", required=True, metavar="DIR", help="directory of the token files")
    add("--encoding", metavar="byte|gpt2|FILE", default="byte",
        help="bytes; GPT-2's tokens; or those of a tokenizer.json, in files of 32 bits if it has more than 65,536")
    add("--format", choices=["auto", "text", "jsonl"], default="auto",
        help="auto: files named .jsonl, .ndjson or .json, in capitals too, are JSON lines with a text each")
    add("--documents", choices=DOCUMENTS, default=argparse.SUPPRESS,
        help=f"for gpt2 and FILE: documents of plain text end at the end of a file (default), at blank lines, or at {END_OF_TEXT}")
    add("--errors", choices=["strict", "replace"], default=argparse.SUPPRESS,
        help="for gpt2 and FILE: refuse bytes that are not UTF-8 (default), or replace them by U+FFFD")
    add("--pack", metavar="T", default=argparse.SUPPRESS, type=at_least(1),
        help="for gpt2 and FILE: rows for training with --seq T, each from the beginning of a document; what fits into no row is left out")
    add("--val-fraction", metavar="X", default=0.1, type=at_least(0, 0.999, float),
        help="share of the text, at its end, for validation")
    add("--threads", metavar="N", default=len(os.sched_getaffinity(0)), type=at_least(1, 256), help="that encode at the same time")
    add("--shard-tokens", metavar="N", default=100_000_000, type=at_least(1, 2**31 - 1), help="most tokens in one file")
    options = parser.parse_args(arguments)
    if options.encoding not in ("byte", "gpt2") and not os.path.isfile(options.encoding):
        parser.error(f"--encoding {options.encoding}: neither byte nor gpt2, nor a tokenizer.json that is there")
    options.how = {name: value for name, value in vars(options).items() if name in ("documents", "errors", "pack")}
    for name in options.how if options.encoding == "byte" else ():
        parser.error(f"--{name} is for --encoding gpt2 or FILE")
    if options.how.get("pack", 0) >= options.shard_tokens:
        parser.error("--pack: a file of --shard-tokens holds no row")
    return options


def prepare(options):
    with workplace(options.out) as own:
        sources = find_sources(options.input, options.format, own)
        lines = [source.name for source in sources if source.lines]
        for source in [source for source in sources if source.taken_for_text][:1]:
            note(f"note: --input {source.name} looks like JSON, but is read as text, braces and all: --format jsonl reads the text "
                 "of each line, --format text means it")
        if lines and options.encoding == "byte":
            raise Problem(f"--input {lines[0]}: its lines or rows are documents, and bytes have no token to put between them",
                          "--encoding gpt2 or FILE; or, of JSON, jq -r .text FILE | data/prepare.py --input -, or --format text")
        train, val = split_input(sources, options.val_fraction)
        words = GPT2 if options.encoding == "gpt2" else HuggingFace
        encoder = Bytes() if options.encoding == "byte" else words(options.encoding, **options.how)
        written = []
        for split, parts in ("train", train), ("val", val):
            pieces = encoded(split, parts, encoder, options.threads)
            chunks, most = joined(pieces, encoder.separator), options.shard_tokens
            if encoder.pack:
                chunks = packed(split, pieces, encoder.separator, encoder.pack, (most - 1) // encoder.pack)
                most -= (most - 1) % encoder.pack
            written.append(write_split(own, split, chunks, most, encoder.width))
        if written[0][2] == 0:
            raise Problem("the input has no text to train on")
        if options.encoding != "byte":
            with whole(os.path.join(own, "tokenizer.bin"), "wb") as file:
                file.write(encoder.tokenizer_file())
        gone = replace_data_set(own, options.out)
    for path in gone:
        say(f"removed {path} of an earlier run")
    for split, files, total in written:
        if files > 0:
            pattern = shlex.quote(os.path.join(options.out, split) + "_*.bin")
            say(f"{split:5s} {total:>13,} tokens in {files} file{'s' * (files > 1)}: {pattern}")


def main(arguments=None):
    options = parse_arguments(arguments)
    return status_of(lambda: prepare(options), options.out, "interrupted; nothing was changed")


if __name__ == "__main__":
    sys.exit(main())
