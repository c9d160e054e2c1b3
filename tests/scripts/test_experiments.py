"""Experiments of steps, their arithmetic and tables from rows made up with known answers; and the lines of a real bench_fuse of
two ranks.

limit: 480
"""
import argparse
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
import numpy as np

import command
import measured
import optimizers
import peers
import run_log
from experiments import ablation, policy, steps, training

BENCH = ROOT / os.environ.get("BUILD", "build/release") / "tests/bench/bench_fuse"
OPERATIONS = ("gather_gemm", "gemm_scatter", "attention_scatter", "gemm_alltoall", "attention_alltoall", "alltoall_gemm",
              "wgrad_scatter")
SHAPE = "64,1,64,64,2"  # T, B, C, columns, H
VARIANTS = ("compute", "comm", "none", "slice:1", "slice:2", "slice:4", "slice:8", "ring", "ring:2", "ring:4", "ring:8",
            "direct", "direct:2", "direct:4", "direct:8", "once", "nowire", "nowire:2", "nowire:4", "nowire:8")


class MadeUpPlace:
    def __init__(self, ranks=2):
        self.kind, self.ranks, self.commands, self.rate, self.cores, self.ratio = "lab", ranks, [], 40e9, 2 * ranks, 0.5


class Clock:
    """Its time moves only by the test's step."""
    def __init__(self, step):
        self.now, self.step = 0, step

    def monotonic(self):
        self.now += self.step
        return self.now


def text_rows(markdown):
    return [line for line in markdown.splitlines() if line.startswith("|")]


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
                                         "seconds": 50, "rounds": 8, "ratio": 0.5, "modes": ["none", "ideal"]}
        with mock.patch.object(steps, "time", Clock(9)):  # a process takes nine seconds
            rows = training.measure(place, point)
        started = [dict(zip(command[1::2], command[2::2]))["--rounds"] for command in place.commands]
        self.assertEqual(started, [steps.QUICK_ROUNDS] + 4 * [8] + [4])  # the last one has the rounds that are left
        for mode in point["modes"]:
            mine = [row for row in rows if row["mode"] == mode]
            self.assertEqual([row["round"] for row in mine], list(range(1, 4 * 8 + 4 + 1)))
            # The wire takes half of what a step took in the process before.
            self.assertEqual([round(row["line_ms"]) for row in mine], 8 * [250] + 8 * [300] + 8 * [350] + 8 * [400] + 4 * [450])
            self.assertAlmostEqual(mine[0]["link_bits_per_s"], 8 * 1000 / 0.25)
            self.assertAlmostEqual(mine[0]["mfu_share"], 1e9 / 0.6 / 1e12)


