"""What travels in a step, read from traces: as many bytes as the formula says, and no gradient behind the last computation.

When a transfer was asked for does not depend on the machine: the compute thread asks in the order of its program.
So "no exchange follows the last computation" is exact: nothing of the gradient sync may be asked for after
the last computation of backward has begun. (What is in flight when does depend on the machine: make bench.)
"""
# slow: no_exchange_follows what_has_enough
# limit: 240
import dataclasses
import os
import shutil
import subprocess
import unittest

import numpy as np

import harness
import reference
import shapes
import traffic

STEPS = 9
WIDE = reference.Shape(maxT=32, V=2000, L=2, heads=4, C=128, Vp=2048)
SMALL = reference.Shape(maxT=32, V=30, L=2, heads=4, C=128, Vp=32)      # fewer rows than a rank has tokens


class Traffic(harness.Case):
    @staticmethod
    def data(shape, samples):
        return harness.random_tokens(samples * shape.maxT + 1, shape.V)

    def traced(self, shape, strategy, tp, dp, micro_batch=2, accumulation=1, data=None, **more):
        more.setdefault("overlap", "ring")  # what auto chooses depends on the cores of the machine
        more.setdefault("ranks_per_host", 2 if tp * dp == 4 else None)
        tokens, model, trace = (self.fresh(name) for name in ("tokens", "model", "trace"))
        batch = micro_batch * dp * accumulation
        reference.write_tokens(tokens, self.data(shape, batch) if data is None else data)
        reference.write_model(model, shape, reference.random_model(shape, seed=1))
        result = harness.run(harness.options(
            train=tokens, init_from=model, strategy=strategy, tp=tp, dp=dp, batch=batch, micro_batch=micro_batch,
            seq=shape.maxT, steps=STEPS, threads=1, val_every=0, trace=trace, trace_steps=f"1:{STEPS}", peak_tflops=1,
            **more), ranks=tp * dp)
        self.assertEqual(result.status, 0, str(result))
        return traffic.Trace(trace)

    def late(self, trace):
        """(rank, step, name) of what was asked for after the last computation had begun."""
        found = []
        for rank in trace.ranks:
            for step in trace.steps:
                begin, _ = trace.last_computation(rank, step)
                sync = trace.gradient_sync(rank, step)
                self.assertTrue(sync, f"no gradient has travelled: rank {rank}, step {step}")
                found += [(rank, step, e["name"], e["args"].get("layer")) for e in sync if e["args"]["posted"] > begin]
        return found


MESHES = (("tpsp", 2, 1), ("tpsp", 1, 2), ("tpsp", 2, 2), ("tpsp", 1, 4), ("up", 2, 1), ("up", 1, 2), ("up", 2, 2),
          ("up", 4, 1))


