"""A new block of known kinds is a row of layers/params.h: in a copy of the sources, two rows, each of kinds that no block has
together, train as numpy does on every mesh, are saved and resumed on another mesh, and their files are never taken for another
block's. What the kernels cannot compute is not compiled."""
# limit: 600
# quick: none
import os
import pathlib
import shutil
import struct
import subprocess
import unittest

import numpy as np

import checkpoints
import grown
import harness
import meshes
import reference
import shapes

FILE, LAST = "layers/params.h", "    ROW(llama, RMSNORM, ROTARY, SWIGLU, false, 0, 20261129)\n"
ROWS = {"plain": "RMSNORM, LEARNED, GELU, true, 4, 20261201", "turned": "LAYERNORM, ROTARY, SWIGLU, false, 0, 20261202"}
BLOCKS = {"plain": shapes.Block(20261201, True, False, False, True), "turned": shapes.Block(20261202, False, True, True, False)}


def with_rows(rows):
    """params.h with more blocks."""
    def add(source):
        assert LAST in source
        return source.replace(LAST, " \\\n".join([LAST[:-1], *(f"    ROW({name}, {row})" for name, row in rows.items())]) + "\n")
    return add


class Tree(grown.Case):
    """The copy of the sources, for all cases."""


def setUpModule():
    shapes.BLOCKS.update({block.magic: block for block in BLOCKS.values()})
    Tree.setUpClass()
    unittest.addModuleCleanup(Tree.doClassCleanups)
    Tree.grow({FILE: with_rows(ROWS)}, f"{grown.B}/train_gpt")
    assert Tree.lines == len(ROWS)


class Trained:
    """By the program with more rows."""
    T, samples, name = 24, 12, None

    def train(self, ranks=1, timeout=60, **more):
        log = self.fresh("log.jsonl")
        result = harness.run(self.arguments(log=log, **more), ranks, timeout, program=Tree.program)
        self.assertEqual(result.status, 0, str(result))
        return harness.read_log(log), result

    def test_it_trains_as_numpy_does(self):
        for strategy in meshes.STRATEGIES:
            for mesh in (1, 1, 3), (2, 1), (1, 2), (2, 2, 3):
                for recompute in 0, 1:
                    with self.subTest(strategy=strategy, mesh=mesh, recompute=recompute):
                        self.trained(*mesh, strategy=strategy, overlap="ring:2", recompute=recompute)

    def test_it_is_saved_and_resumed(self):
        shape = dict(block=self.name, layers=2, channels=96, heads=12, kv_heads=self.shape.KV, ffn=self.shape.F, vocab=101)
        more = dict(init_from=None, schedule="constant", steps=6, save_every=3, keep=0)
        out = self.fresh("out")
        whole = [s["loss"] for s in harness.events(self.train(2, tp=2, out=out, **shape, **more)[0], "step")]
        shutil.rmtree(checkpoints.directory(out, 6))
        losses = [s["loss"] for s in harness.events(self.train(2, dp=2, micro_batch=6, out=out, **more)[0], "step")]
        np.testing.assert_allclose(losses, whole[3:], rtol=1e-5)
        of_another = harness.run(self.arguments(out=out, **more, **{**shape, "block": "llama"}), program=Tree.program)
        self.assertFails(of_another, "another model")
        self.assertFails(harness.run(self.arguments(out=out, **more)), f"--block {self.name}", "continue with the program that")

    def test_its_files_are_its_own(self):
        out = self.fresh("out")
        self.train(out=out)
        path, magic = os.path.join(out, "model.bin"), BLOCKS[self.name].magic
        self.assertEqual(struct.unpack("<i", pathlib.Path(path).read_bytes()[:4])[0], magic)
        self.assertEqual(reference.read_model(path)[0], self.shape)
        _, result = self.train(init_from=path, steps=1)
        self.assertIn(f"units of {self.name}", result.out)
        self.assertFails(harness.run(self.arguments(init_from=path)), "not a model file", str(magic), "llama: 20261129")

    def test_it_is_told_of(self):
        self.assertIn("--block gpt2|llama|plain|turned", harness.run(["--help"], program=Tree.program).out)
        shape = dict(init_from=None, block=self.name, layers=2, channels=96, heads=12, kv_heads=6, ffn=144, tp=2, dry_run=True)
        result = harness.run(self.arguments(**shape), program=Tree.program)
        self.assertEqual(result.status, 0, str(result))
        self.assertIn(f"{self.name}, 6 heads of keys, 144 units", result.out, "of the plan")
        result = harness.run(self.arguments(**shape, rope_theta=50), program=Tree.program)
        if BLOCKS[self.name].rotary:
            self.assertEqual(result.status, 0, str(result))
        else:
            self.assertFails(result, f"--rope-theta: blocks of {self.name} have none")


class Plain(Trained, meshes.Training):
    name, shape = "plain", reference.Shape(48, 101, 2, 12, 96, 128, KV=12, F=384, block=BLOCKS["plain"])


class Turned(Trained, meshes.Training):
    name, shape = "turned", reference.Shape(48, 101, 2, 12, 96, 128, KV=6, F=144, eps=1e-4, theta=100.0, block=BLOCKS["turned"])


class Refused(harness.Case):
    def refused(self, row, *words):
        """A row that does not compile."""
        path = Tree.tree / FILE
        before = path.read_text(encoding="utf-8")
        self.addCleanup(path.write_text, before, encoding="utf-8")
        path.write_text(with_rows({"wrong": row})(grown.ROOT.joinpath(FILE).read_text(encoding="utf-8")), encoding="utf-8")
        made = subprocess.run(["make", f"{grown.B}/layers/params.o"], cwd=Tree.tree, text=True, check=False, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)
        self.assertNotEqual(made.returncode, 0, made.stdout)
        for word in words:
            self.assertIn(word, made.stdout)

    def test_what_no_kernel_has(self):
        self.refused("RMSNORM, ROTARY, GELU, false, 4, 20261203", "wrong: ", "a product with a bias")

    def test_a_kind_that_is_none(self):
        self.refused("RMSNORM, ROTARY, 2, true, 4, 20261203", "wrong: a kind is not computed")

    def test_the_magic_of_another_block(self):
        self.refused("RMSNORM, ROTARY, SWIGLU, true, 4, 20261129", "redeclaration of enumerator", "MODEL_FILES_20261129")
