"""data/hugging_face.py: model files to and from directories of Hugging Face's transformers.

Their side is written here a second time, from the format: names, the (in, out) weights of their Conv1D, and a forward
pass of a block by x @ W + b. test_transformers.py asks transformers itself, where it is installed.
"""
import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import unittest

import numpy as np

import harness
import reference

SCRIPT = os.path.join(harness.ROOT, "data", "hugging_face.py")
SHAPE = reference.Shape(maxT=48, V=101, L=2, heads=12, C=96, Vp=128)
TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "u1"}
THEIRS = {"ln1w": "ln_1.weight", "ln1b": "ln_1.bias", "qkvw": "attn.c_attn.weight", "qkvb": "attn.c_attn.bias",
          "attprojw": "attn.c_proj.weight", "attprojb": "attn.c_proj.bias", "ln2w": "ln_2.weight", "ln2b": "ln_2.bias",
          "fcw": "mlp.c_fc.weight", "fcb": "mlp.c_fc.bias", "fcprojw": "mlp.c_proj.weight", "fcprojb": "mlp.c_proj.bias"}
WHOLE = {"wte": "wte.weight", "wpe": "wpe.weight", "lnfw": "ln_f.weight", "lnfb": "ln_f.bias"}


def their_tensors(shape, model):
    """float32 arrays by their names."""
    tensors = {theirs: model[ours] for ours, theirs in WHOLE.items()}
    tensors["wte.weight"] = model["wte"][:shape.V]
    for ours, theirs in THEIRS.items():
        for layer in range(shape.L):
            values = model[ours][layer]
            tensors[f"h.{layer}.{theirs}"] = values.T if values.ndim == 2 else values
    return {name: np.ascontiguousarray(values, "<f4") for name, values in tensors.items()}


LLAMA = reference.Shape(maxT=48, V=101, L=2, heads=12, C=96, Vp=128, KV=4, F=112, eps=1e-6, theta=5e5,
                        stretch=(32.0, 1.0, 4.0, 8192))
THEIRS_OF_LLAMA = {"ln1w": ["input_layernorm"], "qkvw": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
                   "attprojw": ["self_attn.o_proj"], "ln2w": ["post_attention_layernorm"],
                   "fcw": ["mlp.gate_proj", "mlp.up_proj"], "fcprojw": ["mlp.down_proj"]}


def their_llama(shape, model):
    tensors = {"model.embed_tokens.weight": model["wte"][:shape.V], "model.norm.weight": model["lnfw"]}
    for ours, names in THEIRS_OF_LLAMA.items():
        keys = shape.KV * shape.C // shape.heads
        at = {3: (shape.C, shape.C + keys), 2: (shape.F,), 1: ()}[len(names)]
        for layer in range(shape.L):
            parts = np.split(model[ours][layer], at)
            tensors.update((f"model.layers.{layer}.{name}.weight", part) for name, part in itertools.zip_longest(names, parts))
    return {name: np.ascontiguousarray(values, "<f4") for name, values in tensors.items()}


def config_of_llama(shape, **more):
    factor, low, high, original = shape.stretch or (0, 0, 0, 0)
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
               "original_max_position_embeddings": original} if factor else None
    return {"model_type": "llama", "vocab_size": shape.V, "max_position_embeddings": shape.maxT, "hidden_size": shape.C,
            "num_hidden_layers": shape.L, "num_attention_heads": shape.heads, "num_key_value_heads": shape.KV,
            "intermediate_size": shape.F, "rms_norm_eps": shape.eps, "rope_theta": shape.theta, "rope_scaling": scaling,
            "tie_word_embeddings": True, **more}


def their_config(shape, **more):
    return {"model_type": "gpt2", "vocab_size": shape.V, "n_positions": shape.maxT, "n_embd": shape.C,
            "n_layer": shape.L, "n_head": shape.heads, **more}


def stored(values, dtype):
    return reference.to_bf16_bits(values) if dtype == "BF16" else np.asarray(values, TYPES[dtype])


