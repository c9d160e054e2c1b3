"""Experiments on operations: which points there are, their arithmetic, tables and figures from rows made up with known
answers, and the lines of a real bench_fuse of two ranks.

limit: 240
"""
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import tables
import plots
from experiments import ablation, operations, steps, training

BENCH = ROOT / os.environ.get("BUILD", "build/release") / "tests/bench/bench_fuse"
SMALL = dict(operation="gemm_scatter", ranks=2, T=64, B=1, C=64, columns=64, H=2)
try:
    import matplotlib  # noqa: F401
    DRAWS = True
except ImportError:
    DRAWS = False


VARIANTS = ("compute", "comm", "none", "slice:1", "slice:2", "slice:4", "slice:8", "ring", "ring:2", "ring:4", "ring:8",
            "direct", "direct:2", "direct:4", "direct:8", "once", "nowire", "nowire:2", "nowire:4", "nowire:8")


class MadeUpPlace:
    """A machine whose computation takes 100 ms, cutting into s slices s ms more, and whose link is as asked.

    The native collective takes twice the wire's time, a schedule exposes a tenth of the wire's: every share can be
    worked out by hand."""

    def __init__(self, kind="lab", ranks=2):
        self.kind, self.ranks, self.commands, self.rate, self.cores, self.ratio = kind, ranks, [], 40e9, 2 * ranks, 0.5

    def time(self, variant, slices, wire):
        return {"compute": 100, "comm": 2 * wire, "none": 100 + 2 * wire, "nowire": 100 + slices,
                "slice": 100 + slices + 4 * wire}.get(variant, 100 + slices + 0.1 * wire)

    def run(self, ranks, command, env=None, timeout=None):
        self.commands.append(command)
        words = [word for word in command[1:] if word != "--json"]
        option = dict(zip(words[::2], words[1::2]))
        point = dict(zip(operations.FIELDS[3:], map(int, option["--shape"].split(","))), operation=option["--op"], ranks=ranks)
        sent = operations.payload_bytes(point)
        wire = sent * 8e3 / self.rate
        if option["--repetitions"] < 10:
            raise AssertionError(f"bench_fuse refuses so few: {command}")
        lines = []
        for name in VARIANTS:
            variant, slices = (name.split(":") + ["1"])[:2]
            ms = self.time(variant, int(slices), wire)
            if option.get("--only", variant) == variant:
                lines.append(json.dumps({"variant": name, "ms": ms, "samples_ms": [ms] * (4 if variant == "compute" else 1),
                                         "bytes": 0 if variant in ("compute", "nowire") else sent}))
        return "\n".join(["a line of mpirun's", *lines, ""])


class Clock:
    """Its time moves only by the test's step."""
    def __init__(self, step):
        self.now, self.step = 0, step

    def monotonic(self):
        self.now += self.step
        return self.now


def rows_of(module, place, quick=False):
    with mock.patch.object(module, "time", Clock(1000)):  # ten repetitions of a point
        return [row for point in module.points(place, quick) for row in module.measure(place, point)]


def text_rows(markdown):
    return [line for line in markdown.splitlines() if line.startswith("|")]


class PointsTest(unittest.TestCase):
    def test_points_are_stable_unique_and_plain(self):
        for quick in (False, True):
            place = MadeUpPlace()
            texts = [json.dumps(point, sort_keys=True) for point in operations.points(place, quick)]
            again = [json.dumps(point, sort_keys=True) for point in operations.points(MadeUpPlace(), quick)]
            self.assertEqual(texts, again)
            self.assertEqual(len(texts), len(set(texts)))
            self.assertGreater(len(texts), 1)
            self.assertEqual(place.commands, [], "listing points measures nothing")

    def test_shared_memory_has_no_ratio_to_set(self):
        self.assertEqual(operations.points(MadeUpPlace("local"), False), [])

    def test_quick_is_two_ratios_of_two_operations(self):
        points = operations.points(MadeUpPlace(), True)
        self.assertEqual(len({point["operation"] for point in points}), 2)
        self.assertEqual(len({point["ratio"] for point in points}), 2)
        self.assertEqual(len(points), 4)

    def test_full_has_every_operation_from_a_tenth_to_three(self):
        points = operations.points(MadeUpPlace(), False)
        for operation in operations.TITLES:
            ratios = {point["ratio"] for point in points if point["operation"] == operation}
            self.assertEqual((min(ratios), max(ratios)), (0.1, 3.0), operation)

    def test_links_follow_a_machine_whose_speed_moves(self):
        """It slows down with every run, and the link with it: the wire takes its share of the computation one run before."""
        class Tiring(MadeUpPlace):
            def time(self, variant, slices, wire):
                speed = 1 + 0.1 * len(self.commands)
                return wire if variant == "comm" else speed * super().time(variant, slices, wire)

        point = dict(operations.points(MadeUpPlace(), False)[0], seconds=240)
        place = Tiring()
        with mock.patch.object(operations, "time", Clock(60)):
            rows = operations.measure(place, point)
        blocks = len(place.commands) - 1  # the first chose the first link
        self.assertEqual(blocks, 4)
        wires = [point["ratio"] * 100 * (1 + 0.1 * run) for run in range(1, blocks + 1)]
        self.assertEqual(rows[0]["repetitions"], blocks)  # of one each, whatever was asked for
        faster = [wire for wire in wires for _ in range(4)][:2 * blocks]  # half of the computation's turns
        self.assertAlmostEqual(rows[0]["wire_ms"], sum(faster) / len(faster))

    def test_ranks_are_those_the_place_serves(self):
        for serves, ranks in ((2, {2}), (3, {2}), (4, {4})):
            self.assertEqual({point["ranks"] for point in operations.points(MadeUpPlace(ranks=serves), False)}, ranks)

    def test_shapes_can_be_shared(self):
        for serves in (2, 4, 8):
            for point in operations.points(MadeUpPlace(ranks=serves), False):
                self.assertEqual([point[key] % point["ranks"] for key in ("T", "columns", "H")], 3 * [0], point)


