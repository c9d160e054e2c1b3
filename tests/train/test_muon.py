"""--optimizer muon is numpy's Muon (muon.py) and, where torch is installed, torch's; on every mesh, with either strategy, whatever
travels how; it is saved, resumed with equal bits and gone on with elsewhere."""
# quick: reference ring bad_input sixteen
# sanitizers: too
# limit: 300
import json
import os
import pathlib
import re
import shutil

import numpy as np

import checkpoints
import harness
import meshes
import muon
import reference

OF_LOSS, OF_MOVEMENT = 1e-5, 1e-5  # relative
KINDS = "weight", "momentum", "v"


class Training(harness.Case):
    T, samples, steps = 24, 12, 10
    RECIPE = dict(schedule="cosine", lr=3e-3, min_lr=3e-4, warmup=3, weight_decay=0.1, clip=1.5, momentum=0.9)

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        batch = reference.samples(reference.read_tokens(cls.tokens), cls.T)
        cls.expected = {name: w.copy() for name, w in cls.parameters.items()}
        cls.history = muon.train(cls.shape, cls.expected, [batch] * cls.steps, **cls.RECIPE)

    def options(self, tp=1, dp=1, **more):
        return dict(optimizer="muon", tp=tp, dp=dp, steps=self.steps, batch=self.samples,
                    micro_batch=self.samples // dp) | self.RECIPE | more

    def trained(self, tp=1, dp=1, **more):
        """OUT and the log's steps of one run."""
        out = more.pop("out", None) or self.fresh("out")
        log, _ = self.train(tp * dp, out=out, **self.options(tp, dp, **more))
        return out, harness.events(log, "step")

    def assertSameModel(self, out, expected):
        """Relative to the movement."""
        shape, found = reference.read_model(os.path.join(out, "model.bin"))
        self.assertEqual(shape, self.shape)
        for name in muon.MATRICES:
            moved = np.linalg.norm(expected[name] - self.parameters[name])
            self.assertGreater(moved, 0, name)
            self.assertLess(np.linalg.norm(found[name] - expected[name]), OF_MOVEMENT * moved, name)

    def assertSameTraining(self, *mesh, **more):
        out, steps = self.trained(*mesh, **more)
        np.testing.assert_allclose([s["loss"] for s in steps], [loss for loss, _, _ in self.history], rtol=OF_LOSS)
        self.assertSameModel(out, self.expected)
        return out, steps


class Muon(Training):
    """Two layers: eight tensors have homes, whose matrices are square (attention's), tall and wide (the MLP's)."""
    shape = reference.Shape(maxT=25, V=197, L=2, heads=12, C=96, Vp=206)

    def test_reference_one_step(self):
        """A large one, of which fp32's rounding of the weights is a small part."""
        recipe = self.RECIPE | dict(schedule="constant", lr=0.05, warmup=0)
        batch = reference.samples(reference.read_tokens(self.tokens), self.T)
        expected = {name: w.copy() for name, w in self.parameters.items()}
        muon.train(self.shape, expected, [batch], **recipe)
        self.assertSameModel(self.trained(steps=1, **recipe)[0], expected)

    def test_reference_ten_steps(self):
        norms = [norm for _, norm, _ in self.history]
        self.assertTrue(min(norms) < self.RECIPE["clip"] < max(norms), "some steps are clipped, some are not")
        _, steps = self.assertSameTraining()
        self.assertLess(steps[-1]["loss"], steps[0]["loss"] - 0.3)
        for step in steps[2:]:  # the first has no update before it
            self.assertTrue(0 < step["optimizer_ms"] < step["step_ms"], step)

    def test_meshes(self):
        for tp, dp, overlap in ((2, 1, "ring"), (1, 2, "none"), (2, 2, "slice:2"), (4, 1, "auto"), (1, 4, "levels:2"), (3, 2, "once")):
            with self.subTest(tp=tp, dp=dp):
                self.assertSameTraining(tp, dp, overlap=overlap, micro_batch=self.samples // dp // 2)

    def test_meshes_up(self):
        for tp, dp, overlap in ((2, 1, "none"), (2, 2, "ring"), (1, 4, "auto"), (3, 2, "direct")):
            with self.subTest(tp=tp, dp=dp):
                self.assertSameTraining(tp, dp, strategy="up", overlap=overlap)

    def test_sixteen_ranks_of_which_some_are_no_home(self):
        self.assertSameTraining(4, 4, micro_batch=3, overlap="ring")
        said = harness.run(self.arguments(dry_run=True, **self.options(4, 4)))
        homes = re.findall(r"rank (\d+): layer \d (\w+)w", said.out)
        self.assertEqual(len(homes), 8, str(said))
        self.assertEqual(len({rank for rank, _ in homes}), 8, homes)
        self.assertIn("products of 0 to", said.out)

    def test_ring_and_direct_have_the_same_bits(self):
        for mesh in (2, 2), (1, 3):
            found = [self.trained(*mesh, overlap=name, steps=4) for name in ("ring", "direct")]
            losses = [[(s["loss"], s["grad_norm"]) for s in steps] for _, steps in found]
            self.assertEqual(*losses)
            self.assertEqual(*(pathlib.Path(out, "model.bin").read_bytes() for out, _ in found))

    def test_homes_are_balanced_and_state_is_half(self):
        shape = dict(model="d6", layers=4, seq=64, vocab=256, init_from=None, dry_run=True, dp=3, micro_batch=1, batch=3)
        said = {name: harness.run(self.arguments(optimizer=name, **shape)).out for name in ("adamw", "muon")}
        state = {name: float(re.search(r"optimizer state +([0-9.]+)", text)[1]) for name, text in said.items()}
        self.assertLess(state["muon"], 0.53 * state["adamw"])  # the table and vectors have two values
        least, most = map(float, re.search(r"products of ([0-9.e+]+) to ([0-9.e+]+) GFLOP", said["muon"]).groups())
        self.assertLess(most, 1.1 * least, "of a fourth layer among three ranks one has the two that cost least")
        self.assertNotIn("Homes", said["adamw"])

    def test_watching_changes_nothing(self):
        """What reads weights or state between steps waits for the last matrices; the next step does, too."""
        more = dict(steps=7, overlap="direct", micro_batch=self.samples // 4)  # passes of which the first alone updates
        plain, watched = self.trained(2, 2, **more), self.trained(2, 2, val=self.tokens, val_every=2, val_batches=1, sample_every=3,
                                                                  sample_tokens=8, save_every=5, **more)
        self.assertEqual(*([(s["loss"], s["grad_norm"]) for s in steps] for _, steps in (plain, watched)))
        self.assertEqual(*(pathlib.Path(out, "model.bin").read_bytes() for out, _ in (plain, watched)))

    def test_saved_and_resumed(self):
        out, steps = self.trained(2, 2, steps=6, save_every=3, overlap="ring")
        end = checkpoints.saved_bytes(out, 6)
        at, after = (checkpoints.assemble(out, step, self.shape, KINDS) for step in (3, 6))
        for name in muon.MATRICES:
            self.assertFalse(at["v"][name].any(), f"{name} has one value")
            self.assertFalse((at["momentum"][name] == after["momentum"][name]).all())
        self.assertTrue(at["v"]["wte"].any())
        shutil.rmtree(checkpoints.directory(out, 6))
        copies = [shutil.copytree(out, self.fresh("copy")) for _ in range(3)]
        _, again = self.trained(2, 2, steps=6, save_every=3, overlap="ring", out=out)
        self.assertEqual([s["loss"] for s in again], [s["loss"] for s in steps[3:]])
        self.assertTrue(checkpoints.saved_bytes(out, 6) == end, "other bits on the same mesh")
        others = [self.trained(1, 3, steps=6, overlap="ring", strategy="up", out=copy)[1] for copy in copies[:2]]
        self.assertEqual(*([s["loss"] for s in found] for found in others))
        self.assertTrue(checkpoints.saved_bytes(copies[0], 6) == checkpoints.saved_bytes(copies[1], 6))
        np.testing.assert_allclose([s["loss"] for s in others[0]], [s["loss"] for s in steps[3:]], rtol=OF_LOSS)
        moved = checkpoints.assemble(copies[0], 6, self.shape, KINDS)
        for kind in KINDS:
            for name in muon.MATRICES + ("wte", "lnfw"):
                error = np.linalg.norm(moved[kind][name] - after[kind][name])
                self.assertLessEqual(error, 2e-4 * np.linalg.norm(after[kind][name]), (kind, name))
        options = self.options(optimizer="adamw", out=copies[2], steps=6)
        self.assertFails(harness.run(self.arguments(**options)), "--optimizer adamw (the checkpoint: muon)")
        options["momentum"], options["optimizer"] = 0.8, "muon"
        self.assertFails(harness.run(self.arguments(**options)), "--momentum 0.8 (the checkpoint: 0.9)")

    def test_from_adamw_with_force(self):
        out = self.fresh("out")
        self.train(out=out, **self.options(optimizer="adamw", steps=3, schedule="constant"))
        options = self.options(out=out, steps=5, schedule="constant")
        self.assertFails(harness.run(self.arguments(**options)), "--optimizer muon (the checkpoint: adamw)", "--force")
        log, _ = self.train(force=True, **options)
        self.assertEqual([s["step"] for s in harness.events(log, "step")], [3, 4])

    def test_the_trace_shows_it(self):
        """What travels is posted before the products that hide it."""
        trace = self.fresh("trace.json")
        self.train(2, trace=trace, trace_steps="1:3", overlap="ring", **self.options(1, 2, steps=4))
        with open(trace, encoding="utf-8") as file:
            names = [event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
        for name in "momentum", "orthogonalise", "matrices home", "matrices back":
            self.assertTrue(any(name in found for found in names), (name, sorted(set(names))))

    def test_bad_input(self):
        for value in "1", "1.5", "-0.1", "nan":
            self.assertFails(harness.run(self.arguments(optimizer="muon", momentum=value)), "--momentum")
        self.assertFails(harness.run(self.arguments(optimizer="muo")), "--optimizer", "adamw|muon")

    def test_torch(self):
        """The same update within 1 %, of a matrix of each shape: torch's iterations are bf16."""
        try:
            import torch
            optimizer = torch.optim.Muon
        except (ImportError, AttributeError):
            self.skipTest("torch.optim.Muon is not installed")
        random = np.random.default_rng(1)
        for rows, columns in ((96, 96), (384, 96), (96, 384)):
            start, gradients = random.normal(size=(rows, columns)), random.normal(size=(3, rows, columns))
            w = torch.nn.Parameter(torch.tensor(start, dtype=torch.float32))
            torchs = optimizer([w], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
            ours, buffer = start.copy(), np.zeros_like(start)
            for g in gradients:
                w.grad = torch.tensor(g, dtype=torch.float32)
                torchs.step()
                buffer += 0.05 * (g - buffer)
                ours = ours * (1 - 0.02 * 0.1) - 0.02 * 0.2 * max(rows, columns) ** 0.5 * muon.orthogonalised(g + 0.95 * (buffer - g))
            moved = np.linalg.norm(ours - start)
            self.assertLess(np.linalg.norm(w.detach().numpy() - ours), 0.01 * moved, (rows, columns))


class Llama(Training):
    """Queries are more than keys and values; gate and up are two matrices."""
    shape = reference.Shape(maxT=31, V=197, L=3, heads=12, C=96, Vp=206, KV=6, F=144, eps=1e-4, theta=100.0)

    def test_meshes(self):
        for mesh in (1, 1), (2, 2), (1, 3):
            with self.subTest(mesh=mesh):
                self.assertSameTraining(*mesh)

    def test_meshes_up(self):
        self.assertSameTraining(3, 2, strategy="up", overlap="ring")