def write_safetensors(path, tensors, dtypes=lambda name: "F32", change=lambda header: header):
    """A file of tensors; what change() makes of the header may be wrong."""
    header, data = {}, b""
    for name, values in tensors.items():
        content = stored(values, dtypes(name)).tobytes()
        header[name] = {"dtype": dtypes(name), "shape": list(np.shape(values)),
                        "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(change(header)).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    with open(path, "rb") as file:
        content = file.read()
    length, = struct.unpack("<Q", content[:8])
    assert length % 8 == 0, "the data is not aligned"
    header, data, tensors, expected = json.loads(content[8:8 + length]), content[8 + length:], {}, 0
    assert header.pop("__metadata__") == {"format": "pt"}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        assert begin == expected, "a hole"
        values = np.frombuffer(data[begin:end], TYPES[entry["dtype"]]).reshape(entry["shape"])
        tensors[name], expected = (entry["dtype"], values), end
    assert expected == len(data)
    return tensors


def their_loss(tensors, shape, inputs, targets):
    """Mean cross-entropy in float64 as their GPT2LMHeadModel computes it."""
    t = {name.removeprefix("transformer."): values.astype(np.float64) for name, (_, values) in tensors.items()}
    B, T = inputs.shape

    def conv1d(x, name):
        return x @ t[name + ".weight"] + t[name + ".bias"]

    def norm(x, name):
        return reference.layernorm(x, t[name + ".weight"], t[name + ".bias"])[0]

    x = t["wte.weight"][inputs] + t["wpe.weight"][:T]
    for h in (f"h.{layer}." for layer in range(shape.L)):
        mixed, _ = reference.attention(conv1d(norm(x, h + "ln_1"), h + "attn.c_attn"), shape.heads)
        x = x + conv1d(mixed, h + "attn.c_proj")
        x = x + conv1d(reference.gelu(conv1d(norm(x, h + "ln_2"), h + "mlp.c_fc")), h + "mlp.c_proj")
    logits = norm(x, "ln_f") @ t["wte.weight"].T
    logits -= logits.max(-1, keepdims=True)
    chosen = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (np.log(np.exp(logits).sum(-1)) - chosen).mean()


class Case(unittest.TestCase):
    shape, tensors_of, config_of = SHAPE, staticmethod(their_tensors), staticmethod(their_config)

    def setUp(self):
        self.directory = harness.temporary_directory(self)
        self.model = reference.random_model(self.shape)
        self.model["wte"][self.shape.V:] = 0

    def path(self, name):
        return os.path.join(self.directory, name)

    def convert(self, *arguments, status=0, command=(sys.executable, SCRIPT)):
        result = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=100)
        self.assertEqual(result.returncode, status, result.stderr)
        self.assertNotIn("Traceback", result.stderr)
        self.assertEqual([name for name in os.listdir(self.directory) if name.startswith(".")], [])
        return result.stdout if status == 0 else result.stderr

    def theirs(self, name="theirs", config=None, **safetensors):
        """A directory as transformers save it."""
        shutil.rmtree(self.path(name), ignore_errors=True)
        os.mkdir(self.path(name))
        with open(self.path(f"{name}/config.json"), "w", encoding="utf-8") as file:
            json.dump(self.config_of(self.shape) if config is None else config, file)
        tensors = safetensors.pop("tensors", None) or self.tensors_of(self.shape, self.model)
        write_safetensors(self.path(f"{name}/model.safetensors"), tensors, **safetensors)
        return self.path(name)

    def ours(self, name="model.bin", version=3, model=None):
        reference.write_model(self.path(name), self.shape, model or self.model, version)
        return self.path(name)

    def assertImported(self, directory, version=3, model=None):
        """To the bytes that this model's file has."""
        if os.path.exists(self.path("imported.bin")):
            os.remove(self.path("imported.bin"))
        self.convert("--import", directory, "--out", self.path("imported.bin"))
        expected = self.ours("expected.bin", version, model)
        with open(self.path("imported.bin"), "rb") as found, open(expected, "rb") as file:
            self.assertEqual(found.read(), file.read())

    def refused(self, *words, **directory):
        error = self.convert("--import", self.theirs(**directory), "--out", self.path("imported.bin"), status=1)
        for word in words:
            self.assertIn(word, error)
        self.assertFalse(os.path.exists(self.path("imported.bin")))


