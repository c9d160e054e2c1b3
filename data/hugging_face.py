#!/usr/bin/env python3
"""Convert GPT-2 and Llama models between Hugging Face's directories and this program's model files (llm.c's).

    data/hugging_face.py --import gpt2 --out gpt2_124M.bin      to start from: ./train_gpt --init-from gpt2_124M.bin
    data/hugging_face.py --export model.bin --out my-gpt2       for AutoModelForCausalLM.from_pretrained("my-gpt2")

A directory holds config.json and model.safetensors, or several parts of it. Both formats hold the same numbers in
different layouts: tensors are stacked over layers here; weights of a GPT-2's linear layers are (in, out) there and (out, in) here;
the token table has V rows there, padded with zeros to a multiple of 128 here; it is also the head and is stored once. fp32 and bf16
keep every bit; fp16 becomes fp32. Models that the trainer cannot compute are refused; dropout is ignored. Tokenizers are not
converted.

Few tensors are in memory at a time. The formats: data/model_file.h, and https://huggingface.co/docs/safetensors.
"""
import collections
import json
import math
import os
import re
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from prepare import GPT2_TOKENS, HEADER, TOKENIZER_MAGIC, TOKENIZER_VERSION
from command import Parser, Problem, appearing, note, opened, say, status_of, whole, write_whole  # where prepare has looked for it
import numpy as np  # after command, whose errors name a Python that has it

FP32, BF16 = 3, 5
PADDING = 128  # of the vocabulary, as in layers/params.h
HEADER_LIMIT = 100_000_000  # bytes, as safetensors' own
MOST_DIMENSIONS, MOST_SIZE = 100, 1 << 100  # of a tensor: more are no tensors, and their product takes minutes
DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # numpy has no bf16: its bits
BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # constants of old files
ALIASES = {"max_position_embeddings": "n_positions", "hidden_size": "n_embd", "num_hidden_layers": "n_layer",
           "num_attention_heads": "n_head"}  # other names of fields, which take precedence in transformers


