"""Llama's block: the same ten steps on every mesh, by every schedule, and the right ones (see meshes.py); a run that goes on; what
is refused. Twelve heads of keys and values serve twenty-four of queries, on six ranks two, and slow angles are stretched."""
# quick: plan goes_on refused old_checkpoint
# limit: 600
import ctypes
import json
import os
import pathlib
import re

import numpy as np

import checkpoints
import harness
import meshes
import reference

SHAPE = reference.Shape(maxT=31, V=197, L=3, heads=24, C=96, Vp=206, KV=12, F=144, eps=1e-4, theta=100.0,
                        stretch=(8.0, 1.0, 4.0, 16))
OPTIONS = dict(init_from=None, model=None, layers=2, channels=96, heads=24, kv_heads=12, block="llama", vocab=197, ffn=144)


class Steps(meshes.Training):
    shape, T, samples = SHAPE, 24, 12

    def check_meshes(self, *shapes):
        for strategy in meshes.STRATEGIES:
            for tp, dp, accumulate in shapes:
                self.check_bits(tp, dp, accumulate, slices=2, strategy=strategy)
                self.check_others(tp, dp, accumulate, slices=2, strategy=strategy)

    def test_one_rank(self):
        for recompute in 0, 1:
            steps = self.trained(1, 1, 3, strategy="tpsp", overlap="none", recompute=recompute)[0]
            self.assertLess(steps[-1][0], steps[0][0] - 0.3)

    def test_two_ranks(self):
        self.check_meshes((2, 1, 1), (1, 2, 3))

    def test_four_ranks(self):
        self.check_meshes((2, 2, 3), (4, 1, 1))

    def test_six_ranks(self):
        for strategy in meshes.STRATEGIES:
            self.check_bits(6, 1, slices=2, strategy=strategy)
            self.check_bits(3, 2, slices=2, strategy=strategy)

    def test_nothing_computed_again(self):
        for strategy in meshes.STRATEGIES:
            with self.subTest(strategy=strategy):
                first, again = (self.trained(2, 1, 2, strategy=strategy, overlap="none", recompute=again) for again in (0, 1))
                self.assertTrue(first[1] == again[1], "model.bin differs")


class WideTokens(meshes.Training):
    """A vocabulary above 65,536 has token files of 32 bits."""
    shape, T, samples, strategy, steps = reference.Shape(8, 70001, 1, 4, 16, 70016, KV=2, F=16), 8, 6, "tpsp", 3

    def test_training(self):
        self.assertGreater(reference.read_tokens(self.tokens).max(), 65536)
        for mesh in (1, 1), (2, 1), (1, 2):
            self.assertSameTraining(self.steps_of(*mesh))
        self.assertFails(harness.run(self.arguments(init_from=None, vocab=65536, seq=8)), "but the vocabulary has 65536")


class Resume(harness.Case):
    shape, T = SHAPE, 24

    def losses(self, out, ranks=1, **more):
        values = {**OPTIONS, **dict(schedule="constant", steps=6, save_every=3, keep=0, out=out)} | more
        return [s["loss"] for s in harness.events(self.train(ranks, **values)[0], "step")]

    def cut_back(self, out):
        """To the first of two checkpoints; returns the model that the run had ended with."""
        path = pathlib.Path(out, "model.bin")
        model = path.read_bytes()
        path.unlink()
        for file in pathlib.Path(checkpoints.directory(out, 6)).iterdir():
            file.unlink()
        os.rmdir(checkpoints.directory(out, 6))
        return model

    def test_goes_on_with_the_shape_of_the_checkpoint(self):
        out = self.fresh("out")
        whole = self.losses(out, norm_eps=1e-4, rope_theta=123.5)
        model = self.cut_back(out)
        shape = {name: None for name in OPTIONS}
        self.assertEqual(self.losses(out, **shape), whole[3:])
        self.assertTrue(model == pathlib.Path(out, "model.bin").read_bytes(), "model.bin differs")
        self.assertEqual(reference.read_model(os.path.join(out, "model.bin"))[0].theta, 123.5)
        self.cut_back(out)
        np.testing.assert_allclose(self.losses(out, 4, tp=2, dp=2, micro_batch=4, strategy="up", **shape), whole[3:], 1e-5)
        for other in dict(kv_heads=6), dict(ffn=128), dict(rope_theta=124), dict(norm_eps=1e-5), dict(block="gpt2"):
            name, value = *other, *other.values()
            option = "--" + name.replace("_", "-")
            result = harness.run(self.arguments(**{**shape, "schedule": "constant", "steps": 6, "out": out, **other}))
            self.assertFails(result, f"{option} {value}", "(the checkpoint: ", "another model")

    def test_old_checkpoint_is_gpt2_s(self):
        """One that names no block: its manifest without the six options, and sealed again."""
        out, more = self.fresh("out"), dict(block=None, kv_heads=None, ffn=None)
        whole = self.losses(out, **more)
        self.cut_back(out)
        path = pathlib.Path(checkpoints.directory(out, 3), "manifest.json")
        text = path.read_text().splitlines(True)
        new = ("block", "kv-heads", "ffn", "norm-eps", "rope-theta", "rope-stretch")
        kept = [line for line in text[:-2] if not line.strip().startswith(tuple(f'"{name}":' for name in new))]
        self.assertEqual(len(text) - 2 - len(kept), len(new))
        body = "".join(kept).encode()
        xxhash = ctypes.CDLL("libxxhash.so.0")
        xxhash.XXH64.restype = ctypes.c_uint64
        seal = xxhash.XXH64(body, ctypes.c_size_t(len(body)), ctypes.c_uint64(0))
        path.write_bytes(body + b'\t"xxh64":\t"%016x"\n}\n' % seal)
        json.loads(path.read_text())
        self.assertEqual(self.losses(out, **more), whole[3:])


