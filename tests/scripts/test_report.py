"""scripts/report.py and its parts, and scripts/mfu_sweep.

Reports are made of a tiny experiment in separate processes, interrupted at known points; tables, arithmetic and
pictures of rows and traces written by hand, with known answers.
"""
# quick: Fake Measured.test_timeline Timeline
# limit: 300
import argparse
import contextlib
import csv
import importlib.machinery
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / os.environ.get("BUILD", "build/release") / "train_gpt"
mfu_sweep = importlib.machinery.SourceFileLoader("mfu_sweep", str(ROOT / "scripts/mfu_sweep")).load_module()

try:
    import numpy
    import lab as laboratory
    import plots
    import report
    from experiments import steps, timeline, training
    from experiments.steps import Place
    from runner import Failed, Result
    from tokens import write_tokens
except ImportError as error:
    raise unittest.SkipTest(f"no numpy or matplotlib: {error}") from None

POINTS = 5
# Writes down each point that it begins, and stays in the one that the file `hold` names until that file is gone.
FAKE = """'''What a fake experiment is for.'''
import os, pathlib, time
import plots
NAME, TITLE = "fake", "A fake experiment"
folder = pathlib.Path(os.environ["FAKE"])

def points(place, quick):
    return [{"size": i, "quick": quick, "seconds": 2} for i in range(int(os.environ.get("FAKE_POINTS", 5)))]

def measure(place, point):
    with open(folder / "begun", "a") as file:
        file.write(f"{point['size']}\\n")
    hold = folder / "hold"
    while hold.exists() and hold.read_text() == str(point["size"]):
        time.sleep(0.02)
    if os.environ.get("FAKE_BROKEN") == str(point["size"]):
        raise RuntimeError("this point cannot be measured")
    place.run(1, ["echo", f"point {point['size']}"])
    return [{"size": point["size"], "way": way, "step_ms": 10.5 * point["size"] + way, "hidden_share": 0.5}
            for way in (1, 2)]

def shown(rows, folder):
    drawn = plots.plt.figure(figsize=(2, 2))
    plots.save(drawn, folder / "fake.png")
    return "\\n".join(f"| {row['size']} | {row['way']} | {row['step_ms']:.1f} |" for row in rows)
"""
DRIVER = """
import sys
sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]
import command, report, fake
report.EXPERIMENTS = {"fake": fake}
sys.exit(command.status_of(report.main))
"""


def wait_until(condition, what, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s in vain: {what}")
        time.sleep(0.02)


def runs(number):
    """Whether there is such a process; one that has ended may wait for somebody to take note."""
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{number}/stat").read_text().rpartition(") ")[2][0] != "Z"
    return False


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="commfuse-test-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.out = self.folder / "report"