class Shape:
    """Of a model. MOST: its fields by their names in config.json, in the order of a model file, and their limits. NUMBERS: those
    that are not whole."""
    NUMBERS, others = {}, ()

    def __init__(self, values, where):
        for name, most in self.MOST.items():
            value = values[name]
            if type(value) is not int or not 1 <= value <= most:
                raise Problem(f"{where}: {name} is {repr(value)[:50]}, it must be a whole number from 1 to {most}")
        self.config = {**self.CONFIG, **{name: values[name] for name in self.MOST}}
        self.positions, self.vocab, self.layers, self.heads, self.channels, *self.more = (values[name] for name in self.MOST)
        if self.channels % self.heads != 0:
            raise Problem(f"{where}: {self.channels} channels cannot be split among {self.heads} heads")
        self.padded = -(-self.vocab // PADDING) * PADDING

    @classmethod
    def of_header(cls, header, path):
        floats = [float(f"{x:.7g}") for x in struct.unpack("<5f", struct.pack("<5i", *header[10:15]))]  # 1e-5, not 9.99999975e-06
        floats[2] = floats[2] or None  # of positions that are not stretched
        return cls(dict(zip([*cls.MOST, *cls.NUMBERS], (*header[2:7], *header[8:10], *floats, header[15]))), path)

    def header(self, version):
        values = (version, self.positions, self.vocab, self.layers, self.heads, self.channels, self.padded, *self.others)
        return struct.pack(f"<{HEADER}i", self.MAGIC, *values, *[0] * (HEADER - 1 - len(values)))

    def __str__(self):
        elements = sum(math.prod(shape) for _, shape, _ in self.tensors())
        return (f"{self.KIND} of {self.layers} layers, {self.channels} channels, {self.heads} heads, {self.vocab} tokens,"
                f" {self.positions} positions: {elements / 1e6:.2f} M parameters")


class GPT2(Shape):
    KIND, MAGIC, PREFIX, TABLE = "GPT-2", 20240326, "transformer.", "wte.weight"  # PREFIX: of the names in some files
    MOST = {"n_positions": 1 << 24, "vocab_size": 1 << 24, "n_layer": 1 << 12, "n_head": 1 << 17, "n_embd": 1 << 17}
    # As transformers write it. The trainer has no dropout.
    CONFIG = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_inner": None, "activation_function": "gelu_new",
              "layer_norm_epsilon": 1e-5, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}

    def tensors(self):
        """(name, shape in a model file without padding, whether it is transposed there), in the file's order."""
        C = self.channels
        yield from ((self.TABLE, (self.vocab, C), False), ("wpe.weight", (self.positions, C), False))
        # Each layer's outputs and inputs as multiples of the channels; a layer norm has no inputs.
        for name, outputs, inputs in (("ln_1", 1, 0), ("attn.c_attn", 3, 1), ("attn.c_proj", 1, 1), ("ln_2", 1, 0),
                                      ("mlp.c_fc", 4, 1), ("mlp.c_proj", 1, 4)):
            weight = (outputs * C, inputs * C) if inputs else (C,)
            yield from ((f"h.{layer}.{name}.weight", weight, inputs > 0) for layer in range(self.layers))
            yield from ((f"h.{layer}.{name}.bias", (outputs * C,), False) for layer in range(self.layers))
        yield from (("ln_f.weight", (C,), False), ("ln_f.bias", (C,), False))

    @classmethod
    def of_config(cls, config, path):
        """The shape, and the values of other fields that the trainer can compute, the usual one first."""
        config.update({name: config[alias] for alias, name in ALIASES.items() if alias in config})
        shape = cls({"n_positions": 1024, "vocab_size": GPT2_TOKENS, "n_layer": 12, "n_head": 12, "n_embd": 768, **config}, path)
        return shape, {"activation_function": ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "layer_norm_epsilon": (1e-5,),
                       "n_inner": (None, 4 * shape.channels), "scale_attn_weights": (True,), "tie_word_embeddings": (True,),
                       "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)}


class Llama(Shape):
    KIND, MAGIC, PREFIX, TABLE = "Llama", 20261129, "model.", "embed_tokens.weight"
    MOST = {"max_position_embeddings": 1 << 24, "vocab_size": 1 << 24, "num_hidden_layers": 1 << 12, "num_attention_heads": 1 << 17,
            "hidden_size": 1 << 17, "num_key_value_heads": 1 << 17, "intermediate_size": 1 << 20}
    NUMBERS = {"rms_norm_eps": 1, "rope_theta": 3e38, "factor": 1 << 24, "low_freq_factor": 1 << 24, "high_freq_factor": 1 << 24,
               "original_max_position_embeddings": 1 << 24}  # the last four if positions are stretched
    CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
              "mlp_bias": False, "attention_dropout": 0.0}

    def __init__(self, values, where):
        super().__init__(values, where)
        numbers = {name: values[name] for name in list(self.NUMBERS)[:6 if values["factor"] is not None else 2]}
        for name, value in numbers.items():
            if type(value) not in (int, float) or not 1e-30 <= value <= self.NUMBERS[name]:
                raise Problem(f"{where}: {name} is {repr(value)[:50]}, it must be a number from 1e-30 to {self.NUMBERS[name]}")
        eps, theta, factor, low, high, original = [*numbers.values(), 0, 0, 0, 0][:6]
        if factor and not (factor >= 1 and low < high and type(original) is int):
            raise Problem(f"{where}: factor is {factor} between {low} and {high} of {original}: such a stretch is not llama3's")
        size, keys = self.channels // self.heads, self.more[0]
        if self.heads % keys != 0 or size % 2 != 0:
            raise Problem(f"{where}: {self.heads} heads of {size} channels cannot share {keys} of keys and values, or are odd")
        self.others = (*self.more, *struct.unpack("<5i", struct.pack("<5f", eps, theta, factor, low, high)), original)
        stretch = {"rope_type": "llama3", **dict(list(numbers.items())[2:])} if factor else None
        self.config.update({"rms_norm_eps": eps, "rope_theta": theta, "rope_scaling": stretch})

    def tensors(self):
        C, (keys, F) = self.channels, self.more
        keys *= C // self.heads
        yield self.TABLE, (self.vocab, C), False
        for group in ({"input_layernorm": (C,)}, {"self_attn.q_proj": (C, C), "self_attn.k_proj": (keys, C), "self_attn.v_proj":
                      (keys, C)}, {"self_attn.o_proj": (C, C)}, {"post_attention_layernorm": (C,)},
                      {"mlp.gate_proj": (F, C), "mlp.up_proj": (F, C)}, {"mlp.down_proj": (C, F)}):
            for layer in range(self.layers):
                yield from ((f"layers.{layer}.{name}.weight", size, False) for name, size in group.items())
        yield "norm.weight", (C,), False

    @classmethod
    def of_config(cls, config, path):
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}  # the older and the newer name
        if not isinstance(rope, dict):
            raise Problem(f"{path}: rope_scaling is {repr(rope)[:50]}, it must be an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
        given = {name: "missing" if rope.get(name) is None else rope[name] for name in list(cls.NUMBERS)[2:]}
        usual = {"max_position_embeddings": 2048, "vocab_size": 32000, "num_hidden_layers": 32, "num_attention_heads": 32,
                 "hidden_size": 4096, "intermediate_size": 11008, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
        config.update({**usual, **config}, rope_scaling=kind)
        if config.get("num_key_value_heads") is None:
            config["num_key_value_heads"] = config["num_attention_heads"]
        shape = cls({**config, "factor": None, **(given if kind == "llama3" else {}), "rope_theta": theta}, path)
        return shape, {"hidden_act": ("silu",), "rope_scaling": ("default", "llama3"), "tie_word_embeddings": (True,),
                       "attention_bias": (False,), "mlp_bias": (False,), "head_dim": (None, shape.channels // shape.heads)}


class Tensor(collections.namedtuple("Tensor", "path dtype shape at end")):
    """A tensor in a file: bytes [at, end)."""

    def stored(self):
        """The elements as they are stored; bf16 as bits."""
        count = math.prod(self.shape)
        values = np.fromfile(self.path, DTYPES[self.dtype], count, offset=self.at)
        if len(values) < count:
            raise Problem(f"{self.path} became shorter while it was read")
        return values.reshape(self.shape)

    def fp32(self):
        values = self.stored()
        return (values.astype("<u4") << 16).view("<f4") if self.dtype == "BF16" else values.astype("<f4", copy=False)


def read_object(text, path):
    """Parses bytes as a JSON object."""
    try:
        values = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise Problem(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise Problem(f"{path} is not a JSON object")
    return values


def read_config(path):
    """The shape, if the trainer can compute this model. Missing fields have transformers' defaults."""
    with opened(path) as file:
        config = read_object(file.read(), path)
    kind = {"gpt2": GPT2, "llama": Llama}.get(str(config.get("model_type")))
    if not kind:
        raise Problem(f"{path}: model_type is {repr(config.get('model_type'))[:50]}, only gpt2 and llama can be imported")
    shape, accepted = kind.of_config(config, path)
    for name, values in accepted.items():
        if config.get(name, values[0]) not in values:
            raise Problem(f"{path}: {name} is {repr(config[name])[:50]}, the trainer has only {' or '.join(map(repr, values))}")
    return shape


def weight_files(directory):
    """The one file, or else the parts of one. Their index says nothing that their headers do not."""
    names = sorted(name for name in os.listdir(directory) if re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", name))
    if not names:
        raise Problem(f"{directory} holds no model.safetensors",
                      "a model in another format is converted by save_pretrained() of a current transformers")
    return [os.path.join(directory, name) for name in (names[-1:] if names[-1] == "model.safetensors" else names)]


def safetensors(path, prefix):
    """Yields (name without the prefix, Tensor) of a file; checks the header's entries."""
    size = os.path.getsize(path)
    with opened(path) as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if first == b"version ":
            raise Problem(f"{path} is only a pointer to a file that git has not fetched", "git lfs pull, in its directory")
        if len(first) < 8 or length > min(HEADER_LIMIT, size - 8):
            raise Problem(f"{path} is not a safetensors file, or was not copied completely", "make or copy it again")
        header = read_object(file.read(length), path)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            whole = (isinstance(dtype, str) and len(shape) <= MOST_DIMENSIONS and
                     all(type(n) is int and 0 <= n < MOST_SIZE for n in [*shape, begin, end]))
        except (TypeError, KeyError, ValueError):
            whole = False
        name = name.removeprefix(prefix)
        if not whole or not begin <= end <= size - 8 - length:
            raise Problem(f"{path}: {name[:50]}: its entry in the header is damaged, or the file was not copied completely")
        if dtype in DTYPES and end - begin != math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize:
            raise Problem(f"{path}: {name[:50]}: {end - begin} bytes cannot be {dtype} of shape {str(shape)[:50]}")
        yield name, Tensor(path, dtype, tuple(shape), 8 + length + begin, 8 + length + end)


def read_weights(directory, shape):
    """Tensors by name: exactly those of a model of this shape."""
    tensors = {}
    for path in weight_files(directory):
        for name, tensor in safetensors(path, shape.PREFIX):
            if name in tensors:
                raise Problem(f"{path}: {name[:50]} appears twice")
            tensors[name] = tensor
    if shape.TABLE not in tensors and "lm_head.weight" in tensors:  # one table, by its other name
        tensors[shape.TABLE] = tensors.pop("lm_head.weight")
    expected = {name: size[::-1] if linear else size for name, size, linear in shape.tensors()}
    for name, size in expected.items():
        if name not in tensors:
            raise Problem(f"{directory} has no tensor {name}, but config.json requires it; of its "
                          f"{len(tensors)} tensors the first is {min(tensors, default='none')[:50]}")
        path, dtype, found, *_ = tensors[name]
        if found != size or dtype not in DTYPES:
            raise Problem(f"{path}: {name} is {dtype[:50]} {str(list(found))[:50]}, not {' or '.join(DTYPES)} {list(size)}")
    places = sorted((tensor.path, tensor.at, tensor.end, name) for name, tensor in tensors.items() if tensor.at < tensor.end)
    head = tensors.pop("lm_head.weight", None)
    if head and not (head.shape == expected[shape.TABLE] and head.dtype in DTYPES
                     and np.array_equal(head.fp32(), tensors[shape.TABLE].fp32())):
        raise Problem(f"{head.path}: lm_head.weight is not the token table; the trainer has no other head")
    for name in sorted(tensors.keys() - expected.keys()):
        if not BUFFER.fullmatch(name):
            raise Problem(f"{tensors[name].path} has {name[:50]}, which the trainer's {shape.KIND} does not have")
    for (path, _, end, name), (other, at, _, second) in zip(places, places[1:]):
        if path == other and at < end:
            raise Problem(f"{path}: {name} and {second} share bytes", "it is damaged; make or copy it again")
    return tensors


def import_model(directory, out):
    shape = read_config(os.path.join(directory, "config.json"))
    weights = read_weights(directory, shape)
    bf16 = all(weights[name].dtype == "BF16" for name, *_ in shape.tensors())
    with whole(out, "wb") as file:
        file.write(shape.header(BF16 if bf16 else FP32))
        for name, _, linear in shape.tensors():
            values = weights[name].stored() if bf16 else weights[name].fp32()
            values = np.ascontiguousarray(values.T if linear else values)
            file.write(values)
            if name == shape.TABLE:
                file.write(bytes((shape.padded - shape.vocab) * shape.channels * values.itemsize))
    return f"{out}: {shape}, {'bf16' if bf16 else 'fp32'}"


def read_model(path):
    """Shape, type, and (name, Tensor, linear) in the file's order; checks the header against the file's size."""
    with opened(path) as file:
        header = file.read(4 * HEADER)
    kind = {kind.MAGIC: kind for kind in (GPT2, Llama)}.get(int.from_bytes(header[:4], "little"))
    if len(header) < 4 * HEADER or not kind:
        raise Problem(f"{path} is not a model file", "./train_gpt --out RUN --export FILE writes one")
    header = struct.unpack_from("<16i", header)
    version, padded = header[1], header[7]
    if version not in (FP32, BF16):
        raise Problem(f"{path}: its version is {version}, known are {FP32} (fp32) and {BF16} (bf16)", "export it again")
    shape = kind.of_header(header, path)
    if not shape.vocab <= padded <= 1 << 24:
        raise Problem(f"{path}: {padded} rows cannot hold {shape.vocab} tokens")
    dtype, itemsize = ("F32", 4) if version == FP32 else ("BF16", 2)
    tensors, at = [], 4 * HEADER
    for name, size, linear in shape.tensors():
        end = at + (padded if name == shape.TABLE else size[0]) * math.prod(size[1:]) * itemsize
        tensors.append((name, Tensor(path, dtype, size, at, end), linear))
        at = end
    if os.path.getsize(path) != at:
        raise Problem(f"{path} has {os.path.getsize(path)} bytes, its header promises {at}",
                      "it is damaged or was not copied completely; make or copy it again")
    return shape, dtype, tensors


def words_of(model, tokenizer, shape):
    """The number of words and the token that ends a text, as the vocabulary file given or beside the model says; else GPT-2's,
    whose table may be padded."""
    path = tokenizer or os.path.join(os.path.dirname(model), "tokenizer.bin")
    if not tokenizer and not os.path.exists(path):
        gpt2 = GPT2_TOKENS <= shape.vocab <= -(-GPT2_TOKENS // PADDING) * PADDING
        if not gpt2 and shape.vocab > 256:  # not of bytes
            note("note: nothing says which token ends a text (eos): --tokenizer names the tokenizer.bin beside the tokens")
        return (GPT2_TOKENS, GPT2_TOKENS - 1) if gpt2 else (shape.vocab, None)
    with opened(path) as file:
        magic, version, words, last = struct.unpack("<4I", file.read(16).ljust(16, b"\0"))
    if (magic, version) != (TOKENIZER_MAGIC, TOKENIZER_VERSION) or not last < words <= shape.vocab:
        raise Problem(f"{path} is not the vocabulary file of a model of {shape.vocab} words",
                      "data/prepare.py --encoding gpt2 writes it beside the tokens of that model")
    return words, last


def export_model(path, out, tokenizer):
    shape, dtype, tensors = read_model(path)
    words, last = words_of(path, tokenizer, shape)
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor, linear in tensors:
        end = at + math.prod(tensor.shape) * np.dtype(DTYPES[dtype]).itemsize
        size = tensor.shape[::-1] if linear else tensor.shape
        header[shape.PREFIX + name] = {"dtype": dtype, "shape": size, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
    config = {**shape.config, "tie_word_embeddings": True, "bos_token_id": last, "eos_token_id": last,
              "torch_dtype": {"F32": "float32", "BF16": "bfloat16"}[dtype]}
    with appearing(out) as directory:
        os.mkdir(directory)
        with whole(os.path.join(directory, "model.safetensors"), "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _, tensor, linear in tensors:
                values = tensor.stored()
                file.write(np.ascontiguousarray(values.T if linear else values))
        write_whole(os.path.join(directory, "config.json"), json.dumps(config, indent=2))
    padding = f"\nrows {words} to {shape.vocab - 1} pad the vocabulary: no tokenizer has these words"
    return f"{out}: {shape}" + padding * (words < shape.vocab)


def main(arguments=None):
    parser = Parser(__doc__.split("\n")[0], allow_abbrev=False)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--import", dest="directory", metavar="DIR", help="with config.json and model.safetensors")
    which.add_argument("--export", dest="model", metavar="FILE", help="a model file (llm.c format)")
    parser.add_argument("--out", required=True, metavar="PATH", help="the new model file, or the new directory")
    parser.add_argument("--tokenizer", metavar="FILE", help="for --export: the tokenizer.bin beside the tokens, whose end of text "
                        "becomes eos and bos (default: the one beside the model; else GPT-2's, for 50257 to 50304 words)")
    options = parser.parse_args(arguments)
    if options.tokenizer is not None and options.model is None:
        parser.error("--tokenizer is for --export")

    def work():
        if os.path.lexists(options.out):
            raise Problem(f"--out {options.out} exists already", "choose another name, or remove it")
        os.makedirs(os.path.dirname(os.path.abspath(options.out)), exist_ok=True)
        say(import_model(options.directory, options.out) if options.model is None else
            export_model(options.model, options.out, options.tokenizer))
    return status_of(work, options.out)


if __name__ == "__main__":
    sys.exit(main())
