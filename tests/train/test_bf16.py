"""--dtype bf16 on CPUs: see halves.py; the program for the other type is found, and a processor without such products is refused.

quick: Bf16 Refused Resume test_other_shape
limit: 400
make: bf16-tools
"""
import importlib.machinery
import os
import re
import shutil
import struct
import unittest
import unittest.mock

import halves
import harness
import meshes
import reference
import test_gradients
from processor import FLAGS, needs_bf16

bench = importlib.machinery.SourceFileLoader("bench_run", os.path.join(harness.ROOT, "tests", "bench", "run.py")).load_module()
INSTRUCTIONS = {"avx512_bf16", "amx_bf16"}  # of a processor that multiplies bf16


@needs_bf16
class Bf16(halves.Training):
    shape = reference.Shape(maxT=48, V=101, L=6, heads=4, C=32, Vp=128)  # later layers share buffers of gradients that travel
    meshes = (2, 1), (1, 2), (2, 2)
    others = dict(overlap="none"), dict(overlap="slice:3")

    def arguments(self, **more):
        return meshes.Training.arguments(self, **dict(dtype="bf16") | more)

    def test_two_threads(self):
        self.assertEqual(*(self.losses(1, 1, threads=threads) for threads in (2, 2)), "bits differ from run to run")

    def test_what_is_written_and_read(self):
        out = self.fresh("out")
        log, _ = self.train(out=out, dtype="bf16")
        self.assertEqual(harness.events(log, "config")[0]["dtype"], "bf16")
        path = os.path.join(out, "model.bin")
        with open(path, "rb") as file:
            self.assertEqual(struct.unpack("<3i", file.read(12))[:2], (20240326, 5), "llm.c's file of bf16")
        half, whole = (harness.events(self.train(init_from=path, dtype=dtype, steps=1)[0], "step")[0]["loss"]
                       for dtype in ("bf16", "fp32"))
        self.assertNotEqual(half, whole)
        self.assertLess(abs(half / whole - 1), halves.BAND)

    def test_either_program_starts_the_other(self):
        for program in (harness.PROGRAM, f"{harness.PROGRAM}_bf16"):
            for dtype in ("fp32", "bf16"):
                with self.subTest(program=program, dtype=dtype):
                    log = self.fresh("log.jsonl")
                    result = harness.run(self.arguments(dtype=dtype, log=log), program=program)
                    self.assertEqual(result.status, 0, str(result))
                    self.assertIn(f"CPU, {dtype};", result.out, str(result))
                    self.assertEqual(harness.read_log(log)[0]["dtype"], dtype)


@needs_bf16
class Many(halves.Training):
    """Sums of up to sixteen ranks' parts, each rounded before it is sent, stay within the band."""
    shape = reference.Shape(maxT=48, V=101, L=2, heads=16, C=64, Vp=128)
    arguments, T, samples, steps = Bf16.arguments, 32, 16, 4
    test_one_rank = test_meshes = test_gradients_travel_in_bf16 = test_goes_on_from_what_it_saved = None

    def test_sixteen_ranks(self):
        for strategy, tp, dp in (("tpsp", 8, 1), ("tpsp", 16, 1), ("up", 16, 1), ("tpsp", 1, 16), ("tpsp", 4, 4), ("up", 2, 8)):
            for dtype in ("fp32", "bf16") if dp > 1 or strategy == "up" else ("fp32",):
                for overlap in ("ring", "levels"):
                    with self.subTest(strategy=strategy, tp=tp, dp=dp, reduce_dtype=dtype, overlap=overlap):
                        self.losses(tp, dp, strategy=strategy, overlap=overlap, reduce_dtype=dtype)


class Refused(meshes.Training):
    strategy, steps, arguments = "tpsp", 6, Bf16.arguments

    def test_the_other_program_is_missing(self):
        alone = shutil.copy(harness.PROGRAM, self.fresh("train_gpt"))
        self.assertFails(harness.run(self.arguments(), program=alone), "--dtype bf16", "train_gpt_bf16", "make")

    def test_a_program_under_the_other_name(self):
        folder = harness.temporary_directory(self)
        wrong = shutil.copy(harness.PROGRAM, os.path.join(folder, "train_gpt_bf16"))
        self.assertFails(harness.run(self.arguments(), program=wrong), "--dtype bf16", "this one, for fp32")

    def test_processor_without_such_products(self):
        """oneDNN is told that it has AVX2 alone."""
        for mesh in (1, 1), (2, 1):
            with self.subTest(mesh=mesh), unittest.mock.patch.dict(os.environ, ONEDNN_MAX_CPU_ISA="AVX2"):
                self.assertFails(harness.run(self.arguments(**self.recipe(*mesh)), mesh[0] * mesh[1]), "--dtype bf16", "AVX-512",
                                 "use --dtype fp32")

    @needs_bf16
    def test_processor_without_instructions_for_them(self):
        """oneDNN is told that it has AVX-512 without them: the banner says what fp32 reaches, and benchmarks leave bf16 out."""
        told = (r"(?m)^peak .*\n +this processor has no instructions for bf16: --dtype fp32(?: \(peak ([\d.]+) TFLOP/s\))? "
                r"is faster$")
        for isa, slow in ("AVX512_CORE", True), ("ALL", not INSTRUCTIONS & FLAGS):
            with self.subTest(isa=isa), unittest.mock.patch.dict(os.environ, ONEDNN_MAX_CPU_ISA=isa):
                for more, peak in (dict(peak_tflops=0), slow), (dict(peak_tflops=1), False), (dict(dry_run=True), False):
                    banner = harness.run(self.arguments(**more), timeout=120)
                    self.assertEqual(banner.status, 0, str(banner))
                    found = re.search(told, banner.out)
                    self.assertEqual((bool(found), bool(found and found[1])), (slow, peak), banner.out)
                self.assertNotRegex(harness.run(self.arguments(dtype="fp32", dry_run=True)).out, "instructions")
                self.assertEqual(bench.types(harness.BUILD), ["fp32"] if slow else ["fp32", "bf16"])
        with unittest.mock.patch.dict(os.environ, ONEDNN_MAX_CPU_ISA="AVX2"):  # where there is none at all
            self.assertEqual(bench.types(harness.BUILD), ["fp32"])


@needs_bf16
class Gradients(test_gradients.Gradients):
    """Each tensor is off by 1.5 % of its norm at most, its elements by 2.5 % of the largest."""
    program = os.path.join(harness.BUILD, "bf16", "tests", "layers", "tool_gradients")
    tolerance, of_loss = (0.025, 0.04), 1e-3
    test_nothing_computed_again = test_more_slices_than_rows = test_large_vocabulary = None  # no other arithmetic


@needs_bf16
class Resume(halves.Resume):
    @classmethod
    def recipe(cls, *mesh, **more):
        return super().recipe(*mesh, **dict(dtype="bf16") | more)
