#!/usr/bin/env python3
"""Model files from, and to, the directories in which Hugging Face's transformers keep a GPT-2.

    data/hugging_face.py --import gpt2 --out gpt2_124M.bin      to start from: ./train_gpt --init-from gpt2_124M.bin
    data/hugging_face.py --export model.bin --out my-gpt2       for AutoModelForCausalLM.from_pretrained("my-gpt2")

A directory holds config.json and model.safetensors, or several of these and their index. Both sides store the same
numbers, so nothing is computed but the places: weights of linear layers are (in, out) there and (out, in) here, stacked
over layers; the token table has V rows there and a multiple of 128 here, with zeros behind; the head is that table
and is stored once. fp32 stays fp32 and bf16 stays bf16, to the last bit; fp16 becomes fp32.

What the trainer does not compute is refused, not dropped, but for dropout: another activation, a head of its own, tensors
that no GPT-2 has. Tokenizers are files of their own, and stay where they are: vocab.json and merges.txt beside a GPT-2.

What is written appears whole or not at all, and nothing is overwritten: --out must not exist. A few tensors are in memory
at a time. The formats: data/model_file.h, and https://huggingface.co/docs/safetensors.
"""
import argparse
import contextlib
import json
import math
import os
import re
import shutil
import struct
import sys

try:
    import numpy as np
except ImportError as missing:
    sys.exit(f"error: {sys.executable} has no numpy: {missing}\n"
             'hint:  "$(scripts/find_python.sh)" data/hugging_face.py … finds a Python that has it; '
             "scripts/install_deps.sh installs it")

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from prepare import GPT2_TOKENS, HEADER, Problem, Progress, close_synced, status_of, sync_directory

MODEL_MAGIC, FP32, BF16 = 20240326, 3, 5
PADDING = 128  # of the vocabulary, as in layers/params.h
MOST_TOKENS = 1 << 16
MOST = {"n_positions": 1 << 24, "vocab_size": MOST_TOKENS, "n_layer": 1 << 12, "n_head": 1 << 17, "n_embd": 1 << 17}
HEADER_LIMIT = 100_000_000  # bytes, as safetensors' own
DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # numpy has no bf16: its bits
PREFIX = "transformer."  # some have it in front of each name, some do not
BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # constants that older versions have saved along
ALIASES = {"max_position_embeddings": "n_positions", "hidden_size": "n_embd", "num_hidden_layers": "n_layer",
           "num_attention_heads": "n_head"}  # by which transformers know a field, too; they win
DOWNLOAD = "hf download openai-community/gpt2 config.json model.safetensors --local-dir gpt2, for one"

# In the order of a model file: what each tensor is called there, its rows and columns in multiples of the channels
# (or by what is named), and whether it is a linear layer's weight.
TENSORS = (
    ("wte.weight", "V", 1, False), ("wpe.weight", "T", 1, False),
    ("h.{}.ln_1.weight", None, 1, False), ("h.{}.ln_1.bias", None, 1, False),
    ("h.{}.attn.c_attn.weight", 3, 1, True), ("h.{}.attn.c_attn.bias", None, 3, False),
    ("h.{}.attn.c_proj.weight", 1, 1, True), ("h.{}.attn.c_proj.bias", None, 1, False),
    ("h.{}.ln_2.weight", None, 1, False), ("h.{}.ln_2.bias", None, 1, False),
    ("h.{}.mlp.c_fc.weight", 4, 1, True), ("h.{}.mlp.c_fc.bias", None, 4, False),
    ("h.{}.mlp.c_proj.weight", 1, 4, True), ("h.{}.mlp.c_proj.bias", None, 1, False),
    ("ln_f.weight", None, 1, False), ("ln_f.bias", None, 1, False))