class TrainingPlace(MadeUpPlace):
    """Whose trainer takes 500 ms without transfers, and with every process 100 ms more; the first round takes far longer."""

    def run(self, ranks, command, env=None, timeout=None):
        self.commands.append(command)
        option = dict(zip(command[1::2], command[2::2]))
        lines = [{"event": "config", "ranks": ranks, "flops": 1e9, "parameters": 1, "memory_mib": 1.0, "free_mib": 100}]
        ms = 400.0 + 100 * len(self.commands)
        lines += [{"event": "step", "mode": mode, "round": number, "step_ms": ms * (9 if number == 0 else 1),
                   "exposed_comm_ms": 1.0, "exposed_mean_ms": 1.0, "comm_ms": 1.0, "loss": 1.0, "bytes_sent_rank0": 1000}
                  for number in range(option["--rounds"] + 1) for mode in option["--modes"].split(",")]
        lines += [{"event": "end", "peak_tflops_all_ranks": 1.0}]
        return "\n".join(map(json.dumps, lines))


class TrainingTest(unittest.TestCase):
    def test_rounds_are_those_of_several_processes_over_links_that_follow(self):
        place, point = TrainingPlace(), {"model": "d6", "vocab": 8192, "seq": 256, "batch": 4, "strategy": "tpsp", "tp": 2, "dp": 1,
                                         "seconds": 30, "rounds": 8, "ratio": 0.5, "modes": ["none", "ideal"]}
        with mock.patch.object(steps, "time", Clock(10)):
            rows = training.measure(place, point)
        started = [dict(zip(command[1::2], command[2::2]))["--rounds"] for command in place.commands]
        self.assertEqual(started, [steps.QUICK_ROUNDS] + 3 * [8])
        for mode in point["modes"]:
            mine = [row for row in rows if row["mode"] == mode]
            self.assertEqual([row["round"] for row in mine], list(range(1, 3 * 8 + 1)))
            # The wire takes half of what a step took in the process before.
            self.assertEqual([round(row["line_ms"]) for row in mine], 8 * [250] + 8 * [300] + 8 * [350])
            self.assertAlmostEqual(mine[0]["link_bits_per_s"], 8 * 1000 / 0.25)
            self.assertAlmostEqual(mine[0]["mfu_share"], 1e9 / 0.6 / 1e12)


