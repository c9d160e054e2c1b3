"""What test_meshes.py and test_meshes_up.py share: ten steps of training are the same ten steps on every mesh, in
by every schedule, with every accumulation, and the right ones. Each file runs all of it with its strategy.

The token file holds exactly one batch, so that every step sees every sample and the expected losses do not depend on
the order in which the program visits them: reference.py trains the same model on its own. What all runs are compared
with besides, more closely, is one rank that never communicates. Schedules are the rows of the table in
commfuse/schedule.c, a new one too. Some promise more than agreement: the same bits from run to run and as the row that
they name. Two ranks are taken for a host, so that four are two levels.

Three shapes, so that every choice in the code is taken, which --dry-run is asked to confirm:

Matrix      the whole matrix of runs. Of a layer's matrices some are buckets of their own and some share one; rows of the
            table travel, with the baselines all of it; in one pass most ranks have more tokens than an owner has rows, in
            three fewer. Six layers, more than are gathered ahead, so that an update leaves some gathers for forward to begin.
Uneven      owners get different numbers of rows of a matrix, of the table, and of a vocabulary's parts.
Few         eight rows of the table, of which two owners of six have none; fewer rows of positions than slices; no matrix
            large enough to be a bucket of its own for six owners.
"""
import json
import os
import pathlib
import re

import numpy as np

import harness
import reference

RECIPE = dict(schedule="cosine", lr=3e-3, min_lr=3e-4, warmup=3)
ADAMW = dict(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip=1.5)
BETWEEN_MESHES, TO_REFERENCE = 1e-5, 1e-4  # relative, of every loss
STRATEGIES = "tpsp", "up"
# For the emulator: shape, T and samples. Of two owners each has two matrices of a layer to itself; a batch in one pass is more
# rows than an owner of two has, in two fewer.
SMALL = reference.Shape(maxT=48, V=101, L=2, heads=4, C=48, Vp=128), 36, 4


class Training(harness.Case):
    """Ten steps, what they must be, and what the program says about how they travel."""
    strategy = None  # a subclass says
    steps = 10       # a subclass may take fewer

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.cache = {}
        batch = reference.samples(reference.read_tokens(cls.tokens), cls.T)
        cls.expected_model = {name: w.copy() for name, w in cls.parameters.items()}
        cls.expected = reference.train(cls.shape, cls.expected_model, [batch] * cls.steps, **RECIPE, **ADAMW)

    def recipe(self, tp, dp, accumulate=1, **more):
        micro_batch, rest = divmod(self.samples, dp * accumulate)
        self.assertEqual(rest, 0, "the batch does not divide")
        return dict(strategy=self.strategy, tp=tp, dp=dp, steps=self.steps, batch=self.samples, micro_batch=micro_batch,
                    ranks_per_host=2 if tp * dp % 2 == 0 else None, **RECIPE, **ADAMW) | more

    def logged(self, tp, dp, accumulate=1, **more):
        return self.train(tp * dp, **self.recipe(tp, dp, accumulate, **more))[0]

    def steps_of(self, *mesh, **more):
        """The log's steps of one run."""
        return harness.events(self.logged(*mesh, **more), "step")

    def one_rank(self):
        if "one rank" not in self.cache:
            self.cache["one rank"] = self.steps_of(1, 1, strategy="tpsp", overlap="none")
        return self.cache["one rank"]

    def assertSameTraining(self, steps):
        self.assertEqual(len(steps), self.steps)
        for step, alone, (loss, norm, lr) in zip(steps, self.one_rank(), self.expected):
            where = f"step {step['step']}: {json.dumps(step)}"
            self.assertLess(abs(step["loss"] / alone["loss"] - 1), BETWEEN_MESHES, where)
            self.assertLess(abs(step["loss"] / loss - 1), TO_REFERENCE, f"expected {loss}, {where}")
            self.assertLess(abs(step["grad_norm"] / norm - 1), 10 * TO_REFERENCE, f"expected {norm}, {where}")
            self.assertLess(abs(step["grad_norm"] / alone["grad_norm"] - 1), 100 * BETWEEN_MESHES, where)
            self.assertLess(abs(step["lr"] / lr - 1), 1e-6, f"expected {lr}, {where}")

    def assertSameModel(self, path, other=None):
        """The weights have moved as the reference's (or another's) have. Relative to the movement, not the weights."""
        shape, found = reference.read_model(path)
        self.assertEqual(shape, self.shape)
        expected = reference.read_model(other)[1] if other else self.expected_model
        for name in shape.names():
            tensors = [self.parameters[name], expected[name], found[name]]
            if name == "qkvb":  # keys' biases do not change the loss: what moves them is rounding and AdamW's eps
                tensors = [np.delete(x, slice(shape.C, 2 * shape.C), axis=1) for x in tensors]
            if name == "wte":  # padding rows: nothing but decay moves them, and nothing reads them
                tensors = [x[:shape.V] for x in tensors]
            start, end, ours = tensors
            moved = np.linalg.norm(end - start)
            self.assertGreater(moved, 0, name)
            self.assertLess(np.linalg.norm(ours - end), 0.01 * moved, name)

    def trained(self, *mesh, **more):
        """One run held to everything; its figures and its model as bits, to compare with another's."""
        out = self.fresh("out")
        steps = self.steps_of(*mesh, out=out, **more)
        path = os.path.join(out, "model.bin")
        self.assertSameTraining(steps)
        self.assertSameModel(path)
        return [(s["loss"], s["grad_norm"]) for s in steps], pathlib.Path(path).read_bytes()

    def check_bits(self, *mesh, slices, rerun=False, **more):
        """By every schedule that shares bits with others and, where asked, by the one that they name once again."""
        for bits in sorted({row.bits for row in harness.schedules("native", "exchanges")} - {"-"}):
            names = [row.name for row in harness.schedules("native", "exchanges", bits=bits) if row.most >= slices]
            first = None
            for name in (names + [bits] * rerun) * (len(names) > 1):
                with self.subTest(mesh=mesh, overlap=f"{name}:{slices}", **more):
                    found = self.trained(*mesh, overlap=f"{name}:{slices}", **more)
                    first = first or found
                    self.assertEqual(found[0], first[0], "losses differ")
                    self.assertTrue(found[1] == first[1], "model.bin differs")

    def check_others(self, *mesh, slices, **more):
        """By every other schedule: the same losses."""
        shared = [row.bits for row in harness.schedules("native", "exchanges") if row.bits != "-"]
        for row in harness.schedules("native", "exchanges"):
            if shared.count(row.bits) < 2 or row.most < slices:
                with self.subTest(mesh=mesh, overlap=row.in_slices(slices), **more):
                    self.assertSameTraining(self.steps_of(*mesh, overlap=row.in_slices(slices), **more))

    def plan(self, *mesh, **more):
        """The part of --dry-run on gradients and weights: what it says of each bucket and matrix."""
        result = harness.run(self.arguments(dry_run=True, **self.recipe(*mesh, **more)), timeout=10)
        self.assertEqual(result.status, 0, str(result))
        part = re.search(r"^Gradients and weights of each layer.*\n((?:  .*\n)+)", result.out, re.MULTILINE)
        self.assertTrue(part, str(result))
        lines = {}
        for line in part.group(1).splitlines():
            name, text = re.match(r"  (token embedding|thin matrices|split vectors|wpe, vectors|\w+):? +(.*)", line).groups()
            lines.setdefault(name, []).append(text)
        return {name: "\n".join(texts) for name, texts in lines.items()}

    def is_split_among_owners(self, dp):
        """Do ranks own parts of matrices? In TPSP only the replicas do."""
        return self.strategy == "up" or dp > 1


