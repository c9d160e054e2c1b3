"""The order of things on GPUs that are imagined: bench_train over the emulator's clock (tests/emulator/clock.cc), which says
what waits for what. Blocking collectives are exposed for as long as arithmetic says, ring's transfers hide, over either
transport, and what the host asks of the driver for one exchange stays within bounds.

The model of the GPU is assumed; what it is held against here are its own assumptions and not a GPU.
"""
# quick: too_thin ulysses longer calls
# limit: 600
# make: emulated-tests
import json
import os
import re
import subprocess
import unittest

import harness

PROGRAM = os.path.join(harness.ROOT, "build", "emulated-bf16", "tests", "bench", "bench_train")
GBPS = 370  # that NCCL reaches of the link, as clock.cc has it
WIDE = dict(layers=2, channels=2560, heads=20, vocab=2048, seq=1024)  # wide enough to hide behind
THIN = dict(layers=2, channels=512, heads=8, vocab=512, seq=256, micro_batch=2)


class Steps(dict):
    """Of each mode by name: step and exposed milliseconds, and bytes sent, of the last round."""

    def over(self, mode, other):
        return self[mode]["step_ms"] / self[other]["step_ms"]


def printed(text):
    """The name and the line of each row of the table."""
    lines = text[text.index("\nmode "):].splitlines()[2:-1]
    return [(line.split()[0], line) for line in lines]


def measure(ranks, *modes, **options):
    events = [json.loads(line) for line in measure_text(ranks, *modes, json=True, **options).splitlines() if line.startswith("{")]
    return Steps({e["mode"]: e for e in events if e["event"] == "step" and e["round"] == 2})


