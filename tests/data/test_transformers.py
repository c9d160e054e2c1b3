"""Hugging Face's transformers and PyTorch as judges: models of theirs are imported, trained here and there, and exported.

They are no requirement of anything (2 GB):  build/venv/bin/pip install torch transformers && make test T=transformers
"""
# python: venv
# limit: 600
import glob
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import unittest

import numpy as np

import harness
import reference
from prepared import BPE, keep_vocabulary

try:
    import torch
    import transformers
except ImportError as missing:
    raise unittest.SkipTest(f"PyTorch and transformers are not here: {missing}")

SCRIPT = os.path.join(harness.ROOT, "data", "hugging_face.py")
T, B, STEPS, LR = 64, 4, 10, 1e-3


def their_model(vocab, dtype=torch.float32):
    return random_weights(transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=vocab, n_positions=T, n_embd=96, n_layer=2, n_head=6, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=None, eos_token_id=None)), dtype)


def their_llama(keys, stretch=None, dtype=torch.float32):
    """Twelve heads that share keys and values."""
    return random_weights(transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=300, max_position_embeddings=T, hidden_size=96, num_hidden_layers=2, num_attention_heads=12,
        num_key_value_heads=keys, intermediate_size=120, rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, rope_parameters={"rope_type": "default", "rope_theta": 500.0, **(stretch or {})})), dtype)


STRETCH = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 32}


def random_weights(model, dtype):
    """Every weight random, biases and norms too."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn_like(weights) * 0.05)
    return model.to(dtype)


def train_there(model, inputs, targets):
    """(loss, norm) of each step, in double precision, by PyTorch's AdamW."""
    model, history = model.double(), []
    matrices = [weights for weights in model.parameters() if weights.dim() == 2]
    vectors = [weights for weights in model.parameters() if weights.dim() != 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}], LR,
                                  (0.9, 0.95), 1e-8)
    for _ in range(STEPS):
        logits = model(torch.tensor(inputs)).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append((loss.item(), norm.item()))
    return history