class Refused(harness.Case):
    def refused(self, *words, **more):
        result = harness.run(self.arguments(**{**OPTIONS, "dry_run": True, **more}))
        self.assertFails(result, *words)
        self.assertNotIn("memory", result.out)

    def test_shapes_are_refused_before_memory_is_taken(self):
        self.refused("24 heads cannot share 5 heads", "--kv-heads", kv_heads=5)
        self.refused("a head has 3", "even", heads=32, kv_heads=32)
        self.refused("145 units", "--tp 2", "--ffn", ffn=145, tp=2)
        self.refused("12 heads of keys and values do not divide over --tp 8", "at most --tp 12", tp=8, seq=24)
        self.refused("12 heads of keys and values do not divide over --tp 8", "at most --tp 6", tp=8, seq=24, ffn=150)
        self.refused("12 heads of keys and values do not divide over --tp 8", "at most --tp 12", tp=8, seq=24, ffn=145,
                     strategy="up")
        self.refused("--rope-theta 0 is out of range", rope_theta=0)
        self.refused("--norm-eps 0 is out of range", norm_eps=0)

    def test_options_of_llama_are_refused_beside_gpt2(self):
        for option in dict(kv_heads=12), dict(ffn=144), dict(rope_theta=100), dict(norm_eps=1e-5):
            more = {**dict(block=None, kv_heads=None, ffn=None), **option}
            self.refused("--" + [*option][0].replace("_", "-"), "blocks of gpt2 have none", "--block llama", **more)
        more = dict.fromkeys(OPTIONS)
        self.refused("--model smollm2-135m has blocks of llama", **{**more, "model": "smollm2-135m", "block": "gpt2"})
        more["init_from"] = self.model
        self.refused("--block is set by the model file", **{**more, "block": "llama"})

    def test_known_models_have_their_numbers(self):
        """Of parameters, as their cards have them, and of positions."""
        for name, millions in ("smollm2-135m", "134.52"), ("smollm2-360m", "361.82"), ("smollm2-1.7b", "1711.38"), \
                ("llama3.2-1b", "1235.81"):
            more = {**dict.fromkeys(OPTIONS), "model": name, "dry_run": True, "train": None, "batch": None, "micro_batch": 1}
            result = harness.run(self.arguments(**{**more, "seq": 64}))
            self.assertIn(f"{millions} M parameters", result.out, str(result))
        result = harness.run(self.arguments(**{**more, "model": "smollm2-135m", "seq": 8193}))
        self.assertFails(result, "8193 is longer than the model's 8192 positions")

    def test_plan_of_a_machine(self):
        """A prediction: shared keys shorten the step, and of what must be hidden UP's all-to-all has less."""
        steps = {}
        for kv_heads in 4, 16:
            result = harness.run(["--predict", "h100x8", "--block", "llama", "--heads", 16, "--channels", 1024, "--layers", 4,
                                  "--kv-heads", kv_heads, "--tp", 2, "--strategy", "up", "--micro-batch", 8])
            self.assertEqual(result.status, 0, str(result))
            steps[kv_heads] = {mode: float(ms) for mode, ms in re.findall(r"^(\w+) +([\d.]+) ", result.out, re.MULTILINE)}
        for mode in "none", "ring", "auto":
            self.assertLess(steps[4][mode], steps[16][mode])
        self.assertLess(steps[4]["none"] - steps[4]["auto"], steps[16]["none"] - steps[16]["auto"])

    def test_plan_is_of_its_shape(self):
        more = {**OPTIONS, "tp": 2, "seq": 24, "steps": 2}
        result = harness.run(self.arguments(**more, dry_run=True))
        plan = pathlib.Path(self.fresh("plan.json"))
        plan.write_text(result.out[result.out.index("{\n"):result.out.index("\n}") + 2])
        self.train(2, plan=plan, **more)
        other = harness.run(self.arguments(**{**more, "plan": plan, "kv_heads": 6}), 2)
        self.assertFails(other, "llama, 12 heads of keys, 144 units", "llama, 6 heads of keys")