class Matrix(Training):
    """Schedules × accumulation on each mesh. Three heads a rank for tp = 4, five rows of positions."""
    shape, T, samples = reference.Shape(maxT=23, V=197, L=6, heads=12, C=96, Vp=206), 20, 12

    def check_plan(self, tp, dp, accumulate):
        plan = self.plan(tp, dp, accumulate, overlap="ring")
        if tp * dp == 1:
            return
        if not self.is_split_among_owners(dp):
            self.assertIn("one copy", plan["token embedding"])
            self.assertIn("one owner", plan["qkvw"])
            return
        for matrix in ("qkvw", "fcw"):
            self.assertIn("owner by owner", plan[matrix])
        self.assertIn("in thin matrices", plan["fcprojw"])
        self.assertIn("rows are sent", plan["token embedding"])
        self.assertIn("the whole table is sent", self.plan(tp, dp, accumulate, overlap="none")["token embedding"])

    def check_mesh(self, tp, dp):
        for accumulate in (1, 3):
            self.check_plan(tp, dp, accumulate)
            self.check_others(tp, dp, accumulate, slices=3)
            self.check_bits(tp, dp, accumulate, slices=accumulate, rerun=True)

    def test_learns_at_all(self):
        steps = self.one_rank()
        self.assertSameTraining(steps)
        self.assertLess(steps[-1]["loss"], steps[0]["loss"] - 0.3)
        self.assertTrue(any(norm > ADAMW["clip"] for _, norm, _ in self.expected), "clipping is not exercised")
        self.assertTrue(any(norm < ADAMW["clip"] for _, norm, _ in self.expected), "all steps are clipped")

    def test_1x1(self):
        self.check_mesh(1, 1)

    def test_2x1(self):
        self.check_mesh(2, 1)

    def test_1x2(self):
        self.check_mesh(1, 2)

    def test_2x2(self):
        self.check_mesh(2, 2)

    def test_4x1(self):
        self.check_mesh(4, 1)

    def test_1x4(self):
        self.check_mesh(1, 4)

    def test_two_threads(self):
        for mesh in ((2, 1), (1, 2)):
            self.check_bits(*mesh, 3, slices=2, threads=2, rerun=True)

    def test_two_levels_give_the_same_bits_again(self):
        for mesh in ((4, 1, 1), (1, 4, 3)):
            with self.subTest(mesh=mesh):
                first, again = (self.trained(*mesh, overlap="levels:2") for _ in range(2))
                self.assertTrue(first == again, "losses or model.bin differ")
                self.assertIn("2, of 2 ranks each", self.train(4, **self.recipe(*mesh, overlap="levels:2"))[1].out)

    def test_watching_changes_nothing(self):
        """Of the passes behind an update the first finds weights on their way, others find all of them: the first is
        validation (even steps), a sample (3, 9), the next step (1, 7), or behind a save there is none (5)."""
        for mesh in ((2, 1, 3), (2, 2, 3), (1, 4, 3), (4, 1, 1)):
            with self.subTest(mesh=mesh):
                plain, evaluated = self.fresh("plain"), self.fresh("evaluated")
                expected = self.steps_of(*mesh, out=plain, overlap="direct:3")
                self.assertSameTraining(expected)
                log = self.logged(*mesh, out=evaluated, val=self.tokens, val_every=2, val_batches=1, sample_every=3,
                                  save_every=5, overlap="direct:3")
                steps, validations, samples = (harness.events(log, kind) for kind in ("step", "val", "sample"))
                self.assertEqual(*([(s["loss"], s["grad_norm"]) for s in which] for which in (steps, expected)))
                self.assertEqual([v["step"] for v in validations], [0, 2, 4, 6, 8, 10])
                for v in validations[:-1]:  # on the training samples, before the step that is trained on them
                    self.assertLess(abs(v["loss"] / steps[v["step"]]["loss"] - 1), BETWEEN_MESHES, v)
                self.assertEqual([s["step"] for s in samples], [3, 6, 9, 10])
                models = [pathlib.Path(out, "model.bin").read_bytes() for out in (plain, evaluated)]
                self.assertTrue(models[0] == models[1], "model.bin differs")

    def test_nowire_and_other_bounds_go_all_their_way(self):
        for mesh in ((2, 1, 1), (1, 2, 1), (1, 2, 3), (2, 2, 1), (2, 2, 3)):
            for bound in harness.schedules("bound"):
                with self.subTest(mesh=mesh, bound=bound.name):
                    log, result = self.train(mesh[0] * mesh[1], **self.recipe(*mesh, overlap=bound.name))
                    self.assertIn("wrong", result.text.lower(), str(result))
                    steps = harness.events(log, "step")
                    self.assertEqual([step["step"] for step in steps], list(range(self.steps)))
                    for step in steps:
                        self.assertTrue(step["step_ms"] > 0 and step["mfu"] > 0, step)
                    self.assertGreater(abs(steps[-1]["loss"] / self.expected[-1][0] - 1), TO_REFERENCE,
                                       "without transfers the losses cannot be right")

    def test_nowire_and_other_bounds_do_not_save(self):
        for bound in harness.schedules("bound"):
            with self.subTest(bound=bound.name):
                out = self.fresh("out")
                result = harness.run(self.arguments(strategy=self.strategy, tp=2, overlap=bound.name, out=out), 2)
                self.assertFails(result, bound.name, "--out")
                self.assertFalse(os.path.exists(os.path.join(out, "model.bin")))