class Shape:
    """Of a GPT-2: fields as in config.json."""

    def __init__(self, values, where):
        for name, most in MOST.items():
            value = values[name]
            if type(value) is not int or not 1 <= value <= most:
                raise Problem(f"{where}: {name} is {repr(value)[:50]}, it must be a whole number from 1 to {most}")
            setattr(self, name, value)
        if self.n_embd % self.n_head != 0:
            raise Problem(f"{where}: {self.n_embd} channels cannot be split among {self.n_head} heads")
        self.padded = -(-self.vocab_size // PADDING) * PADDING

    def tensors(self):
        """(name, shape in a model file without padding, whether it is transposed there), in the file's order."""
        sizes = {"V": self.vocab_size, "T": self.n_positions}
        for name, rows, columns, linear in TENSORS:
            columns *= self.n_embd
            shape = (columns,) if rows is None else (sizes.get(rows) or rows * self.n_embd, columns)
            for layer in range(self.n_layer if "{}" in name else 1):
                yield name.format(layer), shape, linear

    def elements(self):
        return sum(math.prod(shape) for _, shape, _ in self.tensors())


def read_values(path, dtype, count, at):
    values = np.fromfile(path, dtype, count, offset=at)
    if len(values) < count:
        raise Problem(f"{path} became shorter while it was read")
    return values


def widened(bits):
    """bf16 to fp32."""
    return (bits.astype("<u4") << 16).view("<f4")


# ------------------------------------------------------------------------------------------- their directories


def read_json(path):
    try:
        with open(path, encoding="utf-8") as file:
            return checked_object(file.read(), path)
    except UnicodeDecodeError:
        raise Problem(f"{path} is no text") from None


def checked_object(text, path):
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Problem(f"{path} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise Problem(f"{path} is JSON, but no object")
    return values


def read_config(path):
    """The shape, if the model computes what the trainer does. What is not in the file is as transformers have it."""
    if not os.path.exists(path):
        raise Problem(f"there is no {path}", f"name a directory of this machine, made by {DOWNLOAD}")
    config = read_json(path)
    config.update({name: config[alias] for alias, name in ALIASES.items() if alias in config})
    if config.get("model_type") != "gpt2":
        raise Problem(f"{path}: model_type is {config.get('model_type')!r}, only gpt2 can be imported")
    usual = {"n_positions": 1024, "vocab_size": GPT2_TOKENS, "n_layer": 12, "n_head": 12, "n_embd": 768}
    shape = Shape({name: config.get(name, value) for name, value in usual.items()}, path)
    for name, accepted in (("activation_function", ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")),
                           ("layer_norm_epsilon", (1e-5,)), ("n_inner", (None, 4 * shape.n_embd)), ("scale_attn_weights", (True,)),
                           ("scale_attn_by_inverse_layer_idx", (False,)), ("tie_word_embeddings", (True,)),
                           ("add_cross_attention", (False,))):
        if config.get(name, accepted[0]) not in accepted:
            raise Problem(f"{path}: {name} is {repr(config[name])[:50]}, the trainer has {accepted[0]!r} only")
    return shape


class Weights:
    """The tensors of a directory, by name without the prefix: (file, dtype, shape, offset of the first byte)."""

    def __init__(self, directory):
        self.directory, self.tensors = directory, {}
        index = os.path.join(directory, "model.safetensors.index.json")
        single = os.path.join(directory, "model.safetensors")
        if os.path.exists(single):
            self.add(single)
        elif os.path.exists(index):
            for path in self.parts(index):
                self.add(path)
        else:
            raise Problem(f"{directory} holds no model.safetensors",
                          "a model in another format is converted by save_pretrained() of a current transformers")
        if "wte.weight" not in self.tensors and "lm_head.weight" in self.tensors:  # one table, by its other name
            self.tensors["wte.weight"] = self.tensors.pop("lm_head.weight")

    def parts(self, index):
        files = read_json(index).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(name, str) and re.fullmatch(r"[\w.-]+\.safetensors", name)
                                                  for name in files.values()):
            raise Problem(f"{index}: its weight_map does not name files of its directory")
        return [os.path.join(self.directory, name) for name in sorted(set(files.values()))]

    def add(self, path):
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            first = file.read(8)
            length = int.from_bytes(first, "little")
            if first == b"version ":
                raise Problem(f"{path} is the pointer of a file that git has not fetched", "git lfs pull, in its directory")
            if len(first) < 8 or length > min(HEADER_LIMIT, size - 8):
                raise Problem(f"{path} is no safetensors file, or was not copied completely", "make or copy it again")
            try:
                header = checked_object(file.read(length).decode(), path)
            except UnicodeDecodeError:
                raise Problem(f"{path} is no safetensors file: its header is no text") from None
        for name, entry in header.items():
            if name != "__metadata__":
                name = name[len(PREFIX):] if name.startswith(PREFIX) else name
                if name in self.tensors:
                    raise Problem(f"{path}: {name} is there twice")
                self.tensors[name] = (path, *self.checked(entry, size - 8 - length, f"{path}: {name}"), 8 + length)

    @staticmethod
    def checked(entry, room, where):
        """dtype, shape and first byte of a header's entry."""
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            whole = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in [*shape, begin, end])
        except (TypeError, KeyError, ValueError):
            whole = False
        if not whole or not begin <= end <= room:
            raise Problem(f"{where}: its entry in the header is damaged, or the file was not copied completely")
        if dtype in DTYPES and end - begin != math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize:
            raise Problem(f"{where}: {end - begin} bytes cannot be {dtype} of shape {shape}")
        return dtype, tuple(shape), begin

    def check(self, shape):
        """All that a GPT-2 of this shape has are there, and nothing else."""
        expected = {name: size[::-1] if linear else size for name, size, linear in shape.tensors()}
        for name, size in expected.items():
            if name not in self.tensors:
                raise Problem(f"{self.directory} holds no tensor {name}, but config.json promises it; of its "
                              f"{len(self.tensors)} tensors the first is {min(self.tensors, default='none')[:50]}")
            path, dtype, found, *_ = self.tensors[name]
            if found != size or dtype not in DTYPES:
                raise Problem(f"{path}: {name} is {dtype[:50]} {str(list(found))[:50]}, not {' or '.join(DTYPES)} {list(size)}")
        for name, (path, dtype, found, *_) in self.tensors.items():
            if name == "lm_head.weight":
                alike = found == expected["wte.weight"] and dtype in DTYPES
                if not alike or not np.array_equal(self.fp32(name), self.fp32("wte.weight")):
                    raise Problem(f"{path}: {name} is not the token table; the trainer has no other head")
            elif name not in expected and not BUFFER.fullmatch(name):
                raise Problem(f"{path} holds {name[:50]}, which the trainer's GPT-2 has not")

    def all_bf16(self, shape):
        return all(self.tensors[name][1] == "BF16" for name, *_ in shape.tensors())

    def stored(self, name):
        """As it is there: of bf16 the bits."""
        path, dtype, shape, begin, data = self.tensors[name]
        return read_values(path, DTYPES[dtype], math.prod(shape), data + begin).reshape(shape)

    def fp32(self, name):
        values = self.stored(name)
        return widened(values) if self.tensors[name][1] == "BF16" else values.astype("<f4", copy=False)


def import_model(directory, out):
    shape = read_config(os.path.join(directory, "config.json"))
    weights = Weights(directory)
    weights.check(shape)
    bf16 = weights.all_bf16(shape)
    progress = Progress(shape.elements() * (2 if bf16 else 4))
    with appearing(out) as temporary, open(temporary, "xb") as file:
        file.write(struct.pack(f"<{HEADER}i", MODEL_MAGIC, BF16 if bf16 else FP32, shape.n_positions, shape.vocab_size,
                               shape.n_layer, shape.n_head, shape.n_embd, shape.padded, *[0] * (HEADER - 8)))
        for name, _, linear in shape.tensors():
            values = weights.stored(name) if bf16 else weights.fp32(name)
            values = np.ascontiguousarray(values.T if linear else values)
            file.write(values)
            progress.add(values.nbytes)
            if name == "wte.weight":
                file.write(bytes((shape.padded - shape.vocab_size) * shape.n_embd * values.itemsize))
        close_synced(file)
    return f"{out}: {describe(shape)}, {'bf16' if bf16 else 'fp32'}"


def describe(shape):
    return (f"GPT-2 of {shape.n_layer} layers, {shape.n_embd} channels, {shape.n_head} heads, {shape.vocab_size} tokens,"
            f" {shape.n_positions} positions: {shape.elements() / 1e6:.2f} M parameters")


@contextlib.contextmanager
def appearing(out):
    """A name for what will be OUT once it is complete and synced; if that fails, nothing is left of it."""
    out = os.path.abspath(out)
    if os.path.lexists(out):
        raise Problem(f"--out {out} is there already", "name what is new, or remove this")
    temporary = f"{out}.tmp.{os.getpid()}"
    if os.path.lexists(temporary):  # of another machine's process with our number
        raise Problem(f"{temporary} is there already", "remove it, unless somebody writes it just now")
    os.makedirs(os.path.dirname(out), exist_ok=True)
    try:
        yield temporary
        os.rename(temporary, out)
        sync_directory(os.path.dirname(out))
    finally:
        if os.path.isdir(temporary):
            shutil.rmtree(temporary)
        elif os.path.exists(temporary):
            os.remove(temporary)


# ------------------------------------------------------------------------------------------- our files


class ModelFile:
    """A model file whose header has been checked against its size."""

    def __init__(self, path):
        self.path = path
        if os.path.isdir(path):
            raise Problem(f"{path} is a directory", f"a run's model is {os.path.join(path, 'model.bin')}, once it is done")
        with open(path, "rb") as file:
            header = file.read(4 * HEADER)
        if len(header) < 4 * HEADER or struct.unpack("<i", header[:4])[0] != MODEL_MAGIC:
            raise Problem(f"{path} is no model file", "./train_gpt --out RUN --export FILE writes one")
        _, version, *fields, self.padded = struct.unpack_from("<8i", header)
        if version not in (FP32, BF16):
            raise Problem(f"{path}: its version is {version}, known are {FP32} (fp32) and {BF16} (bf16)", "export it again")
        names = "n_positions", "vocab_size", "n_layer", "n_head", "n_embd"
        self.shape = Shape(dict(zip(names, fields)), path)
        self.dtype = "F32" if version == FP32 else "BF16"
        if not self.shape.vocab_size <= self.padded <= 1 << 24:
            raise Problem(f"{path}: {self.padded} rows cannot hold {self.shape.vocab_size} tokens")
        padding = (self.padded - self.shape.vocab_size) * self.shape.n_embd
        expected = 4 * HEADER + (self.shape.elements() + padding) * self.itemsize
        if os.path.getsize(path) != expected:
            raise Problem(f"{path} has {os.path.getsize(path)} bytes, its header promises {expected}",
                          "it is damaged or was not copied completely; make or copy it again")

    @property
    def itemsize(self):
        return np.dtype(DTYPES[self.dtype]).itemsize

    def tensors(self):
        """(name, its bits as they are there) in the file's order."""
        at = 4 * HEADER
        for name, shape, linear in self.shape.tensors():
            values = read_values(self.path, DTYPES[self.dtype], math.prod(shape), at).reshape(shape)
            rows = self.padded if name == "wte.weight" else shape[0]
            at += rows * math.prod(shape[1:]) * self.itemsize
            yield name, np.ascontiguousarray(values.T if linear else values)


def safetensors_header(model):
    """Offsets follow from the shapes; blanks behind make the data begin at a multiple of 8."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape, linear in model.shape.tensors():
        end = at + math.prod(shape) * model.itemsize
        header[PREFIX + name] = {"dtype": model.dtype, "shape": shape[::-1] if linear else shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def config(model):
    """As transformers write it. The trainer has no dropout; only GPT-2's tokens are known to have one that ends a text."""
    shape = model.shape
    end = GPT2_TOKENS - 1 if shape.vocab_size == GPT2_TOKENS else None
    return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **{name: getattr(shape, name) for name in MOST},
            "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
            "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": end, "eos_token_id": end,
            "torch_dtype": {"F32": "float32", "BF16": "bfloat16"}[model.dtype]}