class Import(Case):
    def test_a_directory(self):
        self.assertImported(self.theirs())

    def test_names_with_a_prefix_and_what_old_versions_save_along(self):
        tensors = their_tensors(SHAPE, self.model)
        tensors = {"transformer." + name: values for name, values in reversed(tensors.items())}
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
        tensors["transformer.h.0.attn.bias"] = np.tri(48).reshape(1, 1, 48, 48)
        tensors["transformer.h.1.attn.masked_bias"] = np.array(-1e4)
        self.assertImported(self.theirs(tensors=tensors, dtypes=lambda name: "U8" if name.endswith(".attn.bias") else "F32"))

    def test_a_table_that_is_there_as_the_head_alone(self):
        tensors = their_tensors(SHAPE, self.model)
        tensors["lm_head.weight"] = tensors.pop("wte.weight")
        self.assertImported(self.theirs(tensors=tensors))

    def test_a_head_of_another_type(self):
        """Its values decide."""
        self.model["wte"] = self.model["wte"].astype("<f2").astype(float)
        tensors = their_tensors(SHAPE, self.model)
        tensors["lm_head.weight"] = tensors["wte.weight"]
        self.assertImported(self.theirs(tensors=tensors, dtypes=lambda name: "F16" if name == "lm_head.weight" else "F32"))

    def test_what_a_configuration_may_say(self):
        for more in (dict(n_inner=384), dict(n_inner=None), dict(activation_function="gelu_pytorch_tanh"),
                     dict(scale_attn_weights=True, tie_word_embeddings=True, layer_norm_epsilon=1e-5, resid_pdrop=0.1)):
            with self.subTest(**more):
                self.assertImported(self.theirs(config=their_config(SHAPE, **more)))
        config = their_config(SHAPE)
        del config["n_head"]  # 12 unless said
        self.assertImported(self.theirs(config=config))
        config.update(num_attention_heads=12, n_head=6)  # the alias wins
        self.assertImported(self.theirs(config=config))
        aliases = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "max_position_embeddings": "n_positions"}
        for alias, name in aliases.items():
            config[alias] = config.pop(name)
        self.assertImported(self.theirs(config=config))

    def test_several_files(self):
        directory, names = self.theirs(), list(their_tensors(SHAPE, self.model))
        os.remove(os.path.join(directory, "model.safetensors"))
        parts = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
        for file, held in parts.items():
            tensors = their_tensors(SHAPE, self.model)
            write_safetensors(os.path.join(directory, file), {name: tensors[name] for name in held})
        with open(os.path.join(directory, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
            json.dump({"weight_map": {name: part for part, held in parts.items() for name in held}}, file)
        self.assertImported(directory)
        os.remove(os.path.join(directory, "model-00002-of-00003.safetensors"))
        os.remove(self.path("imported.bin"))
        self.assertIn(f"{directory} has no tensor {names[1]}",
                      self.convert("--import", directory, "--out", self.path("imported.bin"), status=1))

    def test_halves(self):
        model = {name: values.astype("<f2").astype(float) for name, values in self.model.items()}
        self.assertImported(self.theirs(dtypes=lambda name: "F16"), model=model)
        self.assertImported(self.theirs(dtypes=lambda name: "BF16"), version=5)
        mixed = {name: values if "ln" in name else
                 (reference.to_bf16_bits(values).astype("<u4") << 16).view("<f4").astype(float)
                 for name, values in self.model.items()}
        self.assertImported(self.theirs(dtypes=lambda name: "F32" if "ln_" in name else "BF16"), model=mixed)

    def test_the_trainer_computes_what_they_would(self):
        directory = self.theirs()
        self.convert("--import", directory, "--out", self.path("model.bin"))
        tensors = {name: ("F32", values) for name, values in their_tensors(SHAPE, self.model).items()}
        tokens = harness.random_tokens(4 * 40 + 1, SHAPE.V)
        reference.write_tokens(self.path("tokens.bin"), tokens)
        expected = their_loss(tensors, SHAPE, *reference.samples(tokens, 40))
        for ranks in 1, 2:
            log = self.path(f"log{ranks}.jsonl")
            result = harness.run(harness.options(init_from=self.path("model.bin"), train=self.path("tokens.bin"), seq=40,
                                                 val=self.path("tokens.bin"), tp=ranks, steps=0, val_every=1, threads=1,
                                                 micro_batch=4, log=log), ranks)
            self.assertEqual(result.status, 0, str(result))
            loss = harness.events(harness.read_log(log), "val")[0]["loss"]
            self.assertLess(abs(loss / expected - 1), 1e-5)
        self.assertGreater(expected, 4)

    def test_another_model_is_refused(self):
        for name, value in (("model_type", "gpt_neo"), ("activation_function", "relu"), ("layer_norm_epsilon", 1e-6),
                            ("n_inner", 100), ("scale_attn_weights", False), ("scale_attn_by_inverse_layer_idx", True),
                            ("tie_word_embeddings", False), ("add_cross_attention", True), ("n_head", 7), ("n_embd", -96),
                            ("n_layer", "2"), ("n_layer", 10**9), ("vocab_size", (1 << 24) + 1), ("n_positions", True)):
            with self.subTest(name=name, value=value):
                self.refused("config.json", "heads" if name == "n_head" else name,
                             config=their_config(SHAPE, **{name: value}))
        self.refused("model_type", config={})

    def test_other_tensors_are_refused(self):
        tensors = their_tensors(SHAPE, self.model)
        cases = (("h.1.ln_2.bias", None, "no tensor h.1.ln_2.bias"), ("h.2.ln_2.bias", np.ones(96), "h.2.ln_2.bias"),
                 ("score.attn.bias", np.ones(96), "has score.attn.bias"), ("h.0.attn.bias2", np.ones(96), "h.0.attn.bias2"),
                 ("lm_head.weight", tensors["wte.weight"] + 1, "lm_head.weight is not the token table"),
                 ("lm_head.weight", tensors["wte.weight"][1:], "lm_head.weight is not the token table"),
                 ("h.0.mlp.c_fc.weight", tensors["h.0.mlp.c_fc.weight"].T, "h.0.mlp.c_fc.weight is F32 [384, 96]"),
                 ("wpe.weight", tensors["wpe.weight"][:-1], "wpe.weight"), ("transformer.wpe.weight", np.ones(1), "twice"))
        for name, values, word in cases:
            with self.subTest(name=name):
                changed = {**tensors, name: values}
                if values is None:
                    del changed[name]
                self.refused(word, tensors=changed)
        self.refused("wte.weight is U8", dtypes=lambda name: "U8" if name == "wte.weight" else "F32")

    def test_damaged_headers_are_refused(self):
        def with_entry(**values):
            return {"change": lambda header: {**header, "wpe.weight": {**header["wpe.weight"], **values}}}
        damage = "wpe.weight: its entry in the header is damaged"
        for number, wrong in enumerate((
                with_entry(dtype=[]), with_entry(dtype=None), with_entry(data_offsets=[0, 1 << 60]),
                with_entry(data_offsets=[-8, 0]), with_entry(data_offsets=[8, 0]),
                with_entry(data_offsets=[0]), with_entry(data_offsets="ab"), with_entry(shape=[48, "96"]),
                with_entry(shape=None), with_entry(shape=[48, True]),
                {"change": lambda header: {**header, "wpe.weight": 1}})):
            with self.subTest(number=number):
                self.refused(damage, **wrong)
        self.refused("8 bytes cannot be F32 of shape [48, 96]", **with_entry(data_offsets=[0, 8]))
        self.refused("not a JSON object", change=lambda header: [header])
        for shape in [101, 96] + [1] * 90, [0, 1 << 70]:  # more than numpy can have
            end = 4 * 101 * 96 if 0 not in shape else 0
            head = {"lm_head.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}
            self.refused("lm_head.weight is not the token table", change=lambda header: {**header, **head})

    def test_many_dimensions_are_refused_at_once(self):
        begin = os.times().children_user
        for shape in [1] * 100_000, [1 << 64] * 100_000, [1 << 99] * 100, [int("9" * 4000)] * 9:
            head = {"lm_head.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}
            directory = self.theirs(change=lambda header: {**header, **head})
            error = self.convert("--import", directory, "--out", self.path("x"), status=1)
            self.assertLess(len(error), 1000)
            self.assertIn("lm_head.weight", error)
        self.assertLess(os.times().children_user - begin, 20)

    def test_tensors_that_share_bytes_are_refused(self):
        biases = "h.0.ln_1.bias", "h.0.ln_2.bias"

        def onto(name, by):
            def change(header):
                at = header[biases[0]]["data_offsets"]
                return {**header, name: {**header[biases[0]], "data_offsets": [at[0] + by, at[1] + by]}}
            return change
        for by in 0, 4, -4, 380:
            self.refused("share bytes", "h.0.ln_", change=onto(biases[1], by))
        self.refused("share bytes", change=lambda header: {**header, "lm_head.weight": header["wte.weight"]})
        empty = {"dtype": "U8", "shape": [0], "data_offsets": [8, 8]}
        self.convert("--import", self.theirs(change=lambda header: {**header, "h.0.attn.bias": empty}), "--out", self.path("x.bin"))

    def test_names_do_not_reach_the_terminal_as_they_are(self):
        evil = "\x1b]0;title\x07\x9b31m\r"
        tensors, config = their_tensors(SHAPE, self.model), their_config(SHAPE)
        for changed in (dict(tensors={**tensors, evil: np.ones(1)}), dict(config={**config, "model_type": evil}),
                        dict(change=lambda header: {**header, "wpe.weight": {**header["wpe.weight"], "dtype": evil}}),
                        dict(change=lambda header: {**header, evil: 1}),
                        dict(change=lambda header: {**header, evil: {**header["wpe.weight"], "data_offsets": [0, 1]}})):
            error = self.convert("--import", self.theirs(**changed), "--out", self.path("x"), status=1)
            self.assertNotRegex(error, "[\0-\x08\x0b-\x1f\x7f-\x9f]")
            self.assertIn(r"\x1b]0;title", error)
        self.assertIn(r"\x1b", self.convert("--export", self.ours(), "--out", self.path(f"out{evil}")))

    def test_pipes_are_refused(self):
        for name in "config.json", "model.safetensors", "model-1-of-1.safetensors", "model.bin":
            directory = self.theirs()
            os.remove(os.path.join(directory, "config.json" if name == "config.json" else "model.safetensors"))
            os.mkfifo(os.path.join(directory, name))
            words = ("--export", os.path.join(directory, name)) if name == "model.bin" else ("--import", directory)
            self.assertIn(f"not a regular file: {directory}/{name}", self.convert(*words, "--out", self.path("x"), status=1))

    def test_files_that_are_none(self):
        directory = self.theirs()
        weights, config = os.path.join(directory, "model.safetensors"), os.path.join(directory, "config.json")
        with open(weights, "rb") as file:
            whole = file.read()
        length, = struct.unpack("<Q", whole[:8])
        for content, word in ((b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
                              (b"", "not a safetensors"), (whole[:7], "not a safetensors"),
                              (b"\xff" * 8 + whole[8:], "not a safetensors"),
                              (whole[:8 + length - 1], "not a safetensors"), (whole[:-1], "damaged, or the file was not copied"),
                              (whole[:8] + b"\xff" * length + whole[8 + length:], "not JSON"),
                              (whole[:8] + b"[" * length + whole[8 + length:], "not JSON")):
            with self.subTest(word=word, bytes=len(content)):
                with open(weights, "wb") as file:
                    file.write(content)
                self.assertIn(word, self.convert("--import", directory, "--out", self.path("x.bin"), status=1))
        os.remove(weights)
        error = self.convert("--import", directory, "--out", self.path("x.bin"), status=1)
        self.assertIn("holds no model.safetensors", error)
        self.assertIn("save_pretrained", error)
        with open(config, "wb") as file:
            file.write(b"\xff")
        self.assertIn("config.json is not JSON", self.convert("--import", directory, "--out", self.path("x.bin"), status=1))
        os.remove(config)
        error = self.convert("--import", directory, "--out", self.path("x.bin"), status=1)
        self.assertIn("No such file or directory: " + config, error)
        self.assertFalse(os.path.exists(self.path("x.bin")))


class Export(Case):
    def test_a_directory(self):
        for version, dtype in (3, "F32"), (5, "BF16"):
            with self.subTest(version=version):
                out = self.path(f"out{version}")
                self.convert("--export", self.ours(version=version), "--out", out)
                self.assertEqual(sorted(os.listdir(out)), ["config.json", "model.safetensors"])
                found = read_safetensors(os.path.join(out, "model.safetensors"))
                expected = their_tensors(SHAPE, self.model)
                self.assertEqual(sorted(found), sorted("transformer." + name for name in expected))
                for name, values in expected.items():
                    self.assertEqual(found["transformer." + name][0], dtype)
                    np.testing.assert_array_equal(found["transformer." + name][1], stored(values, dtype), name)
                with open(os.path.join(out, "config.json"), encoding="utf-8") as file:
                    config = json.load(file)
                self.assertEqual(config, {**config, **their_config(SHAPE), "architectures": ["GPT2LMHeadModel"],
                                          "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_inner": None,
                                          "eos_token_id": None, "tie_word_embeddings": True,
                                          "torch_dtype": "float32" if version == 3 else "bfloat16"})
                self.assertImported(out, version)  # and back, to the same bytes

    def test_the_end_of_a_text(self):
        """As tokenizer.bin says it, beside the model or named; else of GPT-2's tokens alone. Rows that no tokenizer has are named."""
        def tokenizer(name, words, last, magic=20240328, version=2):
            with open(self.path(name), "wb") as file:
                file.write(reference.header(magic, version, words, last) + b"\1w" * words)
            return self.path(name)

        def exported(V, *more, status=0, noted=False):
            shape, out = reference.Shape(maxT=8, V=V, L=1, heads=2, C=4, Vp=-(-V // 128) * 128), self.path("out")
            reference.write_model(self.path("some.bin"), shape, reference.random_model(shape))
            shutil.rmtree(out, ignore_errors=True)
            result = subprocess.run([sys.executable, SCRIPT, "--export", self.path("some.bin"), "--out", out, *more],
                                    capture_output=True, text=True, timeout=100, check=False)
            self.assertEqual((result.returncode, "note: nothing says which token ends a text" in result.stderr), (status, noted), result)
            if status:
                return result.stderr
            with open(os.path.join(out, "config.json"), encoding="utf-8") as file:
                config = json.load(file)
            self.assertEqual(config["eos_token_id"], config["bos_token_id"])
            return config["eos_token_id"], "".join(re.findall(r"rows \d+ to \d+ pad", result.stdout))
        for V, end, rows in (50256, None, ""), (50257, 50256, ""), (50304, 50256, "rows 50257 to 50303 pad"), (51200, None, ""), (
                256, None, ""):
            with self.subTest(V=V):
                self.assertEqual(exported(V, noted=V in (50256, 51200)), (end, rows))
        named = tokenizer("named.bin", 500, 7)
        self.assertEqual(exported(512, "--tokenizer", named), (7, "rows 500 to 511 pad"))
        self.assertEqual(exported(50304, "--tokenizer", named), (7, "rows 500 to 50303 pad"))
        tokenizer("tokenizer.bin", 300, 299)
        self.assertEqual(exported(300), (299, ""))
        self.assertEqual(exported(512, "--tokenizer", named), (7, "rows 500 to 511 pad"))
        for wrong in (tokenizer("wrong", 301, 0), tokenizer("wrong1", 10, 10), tokenizer("wrong2", 10, 0, magic=20240520),
                      tokenizer("wrong3", 10, 0, version=1), os.devnull):
            self.assertIn(wrong, exported(300, "--tokenizer", wrong, status=1))
        self.assertIn("--tokenizer is for --export", self.convert("--import", self.theirs(), "--out", self.path("x"), "--tokenizer",
                                                                  named, status=2))

    def test_padding_stays_here(self):
        self.model["wte"][SHAPE.V:] = 7
        self.convert("--export", self.ours(), "--out", self.path("out"))
        self.model["wte"][SHAPE.V:] = 0
        self.assertImported(self.path("out"))

    def test_damaged_files_are_refused(self):
        with open(self.ours(), "rb") as file:
            whole = file.read()
        for at, value, word in ((0, 1, "not a model file"), (1, 4, "version is 4"), (2, 0, "n_positions"),
                                (3, (1 << 24) + 1, "vocab_size"), (4, -1, "n_layer"), (5, 7, "heads"), (6, 1 << 18, "n_embd"), (7, 100, "100 rows"),
                                (7, 129, "promises"), (1, 5, "promises")):
            with self.subTest(at=at, value=value):
                with open(self.path("damaged.bin"), "wb") as file:
                    file.write(whole[:4 * at] + struct.pack("<i", value) + whole[4 * at + 4:])
                self.assertIn(word, self.convert("--export", self.path("damaged.bin"), "--out", self.path("out"), status=1))
        for content in whole[:-1], whole + b"x", whole[:1000], b"":
            with open(self.path("damaged.bin"), "wb") as file:
                file.write(content)
            self.convert("--export", self.path("damaged.bin"), "--out", self.path("out"), status=1)
        error = self.convert("--export", self.directory, "--out", self.path("out"), status=1)
        self.assertIn("It is not a regular file: " + self.directory, error)
        self.assertFalse(os.path.exists(self.path("out")))

    def test_nothing_is_overwritten_or_left(self):
        model = self.ours()
        self.convert("--export", model, "--out", self.path("new/out/"))
        os.rename(self.path("new/out"), self.path("out"))
        os.rmdir(self.path("new"))
        os.mkdir(self.path("empty"))
        os.symlink(self.path("nowhere"), self.path("link"))
        os.mkfifo(self.path("fifo"))
        for there in "out", "empty", "link", "fifo", "model.bin":
            for source in ("--export", model), ("--import", self.path("out")):
                self.assertIn("exists already", self.convert(*source, "--out", self.path(there), status=1))
        limited = (sys.executable, "-c",
                   "import resource, signal, runpy, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
                   "resource.setrlimit(resource.RLIMIT_FSIZE, (50000, 50000)); sys.argv = sys.argv[1:];"
                   "runpy.run_path(sys.argv[0], run_name='__main__')", SCRIPT)
        self.assertIn("File too large", self.convert("--export", model, "--out", self.path("new"), status=1, command=limited))
        self.assertFalse(os.path.exists(self.path("new")))
        self.assertIn("File too large", self.convert("--import", self.path("out"), "--out", self.path("new"), status=1,
                                                     command=limited))
        self.assertFalse(os.path.exists(self.path("new")))

    def test_who_ends_it_finds_nothing(self):
        halted = ("import os, runpy, sys, time; sys.argv = sys.argv[1:];"
                  # naps, because a signal just before a long sleep would be handled after it
                  "os.fsync = lambda file: (print('written', flush=True), [time.sleep(0.05) for nap in range(1200)]);"
                  "runpy.run_path(sys.argv[0], run_name='__main__')")
        for words in ("--export", self.ours()), ("--import", self.theirs()):
            before = os.listdir(self.directory)
            for number, status in (signal.SIGINT, 130), (signal.SIGTERM, 143):
                child = subprocess.Popen([sys.executable, "-c", halted, SCRIPT, *words, "--out", self.path("new")],
                                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                         preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
                self.assertEqual(child.stdout.readline(), "written\n")
                self.assertEqual(len(os.listdir(self.directory)), len(before) + 1)
                child.send_signal(number)
                child.communicate(timeout=60)
                self.assertEqual(child.returncode, status)
                self.assertEqual(sorted(os.listdir(self.directory)), sorted(before))


class Llama(Case):
    shape, tensors_of, config_of = LLAMA, staticmethod(their_llama), staticmethod(config_of_llama)

    def test_there_and_back(self):
        for version, dtype in (3, "F32"), (5, "BF16"):
            for shape in LLAMA, dataclasses.replace(LLAMA, stretch=()), dataclasses.replace(LLAMA, KV=12, eps=1e-5, theta=1e4):
                with self.subTest(version=version, shape=shape):
                    self.shape, self.model = shape, reference.random_model(shape)
                    self.model["wte"][shape.V:] = 0
                    self.assertImported(self.theirs(dtypes=lambda name: dtype), version)
                    out = self.path("out")
                    shutil.rmtree(out, ignore_errors=True)
                    self.convert("--export", self.ours(version=version), "--out", out)
                    found = read_safetensors(os.path.join(out, "model.safetensors"))
                    expected = their_llama(shape, self.model)
                    self.assertEqual(sorted(found), sorted(expected))
                    for name, values in expected.items():
                        self.assertEqual(found[name][0], dtype)
                        np.testing.assert_array_equal(found[name][1], stored(values, dtype), name)
                    with open(os.path.join(out, "config.json"), encoding="utf-8") as file:
                        config = json.load(file)
                    self.assertEqual(config, {**config, **config_of_llama(shape), "architectures": ["LlamaForCausalLM"],
                                              "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
                                              "bos_token_id": None, "eos_token_id": None,
                                              "torch_dtype": "float32" if version == 3 else "bfloat16"})
                    self.assertImported(out, version)

    def test_what_a_configuration_may_say(self):
        """The newer name of rope_scaling, with theta in it; the older one of its type; names without a prefix; a head that is the
        table; what is usual may be missing."""
        config, tensors = config_of_llama(LLAMA), their_llama(LLAMA, self.model)
        scaling, old = config.pop("rope_scaling"), config.copy()
        config["rope_parameters"] = {**scaling, "rope_theta": config.pop("rope_theta")}
        self.assertImported(self.theirs(config=config))
        scaling["type"] = scaling.pop("rope_type")
        self.assertImported(self.theirs(config={**old, "rope_scaling": scaling}))
        config = config_of_llama(LLAMA, head_dim=8, hidden_act="silu", attention_bias=False)
        self.assertImported(self.theirs(config=config, tensors={
            **{name.removeprefix("model."): values for name, values in tensors.items()},
            "lm_head.weight": tensors["model.embed_tokens.weight"], "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4)}))
        self.shape = dataclasses.replace(LLAMA, KV=12, eps=1e-6, theta=1e4, stretch=())
        self.model = reference.random_model(self.shape)
        self.model["wte"][self.shape.V:] = 0
        config = config_of_llama(self.shape, rope_scaling={"rope_type": "default", "factor": 7.0}, factor=3)
        for name in "num_key_value_heads", "rms_norm_eps", "rope_theta":
            del config[name]
        self.assertImported(self.theirs(config=config))

    def test_another_model_is_refused(self):
        for name, value, word in (
                ("model_type", "mistral", "model_type"), ("model_type", ["llama"], "model_type"),
                ("hidden_act", "gelu", "hidden_act"), ("attention_bias", True, "attention_bias"), ("mlp_bias", True, "mlp_bias"),
                ("head_dim", 16, "head_dim is 16"), ("tie_word_embeddings", False, "tie_word_embeddings is False"),
                ("hidden_size", 100, "100 channels cannot be split"), ("num_key_value_heads", 5, "share 5"),
                ("num_key_value_heads", 24, "share 24"), ("num_attention_heads", 32, "are odd"),
                ("num_key_value_heads", 0, "num_key_value_heads is 0"), ("intermediate_size", "112", "intermediate_size is '112'"),
                ("rms_norm_eps", 0, "rms_norm_eps is 0"), ("rms_norm_eps", float("nan"), "rms_norm_eps is nan"),
                ("rms_norm_eps", True, "rms_norm_eps is True"), ("rope_theta", 0, "rope_theta is 0"),
                ("rope_theta", -1e4, "rope_theta is -10000"), ("rope_theta", float("inf"), "rope_theta is inf"),
                ("rope_scaling", "yarn", "rope_scaling is 'yarn'"),
                *(("rope_scaling", {key: kind, "factor": 2.0}, f"rope_scaling is '{kind}', the trainer has only 'default' or")
                  for key, kind in (("type", "linear"), ("rope_type", "dynamic"), ("rope_type", "yarn")))):
            with self.subTest(name=name, value=value):
                self.refused("config.json", word, config=config_of_llama(LLAMA, **{name: value}))
        config = config_of_llama(LLAMA)
        del config["tie_word_embeddings"]  # which transformers take as False
        self.refused("tie_word_embeddings is False", config=config)
        for change, word in (({"factor": None}, "factor is 'missing'"), ({"factor": 0}, "factor is 0"),
                             ({"factor": 0.5}, "factor is 0.5"),
                             ({"low_freq_factor": 4.0}, "between 4.0 and 4.0"), ({"low_freq_factor": -1}, "low_freq_factor is -1"),
                             ({"high_freq_factor": "4"}, "high_freq_factor is '4'"),
                             ({"original_max_position_embeddings": 10.5}, "of 10.5")):
            with self.subTest(change=change):
                scaling = {**config["rope_scaling"], **change}
                self.refused("config.json", word, config=config_of_llama(LLAMA, rope_scaling=scaling))
        del scaling["high_freq_factor"]
        self.refused("high_freq_factor is 'missing'", config=config_of_llama(LLAMA, rope_scaling=scaling))

    def test_fields_that_contradict_the_tensors(self):
        for name, value, word in (("num_key_value_heads", 6, "k_proj.weight is F32 [32, 96], not F32 or F16 or BF16 [48, 96]"),
                                  ("intermediate_size", 100, "mlp.gate_proj.weight is F32 [112, 96]"),
                                  ("vocab_size", 100, "embed_tokens.weight is F32 [101, 96]"),
                                  ("hidden_size", 48, "embed_tokens.weight is F32 [101, 96]"),
                                  ("num_hidden_layers", 1, "layers.1.input_layernorm.weight, which the trainer's Llama does not"),
                                  ("num_hidden_layers", 3, "no tensor layers.2.input_layernorm.weight")):
            with self.subTest(name=name):
                self.refused(word, config=config_of_llama(LLAMA, **{name: value}))
        tensors = their_llama(LLAMA, self.model)
        bias, head = "model.layers.1.self_attn.q_proj.bias", "lm_head.weight"
        self.refused("has layers.1.self_attn.q_proj.bias", tensors={**tensors, bias: np.ones(96)})
        self.refused("lm_head.weight is not the token table", tensors={**tensors, head: tensors["model.embed_tokens.weight"] + 1})
        self.refused("n_positions", config=their_config(SHAPE, n_positions=0))  # neither is taken for the other
        self.refused("no tensor wte.weight", config=their_config(SHAPE))

    def test_damaged_files_are_refused(self):
        with open(self.ours(), "rb") as file:
            whole = file.read()
        for at, value, word in ((0, 20240326, "promises"), (1, 4, "version is 4"), (8, 0, "num_key_value_heads is 0"),
                                (8, 5, "share 5"),
                                (8, 6, "promises"), (9, -1, "intermediate_size is -1"), (9, 111, "promises"),
                                (10, 0, "rms_norm_eps is 0.0"), (11, 0, "rope_theta is 0.0"), (11, 0x7FC00000, "rope_theta is nan"),
                                (12, -1, "factor is nan"), (13, 0, "low_freq_factor is 0"),
                                (15, 0, "original_max_position_embeddings is 0")):
            with self.subTest(at=at, value=value):
                with open(self.path("damaged.bin"), "wb") as file:
                    file.write(whole[:4 * at] + struct.pack("<i", value) + whole[4 * at + 4:])
                self.assertIn(word, self.convert("--export", self.path("damaged.bin"), "--out", self.path("out"), status=1))
        self.assertFalse(os.path.exists(self.path("out")))


class Options(Case):
    def test_options(self):
        for wrong, word in (((), "--import"), (("--import", "a", "--export", "b"), "not allowed"), (("--import", "a"), "--out")):
            with self.subTest(wrong=wrong):
                self.assertIn(word, self.convert(*wrong, status=2))
