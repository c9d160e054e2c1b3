"""What travels in a step, read from traces: as many bytes as the formula says, and no gradient behind the last computation.

When a transfer was asked for does not depend on the machine: the compute thread asks in the order of its program.
So "no exchange follows the last computation" is exact: nothing of the gradient sync may be asked for after
the last computation of backward has begun. (What is in flight when does depend on the machine: make bench.)
"""
# limit: 240
import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import harness
import reference
import traffic

STEPS = 9
WIDE = reference.Shape(maxT=32, V=2000, L=2, heads=4, C=128, Vp=2048)   # rows of the lookup travel
SMALL = reference.Shape(maxT=32, V=30, L=2, heads=4, C=128, Vp=32)      # the whole table does


class Traffic(harness.Case):
    def traced(self, shape, strategy, tp, dp, micro_batch=2, accumulation=1, **more):
        more.setdefault("overlap", "commfuse")  # what auto chooses depends on the cores of the machine
        tokens, model, trace = (self.fresh(name) for name in ("tokens", "model", "trace"))
        batch = micro_batch * dp * accumulation
        reference.write_tokens(tokens, harness.random_tokens(batch * shape.maxT + 1, shape.V))
        reference.write_model(model, shape, reference.random_model(shape, seed=1))
        result = harness.run(harness.options(
            train=tokens, init_from=model, strategy=strategy, tp=tp, dp=dp, batch=batch, micro_batch=micro_batch,
            seq=shape.maxT, steps=STEPS, threads=1, val_every=0, trace=trace, trace_steps=f"1:{STEPS}", peak_tflops=1,
            **more), ranks=tp * dp)
        self.assertEqual(result.status, 0, str(result))
        return traffic.Trace(trace)


MESHES = (("tpsp", 2, 1), ("tpsp", 1, 2), ("tpsp", 2, 2), ("tpsp", 1, 4), ("up", 2, 1), ("up", 1, 2), ("up", 2, 2),
          ("up", 4, 1))


class Bytes(Traffic):
    def assertBytes(self, shape, strategy, tp, dp, accumulation=1, **more):
        with self.subTest(strategy=strategy, tp=tp, dp=dp, vocabulary=shape.Vp, accumulation=accumulation, **more):
            trace = self.traced(shape, strategy, tp, dp, accumulation=accumulation, **more)
            expected = traffic.formula(shape, strategy, tp, dp, shape.maxT, 2, accumulation)
            self.assertEqual(trace.ranks, list(range(tp * dp)))
            for step in trace.steps[1:]:  # the first one traced waits for weights that were sent before
                for rank in trace.ranks:
                    self.assertEqual(trace.bytes_sent(rank, step), expected, f"rank {rank}, step {step}")

    def test_as_the_formula_says(self):
        for strategy, tp, dp in MESHES:
            for shape in (WIDE, SMALL):
                self.assertEqual(traffic.rows_travel(shape, strategy, tp, dp, shape.maxT, 2),
                                 shape is WIDE and (dp > 1 or strategy == "up"))
                self.assertBytes(shape, strategy, tp, dp)

    def test_with_accumulation_gradients_travel_once(self):
        for strategy, tp, dp in (("tpsp", 2, 2), ("up", 2, 1)):
            self.assertBytes(WIDE, strategy, tp, dp, accumulation=3)

    def test_on_the_direct_route_and_in_slices(self):
        for strategy, tp, dp in (("tpsp", 2, 2), ("up", 2, 2)):
            self.assertBytes(WIDE, strategy, tp, dp, route="direct", slices=3)


class Counts(unittest.TestCase):
    SMALL = ("--vocab", 4096, "--layers", 12, "--channels", 64, "--heads", 4, "--seq", 32)

    def test_small_tensors_do_not_cost_a_latency_for_each_rank(self):
        # Whatever nothing hides is posted at once, so what follows one another does not grow with the ranks.
        for mode in ("auto", "commfuse"):
            for mesh in (("--dp", 64), ("--dp", 512), ("--tp", 2, "--dp", 256), ("--strategy", "up", "--tp", 4, "--dp", 64)):
                with self.subTest(mode=mode, mesh=mesh):
                    _, few, some = traffic.posted(harness.PROGRAM, *self.SMALL, *mesh[:-1], 8, "--overlap", mode)
                    _, many, more = traffic.posted(harness.PROGRAM, *self.SMALL, *mesh, "--overlap", mode)
                    self.assertLessEqual(many + more, few + some)

    def test_where_slices_are_large_they_travel_one_by_one(self):
        exchanges, units, collectives = traffic.posted(harness.PROGRAM, "--tp", 4, "--vocab", 50257)
        self.assertGreater(units, 12 * 10 * 3)
        self.assertLess(collectives, 12)
        self.assertLess(exchanges, 2 * units)


class Tail(Traffic):
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

    def test_no_exchange_follows_the_last_computation(self):
        for strategy, tp, dp in MESHES:
            if strategy == "tpsp" and dp == 1:
                continue  # only what every rank holds whole travels: biases and norms
            for route in ("ring", "direct"):
                with self.subTest(strategy=strategy, tp=tp, dp=dp, route=route):
                    self.assertEqual(self.late(self.traced(WIDE, strategy, tp, dp, route=route)), [])

    def test_a_tail_is_seen(self):
        # The baselines' last gradients leave behind the last computation, and those of mode none all do.
        for shape, strategy, tp, dp, overlap, last in ((WIDE, "tpsp", 1, 2, "slice", "reduce-scatter qkvw"),
                                                       (WIDE, "up", 2, 1, "none", "reduce-scatter wte")):
            with self.subTest(vocabulary=shape.Vp, strategy=strategy, overlap=overlap):
                late = self.late(self.traced(shape, strategy, tp, dp, overlap=overlap))
                self.assertIn(last, {name for _, _, name, _ in late})


if __name__ == "__main__":
    unittest.main()