class AblationTest(unittest.TestCase):
    STEPS = {"none": 150.0, "slice:4": 120.0, "ring:4": 110.0, "direct:4": 110.1, "auto": 90.0, "nowire:4": 103.0, "ideal": 100.0}

    def rows(self, ranks=2):
        """Steps that vary by 1 ms, at random in the modes that are nearly ring:4."""
        near, draw = ("ring:4", "direct:4"), random.Random(3)
        return [{"mesh": "tpsp 2x1", "ranks": ranks, "model": "d6", "seq": 256, "batch": 4, "parameters": 1, "mode": mode,
                 "round": number, "step_ms": ms + (draw.gauss(0, 1) if mode in near else (-1)**number), "line_ms": 50.0,
                 "link_bits_per_s": 1e9, "exposed_ms": max(0, ms - 103), "loss": 5.0, "bytes_sent_per_step": 1e6,
                 "tokens_per_s": 1e6, "mfu_share": 0.5} for number in range(1, 17) for mode, ms in self.STEPS.items()]

    def test_one_thing_changes_at_a_time(self):
        for module in ablation, policy:
            for quick in (True, False):
                points = module.points(MadeUpPlace(ranks=4), quick)
                self.assertEqual([(point["strategy"], point["tp"], point["dp"]) for point in points],
                                 [("tpsp", 2, 1), ("up", 2, 1), ("tpsp", 1, 2), ("tpsp", 2, 2)])
                self.assertEqual(len(module.points(MadeUpPlace(), quick)), 3)  # four ranks have no cores
                for point in points:
                    self.assertEqual(point, json.loads(json.dumps(point)))  # or a report would not resume
                    self.assertEqual(tuple(point["policy"]), ablation.POLICY)
        self.assertEqual({mode.partition("+")[0] for mode in policy.CHANGED}, {"ring:4"})
        cut = [mode for mode in ablation.SCHEDULES if mode not in ("none", "auto", "ideal")]
        self.assertEqual({mode.partition(":")[2] for mode in cut}, {"4"})
        self.assertLessEqual({mode for pair in ablation.PAIRS for mode in pair}, set(ablation.SCHEDULES))

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
        lines, text = {}, ablation.shown(self.rows())
        for line in text_rows(text)[2:]:
            mode, *cells = line.strip("| ").split(" | ")
            lines[mode] = cells
        self.assertEqual(set(self.STEPS), set(lines))
        self.assertEqual(lines["slice:4"][1:4], ["1.200 (1.190 – 1.210)", "17.0", "3.0"])  # 20 ms beyond ideal
        alike = {mode: cells[7] for mode, cells in lines.items() if len(cells) > 7}
        self.assertEqual(alike["ring:4"], "does not differ from direct:4")
        self.assertEqual(alike["direct:4"], "does not differ from ring:4")
        self.assertEqual(alike["auto"], "**below ideal**: noise, or a wrong measurement")
        self.assertFalse(set(alike) & {"none", "slice:4", "nowire:4", "ideal"}, alike)
        self.assertRegex(text, r"\* `ring:4` is 8\.\d % shorter than `slice:4` \(\d\.\d to \d\.\d\)\n")
        self.assertRegex(text, r"\* `direct:4` and `ring:4` do not differ significantly \(-\d\.\d to \+\d\.\d %, 16 rounds\)\n")


class PairsTest(unittest.TestCase):
    """Rounds made up of a machine that drifts by a fifth and is slow at times, common to a round, and noise of each step."""

    def modes(self, seed, rounds=40, **factors):
        draw = np.random.default_rng(seed)
        common = 1000 * (1 + 0.2 * np.sin(np.arange(rounds) / 5)) * draw.lognormal(0, 0.05, rounds)
        return {mode: {"step_ms": factor * common * draw.lognormal(0, 0.015, rounds)} for mode, factor in factors.items()}

    def test_a_known_difference_is_found_and_none_is_not(self):
        found = {0.97: 0, 1: 0, 1.03: 0}
        held = 0
        for seed in range(50):
            for part, factor in enumerate(found):
                modes = self.modes(3 * seed + part, a=factor, b=1)
                middle, low, high = steps.beside(modes["a"], modes["b"])
                self.assertTrue(low <= middle <= high)
                held += low <= 100 * (factor - 1) <= high
                sentence = steps.difference(modes, "a", "b")
                word = "do not differ" if low <= 0 <= high else "shorter" if high < 0 else "longer"
                self.assertIn(word, sentence)
                self.assertEqual(steps.alike(modes["a"], modes["b"]), word == "do not differ")
                found[factor] += word != "do not differ" and (factor == 1 or word == ("shorter" if factor < 1 else "longer"))
        self.assertGreaterEqual(found[0.97], 49)
        self.assertGreaterEqual(found[1.03], 49)
        self.assertLessEqual(found[1], 7)  # two or three are expected
        self.assertGreaterEqual(held, 134)  # of 150 intervals, 142 are expected

    def test_what_is_common_to_a_round_does_not_count(self):
        modes = self.modes(1, a=0.97, b=1)
        middle, low, high = steps.beside(modes["a"], modes["b"])
        self.assertLess(high - low, 2)
        apart = {"step_ms": np.random.default_rng(2).permutation(modes["a"]["step_ms"])}  # the same steps, of other rounds
        _, low, high = steps.beside(apart, modes["b"])
        self.assertGreater(high - low, 5)
        exact = {"x": {"step_ms": np.full(9, 95.0)}, "y": {"step_ms": np.full(9, 100.0)}}
        self.assertEqual(steps.difference(exact, "x", "y"), "`x` is 5.0 % shorter than `y` (5.0 to 5.0)")
        self.assertEqual(steps.difference(exact, "y", "y"), "`y` and `y` do not differ significantly (+0.0 to +0.0 %, 9 rounds)")