def measure_text(ranks, *modes, clock=None, **options):
    if not os.path.exists(PROGRAM):
        raise unittest.SkipTest(f"{PROGRAM} is not built")
    environment = harness.environment(EMULATOR_CLOCK="1", **{k: str(v) for k, v in (clock or {}).items()})
    words = harness.options(recompute=0, peak_tflops=989, rounds=2, modes=",".join(modes), **options)
    done = subprocess.run([harness.MPIRUN, "-np", str(ranks), PROGRAM, *words], env=environment, capture_output=True,
                          text=True, timeout=200)
    if done.returncode:
        raise AssertionError(f"{words}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


class Imagined(unittest.TestCase):
    def test_tensor_parallel(self):
        for transport in ("nccl", "auto"):
            with self.subTest(transport=transport):
                steps = measure(4, "none", "slice", "ring", "direct", "nowire", tp=4, micro_batch=32,
                                transport=transport, **WIDE)
                exposed = {mode: row["exposed_comm_ms"] for mode, row in steps.items()}
                wire_ms = steps["none"]["bytes_sent_rank0"] / (GBPS * 1e6)
                self.assertGreater(exposed["none"], wire_ms, steps)
                self.assertLess(exposed["none"], 1.1 * wire_ms, steps)  # latencies; a kernel that waits for multiprocessors
                # A persistent product holds up a collective beside it, so slicing hides less than its schedule could;
                # exchanges by NCCL find multiprocessors that products leave free, at the price of longer products.
                self.assertLess(exposed["slice"], 0.5 * exposed["none"], steps)
                for mode, share in (("ring", 0.55), ("direct", 0.25)):
                    self.assertLess(exposed[mode], share * exposed["none"], steps)
                    self.assertLess(steps.over(mode, "nowire"), 1.4, steps)
                    self.assertLess(steps.over(mode, "slice"), 0.97, steps)

    def test_products_leave_what_exchanges_of_three_ranks_take(self):
        """NCCL rounds a communicator's blocks up to a power of two."""
        steps = measure(3, "none", "ring", "direct", tp=3, micro_batch=32, transport="nccl", **dict(WIDE, channels=2304, heads=18, seq=768))
        exposed = {mode: row["exposed_comm_ms"] for mode, row in steps.items()}
        self.assertLess(exposed["ring"], 0.5 * exposed["none"], steps)
        self.assertLess(exposed["direct"], 0.25 * exposed["none"], steps)

    def test_auto_is_not_beaten(self):
        """Exchanges by NCCL take multiprocessors from products: there baselines may be the best that is fixed."""
        wide = dict(WIDE, channels=4096, heads=32, micro_batch=8, transport="nccl")
        replicas = dict(WIDE, channels=1280, heads=20, micro_batch=16, transport="nccl")
        for mesh in (dict(tp=4, **wide), dict(dp=4, **replicas)):
            with self.subTest(**mesh):
                fixed = measure(4, "none", "slice:1", "slice:4", "direct", **mesh)
                auto = measure(4, "auto", **mesh)["auto"]["step_ms"]  # with the communicators that it has in training
                self.assertLess(auto, 1.01 * min(row["step_ms"] for row in fixed.values()), fixed)

    def test_no_choice_is_measured_when_it_runs_first(self):
        """As many steps as an operation has choices go before those that are measured."""
        text = measure_text(4, "auto", tp=4, micro_batch=8, transport="auto", **WIDE)
        self.assertGreater(int(re.search(r"found in trials up to step (\d+)", text)[1]), 41, text)

    def test_replicas(self):
        for mesh in (dict(dp=4), dict(tp=2, dp=2)):
            with self.subTest(**mesh):
                steps = measure(4, "none", "ring", "nowire", micro_batch=16, transport="auto", **mesh, **WIDE)
                self.assertLess(steps["ring"]["exposed_comm_ms"], 0.35 * steps["none"]["exposed_comm_ms"], steps)
                self.assertLess(steps["ring"]["step_ms"], steps["none"]["step_ms"], steps)

    def test_gradients_too_thin_for_owners_travel_as_the_baselines_do(self):
        shape = dict(WIDE, channels=1280, heads=20)
        steps = measure(4, "none", "slice", "ring", "nowire", dp=4, micro_batch=16, transport="nccl", **shape)
        self.assertLess(steps.over("ring", "none"), 1, steps)
        self.assertLess(steps.over("ring", "slice"), 1.035, steps)  # which lets NCCL add

    def test_ulysses(self):
        steps = measure(4, "none", "direct", "nowire", tp=4, strategy="up", micro_batch=32, transport="auto",
                        **WIDE)
        self.assertLess(steps["direct"]["exposed_comm_ms"], steps["none"]["exposed_comm_ms"] / 4, steps)
        self.assertLess(steps["direct"]["step_ms"], steps["none"]["step_ms"], steps)

    def test_exposed_is_what_a_step_is_longer(self):
        steps = measure(4, "ring", "nowire", tp=4, micro_batch=8, transport="nccl", clock={"EMULATOR_GBPS": 50},
                        **WIDE)
        longer = steps["ring"]["step_ms"] - steps["nowire"]["step_ms"]
        self.assertGreater(longer, 1, steps)
        share = steps["ring"]["exposed_comm_ms"] / longer  # the rest: products that leave room for exchanges take longer
        self.assertGreater(share, 0.8, steps)
        self.assertLess(share, 1.1, steps)

    def test_the_same_again(self):
        def once():
            return measure(2, "none", "ring", tp=2, transport="auto", micro_batch=8, **WIDE)
        first, second = once(), once()
        for mode in first:
            self.assertAlmostEqual(first[mode]["step_ms"] / second[mode]["step_ms"], 1, delta=1e-3)

    def test_a_table_says_which_rows_do_not_differ(self):
        rows = printed(measure_text(2, "none", "ring", "ring", "nowire", "ideal", tp=2, transport="auto", micro_batch=8, **WIDE))
        self.assertEqual([name for name, line in rows if "does not differ from ring" in line], ["ring"], rows)
        self.assertFalse([line for _, line in rows if "below ideal" in line], rows)

    def test_calls_of_the_host(self):
        """Where each call takes a tenth of a millisecond and nothing else takes time, a step's length counts them."""
        free, each_ms = dict(EMULATOR_LAUNCH_NS=1, EMULATOR_GROUP_NS=1, EMULATOR_TFLOPS=1000000, EMULATOR_GBPS=1000000), 0.1
        # Some four of them ask how long spans of the step before took: a step lasts until the next one begins.
        for transport, most in (("nccl", 15), ("ipc", 26)):
            with self.subTest(transport=transport):
                def calls(slices):
                    steps = measure(2, f"ring:{slices}", tp=2, transport=transport,
                                    clock=dict(free, EMULATOR_CALL_NS=int(each_ms * 1e6)), **THIN)
                    return next(iter(steps.values()))["step_ms"] / each_ms
                operations = 10 * THIN["layers"]  # of two ranks: a slice more is an exchange more of each
                exchange = (calls(4) - calls(2)) / (2 * operations)
                print(f"{transport}: {exchange:.1f} calls an exchange")
                self.assertGreater(exchange, 3)
                self.assertLess(exchange, most)