class AblationTest(unittest.TestCase):
    STEPS = {"none": 150.0, "slice:4": 120.0, "ring:4": 110.0, "direct:4": 110.4, "auto": 90.0, "ideal": 100.0, "ring:4+end": 130.0,
             "ring:4+owners": 110.2, "ring:4+rows": 105.0, "ring:4+ahead0": 140.0, "ring:4+ahead4096": 110.0}

    def rows(self, ranks=2):
        """Steps that vary by 1 ms, at random in the modes that are nearly ring:4."""
        near, draw = ("ring:4", "direct:4", "ring:4+owners", "ring:4+ahead4096"), random.Random(3)
        return [{"mesh": "tpsp 2x1", "ranks": ranks, "model": "d6", "seq": 256, "batch": 4, "parameters": 1, "mode": mode,
                 "round": number, "step_ms": ms + (draw.gauss(0, 1) if mode in near else (-1)**number), "line_ms": 50.0,
                 "link_bits_per_s": 1e9, "exposed_ms": ms - 100, "loss": 5.0, "bytes_sent_per_step": 1e6, "tokens_per_s": 1e6, "mfu_share": 0.5}
                for number in range(1, 17) for mode, ms in self.STEPS.items()]

    def test_one_thing_changes_at_a_time(self):
        for quick in (True, False):
            points = ablation.points(MadeUpPlace(ranks=4), quick)
            self.assertEqual([(point["strategy"], point["tp"], point["dp"]) for point in points],
                             [("tpsp", 2, 1), ("up", 2, 1), ("tpsp", 1, 2), ("tpsp", 2, 2)])
            self.assertEqual(len(ablation.points(MadeUpPlace(), quick)), 3)  # four ranks have no cores
            for point in points:
                self.assertEqual(point, json.loads(json.dumps(point)))  # or a report would not resume
                self.assertEqual({mode.partition("+")[0] for mode in point["modes"]}, set(ablation.SCHEDULES))
                self.assertEqual({mode.partition("+")[0] for mode in ablation.POLICIES}, {"ring:4"})
                cut = [mode for mode in ablation.SCHEDULES if mode not in ("none", "auto", "ideal")]
                self.assertEqual({mode.partition(":")[2] for mode in cut}, {"4"})

    def test_all_take_turns_with_one_policy(self):
        place = TrainingPlace()
        point = {**ablation.points(place, True)[0], "seconds": 0}
        rows = ablation.measure(place, point)
        self.assertEqual({row["mode"] for row in rows}, set(self.STEPS))
        for command in place.commands:
            words = list(map(str, command))
            for name, value in zip(ablation.POLICY[::2], ablation.POLICY[1::2]):
                self.assertEqual(words[words.index(name) + 1], str(value))
        self.assertEqual(ablation.problems(rows), [])

    def test_tables(self):
        lines = {}
        for line in text_rows(ablation.tables(self.rows()))[2:]:
            mode, *cells = line.strip("| ").split(" | ")
            lines[mode] = cells
        self.assertEqual(set(self.STEPS), set(lines))
        self.assertEqual(lines["slice:4"][1:4], ["1.202 ± 0.000", "1.200 (1.190 – 1.210)", "20.0"])
        alike = {mode: cells[7] for mode, cells in lines.items() if len(cells) > 7}
        self.assertEqual(alike["ring:4"], "does not differ from direct:4, ring:4+owners, ring:4+ahead4096")
        self.assertEqual(alike["ring:4+owners"], "does not differ from ring:4, direct:4, ring:4+ahead4096")
        self.assertEqual(alike["auto"], "**below ideal**: noise, or a wrong measurement")
        self.assertFalse(set(alike) & {"none", "slice:4", "ideal", "ring:4+end", "ring:4+rows", "ring:4+ahead0"}, alike)

    def test_four_ranks_that_are_missing_are_named(self):
        self.assertIn("tp 2 x dp 2 is not measured: four ranks need 8 cores", ablation.tables(self.rows()))
        self.assertNotIn("not measured", ablation.tables(self.rows(ranks=4)))