class Bytes(Traffic):
    def assertBytes(self, shape, strategy, tp, dp, accumulation=1, data=None, tail_free=False, **more):
        """And no tail, where that is promised. Returns the rows that were fetched and delivered: of all ranks and steps."""
        with self.subTest(strategy=strategy, tp=tp, dp=dp, vocabulary=shape.Vp, accumulation=accumulation, **more):
            data = self.data(shape, 2 * dp * accumulation) if data is None else data
            trace = self.traced(shape, strategy, tp, dp, accumulation=accumulation, data=data, **more)
            samples, _ = reference.samples(data, shape.maxT)
            self.assertEqual(trace.ranks, list(range(tp * dp)))
            self.assertEqual(self.late(trace) if tail_free else [], [])
            found = []
            for step in trace.steps[1:]:  # the first one traced waits for weights that were sent before
                lists = traffic.longest_lists(shape, strategy, tp, dp, samples, 2, step, accumulation)
                found += lists
                for rank in trace.ranks:
                    expected = traffic.formula(shape, strategy, tp, dp, shape.maxT, 2, accumulation, lists[rank],
                                               more.get("recompute", 0))
                    self.assertEqual(trace.bytes_sent(rank, step), expected, f"rank {rank}, step {step}")
            return found

    def test_as_the_formula_says(self):
        for strategy, tp, dp in MESHES:
            for shape in (WIDE, SMALL):
                self.assertBytes(shape, strategy, tp, dp, tail_free=shape is WIDE and (strategy == "up" or dp > 1))

    def test_of_a_llama_that_shares_keys(self):
        llama = dataclasses.replace(WIDE, heads=8, KV=2, F=384, block=shapes.LLAMA)
        for strategy, tp, dp in MESHES[:3] + MESHES[4:7]:
            self.assertBytes(llama, strategy, tp, dp)

    def test_a_row_travels_once_for_all_tokens_that_name_it(self):
        # As in text some tokens are frequent: here token i has a probability of 1 / i. All ranks' tokens together are as
        # many as the vocabulary, or one is all of them.
        shape = reference.Shape(maxT=32, V=256, L=2, heads=4, C=128, Vp=256)
        tokens = 8 * shape.maxT + 1
        weights = 1 / np.arange(1, shape.V + 1)
        frequent = np.random.default_rng(1).choice(shape.V, tokens, p=weights / weights.sum())
        for strategy, tp, dp in (("tpsp", 1, 4), ("tpsp", 2, 2), ("up", 2, 2)):
            owned = shape.Vp // 4
            for _, delivered in self.assertBytes(shape, strategy, tp, dp, data=frequent[:2 * dp * shape.maxT + 1]):
                self.assertLess(delivered, min(owned, 2 * shape.maxT // (tp if strategy == "up" else 1)))
            same = np.full(2 * dp * shape.maxT + 1, 7)
            self.assertEqual(set(self.assertBytes(shape, strategy, tp, dp, data=same)),
                             {(1, 1)} | ({(0, 0)} if strategy == "tpsp" and tp > 1 else set()))

    def test_with_accumulation_gradients_travel_once(self):
        for strategy, tp, dp in (("tpsp", 2, 2), ("up", 2, 1)):
            self.assertBytes(WIDE, strategy, tp, dp, accumulation=3)

    def test_recomputing_gathers_the_norms_again(self):
        for strategy in ("tpsp", "up"):
            self.assertBytes(WIDE, strategy, 2, 1, recompute=1)

    def test_by_every_schedule_without_a_tail_and_in_slices(self):
        for row in harness.schedules("exchanges", tail_free=True):
            for strategy, tp, dp in (("tpsp", 2, 2), ("up", 2, 2)):
                self.assertBytes(WIDE, strategy, tp, dp, overlap=row.in_slices(3), embedding="rows", tail_free=True)

    def test_of_two_levels_a_slice_crosses_the_network_once_for_a_host(self):
        # Two hosts of two: of three shards one does, with one level two.
        for strategy, tp, dp in (("tpsp", 1, 4), ("up", 2, 2), ("up", 4, 1)):
            for overlap, crossing in (("levels:2", 1), ("direct:2", 2)):
                with self.subTest(strategy=strategy, tp=tp, overlap=overlap):
                    trace = self.traced(WIDE, strategy, tp, dp, overlap=overlap)
                    for rank in trace.ranks:
                        for step in trace.steps[1:]:
                            sent = trace.bytes_sent(rank, step)
                            left = trace.bytes_sent(rank, step, lambda e: e["args"]["peer"] // 2 != rank // 2)
                            for kind in "gradients", "weights":
                                self.assertEqual(3 * left[kind], crossing * sent[kind], f"{kind}, rank {rank}, step {step}")


class Counts(unittest.TestCase):
    # Of 64 owners none has enough rows of the table to compute and send them one owner after another.
    SMALL = ("--vocab", 2048, "--layers", 12, "--channels", 64, "--heads", 4, "--seq", 32)

    def test_small_tensors_do_not_cost_a_latency_for_each_rank(self):
        # Whatever nothing hides is posted at once, so what follows one another does not grow with the ranks.
        for overlap in ("auto", "ring"):
            for mesh in (("--dp", 64), ("--dp", 512), ("--tp", 2, "--dp", 256), ("--strategy", "up", "--tp", 4, "--dp", 64)):
                with self.subTest(overlap=overlap, mesh=mesh):
                    _, few, some = traffic.posted(harness.PROGRAM, *self.SMALL, *mesh[:-1], 8, "--overlap", overlap)
                    _, many, more = traffic.posted(harness.PROGRAM, *self.SMALL, *mesh, "--overlap", overlap)
                    self.assertLessEqual(many + more, few + some)

    def test_where_slices_are_large_they_travel_one_by_one(self):
        exchanges, units, collectives = traffic.posted(harness.PROGRAM, "--tp", 4, "--vocab", 50257)
        self.assertGreater(units, 12 * 8 * 3)
        self.assertLess(collectives, 12)
        self.assertLess(exchanges, 2 * units)


class Tail(Traffic):
    def test_no_exchange_follows_the_last_computation(self):
        """By every schedule on every mesh; some of them are in Bytes, too."""
        for strategy, tp, dp in MESHES:
            if strategy == "tpsp" and dp == 1:
                continue  # only what every rank holds whole travels: biases and norms
            for row in harness.schedules("exchanges", tail_free=True):
                with self.subTest(strategy=strategy, tp=tp, dp=dp, overlap=row.name):
                    self.assertEqual(self.late(self.traced(WIDE, strategy, tp, dp, overlap=row.name)), [])

    def test_a_tail_is_seen(self):
        # The baselines' last gradients leave behind the last computation, and those of mode none all do.
        for shape, strategy, tp, dp, overlap, last in ((WIDE, "tpsp", 1, 2, "slice", "reduce-scatter qkvw"),
                                                       (WIDE, "up", 2, 1, "none", "reduce-scatter wte")):
            with self.subTest(vocabulary=shape.Vp, strategy=strategy, overlap=overlap):
                late = self.late(self.traced(shape, strategy, tp, dp, overlap=overlap))
                self.assertIn(last, {name for _, _, name, _ in late})


@unittest.skipUnless(shutil.which("mpicc"), "no mpicc")
class Tags(harness.Case):
    """A library that has as few message tags as MPI promises (preload_wire.c)."""
    shape = reference.Shape(maxT=32, V=101, L=1, heads=8, C=64, Vp=128)

    def run_with_few(self, **more):
        shim = self.fresh("preload_wire.so")
        subprocess.run(["mpicc", "-std=gnu11", "-O1", "-shared", "-fPIC", "-o", shim,
                        os.path.join(harness.ROOT, "tests/train/preload_wire.c")], check=True)
        return harness.run(self.arguments(seq=16, tp=8, steps=1, **more), ranks=8,
                           wrapper=["env", f"LD_PRELOAD={shim}", "WIRE_TAG_UB=32767"])

    def test_more_than_there_are_is_an_error_before_the_first_step(self):
        result = self.run_with_few(overlap="ring:1024")
        self.assertFails(result, "needs 8192 message tags; 32768 of its group are taken, and MPI has 32768 (MPI_TAG_UB is 32767)",
                         "use fewer slices")
        self.assertEqual(result.err.count("error:"), 1, str(result))
        self.assertNotIn("step ", result.out)

    def test_what_has_enough_trains(self):
        for overlap in "ring:32", "slice:1024":  # 256 of each operation; none, as they are the library's collectives
            with self.subTest(overlap):
                result = self.run_with_few(overlap=overlap)
                self.assertEqual(result.status, 0, str(result))