class PeersTest(unittest.TestCase):
    """tests/bench/peers.py: tables from rows made up; the program, whose PyTorch is a script that prints what it is told."""

    def rows(self, **losses):
        """dp 2: PyTorch takes 1.5 times as long as ring:4 in the first turn and 1.7 times in the second."""
        return [{"group": "dp 2", "mode": mode, "turn": turn, "step": step, "step_ms": 9999.0 if step == 0 else ms * (1 + turn),
                 "loss": losses.get(mode, 9.0) - step, "tokens": 1000, "rate": "1gbit"}
                for turn in range(2) for mode, ms in (("none", 150.0), ("ring:4", 100.0), ("ring:4 AVX2", 200.0), ("ddp", (150.0, 170.0)[turn]))
                for step in range(3)]

    def test_multiples_are_of_one_turn_and_first_steps_do_not_count(self):
        lines = text_rows(peers.table(self.rows()))
        self.assertEqual(lines[2:], ["| dp 2: `none` | 225 | 4444 | 1.50 (1.50 to 1.50) |  |",
                                     "| dp 2: `ring:4` | 150 | 6667 | 1.00 |  |",
                                     "| dp 2: `ring:4`, AVX2 only | 300 | 3333 | 2.00 (2.00 to 2.00) | 1.00 |",
                                     "| dp 2: PyTorch, DDP, eager | 245 | 4082 | 1.60 (1.50 to 1.70) | 0.80 (0.75 to 0.85) |"])

    def test_a_loss_of_the_first_step_that_differs_is_named(self):
        self.assertEqual(peers.problems(self.rows(ddp=9 * (1 + 5e-5))), {})
        wrong = self.rows(ddp=9 * (1 + 2e-4))
        self.assertEqual(peers.problems(wrong), {("dp 2", "ddp"): "the first loss is 9.001800, of `none` 9.000000"})
        self.assertEqual(peers.table(wrong).count("**ERROR: the first loss is 9.001800, of `none` 9.000000**"), 1)
        self.assertEqual(len(peers.problems(self.rows(ddp=float("nan")))), 1)

    def start(self, folder, loss):
        fake = pathlib.Path(folder, "python")
        fake.write_text(f"""#!/bin/sh\necho '{{"step_ms": [5, 4], "loss": [{loss}, 1]}}'\n""")
        fake.chmod(0o755)
        return subprocess.run([sys.executable, ROOT / "tests/bench/peers.py", "--local", "--minutes", "0", "--steps", "1", "--size",
                               "1", "32", "2", "32", "64", "2", "--only", "one process", "--torch", fake,
                               "--out", f"{folder}/peers.csv", "--build", str(BENCH.parents[2].relative_to(ROOT))],
                              capture_output=True, text=True, timeout=100)

    def test_the_program_and_a_pytorch_that_is_right_and_one_that_is_wrong(self):
        with tempfile.TemporaryDirectory() as folder:
            wrong = self.start(folder, 7)
            self.assertEqual(wrong.returncode, 1, wrong.stderr)
            self.assertIn("PyTorch, eager **ERROR: the first loss is 7.0", wrong.stdout)
            ours = next(row["loss"] for row in peers.read(f"{folder}/peers.csv") if row["mode"] == "none")
            right = self.start(folder, ours)
            self.assertEqual(right.returncode, 0, right.stdout + right.stderr)
            self.assertEqual(len(text_rows(right.stdout)), 5)
            fails = self.start(folder, "9]}'; exit 1; : '")  # its row is missing, and the status says so
            self.assertEqual((fails.returncode, len(text_rows(fails.stdout))), (1, 4), fails.stdout + fails.stderr)

    def test_auto_has_tried_its_schedules_before_the_steps_that_count(self):
        with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
            o = argparse.Namespace(local=True, size=(1, 32, 2, 32, 64, 2), build=str(BENCH.parents[2].relative_to(ROOT)))
            counted = peers.Bench(o, folder).measure("tp 2", "auto", 3)[0]
            steps = run_log.steps(run_log.lines(f"{folder}/log.jsonl"))
        tried = [step["step"] for step in steps if step.get("trial")]
        self.assertTrue(tried)
        self.assertEqual(counted[1:], [step["step_ms"] for step in steps[tried[-1] + 1:]][:2])

    def test_pytorch_has_the_same_losses(self):
        python = ROOT / "build/venv/bin/python"
        if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode if python.exists() else True:
            raise unittest.SkipTest("no PyTorch: scripts/install_deps.sh --torch")
        with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
            build = str(BENCH.parents[2].relative_to(ROOT))
            o = argparse.Namespace(local=True, size=(2, 64, 4, 32, 128, 2), torch=python, build=build)
            bench, losses = peers.Bench(o, folder), {}
            for group in "tp 2", "dp 2":
                for mode in peers.GROUPS[group]:
                    if not mode.endswith("compiled"):
                        losses[group, mode] = bench.measure(group, mode, 3)[1]
            for what, found in losses.items():
                same = 1 if "auto" in what else 3  # auto's next steps come after its trials
                np.testing.assert_allclose(found[:same], losses["tp 2", "none"][:same], rtol=1e-5, err_msg=str(what))