class ArithmeticTest(unittest.TestCase):
    SAMPLES = {label: [ms, ms + disturbed, ms, ms - 1, ms + 1, ms + 9 * disturbed] for label, ms, disturbed in (
        ("compute", 100.0, 2.0), ("comm", 50.0, 5.0), ("none", 148.0, 1.0), ("slice:4", 120.0, 3.0), ("ring", 103.0, 20.0),
        ("nowire", 102.0, 7.0), ("nowire:4", 110.0, 2.0))}
    POINT = dict(zip(operations.FIELDS, ("gemm_scatter", "d24", "mlp.fc2", 1000, 1, 10, 200, 1)), ranks=2, ratio=0.4)

    def accounts(self, samples):
        return {row["label"]: row for row in operations.accounts(self.POINT, samples, wire_ms=40.0)}

    def test_known_answers(self):
        rows = self.accounts(self.SAMPLES)
        expected = {"none": (-0.2, 0.0, 48.0), "slice:4": (0.75, 10.0, 10.0), "ring": (0.975, 2.0, 1.0)}
        for label, answers in expected.items():
            for key, value in zip(("hidden_share", "chunking_ms", "exposed_ms"), answers):
                self.assertAlmostEqual(rows[label][key], value, msg=f"{label} {key}")
        for label in ("compute", "comm", "nowire"):
            self.assertNotIn("hidden_share", rows[label])

    def test_errors_are_those_of_drawing_other_repetitions(self):
        middle = {label: samples[0] for label, samples in self.SAMPLES.items()}
        drift = [10 * (-1)**i for i in range(8)]  # of the machine, the same for all variants of a repetition
        steady = {label: [ms] * 8 for label, ms in middle.items()}
        together = {label: [ms + d for d in drift] for label, ms in middle.items()}
        apart = {label: [ms + d * (-1)**n for d in drift] for n, (label, ms) in enumerate(middle.items())}
        error = lambda samples: self.accounts(samples)["ring"]["hidden_error_share"]
        self.assertAlmostEqual(error(steady), 0)
        self.assertAlmostEqual(error(together), 0)
        self.assertGreater(error(apart), 0.01)

    def test_payload(self):
        for operation, ranks, sent in (("gemm_scatter", 2, 4 * 3 * 10), ("gather_gemm", 4, 3 * 2 * 3 * 10),
                                       ("gemm_alltoall", 2, 4 * 3 * 10), ("alltoall_gemm", 4, 3 * 2 * 3 * 5),
                                       ("wgrad_scatter", 2, 10 * 10)):
            work = dict(operation=operation, ranks=ranks, T=8, B=3, C=10, columns=20, H=2)
            self.assertEqual(operations.payload_bytes(work), 4 * sent, operation)

    def test_line_is_where_slice_and_transfer_take_equally_long(self):
        """Per rank 2 · 1000 · 10 · 100 flop in 1 ms are 2 Gflop/s; half the output, 20000 bytes, go in 0.5 ms at
        40 MB/s: the transfer of a slice takes as long as its computation, so the threshold is the 100 columns."""
        row = dict(operation="gemm_scatter", T=1000, B=1, C=10, columns=200, H=1, ranks=2, compute_ms=1.0, wire_ms=0.5)
        self.assertAlmostEqual(operations.threshold(row), 100)
        self.assertAlmostEqual(operations.threshold(dict(row, operation="gather_gemm", wire_ms=0.25)), 50)
        self.assertAlmostEqual(operations.threshold(dict(row, wire_ms=1.0)), 200)

    def test_made_up_place_through_the_first_experiment(self):
        point = dict(next(p for p in operations.points(MadeUpPlace(), False) if p["ratio"] == 0.5), seconds=0)
        place = MadeUpPlace()
        rows = {row["label"]: row for row in operations.measure(place, point)}
        self.assertEqual(set(rows), set(VARIANTS))
        self.assertAlmostEqual(rows["ring:2"]["wire_ms"], 50)
        self.assertAlmostEqual(rows["ring:2"]["ratio"], 0.5)
        self.assertAlmostEqual(rows["ring:2"]["hidden_share"], 1 - 5 / 50)
        self.assertAlmostEqual(rows["ring:2"]["exposed_ms"], 5)
        self.assertAlmostEqual(rows["ring:2"]["chunking_ms"], 2)
        self.assertAlmostEqual(rows["slice:8"]["hidden_share"], 1 - 200 / 50)
        self.assertAlmostEqual(place.rate, operations.payload_bytes(point) * 8 / 0.05)


class TablesTest(unittest.TestCase):
    def test_every_row_of_operations_is_there(self):
        rows = rows_of(operations, MadeUpPlace())
        lines = text_rows(operations.tables(rows))
        hidden = sum(line.count("±") for line in lines)
        self.assertEqual(hidden, sum("hidden_share" in row for row in rows))
        losing = tables.percent(min(row["hidden_share"] for row in rows if "hidden_share" in row))
        self.assertTrue(losing.startswith("−") and any(losing in line for line in lines), losing)

    def test_the_paper_is_beside_its_ratios(self):
        (_, _, ratio, slicing, _), *attention = operations.PAPER
        self.assertAlmostEqual(ratio, 0.558, places=3)
        self.assertAlmostEqual(slicing, 0.839, delta=0.0015)  # as it says itself
        self.assertEqual([f"{ratio:.2f} {slicing:.2f} {commfuse:g}" for *_, ratio, slicing, commfuse in attention],
                         ["0.25 0.44 1", "0.35 -1.67 1"])
        text = operations.tables(rows_of(operations, MadeUpPlace()))
        lines = [line for line in text_rows(text) if "× 4096 |" in line or "× 8192 |" in line]
        self.assertEqual(len(lines), len(operations.PAPER))
        mlp, = (line for line in lines if "MLP" in line)
        self.assertTrue(mlp.endswith("| 83.8 | 86.4 | 99.8 |"), mlp)  # ring 2 loses a tenth of the wire and 2 ms
        self.assertNotIn("Beside the paper", operations.tables(rows_of(operations, MadeUpPlace(), True)))

    def test_cells_are_as_many_as_headings(self):
        width = None
        for line in operations.tables(rows_of(operations, MadeUpPlace(), True)).splitlines():
            cells = line.count("|") if line.startswith("|") else None
            if cells and width:
                self.assertEqual(cells, width, line)
            width = cells

    @unittest.skipUnless(DRAWS, "no matplotlib: scripts/install_deps.sh")
    def test_figures_are_written(self):
        with tempfile.TemporaryDirectory() as folder:
            (end, figure), = operations.figures(rows_of(operations, MadeUpPlace())).items()
            self.assertEqual(end, "_line")
            plots.save(figure, f"{folder}/operations")
            self.assertEqual(sorted(os.listdir(folder)), ["operations.png", "operations.svg"])
            for name in os.listdir(folder):
                with open(f"{folder}/{name}", "rb") as file:
                    head = file.read(200)
                self.assertIn(b"PNG" if name.endswith(".png") else b"<?xml", head, name)


