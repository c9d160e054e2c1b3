"""Predictions beside what is published, and a machine's description made of what the benchmarks print."""
# limit: 240
# quick: none
import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
import command
import measure_machine
import numpy
import predict_check
import predict_programs

LAYERS = """C 768, H 12, B 4, T 1024, V 50304, 15 repetitions; GEMM peak 140.2 GFLOP/s
kernel                          ms   spread   GFLOP/s    peak     GB/s
linear forward C→4C      195.745      28%      98.7   70.4%
linear dgrad 4C→C        159.437      38%     121.2   86.5%
linear wgrad               159.767      29%     121.0   86.3%
layernorm forward            5.152     118%                        4.9
layernorm backward           4.165     138%                       12.1
gelu forward 4C              8.000     107%                       12.0
gelu backward 4C            12.050     107%                       12.5
residual                     2.013     421%                       18.8
attention forward           66.711      45%      96.7   68.9%
attention backward         146.295      43%     110.2   78.6%
crossentropy stats          20.000      10%                       10.0
crossentropy combine        10.000      10%                       30.0
adamw                       34.244      42%                       31.6
"""
COLLECTIVES = """Open MPI v4.1.4, 2 ranks, blocks of a rank; ms, median of 5 rounds in turns (times the wire)
                            --overlap        64 KiB         512 KiB        4096 KiB       16384 KiB
the wire: MPI_Sendrecv                    0.020 (1.00)    0.094 (1.00)    1.383 (1.00)    3.926 (1.00)
MPI_Allgather               none          0.024 (1.44)    0.192 (0.98)    1.547 (1.10)    4.572 (1.10)
"""


def expected(machine, dp):
    """What --predict prints of the error to expect."""
    text = predict_check.run(["./train_gpt", "--predict", machine, "--tp", 1, "--dp", dp, "--layers", 1, "--channels", 64,
                              "--heads", 1, "--seq", 64])
    return re.search("^To expect: .*", text, re.MULTILINE)[0]