class OptimizersTest(unittest.TestCase):
    def test_curves_of_another_length_and_earlier_times_are_not_mixed_in(self):
        with tempfile.TemporaryDirectory() as folder:
            bench = optimizers.Bench.__new__(optimizers.Bench)
            bench.o, bench.stamp, bench.rows = argparse.Namespace(steps=300, out=f"{folder}/o.csv"), {}, []
            bench.run = lambda **options: [{"event": "val", "step": 300, "loss": 2.0}]
            bench.losses("adamw", "1e-3", 1)
            self.assertEqual(optimizers.curve(bench.rows, "adamw", "1e-3", 1), {300: 2.0})
            bench.o.steps = 100
            with self.assertRaisesRegex(Exception, "has a training of 300 steps, not of 100"):
                bench.losses("adamw", "1e-3", 1)
            bench.run = lambda **options: [{"event": "step", "step": step, "step_ms": 5.0} for step in range(3)]
            for _ in range(2):
                bench.all_times()
            self.assertEqual(len([row for row in bench.rows if row["kind"] == "time"]), optimizers.ROUNDS * len(optimizers.RATES) * 2)


class MeasuredTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.document = "".join(f"a\n<!-- {name}: tests/bench/measured.py -->\nold\n<!-- end of {name} -->\nb\n"
                                for name in measured.DOCUMENTS)

    def write(self, name, rows):
        stamp = {"commit": "1234567", "processor": "P", "date": "2026-11-29"}
        peers.write(self.folder / name, [{**row, **stamp} for row in rows])

    def optimizers(self):
        """Muon has AdamW's last loss after 10 steps, by the last seed after 20."""
        rows = [{"kind": "time", "optimizer": name, "lr": "", "seed": "", "step": "", "val_loss": "", "step_ms": ms, "round": 0}
                for name, ms in (("adamw", 100), ("muon", 300))]
        for name, best, loss in ("adamw", "1e-3", 1.0), ("muon", "3e-3", 0.5):
            runs = [(rate, 1, 3, 2) for rate in optimizers.RATES[name] if rate != best]  # rate, seed, losses after 10 and 20 steps
            runs += [(best, 1, 0.9 + loss - 0.5, loss), (best, 2, 0.9 + loss - 0.5, loss + 0.01), (best, 3, 3, loss - 0.01)]
            rows += [{"kind": "loss", "optimizer": name, "lr": rate, "seed": seed, "step": step, "val_loss": value,
                      "step_ms": "", "round": ""} for rate, seed, *values in runs for step, value in zip((10, 20), values)]
        return rows

    def test_tables_come_from_rows_and_take_the_place_of_the_old_ones(self):
        self.assertEqual(measured.filled(self.document, measured.parts(self.folder)), self.document)  # no rows
        self.write("ablation.csv", AblationTest().rows())
        self.write("ablation-2.csv", [{**row, "step_ms": 2 * row["step_ms"]} for row in AblationTest().rows()])
        self.write("peers.csv", PeersTest().rows())
        self.write("optimizers.csv", self.optimizers())
        found = measured.filled(self.document, measured.parts(self.folder))
        self.assertNotIn("old", found)
        self.assertEqual(measured.filled(found, measured.parts(self.folder)), found)
        self.assertRegex(found, r"\| TPSP, tp 2: step ÷ `ideal` \| 1\.500 \| 1\.200 \| 1\.\d+ \| 0\.900 \| "
                         r"-\d\d\.\d % \(\S+ to \S+\) \| (-8\.\d % \(-\d\.\d to -\d\.\d\)) \| \1 \|\n"
                         r"\| exposed, ms \| 47 \| 17 \| 7 \| 0 \| -85 % \| -59 % \| -59 % \|")
        self.assertRegex(found, r"\| `direct:4` vs\. `ring:4` \| \S+ % \(-\S+ to \+\S+\), not significant \|")
        self.assertIn("| `nowire:4` vs. `ideal` | +3.0 % (+3.0 to +3.0) | +3.0 % (+3.0 to +3.0) |", found)
        self.assertRegex(found, r"; again: P, 2026-11-29, commit 1234567, \[every round\]\(\S+ablation-2\.csv\)\.")
        self.assertIn("P, 2026-11-29, commit 1234567", found)
        self.assertIn("1.60 (1.50 to 1.70)", found)
        self.assertIn("| adamw | 1e-3 | 5e-4 2.000, 1e-3 1.000, 3e-3 2.000 | 1.000 (0.990 to 1.010) | 20 (20 to 20) | 100 | 2 (2 to 2) |",
                      found)
        self.assertIn("| muon | 3e-3 | 3e-3 0.500, 1e-2 2.000, 3e-2 2.000 | 0.500 (0.490 to 0.510) | 10 (10 to 20) | 300 | 3 (3 to 6) |",
                      found)
        with self.assertRaisesRegex(command.Problem, "no place for ablation"):
            measured.filled("a", measured.parts(self.folder))

    def test_documents_have_what_the_command_prints(self):
        found = measured.parts(ROOT / "scripts/experiments/results")
        self.assertEqual(set(found), set(measured.DOCUMENTS))
        for path, text, filled in measured.documents(found):
            self.assertEqual(filled, text, f"{path}: tests/bench/measured.py --write")