class BenchTest(unittest.TestCase):
    """The program itself, two ranks on this machine; its times do not matter here."""

    def start(self, *options, ranks=2):
        return subprocess.run(["scripts/mpirun.sh", "-np", str(ranks), BENCH, *options], cwd=ROOT, capture_output=True,
                              text=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def test_lines_of_all_operations(self):
        class Here:
            def run(_, ranks, command):
                done = self.start(*map(str, command[1:]), ranks=ranks)
                self.assertEqual(done.returncode, 0, done.stderr)
                return done.stdout
        for operation in operations.TITLES:
            point = dict(SMALL, operation=operation)
            lines = operations.run(Here(), point)
            self.assertEqual(list(lines), list(VARIANTS), operation)
            for line in lines.values():
                self.assertLessEqual(0, line["p10_ms"])
                self.assertLessEqual(line["p10_ms"], line["ms"])
                self.assertLessEqual(line["ms"], line["p90_ms"])
                self.assertEqual(len(line["samples_ms"]), 40 if line["variant"] == "compute" else 10)
                self.assertTrue(min(line["samples_ms"]) <= line["ms"] <= max(line["samples_ms"]))
                sent = 0 if line["variant"].split(":")[0] in ("compute", "nowire") else operations.payload_bytes(point)
                self.assertEqual(line["bytes"], sent, line)
        self.assertEqual(list(operations.run(Here(), SMALL, "--only", "ring")), ["ring", "ring:2", "ring:4", "ring:8"])

    def test_malformed_options_are_refused(self):
        good = ["--op", "gemm_scatter", "--shape", operations.shape_of(SMALL)]
        for options, why in ((["10"], "unknown option 10"), ([*good, "--jsno"], "unknown option --jsno"),
                             (["--op", "gemm"], "no such operation"), ([*good, "--only", "commfuse"], "no such variant"),
                             (["--op", "gemm_scatter"], "go together"), (["--shape", operations.shape_of(SMALL)], "go together"),
                             (["--json"], "for one operation"), (["--only", "comm"], "for one operation"),
                             ([*good, "--repetitions"], "needs a value"),
                             ([*good, "--repetitions", "9"], "at least 10"),
                             ([*good, "--repetitions", "1e2"], "whole number"),
                             ([*good, "--repetitions", "-20"], "whole number"),
                             (["--op", "gemm_scatter", "--shape", "64,1,64,64"], "5 whole numbers"),
                             (["--op", "gemm_scatter", "--shape", "64,1,64,64,2,"], "5 whole numbers"),
                             (["--op", "gemm_scatter", "--shape", "64, 1,64,64,2"], "5 whole numbers"),
                             (["--op", "gemm_scatter", "--shape", "0,1,64,64,2"], "from 1 to"),
                             (["--op", "gemm_scatter", "--shape", f"{2**70},1,64,64,2"], "from 1 to"),
                             (["--op", "gemm_scatter", "--shape", "63,1,64,64,2"], "cannot be shared"),
                             (["--op", "attention_scatter", "--shape", "64,1,64,128,2"], "attention wants")):
            done = self.start(*options)
            self.assertNotEqual(done.returncode, 0, options)
            self.assertEqual(done.stdout.strip(), "", options)
            self.assertEqual(done.stderr.count("error: "), 1, done.stderr)
            self.assertIn(why, done.stderr, options)
        alone = self.start(*good, ranks=1)
        self.assertNotEqual(alone.returncode, 0)
        self.assertIn("nobody to communicate with", alone.stderr)


if __name__ == "__main__":
    unittest.main()