def export_model(path, out):
    model = ModelFile(path)
    progress = Progress(model.shape.elements() * model.itemsize)
    with appearing(out) as directory:
        os.mkdir(directory)
        with open(os.path.join(directory, "model.safetensors"), "wb") as file:
            file.write(safetensors_header(model))
            for _, values in model.tensors():
                file.write(values)
                progress.add(values.nbytes)
            close_synced(file)
        with open(os.path.join(directory, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config(model), file, indent=2)
            close_synced(file)
        sync_directory(directory)
    return f"{out}: {describe(model.shape)}"


# ------------------------------------------------------------------------------------------- command line


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--import", dest="directory", metavar="DIR", help="with config.json and model.safetensors")
    which.add_argument("--export", dest="model", metavar="FILE", help="a model file (llm.c format)")
    parser.add_argument("--out", required=True, metavar="PATH", help="the new model file, or the new directory")
    return parser.parse_args(arguments)


def convert(options):
    if options.model is None:
        print(import_model(options.directory, options.out))
    else:
        print(export_model(options.model, options.out))


def main(arguments=None):
    options = parse_arguments(arguments)
    for stream in sys.stdout, sys.stderr:
        stream.reconfigure(errors="backslashreplace")  # names of files may be any bytes
    return status_of(lambda: convert(options), options.out)


if __name__ == "__main__":
    sys.exit(main())