class Check(unittest.TestCase):
    def within(self, low, high, rows, table):
        errors = [float(error) for error in re.findall(r"([+-][\d.]+) % \|$", table, re.MULTILINE)]
        self.assertEqual(len(errors), rows)
        self.assertTrue(low <= min(errors) and max(errors) <= high, table)

    def test_the_reported_gpus(self):
        """All steps of the committed reports, in all their modes, by rates of kernels alone. They made more passes over memory."""
        self.within(-11.5, -3.5, 19, predict_check.gpu(None))

    def test_the_machines_are_those_of_the_reports(self):
        """What the script writes again is what is committed: no rate was edited."""
        reports = [str(ROOT / f"scripts/experiments/results/gpu/{name}.txt") for name in ("h100", "h200")]
        for name, given in (("h100x8", reports), ("h200x8", reports[1:])):
            committed = (ROOT / f"scripts/machines/{name}.json").read_text()
            with tempfile.TemporaryDirectory() as folder:
                out = pathlib.Path(folder, "machine.json")
                out.write_text(re.sub(r'("memory_gb_per_s": )[\d.]+', r"\g<1>1", committed))
                subprocess.run([sys.executable, ROOT / "scripts/measure_machine.py", "--report", *given, "--out", out], check=True)
                self.assertEqual(out.read_text(), committed)

    def test_what_a_prediction_says_to_expect_is_what_the_tables_say(self):
        """The errors in the committed tables are within those that --predict prints, and reach them within a percent."""
        tables = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", (
            ROOT / "scripts/experiments/results/predict/predict.md").read_text(), re.MULTILINE | re.DOTALL))
        for names, machine, dp, form in ((("gpu",), "h200x8", 1, r"predicted -(\d+) to (-\d+) %"),
                                         (("emulated",), "h100x8", 2, r"assumptions: -(\d+) to \+(\d+) %"),
                                         (("published",), "h100x8", 2, r"eight GPUs: -(\d+) to (-\d+) %"),
                                         (("here", "report"), "laptop", 2, r"predicted (\d+) % too short to (\d+) % too long")):
            errors = [float(error) for name in names for error in re.findall(r"([+-][\d.]+) % \|$", tables[name], re.MULTILINE)]
            said = expected(machine, dp)
            low, high = map(int, re.search(form, said).groups())
            self.assertTrue(-low - 0.5 <= min(errors) <= -low + 1 and high - 1 <= max(errors) <= high + 0.5, (names, errors, said))

    def test_published_steps(self):
        """llm.c's four figures; the rates of a100x8 and h100x8 are those of others' benchmarks, nothing is fitted."""
        self.within(-17.5, -13.5, 4, predict_check.published(None))

    def test_the_reported_lab_within_five_percent(self):
        with tempfile.TemporaryDirectory() as folder:
            self.within(-5, 5, 9, predict_check.report(argparse.Namespace(out=pathlib.Path(folder))))  # three meshes, three modes

    def test_a_measured_machine_is_one_that_predict_takes(self):
        def run(command, *_, **__):
            told = "device    CPU, fp32; 1 thread of the host a rank (affinity allows 3 of 4 cores)\n"
            return told if "--dry-run" in command else LAYERS if "bench_layers" in str(command) else COLLECTIVES

        with tempfile.TemporaryDirectory() as folder, mock.patch.object(measure_machine, "run", run), \
                mock.patch.object(sys, "argv", ["measure_machine.py", "--out", f"{folder}/here.json"]):
            measure_machine.main()
            text = pathlib.Path(folder, "here.json").read_text()
            self.assertIn('"gb_per_s": 4.27', text)  # 16 MiB in 3.926 ms
            self.assertIn('"memory_gb_per_s": 20.31', text)  # 1942 MB in 95.6 ms
            self.assertIn('"comment": "3 cores (affinity allows 3 of 4 cores), 2 ranks of 1 threads', text)
            self.assertIn('"taken": 0.25', text)  # 3 cores for 4 threads
            found = predict_check.predict(f"{folder}/here.json", tp=2, dp=1, layers=2, channels=256, heads=4, seq=128)
        self.assertEqual(tuple(found), predict_check.MODES)

    def test_without_their_runs_other_programs_are_skipped(self):
        with tempfile.TemporaryDirectory() as folder:
            result = subprocess.run([sys.executable, ROOT / "tests/bench/predict_programs.py", "--data", folder],
                                    capture_output=True, text=True, check=False)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(re.findall("^Skipped: .*/(\\w+) is not here", result.stdout, re.MULTILINE), ["megatron_a100", "ultrascale"])

    def test_options_that_cannot_be_are_refused(self):
        for words, why in ((("../tests/bench/predict_check.py", "--only", "published,nonsense"), "--only: there is no nonsense; there are gpu, published, emulated"),
                           (("measure_machine.py", "--out", "/dev/null", "--ranks", "1"), "--ranks: 1: at least 2")):
            result = subprocess.run([sys.executable, ROOT / "scripts" / words[0], *words[1:]], capture_output=True, text=True,
                                    check=False)
            self.assertEqual(result.returncode, 2)
            self.assertIn(why, result.stderr)

    def test_what_cannot_be_written_ends_before_the_work(self):
        """In one line; what is not there, or no file, is seen before minutes of measuring."""
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(measure_machine, "run", self.fail):
            pathlib.Path(folder, "file").write_text("x", encoding="utf-8")
            for words in (("measure_machine.py", "--out", f"{folder}/nowhere/here.json"), ("measure_machine.py", "--out", folder),
                          ("measure_machine.py", "--out", "/dev/null"), ("measure_machine.py", "--out", f"{folder}/file/x"),
                          ("../tests/bench/predict_check.py", "--out", f"{folder}/file"), ("report.py", "--out", f"{folder}/file"),
                          ("gpu_check.py", "--out", f"{folder}/file"),
                          ("mfu_sweep", "--launcher", "env {ranks}", "--train", "x", "--out", f"{folder}/nowhere/sweep.jsonl"),
                          ("mfu_sweep", "--launcher", "env {ranks}", "--train", "x", "--out", folder),
                          ("mfu_sweep", "--launcher", "no-such-launcher {ranks}", "--train", "x", "--out", f"{folder}/x")):
                with self.subTest(words=words):
                    result = subprocess.run([sys.executable, ROOT / "scripts" / words[0], *words[1:]], capture_output=True,
                                            text=True, check=False, timeout=60)
                    self.assertEqual((result.returncode, result.stdout), (1, ""), result.stderr)
                    self.assertRegex(result.stderr, "\\Aerror: .*\n(hint:  .*\n)?\\Z")
            result = subprocess.run([sys.executable, ROOT / "scripts/measure_machine.py", "--out", f"{folder}/x"],
                                    capture_output=True, text=True, check=False, env={"PATH": folder})
            self.assertIn("there is no mpirun", result.stderr)
            self.assertEqual(os.listdir(folder), ["file"])

    def test_nothing_is_written_through_links(self):
        """Whoever can write a folder could lay there another name of any file."""
        with tempfile.TemporaryDirectory() as folder:
            victim, names = pathlib.Path(folder, "victim"), [f"{folder}/{name}" for name in ("soft", "hard", "gone")]
            victim.write_text("precious", encoding="utf-8")
            os.symlink(victim, names[0])
            os.link(victim, names[1])
            os.symlink(f"{folder}/created", names[2])
            for name in names:
                for mode in "w", "a", "rb+", "wb":
                    with self.assertRaises(OSError):
                        command.opened(name, mode)
                command.write_whole(name, "new")
                self.assertEqual((pathlib.Path(name).read_text(encoding="utf-8"), os.path.islink(name)), ("new", False))
            with self.assertRaises(ZeroDivisionError), command.whole(names[0]) as file:
                file.write("half")
                raise ZeroDivisionError
            self.assertEqual(victim.read_text(encoding="utf-8"), "precious")
            self.assertEqual(sorted(os.listdir(folder)), ["gone", "hard", "soft", "victim"])
            scripts = [*(ROOT / "scripts").rglob("*.py"), ROOT / "scripts/mfu_sweep"]
            for script in scripts:
                if script.name not in ("command.py", "tokens.py"):
                    self.assertNotRegex(script.read_text(encoding="utf-8"),
                                        r"[^.\w]open\([^)]*\"[wax]|write_text|write_bytes|savefig\((?!file)")

    def test_all_reduces_and_the_host_bound_a_step(self):
        """Twice the network or a host that is never the bound cannot make a step longer; a slow host is all of it."""
        run = {name: numpy.array([value], float) for name, value in dict(
            gpus=16, global_batch=64, micro_batch=2, channels=1024, heads=16, layers=12, seq=1024, tp=4, dp=4).items()}
        known, machine = numpy.array([[[1.0], [0.1], [0.2]], [[10.0], [2.0], [3.0]]]), predict_programs.described("a100x8")
        constants = [start for start, _, _ in predict_programs.MEGATRON.values()]
        base = predict_programs.megatron_model(run, known, machine)(constants)[0]
        for link in 0, 1:
            faster = predict_programs.described("a100x8")
            faster["links"][link].update(gb_per_s=400, block_gb_per_s=400)
            self.assertLess(predict_programs.megatron_model(run, known, faster)(constants)[0], base)
        slow_host = predict_programs.megatron_model(run, known, machine)((*constants[:2], 1000, 0, 0))[0]
        self.assertAlmostEqual(slow_host, 8 * 12000, delta=0.02 * slow_host)