class Case(unittest.TestCase):
    def setUp(self):
        self.directory = harness.temporary_directory(self)

    def path(self, name):
        return os.path.join(self.directory, name)

    def convert(self, *arguments):
        result = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=100)
        self.assertEqual(result.returncode, 0, result.stderr)

    def check_training(self, model, of_loss, of_norm):
        """Ten steps here, on several meshes, and there; then both have the same logits."""
        model.save_pretrained(self.path("theirs"))
        self.convert("--import", self.path("theirs"), "--out", self.path("model.bin"))
        tokens = harness.random_tokens(B * T + 1, 300)  # every step takes all samples
        reference.write_tokens(self.path("tokens.bin"), tokens)
        expected = train_there(model, *reference.samples(tokens, T))
        for mesh in dict(tp=1, dp=1), dict(tp=2, dp=1), dict(tp=2, dp=1, strategy="up"), dict(tp=1, dp=2):
            with self.subTest(**mesh):
                out, log = self.path("-".join(map(str, mesh.values()))), self.path("log.jsonl")
                result = harness.run(harness.options(
                    init_from=self.path("model.bin"), train=self.path("tokens.bin"), seq=T, steps=STEPS, lr=LR, out=out,
                    schedule="constant", micro_batch=B // mesh["dp"], log=log, threads=1, **mesh), mesh["tp"] * mesh["dp"])
                self.assertEqual(result.status, 0, str(result))
                steps = harness.events(harness.read_log(log), "step")
                os.remove(log)
                self.assertEqual(len(steps), len(expected))
                for step, (loss, norm) in zip(steps, expected):
                    self.assertLess(abs(step["loss"] / loss - 1), of_loss, step)
                    self.assertLess(abs(step["grad_norm"] / norm - 1), of_norm, step)
                ids = torch.tensor(tokens[None, :T])
                with torch.no_grad():
                    difference = (self.exported(os.path.join(out, "model.bin"))(ids).logits - model(ids).logits).abs().max().item()
                self.assertLess(difference, 1e-3)
        self.assertLess(expected[-1][0], expected[0][0] - 1)

    def exported(self, model):
        shutil.rmtree(self.path("back"), ignore_errors=True)
        self.convert("--export", model, "--out", self.path("back"))
        return transformers.AutoModelForCausalLM.from_pretrained(self.path("back"))

    def check_there_and_back(self, model, name):
        theirs, ours, back = (self.path(f"{name}-{kind}") for kind in ("theirs", "model.bin", "back"))
        model.save_pretrained(theirs, max_shard_size="100KB")  # several files
        self.convert("--import", theirs, "--out", ours)
        self.convert("--export", ours, "--out", back)
        found, told = transformers.AutoModelForCausalLM.from_pretrained(back, dtype="auto", output_loading_info=True)
        self.assertEqual([list(values) for values in told.values()], [[]] * len(told))
        self.assertEqual(found.dtype, torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float32)
        for (name, mine), (same, weights) in itertools.zip_longest(found.named_parameters(), model.named_parameters()):
            self.assertTrue(name == same and torch.equal(mine.float(), weights.float()), name)
        return found


class GPT2(Case):
    def test_training_is_the_same(self):
        self.check_training(their_model(vocab=300), 1e-6, 1e-5)

    def test_there_and_back(self):
        for dtype in torch.float32, torch.float16, torch.bfloat16:
            with self.subTest(dtype=dtype):
                found = self.check_there_and_back(their_model(256, dtype), str(dtype))
                ids = list("To be, or not to be: that is\n\tthe €question.\0".encode())
                longer = found.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=True, pad_token_id=0)
                self.assertEqual(longer.shape, (1, len(ids) + 5))

    @unittest.skipUnless(importlib.util.find_spec("lm_eval"),
                         "no lm_eval: build/venv/bin/pip install -U --upgrade-strategy eager 'lm_eval[hf]'")
    @unittest.skipUnless(os.path.isdir(BPE), "GPT-2's vocabulary is not here")
    def test_lm_eval_asks_an_exported_model(self):
        """As data/README has it, for a task made here in place of one that is downloaded: its accuracy is that of PyTorch's own
        losses."""
        model = their_model(50257)
        model.save_pretrained(self.path("theirs"))
        self.convert("--import", self.path("theirs"), "--out", self.path("model.bin"))
        self.convert("--export", self.path("model.bin"), "--out", self.path("my-gpt2"))
        for ours, theirs in ("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt"):
            shutil.copy(os.path.join(BPE, ours), os.path.join(self.path("my-gpt2"), theirs))
        draw, words = random.Random(1), "a dog ran home over the green hill and sat down".split()
        questions = [{"query": " ".join(draw.choices(words, k=6)), "gold": draw.randrange(3),
                      "choices": [" ".join(draw.choices(words, k=3)) for _ in range(3)]} for _ in range(12)]
        with open(self.path("questions.json"), "w", encoding="utf-8") as file:
            file.write("\n".join(map(json.dumps, questions)))
        with open(self.path("tiny.yaml"), "w", encoding="utf-8") as file:
            json.dump({"task": "tiny", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": self.path("questions.json")}},
                       "output_type": "multiple_choice", "test_split": "test", "doc_to_text": "{{query}}", "doc_to_target": "{{gold}}",
                       "doc_to_choice": "choices", "metric_list": [{"metric": "acc"}]}, file)  # JSON is YAML
        with open(os.path.join(harness.ROOT, "data/README.md"), encoding="utf-8") as file:
            command, = re.findall(r"`lm_eval (.*? hellaswag)`", file.read())
        result = subprocess.run([sys.executable, "-m", "lm_eval", *command.replace("hellaswag", "tiny").split(), "--device", "cpu",
                                 "--include_path", self.directory, "--output_path", self.path("said.json")], cwd=self.directory,
                                env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": self.path("cache")}, capture_output=True,
                                text=True, timeout=280)
        self.assertEqual(result.returncode, 0, result.stderr[-3000:])
        with open(glob.glob(self.path("said*.json"))[0], encoding="utf-8") as file:
            accuracy = json.load(file)["results"]["tiny"]["acc,none"]
        tokenizer, right = transformers.AutoTokenizer.from_pretrained(self.path("my-gpt2")), 0
        for question in questions:
            losses = []
            for choice in question["choices"]:
                begin, ids = len(tokenizer(question["query"])["input_ids"]), tokenizer(f"{question['query']} {choice}")["input_ids"]
                with torch.no_grad():
                    said = model(torch.tensor([ids])).logits[0].log_softmax(-1)
                losses.append(-sum(said[i - 1, ids[i]].item() for i in range(begin, len(ids))))
            right += losses.index(min(losses)) == question["gold"]
        self.assertAlmostEqual(accuracy, right / len(questions), places=6)

    @unittest.skipUnless(os.path.isdir(BPE), "GPT-2's vocabulary is not here")
    def test_tokens_of_gpt2(self):
        import tiktoken  # in the environment
        their_model(50257).save_pretrained(self.path("theirs"))
        self.convert("--import", self.path("theirs"), "--out", self.path("model.bin"))
        self.convert("--export", self.path("model.bin"), "--out", self.path("back"))
        for ours, theirs in ("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt"):
            shutil.copy(os.path.join(BPE, ours), os.path.join(self.path("back"), theirs))
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.path("back"))
        sys.path.insert(0, os.path.join(harness.ROOT, "data"))
        import prepare
        os.mkdir(self.path("bpe"))
        keep_vocabulary(self.path("bpe"))
        ours = prepare.load_gpt2()
        self.assertIsInstance(ours, tiktoken.Encoding)
        text = "CommFuse's last computation needs no communication.\n\n  日本語 — 12345"
        self.assertEqual(tokenizer(text)["input_ids"], ours.encode_ordinary(text))
        self.assertEqual(tokenizer.convert_tokens_to_ids("<|endoftext|>"), 50256)