class ReportOfAFakeExperiment(Case):
    def setUp(self):
        super().setUp()
        (self.folder / "fake.py").write_text(FAKE)
        (self.folder / "driver.py").write_text(DRIVER)

    def start(self, *arguments, **environment):
        return subprocess.Popen(
            [sys.executable, self.folder / "driver.py", ROOT / "scripts", self.folder, "--out", self.out, "--place",
             "local", *arguments], env={**os.environ, "FAKE": str(self.folder), **environment}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's background job ignores it

    def make(self, *arguments, status=0, **environment):
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=120)
        self.assertEqual(process.returncode, status, out + err)
        return out + err

    def begun(self):
        path = self.folder / "begun"
        return path.read_text().split() if path.exists() else []

    def sizes(self):
        with open(self.out / "fake.csv", encoding="utf-8") as file:
            return [int(row["size"]) for row in csv.DictReader(file) if row["way"] == "1"]

    def interrupt_in(self, point, number):
        """A report that is sent a signal while it measures a point."""
        (self.folder / "hold").write_text(str(point))
        (self.folder / "begun").unlink(missing_ok=True)
        process = self.start()
        wait_until(lambda: self.begun()[-1:] == [str(point)], "the point is begun")
        process.send_signal(number)
        output = "".join(process.communicate(timeout=60))
        (self.folder / "hold").unlink()
        return process.returncode, output

    def test_a_report_is_complete(self):
        output = self.make()
        self.assertIn(f"[{POINTS}/{POINTS}]", output)
        text = (self.out / "report.md").read_text()
        for size in range(POINTS):
            for way in (1, 2):
                self.assertIn(f"| {size} | {way} | {10.5 * size + way:.1f} |", text)
            self.assertIn(f"scripts/mpirun.sh -np 1 echo 'point {size}'", text)
        self.assertIn("What a fake experiment is for.", text)
        self.assertTrue((self.out / "fake.png").exists())
        with open(self.out / "fake.csv", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        version = ["git", "describe", "--always", "--dirty"] if shutil.which("git") else ["true"]
        version = subprocess.run(version, cwd=ROOT, capture_output=True, text=True).stdout.strip()
        self.assertEqual({row["commit"] for row in rows}, {version})
        self.assertRegex(rows[0]["date"] + rows[0]["processor"], r"^\d{4}-\d\d-\d\d.+")
        self.assertEqual([(int(row["size"]), int(row["way"])) for row in rows],
                         [(size, way) for size in range(POINTS) for way in (1, 2)])
        config = subprocess.run(["make", "-s", "config"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in "machine", "compiler", "mpi", "oneDNN", "build":
            self.assertIn(re.search(f"^{name} +(.*)", config, re.MULTILINE)[1], text)
        self.assertIn("scripts/report.py --out", text)

    def test_an_interrupted_report_holds_what_is_measured(self):
        for number, expected in (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL):
            status, output = self.interrupt_in(2, number)
            self.assertEqual(status, expected, output)
            text = (self.out / "report.md").read_text()
            self.assertIn("Not complete: 3 points were not measured", text)
            self.assertIn("| 1 | 2 | 12.5 |", text)
            self.assertNotIn("| 2 | 1 | 22.0 |", text)
        self.make()
        self.assertNotIn("Not complete", (self.out / "report.md").read_text())
        self.assertEqual(self.sizes(), list(range(POINTS)))

    def test_patience_measures_longer(self):
        self.assertIn("0 min left", self.make("--patience", "3", FAKE_POINTS="2"))
        self.assertIn("2 min left", self.make("--patience", "30", FAKE_POINTS="2"))
        self.assertIn("--patience: 0: at least 0.01", self.make("--patience", "0", status=2))

    def test_a_point_that_fails_is_reported_and_the_others_go_on(self):
        output = self.make(status=1, FAKE_BROKEN="1")
        self.assertIn("this point cannot be measured", output)
        self.assertIn("this point cannot be measured", (self.out / "report.md").read_text())
        self.assertEqual(self.sizes(), [0, 2, 3, 4])


def rows_of(mode, step_ms, exposed_ms=0.0, loss=5.0, mesh="tpsp 1x2"):
    return [{"mesh": mesh, "mode": mode, "round": number, "step_ms": step_ms, "exposed_ms": exposed_ms, "comm_ms": 500.0,
             "loss": loss - 0.1 * number, "tokens_per_s": 1e6 / step_ms, "mfu_share": 0.5, "ranks": 2, "model": "d6", "seq": 256,
             "batch": 4, "parameters": 13891584, "link_bits_per_s": 1e9, "line_ms": 490.0, "bytes_sent_per_step": 61e6}
            for number in range(1, 7)]


def training_rows(**changed):
    """1000 ms without transfers, 500 ms of transfers of which ring leaves 20."""
    table = {"none": (1500.0, 500.0), "slice": (1200.0, 180.0), "slice:8": (1150.0, 120.0), "ring": (1020.0, 20.0),
             "direct": (1600.0, 600.0), "ring:4": (1033.0, 20.0), "auto": (1015.0, 18.0),
             "nowire:4": (1010.0, 0.0), "nowire": (1000.0, 0.0), "ideal": (1000.0, 0.0)}
    return sum((rows_of(mode, *table[mode], **changed.get(mode, {})) for mode in table), [])


class Training(Case):
    def row(self, text, mode):
        return next(line for line in text.splitlines() if line.startswith(f"| {mode} |")).split(" | ")

    def test_every_mode_is_in_the_tables_the_losing_ones_too(self):
        text = training.shown(training_rows())
        for mode in training.MODES:
            self.assertIn(f"| {mode} |", text)
        self.assertEqual(self.row(text, "direct")[2], "1.600 (1.600 – 1.600)")
        self.assertEqual(self.row(text, "none")[1:3], ["1500.0", "1.500 (1.500 – 1.500)"])
        self.assertEqual(self.row(text, "auto")[2:4], ["1.015 (1.015 – 1.015)", "18.0"])
        for mode in "nowire", "ideal":
            self.assertIn("wrong by construction", self.row(text, mode)[-2])
        self.assertEqual(training.problems(training_rows()), [])
        self.assertIn("link of 1000 to 1000 Mbit/s each way, which takes 490 ms, 0.49 of the ideal step", text)

    def test_single_steps_that_were_disturbed_leave_the_median(self):
        rows = [{**row, "step_ms": row["step_ms"] + 500, "exposed_ms": row["exposed_ms"] + 500}
                if row["mode"] == "ring" and row["round"] % 3 == 0 else row for row in training_rows()]
        self.assertEqual(self.row(training.shown(rows), "ring")[2:4], ["1.020 (1.020 – 1.520)", "20.0"])

    def test_a_mode_that_is_shorter_in_nearly_all_rounds_differs(self):
        rounds = numpy.arange(20)
        drift = 1000.0 + 100 * rounds  # a machine that becomes slower: both modes alike
        times = lambda ms: {"step_ms": drift + ms}
        self.assertFalse(steps.alike(times(0), times(1 + rounds % 2)))
        self.assertTrue(steps.alike(times(0), times(numpy.where(rounds % 3, 1, -1))))
        self.assertFalse(steps.alike(times(0), times(numpy.where(rounds % 6, 1, -1))))

    def test_modes_that_do_not_differ_are_marked(self):
        rows = training_rows()
        noise = numpy.random.default_rng(2).normal(0, 10, len(rows))  # ring:4 and auto lie within, slice and ring do not
        noisy = [{**row, "step_ms": row["step_ms"] + error} for row, error in zip(rows, noise)]
        text = training.shown(noisy)
        self.assertIn("does not differ from", self.row(text, "auto")[-1])
        self.assertNotIn("ring", self.row(text, "slice")[-1])
        self.assertNotIn("differ", self.row(training.shown(rows), "auto")[-1])
        early = [{**row, "step_ms": 900.0} if row["mode"] == "ring" else row for row in rows]
        self.assertIn("below ideal", self.row(training.shown(early), "ring")[-1])

    def test_a_loss_that_differs_is_an_error(self):
        rows = training_rows(slice={"loss": 5.0 * (1 + 3e-5)})
        self.assertIn("**ERROR**", training.shown(rows))
        self.assertEqual(len(training.problems(rows)), 1)
        self.assertIn("slice", training.problems(rows)[0])
        self.assertEqual(training.problems(training_rows(slice={"loss": float("nan")}))[0].count("slice"), 1)
        self.assertEqual(training.problems(training_rows(slice={"loss": 5.0 * (1 + 3e-6)})), [])
        late = [{**row, "round": steps.LOSS_ROUNDS + row["round"]} for row in rows]
        self.assertEqual(training.problems(training_rows() + late), [])


def event(rank, name, kind, begin, end, layer=None, step=1, **more):
    arguments = {"step": step, **({} if layer is None else {"layer": layer}), **more}
    return {"ph": "X", "pid": rank, "tid": 0, "ts": 1e3 * begin, "dur": 1e3 * (end - begin), "cat": kind, "name": name,
            "args": arguments}


def trace():
    """Four layers of 10, 30, 20 and 50 ms each way, on two ranks; the third is the median of the inner two's lower."""
    events, at = [], 0
    for direction, layers in (("forward", range(4)), ("backward", range(3, -1, -1))):
        for layer in layers:
            long = (10, 30, 20, 50)[layer]
            for rank in range(2):
                events += [event(rank, f"block {direction}", "compute", at + rank, at + long, layer),
                           event(rank, "att.qkv", "compute", at + 2, at + 8, layer, slice=0),
                           event(rank, "reduce-scatter mlp.fc2", "comm", at + 5, at + long, layer, slice=0, bytes=1000),
                           event(rank, "reduce-scatter mlp.fc2", "wait", at + 8, at + long - rank, layer)]
            at += long
    return events


class Timeline(Case):
    def test_the_layer_of_median_length(self):
        rows = timeline.layer_of(trace())
        self.assertEqual({row["layer"] for row in rows if row["kind"] == "block"}, {2})
        forward = timeline.select(rows, direction="forward", rank=1)
        self.assertEqual([(row["kind"], row["begin_ms"], row["end_ms"]) for row in forward],
                         [("block", 1, 20), ("compute", 2, 8), ("comm", 5, 20), ("wait", 8, 19)])

    def test_figures(self):
        rows = [{"model": "d6", "seq": 256, "batch": 4, "link_bits_per_s": 1e9, "mode": mode, **row}
                for mode in timeline.MODES for row in timeline.layer_of(trace())]
        self.assertIn("(timeline.png)", timeline.shown(rows, self.folder))
        self.assertGreater((self.folder / "timeline.png").stat().st_size, 10000)
        self.assertIn("20 ms, of which 12 ms exposed", timeline.figure(rows).axes[0].get_title(loc="left"))
        longer = [row | {"end_ms": 2 * row["end_ms"]} if row["direction"] == "backward" else row for row in rows]
        self.assertEqual([panel.get_xlim()[1] for panel in timeline.figure(longer).axes], 3 * [20.4] + 3 * [40.8])

    def test_transfers_at_the_same_time_lie_in_lanes(self):
        spans = [(0, 10), (2, 5), (5, 8), (3, 12), (11, 13)]
        placed, count = timeline.lanes([{"begin_ms": begin, "end_ms": end} for begin, end in spans])
        self.assertEqual(count, 3)
        self.assertEqual([lane for lane, _ in placed], [0, 1, 2, 1, 0])


class Measured(Case):
    """Two real ranks over shared memory, of a size that says nothing about times."""
    point = dict(model="d6", vocab=128, seq=32, batch=2, strategy="tpsp", tp=2, dp=1, seconds=0, ratio=None, rounds=3,
                 modes=["none", "ring", "auto", "nowire", "ideal"])

    def test_training(self):
        rows = training.measure(Place("local"), self.point)
        rounds = [[row["mode"] for row in rows if row["round"] == number] for number in range(1, 4)]
        self.assertEqual(sum(map(len, rounds)), len(rows))
        for order in rounds:
            self.assertEqual(order, self.point["modes"])
        self.assertEqual(training.problems(rows), [])
        self.assertEqual(len({row["loss"] for row in rows if row["mode"] == "ring"}), len(rounds))
        mesh, = steps.by_mesh(rows).values()
        for mode in steps.WITHOUT_TRANSFERS:
            self.assertGreater(steps.loss_difference(mesh[mode], mesh["none"]), steps.LOSS_TOLERANCE)
        text = training.shown(rows)
        for mode in self.point["modes"]:
            self.assertIn(f"| {mode} |", text)

    def test_modes_take_turns_in_an_order_drawn_for_each_round(self):
        _, taken = steps.take_turns(Place("local"), self.point, self.point["modes"], 3)
        orders = [tuple(step["mode"] for step in taken if step["round"] == number) for number in range(1, 4)]
        self.assertEqual({tuple(sorted(order)) for order in orders}, {tuple(sorted(self.point["modes"]))})
        self.assertGreater(len(set(orders)), 1)

    def test_training_with_data_and_heads_split(self):
        for mesh in dict(strategy="up"), dict(tp=1, dp=2):
            self.assertEqual(training.problems(training.measure(Place("local"), {**self.point, **mesh})), [])

    def test_bytes_by_which_a_link_is_set_are_those_of_a_step(self):
        """Of activations alone: 8 exchanges of a layer and two of the head, of half of (B, T, C); beside them the lookup."""
        ideal_ms, bits = steps.first_look(Place("local"), self.point)
        activations = 8 * (8 * 6 + 2) * 2 * 32 * 384 * 4 / 2
        self.assertTrue(activations < bits < 1.2 * activations, (bits, activations))
        self.assertGreater(ideal_ms, 0)

    def test_an_interrupt_ends_what_runs(self):
        number = self.folder / "number"
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts with & ignores it
        self.addCleanup(signal.signal, signal.SIGINT, before)

        def interrupt():
            wait_until(lambda: number.exists() and number.read_text().strip(), "it runs")
            os.kill(os.getpid(), signal.SIGINT)
        thread = threading.Thread(target=interrupt)
        thread.start()
        begin = time.monotonic()
        with self.assertRaises(KeyboardInterrupt):
            Place("local").run(1, ["sh", "-c", f"echo $$ >{number}; exec sleep 1000"])
        thread.join()
        self.assertLess(time.monotonic() - begin, 900)
        wait_until(lambda: not runs(number.read_text().strip()), "a command is left running")

    def test_what_fails_is_reported_with_what_it_printed(self):
        with self.assertRaisesRegex(Failed, r"(?s)^exit status 3: scripts/mpirun.sh -np 1 sh .*out\n.*err"):
            Place("local").run(1, ["sh", "-c", "echo out; echo err >&2; exit 3"])
        with self.assertRaisesRegex(Failed, "^ran past 1 s: scripts/mpirun.sh -np 1 sleep 60"):
            Place("local").run(1, ["sleep", "60"], timeout=1)

    def test_bad_options_are_refused(self):
        for options, says in ((["--modes", "nine"], "there is no mode nine"), (["--overlap", "none"], "says nothing here"),
                              (["--modes", "slice:0"], "no mode slice:0"), (["--modes", "ring+end+owners"], "no word owners"),
                              (["--modes", "ring+soon"], "no word soon"), (["--modes", "ring+ahead-1"], "no word ahead-1"),
                              (["--rounds"], "needs a value"),
                              (["--modes", "none", "--nothing"], "--nothing")):
            done = subprocess.run([steps.BENCH, *map(str, steps.model_options(self.point)),
                                   *options], capture_output=True, text=True, timeout=60)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(says, done.stderr)

    def table(self, modes, rounds):
        """mode → line"""
        text = Place("local").run(2, [steps.BENCH, "--modes", modes, "--rounds", rounds,
                                            *steps.model_options(self.point), "--peak-tflops", 1])
        return [line for line in text.splitlines() if line.startswith(tuple(modes.split(",")))]

    def test_rows_below_ideal_are_marked(self):
        """Models that all are ideal: by chance some are faster than the first."""
        marked = 0
        for _ in range(20):
            for line in self.table(",".join(["ideal"] * 6), 3):
                below = float(line.split()[5]) < 1
                self.assertEqual("below ideal" in line, below, line)
                self.assertNotIn("does not differ", line)
                marked += below
            if marked:
                return
        self.fail("of 120 rows none was below the first")

    def test_rows_that_do_not_differ_from_the_best_are_marked(self):
        """The same schedule again and again. (One that differs: T=imagined, whose clock no other program disturbs.)"""
        rows = self.table(",".join(["ring"] * 6), 9)
        best = [float(line.split()[1]) for line in rows if "does not differ" not in line]
        self.assertEqual(min(best), min(float(line.split()[1]) for line in rows))  # as printed: another may have as much
        self.assertGreater(sum("does not differ from ring" in line for line in rows), 0, rows)

    def test_a_policy_is_part_of_a_mode(self):
        """Replicas send the table, or beside it rows that the tokens name; --embedding is for modes that leave it open."""
        point, modes = {**self.point, "tp": 1, "dp": 2, "vocab": 2048}, ["ring", "ring+rows", "ring+table", "ring+end+table+ahead0"]
        def sent(*options):
            _, taken = steps.take_turns(Place("local"), {**point, "modes": modes}, modes, 1, *options)
            return {step["mode"]: step["bytes_sent_rank0"] for step in taken}
        rows, table = sent(), sent("--embedding", "table")
        self.assertEqual((rows["ring"], table["ring"]), (rows["ring+rows"], table["ring+table"]))
        self.assertEqual((table["ring+rows"], table["ring+end+table+ahead0"]), (rows["ring+rows"], rows["ring+table"]))
        self.assertGreater(rows["ring+rows"], rows["ring+table"])  # beside the gradient of the head, which is the whole table

    def test_a_plan_is_found_once_and_for_one_shape(self):
        def start(layers):
            options = steps.model_options(self.point) + ["--layers", layers, "--rounds", 1, "--out", self.folder]
            return Place("local").run(2, [steps.BENCH, "--modes", "none,auto", *options])
        self.assertIn("found in trials", start(2))
        text = (self.folder / "plan.json").read_text()
        self.assertNotIn("found in trials", start(2))
        self.assertEqual((self.folder / "plan.json").read_text(), text)
        with self.assertRaisesRegex(Failed, "not one of these modes, ranks and shapes"):
            start(3)

    def test_timeline(self):
        rows = timeline.measure(Place("local"), self.point)
        self.assertEqual(list(dict.fromkeys(row["mode"] for row in rows)), list(timeline.MODES))
        for mode in timeline.MODES:
            blocks = timeline.select(rows, mode=mode, kind="block")
            self.assertEqual({(row["direction"], row["rank"]) for row in blocks},
                             {("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)})
            names = {row["name"] for row in timeline.select(rows, mode=mode, kind="compute")}
            self.assertTrue({"att.qkv", "att.proj", "mlp.fc1", "mlp.fc2"} <= names, names)
            self.assertTrue(timeline.select(rows, mode=mode, kind="comm"))
        timeline.figure(rows)


class FirstLine(Case):
    def written(self, done, cores=4, load=0.1):
        self.out.mkdir(exist_ok=True)
        place = Place("local")
        place.cores = cores
        config = "machine P\ncompiler cc\nmpi m\noneDNN 2\nbuild v\n"
        with unittest.mock.patch.object(place.runner, "output", return_value=config), \
                unittest.mock.patch("os.getloadavg", return_value=(load, 0, 0)):
            caption = report.caption_of(place)
        report.write_report(self.out, cores, caption, done, [])
        return (self.out / "report.md").read_text()

    def test_says_that_cores_do_not_suffice(self):
        done = {"training": (training_rows(), ["one"])}
        lines = self.written(done, cores=2).splitlines()
        self.assertIn(f"{laboratory.SHARED}**: 2 ranks need 4 cores", lines[0])
        self.assertIn(laboratory.SHARED, next(line for line in lines if line.startswith("*P")))
        self.assertIn(laboratory.SHARED, plots.note)
        self.assertEqual(report.problems_of(done), [])
        self.assertTrue(self.written(done).startswith("# "))
        self.assertEqual(plots.note, "")

    def test_says_how_much_others_use_the_processors(self):
        self.assertIn("P, load 1.50 at the start;", self.written({}, load=1.5))


class Figures(Case):
    def test_what_the_user_has_set_for_figures_does_not_count(self):
        """A notebook names its own backend, which a script may not have; a program that is missing would be asked for letters."""
        settings = self.folder / "matplotlibrc"
        settings.write_text("text.usetex: True\nfigure.figsize: 1, 1\n")
        environment = {**os.environ, "MPLBACKEND": "nonsense", "MATPLOTLIBRC": str(settings)}
        draw = f"import sys; sys.path[:0] = ['{ROOT}/scripts']; import plots, pathlib; plots.plt.title('a'); " \
               f"plots.save(plots.plt.gcf(), pathlib.Path('{self.folder}/a.png'))"
        for words in ("-c", draw), (ROOT / "scripts/report.py", "--help"), *(
                (ROOT / "tests/bench" / name, "--help") for name in ("predict_check.py", "optimizers.py")):
            done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=100)
            self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(plots.plt.imread(self.folder / "a.png").shape[:2], (720, 960))
        shown = subprocess.run(["make", "-s", "config", f"PYTHON={sys.executable}"], cwd=ROOT, env=environment, capture_output=True,
                               text=True, timeout=100)
        self.assertRegex(shown.stdout, r"(?m)^python .* matplotlib \d")


class Reasons(unittest.TestCase):
    def test_the_line_that_says_why(self):
        rule = "-" * 74
        for output, reason in (
                ("[a:7] OPAL ERROR: Unreachable in file x.c\n\nerror: rank 0 of 2 (a): no such file\nhint:  make it\n",
                 "no such file"),
                (f"[a:7] OPAL ERROR: Unreachable in file x.c\n{rule}\nThe application was started\nby srun.\n\nThere are "
                 f"options.\n{rule}\n*** An error occurred in MPI_Init\n", "The application was started by srun."),
                ("srun: error: n1: task 0: Exited with exit code 1\nsrun: error: no plugin\n", "srun: error: no plugin"),
                ("Signal: 11\n[a:7] *** End of error message ***\nsrun: error: n1: task 0: Segmentation fault\n",
                 "srun: error: n1: task 0: Segmentation fault"),
                ("Traceback\nRuntimeError: no GPU\nsrun: done\n", "RuntimeError: no GPU"), ("one\ntwo\n\n", "two"), ("", "it printed nothing")):
            with self.subTest(reason=reason):
                self.assertEqual(Result(1, output, 0).reason, reason)


class Sweep(Case):
    def setUp(self):
        super().setUp()
        self.tokens, self.file = self.folder / "tokens.bin", self.folder / "sweep.jsonl"
        write_tokens(self.tokens, 16 * 36 + 1, 101)

    def command(self, launcher, *more):
        return [sys.executable, ROOT / "scripts/mfu_sweep", "--launcher", launcher, "--program", PROGRAM,
                "--models", "d6", "--train", self.tokens, "--steps", "3", "--repeats", "1", "--out", self.file, *more, "--",
                "--layers", "2", "--channels", "96", "--heads", "6", "--vocab", "101", "--seq", "36",
                "--micro-batch", "2", "--threads", "1", "--peak-tflops", "1"]

    def sweep(self, *more, status=0, launcher=f"{ROOT}/scripts/mpirun.sh -np {{ranks}}"):
        done = subprocess.run(self.command(launcher, *more), capture_output=True, text=True, timeout=240)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done.stdout

    def rows(self):
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    def test_two_ranks_end_to_end_and_resumed(self):
        mesh = "--tp", "1,2", "--dp", "1", "--strategies", "tpsp,up", "--modes", "none,direct:2,auto"
        output = self.sweep(*mesh)
        self.assertEqual({(row["tp"], row["strategy"], row["mode"]) for row in self.rows()},
                         {(1, "tpsp", "none"), *((2, strategy, mode) for strategy in ("tpsp", "up")
                                                 for mode in ("none", "direct:2", "auto"))})  # others of one rank are alike
        config = next(row["config"] for row in self.rows() if row["mode"] == "direct:2")
        self.assertEqual((config["overlap"], config["gradients"]), ("direct:2", "preset"))
        alone = next(row for row in self.rows() if row["tp"] == 1)
        for row in self.rows():
            self.assertEqual(row["config"]["ranks"], row["ranks"])
            if row["mode"] == "auto":  # steps of trials are not counted
                self.assertTrue(2 <= row["steps"] < row["config"]["steps"] - 10, row)
                continue
            self.assertEqual(row["steps"], 2)
            self.assertAlmostEqual(row["loss"], alone["loss"], delta=1e-4)
            self.assertGreater(row["tokens_per_s"], 0)
            self.assertGreater(row["mfu_share"], 0)
        output = self.sweep(*mesh)
        self.assertEqual(len(self.rows()), 7)
        self.assertEqual(output.count("already"), 7)
        for row in self.rows():
            self.assertIn(f"| d6 | {row['strategy']} {row['tp']}x1 | {row['ranks']} | {row['mode']} | "
                          f"{row['step_ms']:.1f} |", output)

    def test_the_peak_is_measured_once(self):
        command = self.command(f"{ROOT}/scripts/mpirun.sh -np {{ranks}}", "--tp", "2", "--strategies", "tpsp", "--modes", "none,ring",
                               "--repeats", "2")
        del command[command.index("--peak-tflops"):]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        configs = [row["config"] for row in self.rows()]
        self.assertEqual(len({f"{config['peak_tflops_all_ranks']:.12g}" for config in configs}), 1)
        self.assertEqual([config["peak_source"] == "--peak-tflops" for config in configs], [False, True, True, True])

    def test_a_peak_is_of_one_call_and_host(self):
        """Not of another one's options, program or machine, which may be in the file too."""
        mesh = "--tp", "2", "--strategies", "tpsp", "--modes", "none"
        self.sweep(*mesh)  # --peak-tflops 1
        command = self.command(f"{ROOT}/scripts/mpirun.sh -np {{ranks}}", *mesh)
        del command[command.index("--peak-tflops"):]
        subprocess.run(command, check=True, capture_output=True, timeout=240)
        self.assertEqual([row["config"]["peak_source"] == "--peak-tflops" for row in self.rows()], [True, False])
        options, row = argparse.Namespace(launcher=["env", "{ranks}"], program="x", more=[], train="x", steps=2, timeout=9,
                                          out=str(self.file)), {**self.rows()[0], "mode": "none"}
        events = {"event": "config", "host": "n2"}, *({"event": "step", "step_ms": 1, "mfu": 0.5, "loss": 1} for _ in range(2))
        with unittest.mock.patch.object(mfu_sweep.run_log, "lines", lambda _: events), \
                unittest.mock.patch.object(mfu_sweep.Runner, "run", lambda *_: Result(0, "", 1)):
            for host, share in ("n1", None), ("n2", 0.5):
                first = {"ranks": 2, "config": {"host": host, "peak_tflops_all_ranks": 1}}
                self.assertEqual(mfu_sweep.run(options, row, [first])["mfu_share"], share)

    def test_repeats_take_random_turns(self):
        points = "--tp", "1,2", "--strategies", "tpsp", "--modes", "none,slice,ring,direct"
        self.sweep(*points, "--repeats", "2")
        rows, point = self.rows(), lambda row: (row["tp"], row["mode"])
        orders = [[point(row) for row in rows if row["repeat"] == repeat] for repeat in (1, 2)]
        self.assertEqual(sorted(orders[0]), [(1, "none"), *((2, mode) for mode in ("direct", "none", "ring", "slice"))])
        self.assertEqual(sorted(orders[0]), sorted(orders[1]))
        self.assertNotEqual(orders[0], orders[1])
        output = self.sweep(*points, "--repeats", "3")  # goes on
        self.assertEqual(output.count("already"), 10)
        table = [line for line in output.splitlines() if line.startswith("| d6 | tpsp 2x1")]
        self.assertEqual({line.split(" | ")[3] for line in table}, {"none", "slice", "ring", "direct"})
        steps = [float(line.split(" | ")[4]) for line in table]
        self.assertEqual(steps, sorted(steps))
        for line in table:
            mine = sorted(row["step_ms"] for row in self.rows() if point(row) == (2, line.split(" | ")[3]))
            self.assertEqual(line.split(" | ")[4:7], [f"{mine[1]:.1f}", f"{mine[0]:.1f} – {mine[2]:.1f}", "3"])

    def test_rows_that_do_not_differ_are_marked(self):
        def runs(mode, *steps, **more):
            return [dict(zip(mfu_sweep.KEY, ("d6", 2, 1, "tpsp", mode, "p", "o")), ranks=2, repeat=repeat,
                         step_ms=ms, tokens_per_s=1, mfu_share=0.5, exposed_ms=0, **more)
                    for repeat, ms in enumerate(steps, 1)]
        rows = [*runs("ideal", 100, 101, 99), *runs("slice", 120, 118, 124), *runs("domino:2", 95, 90, 96), *runs("ring", 121, 110, 119),
                *runs("none", 150, 149, 170)]
        remarks = {line.split(" | ")[3]: line.split(" | ")[-1].strip(" |") for line in mfu_sweep.table(rows).splitlines()[2:]
                   if line.startswith("| d6")}
        self.assertEqual(remarks, {"none": "", "slice": "does not differ from ring", "ring": "does not differ from slice", "ideal": "",
                                   "domino:2": "**below ideal**: noise, or a wrong measurement"})
        good, = runs("direct", 100)
        self.assertIn("| direct | 100.0 | 100.0 – 100.0 | 1 |", mfu_sweep.table([good]))

    def test_another_file_is_refused_and_stays(self):
        """Whether it has lines or not, and whatever its last line is."""
        row = json.dumps({**dict.fromkeys(mfu_sweep.KEY, 1), "ranks": 1, "repeat": 1}).encode()
        for content, message in ((b"{}\n", "line 1: not a JSON object with 'repeat'"), (b'{"repeat":1}\n', "with 'ranks'"),
                                 (row + b'\n{"event": "st', "is not the beginning of a run"), (b"text", "is not the beginning"),
                                 (b'{"a": 1}', "with 'repeat'"),
                                 (b"{", "is not the beginning"), (b'{"model": "my own notes', "is not the beginning"), (self.tokens.read_bytes(), "sweep.jsonl"),
                                 (self.tokens.read_bytes().replace(b"\n", b"n"), "is not the beginning of a run")):
            with self.subTest(content=content[:20]):
                self.file.write_bytes(content)
                done = subprocess.run(self.command("mpirun -np {ranks}"), capture_output=True, text=True, timeout=60)
                self.assertIn(message, done.stderr)
                self.assertNotIn("Traceback", done.stderr)
                self.assertNotEqual(done.returncode, 0)
                self.assertEqual(self.file.read_bytes(), content)

    def test_a_line_cut_short_goes_and_one_without_its_end_counts(self):
        rows = [{**dict.fromkeys(mfu_sweep.KEY, "d6"), "ranks": 1, "repeat": repeat, "step_ms": 2} for repeat in (1, 2)]
        first, second = (json.dumps(row).encode() + b"\n" for row in rows)
        for tail, left, content in ((b"", 1, first), (second[:4], 1, first), (second[:-3], 1, first),
                                    (second[:-1], 2, first + second)):
            with self.subTest(tail=tail[-5:]):
                self.file.write_bytes(first + tail)
                self.assertEqual(mfu_sweep.earlier(self.file), rows[:left])
                self.assertEqual(self.file.read_bytes(), content)

    def test_a_run_that_fails_is_listed_with_its_reason_and_tried_again(self):
        broken = self.folder / "launcher"
        broken.write_text('#!/bin/sh\necho "error: no such nodes"\nexit 3\n')
        broken.chmod(0o755)
        mesh = "--tp", "2", "--strategies", "tpsp", "--modes", "ring"
        output = self.sweep(*mesh, "--repeats", "2", status=1, launcher=f"{broken} {{ranks}}")
        self.assertIn("ring, repeat 2: failed before", output)
        self.assertEqual(output.splitlines()[-1], "d6 tpsp 2x1 ring **failed**: error: no such nodes")
        self.assertEqual(self.rows(), [])
        self.sweep(*mesh)
        self.assertEqual([row["mode"] for row in self.rows()], ["ring"])
        self.assertIn("already", self.sweep(*mesh))

    def test_an_end_from_outside_ends_the_run_too(self):
        slow, began = self.folder / "launcher", self.folder / "began"
        slow.write_text(f'#!/bin/sh\necho $$ > {began}.new\nmv {began}.new {began}\nexec sleep 100\n')
        slow.chmod(0o755)
        command = self.command(f"{slow} {{ranks}}", "--tp", "2", "--strategies", "tpsp", "--modes", "none")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            wait_until(began.exists, "the run has begun")
            process.terminate()
            output, _ = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 143, output)
        self.assertFalse(pathlib.Path(f"/proc/{began.read_text().strip()}").exists(), output)