class Uneven(Training):
    """Heads of 15 channels. 270 rows of a matrix do not divide among four owners (with TPSP and tp = 2, 135 not among
    two), nor the table's 256, of which 251 are real, among three. Three ranks are no power of two."""
    shape, T, samples = reference.Shape(maxT=19, V=250, L=2, heads=6, C=90, Vp=251), 18, 18

    def test_owners_with_fewer_rows(self):
        for tp, dp, rows in ((2, 2, 68), (1, 3, 90), (3, 1, 90), (2, 1, 135), (1, 2, 135)):
            if self.is_split_among_owners(dp):
                owners = tp * dp if self.strategy == "up" else dp
                plan = self.plan(tp, dp, 3, overlap="ring")
                self.assertIn(f"{owners} owners of {rows} rows", plan["qkvw"])
                self.assertIn("rows are sent", plan["token embedding"])
            self.check_bits(tp, dp, 3, slices=4)
            with self.subTest(tp=tp, dp=dp, overlap="slice:4"):
                self.assertSameTraining(self.steps_of(tp, dp, 1, overlap="slice:4"))


class Few(Training):
    shape, T, samples = reference.Shape(maxT=4, V=8, L=6, heads=4, C=32, Vp=8), 4, 12

    def test_owners_without_rows_and_slices_without_rows(self):
        # One position on a rank of four. Of eight rows of the table, six owners get 2, 2, 2, 2, 0 and 0.
        for tp, dp, accumulate in ((4, 1, 12), (4, 1, 3), (2, 2, 6), (2, 2, 3), (1, 4, 3), (2, 1, 6), (2, 3, 4), (2, 3, 2)):
            plan = self.plan(tp, dp, accumulate, overlap="ring")
            if self.strategy == "up" and tp * dp == 6:
                self.assertIn("in thin matrices", plan["fcw"])
                self.assertIn("6 owners", plan["wte"])
                self.assertIn("rows are sent", plan["token embedding"])
            self.check_bits(tp, dp, accumulate, slices=3)
            self.check_others(tp, dp, accumulate, slices=3)