class Llama(Case):
    def test_training_is_the_same(self):
        """Without and with shared keys and values, and with the stretch of positions of Llama 3."""
        for keys, stretch in (12, None), (4, None), (2, STRETCH):
            with self.subTest(keys=keys, stretch=stretch):
                shutil.rmtree(self.directory)
                os.mkdir(self.directory)
                self.check_training(their_llama(keys, stretch), 1e-5, 1e-5)

    def test_there_and_back(self):
        for dtype in torch.float32, torch.float16, torch.bfloat16:
            for keys, stretch in (12, None), (4, STRETCH):
                with self.subTest(dtype=dtype, keys=keys):
                    model = their_llama(keys, stretch, dtype)
                    found, ids = self.check_there_and_back(model, f"{dtype}-{keys}"), torch.arange(T)[None]
                    self.assertEqual(found.config.rope_parameters, model.config.rope_parameters)
                    with torch.no_grad():  # .to() rounds their angles too
                        self.assertTrue(dtype != torch.float32 or torch.equal(found(ids).logits, model(ids).logits))

    def test_generation_and_losses_are_the_same(self):
        """The most likely 50 tokens after a prompt, the loss of each sequence; and the reference has the export's logits."""
        prompt, tokens = [5, 77, 19, 100, 5], harness.random_tokens(8 * T + 1, 300)
        with open(self.path("tokenizer.bin"), "wb") as file:
            words = [f"<{token}>".encode() for token in range(300)]
            file.write(reference.header(20240328, 2, 300, 0) + b"".join(bytes([len(word)]) + word for word in words))
        with open(self.path("prompt"), "w", encoding="utf-8") as file:
            file.write(" ".join(map(str, prompt)))
        for keys, stretch in (12, None), (4, STRETCH):
            model = their_llama(keys, stretch)
            model.save_pretrained(self.path(f"theirs{keys}"))
            self.convert("--import", self.path(f"theirs{keys}"), "--out", self.path(f"model{keys}.bin"))
            found = model.generate(torch.tensor([prompt]), max_new_tokens=50, do_sample=False, pad_token_id=0)
            expected = "".join(f"<{token}>" for token in found[0].tolist())
            inputs, targets = (torch.tensor(x) for x in reference.samples(tokens, T))
            with torch.no_grad():
                logits = self.exported(self.path(f"model{keys}.bin"))(inputs).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
            ours = reference.forward(*reference.read_model(self.path(f"model{keys}.bin")), inputs.numpy(), targets.numpy())[1][-1]
            self.assertLess(np.abs(np.log(ours) - torch.log_softmax(logits, -1).numpy()).max(), 1e-4)
            reference.write_tokens(self.path("tokens.bin"), tokens)
            for mesh in dict(tp=1), dict(tp=2), dict(tp=4, strategy="up"):
                with self.subTest(keys=keys, **mesh):
                    log = self.path("log.jsonl")
                    result = harness.run(harness.options(
                        init_from=self.path(f"model{keys}.bin"), val=self.path("tokens.bin"), seq=T, steps=0, micro_batch=8,
                        log=log, threads=1, val_every=1, sample_every=1, temperature=0, sample_tokens=50, prompt_tokens=self.path("prompt"),
                        **mesh), mesh["tp"])
                    self.assertEqual(result.status, 0, str(result))
                    events = harness.read_log(log)
                    os.remove(log)
                    self.assertEqual([event["text"] for event in harness.events(events, "sample")], [expected])
                    self.assertLess(abs(harness.events(events, "val")[0]["loss"] / loss - 1), 1e-6)

    def test_the_block_that_times_are_compared_with(self):
        """tests/bench/torch_gpt.py's is the same function as the reference."""
        import torch_gpt
        shape = reference.Shape(maxT=T, V=300, L=2, heads=12, C=96, Vp=300, KV=4, F=112)
        parameters, model = reference.random_model(shape), torch_gpt.GPT(2, 96, 12, T, 300, "llama", 4, 112).double()
        named = {"wte.weight": parameters["wte"], "norm.weight": parameters["lnfw"]}
        for theirs, ours in dict(norm1="ln1w", norm2="ln2w", qkv="qkvw", attproj="attprojw", fc="fcw", fcproj="fcprojw").items():
            named.update((f"blocks.{layer}.{theirs}.weight", parameters[ours][layer]) for layer in range(2))
        model.load_state_dict({name: torch.tensor(values) for name, values in named.items()})
        inputs, targets = reference.samples(harness.random_tokens(3 * T + 1, 300), T)
        loss = model(torch.tensor(inputs), torch.tensor(targets)).item()
        self.assertLess(abs(loss / reference.forward(shape, parameters, inputs, targets)[0] - 1), 1e-7)