class Demo(unittest.TestCase):
    """scripts/demo.sh without its programs: its last sentence, from steps made up here; nothing outside a clone is read."""

    def compare(self, apart="2e-08", status=0):
        text = (ROOT / "scripts/demo.sh").read_text()
        self.assertNotIn("../", text)
        self.assertTrue(text.endswith("printf '\\n%s\\n' \"$proved\"\n"))
        function = re.search(r"^compare\(\) \{.*?^\}$", text, re.MULTILINE | re.DOTALL)[0]
        rows = [{"event": "step", "mode": mode, "round": number, "step_ms": (100 + number % 3) * times + number / 100}
                for number in range(20) for mode, times in (("none", 2), ("slice:4", 1.25), ("ring:4", 1))]
        with tempfile.TemporaryDirectory() as folder:
            printed = pathlib.Path(folder, "printed")
            printed.write_text("".join(json.dumps(row) + "\n" for row in rows) + f"none 1 1 - 1 1 1% 1 1 0e+00\nring:4 1 1 - 1 1 1% 1 1 {apart}\n")
            script = f"set -e\nfail() {{ echo \"$@\"; exit 1; }}\nfake() {{ cat {printed}; }}\ndemo={folder}\npython={sys.executable}\n" \
                     f"{function}\ncompare Here ring:4 fake\necho \"$proved\""
            done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done.stdout.splitlines()

    def test_the_sentence_that_was_proved(self):
        self.assertEqual(self.compare(), ["none 1 1 - 1 1 1% 1 1 0e+00", "ring:4 1 1 - 1 1 1% 1 1 2e-08",
                                          "Here, with equal losses (to 1e-5), `ring:4` is 20.0 % shorter than `slice:4` (20.0 to 20.0), "
                                          "and `ring:4` is 50.0 % shorter than `none` (50.0 to 50.0)."])
        self.assertEqual(self.compare(apart="3e-04", status=1)[-1], "the losses of the modes disagree")


class BenchTest(unittest.TestCase):
    """The program itself, two ranks on this machine; its times do not matter here."""

    def start(self, *options, ranks=2):
        return subprocess.run(["scripts/mpirun.sh", "-np", str(ranks), BENCH, *options], cwd=ROOT, capture_output=True,
                              text=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def lines(self, operation, *only):
        done = self.start("--op", operation, "--shape", SHAPE, "--repetitions", "10", "--json", *only)
        self.assertEqual(done.returncode, 0, done.stderr)
        return {line["variant"]: line for line in run_log.printed(done.stdout)}

    def test_lines_of_all_operations(self):
        for operation in OPERATIONS:
            width = 32 if "alltoall" in operation else 64
            lines = self.lines(operation)
            self.assertEqual(list(lines), list(VARIANTS), operation)
            for line in lines.values():
                self.assertLessEqual(0, line["p10_ms"])
                self.assertLessEqual(line["p10_ms"], line["ms"])
                self.assertLessEqual(line["ms"], line["p90_ms"])
                self.assertEqual(len(line["samples_ms"]), 40 if line["variant"] == "compute" else 10)
                self.assertTrue(min(line["samples_ms"]) <= line["ms"] <= max(line["samples_ms"]))
                sent = 0 if line["variant"].split(":")[0] in ("compute", "nowire") else 32 * width * 4
                self.assertEqual(line["bytes"], sent, line)
        self.assertEqual(list(self.lines("gemm_scatter", "--only", "ring")), ["ring", "ring:2", "ring:4", "ring:8"])

    def test_columns_are_defined_before_the_first_number(self):
        """In the help, which needs no other rank, and above the table, of which the first rows are awaited here."""
        told = subprocess.run([BENCH, "--help"], capture_output=True, text=True, timeout=100, check=True).stdout
        with subprocess.Popen(["scripts/mpirun.sh", "-np", "2", BENCH, "--repetitions", "10"], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                              stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("all-gather > GEMM"):
                    break
            process.terminate()
        heading = lines[-2].replace("T x B", "TxB").split()
        for column in heading[2:]:
            with self.subTest(column=column):
                defined = rf"(?m)^{column.strip(':')} +\S|{column}:? (?!1 -)\w"
                self.assertRegex(told, defined)
                self.assertRegex("".join(lines[:-2]), defined)
        self.assertEqual(heading[2:6], ["compute", "comm", "ratio", "none"])
        self.assertIn("--shape T,B,C,COLUMNS,H", told)

    def test_malformed_options_are_refused(self):
        good = ["--op", "gemm_scatter", "--shape", SHAPE]
        for options, why in ((["10"], "unknown option 10"), ([*good, "--jsno"], "unknown option --jsno"),
                             (["--op", "gemm"], "no such operation"), ([*good, "--only", "commfuse"], "no such variant"),
                             (["--op", "gemm_scatter"], "go together"), (["--shape", SHAPE], "go together"),
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
