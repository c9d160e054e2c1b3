"""scripts/watch_log.py: all numbers of a log, finished or growing, in TensorBoard and Weights & Biases; and as a picture."""
# python: venv
import glob
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/watch_log.py"
import watch_log

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError:
    EventAccumulator = None
try:
    import wandb
except ImportError:
    wandb = None
try:
    import matplotlib
except ImportError:
    matplotlib = None

CONFIG = dict(event="config", run="r", lr=0.25)
VAL = dict(event="val", step=0, ms=1.5, loss=5.5, sequences=8)


def step(number, loss):
    return dict(event="step", step=number, loss=loss, mfu=None, tokens_per_s=100 + number, trial=True)


LINES = [CONFIG, VAL, step(0, 5.25), step(1, 5.0), step(2, None), dict(event="save", step=2, bytes=7),
         dict(event="sample", step=2, text="Once\nupon"), dict(event="end", steps=3)]
CURVES = {("val/ms", 0): 1.5, ("val/loss", 0): 5.5, ("val/sequences", 0): 8, ("step/loss", 1): 5.25, ("step/loss", 2): 5.0,
          ("step/tokens_per_s", 1): 100, ("step/tokens_per_s", 2): 101, ("step/tokens_per_s", 3): 102}


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="commfuse-test-")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.log = os.path.join(self.folder, "run.jsonl")

    def write(self, lines, path=None, mode="w", end="\n"):
        with open(path or self.log, mode, encoding="utf-8") as file:
            file.write("\n".join(map(json.dumps, lines)) + end)

    def replace(self, lines):
        """As a resumed run does."""
        self.write(lines, self.log + ".new")
        os.rename(self.log + ".new", self.log)

    def run_script(self, *words, **environment):
        done = subprocess.run([sys.executable, SCRIPT, *words], cwd=self.folder, capture_output=True, text=True, timeout=400,
                              env={**os.environ, **environment})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


class Follow(Case):
    """What is sent, while the log grows."""

    def setUp(self):
        super().setUp()
        patch = unittest.mock.patch.object(watch_log, "POLL_S", 0.005)
        patch.start()
        self.addCleanup(patch.stop)
        self.sent, self.error = [], None
        self.thread = threading.Thread(target=self.follow, daemon=True)
        self.thread.start()

    def follow(self):
        try:
            for one in watch_log.follow(self.log):
                self.sent.append(one)
        except Exception as error:
            self.error = error

    def wait_for(self, count):
        deadline = time.monotonic() + 60
        while len(self.sent) < count and time.monotonic() < deadline and self.thread.is_alive():
            time.sleep(0.002)
        self.assertEqual((len(self.sent), self.error), (count, None))

    def end(self):
        self.thread.join(60)
        self.assertFalse(self.thread.is_alive())
        self.assertIsNone(self.error)

    def test_a_log_that_comes_later_and_grows(self):
        self.wait_for(0)
        self.write(LINES[:1])
        self.wait_for(1)
        self.assertEqual(self.sent, [(0, {}, CONFIG)])
        text = json.dumps(VAL)
        self.write([], mode="a", end=text[:9])
        self.wait_for(1)
        self.write([], mode="a", end=text[9:] + "\n")
        self.wait_for(2)
        self.write(LINES[2:], mode="a")
        self.end()
        self.assertEqual({(name, at): value for at, numbers, _ in self.sent for name, value in numbers.items()}, CURVES)

    def test_a_resumed_run_begins_again(self):
        """Its log is another file, of fewer lines, and the end of a run that a signal has stopped is not the end."""
        self.write([*LINES[:5], dict(event="end", steps=3, stopped_by="Terminated")], end="\n{\"event\":\"st")
        self.wait_for(5)
        self.replace([*LINES[:3], dict(event="resume", step=1, run="r")])
        self.wait_for(8)
        self.write([step(1, 4.5), dict(event="end", steps=2)], mode="a")
        self.end()
        self.assertEqual([(at, numbers.get("step/loss")) for at, numbers, options in self.sent if not options],
                         [(0, None), (1, 5.25), (2, 5.0), (3, None), (0, None), (1, 5.25), (2, 4.5)])
        self.assertEqual(sum(options is not None for _, _, options in self.sent), 2)

    def test_another_file_is_named(self):
        self.write(["text"])
        self.thread.join(60)
        self.assertIn("line 1: not a JSON object with 'event'", str(self.error))


class Targets(Case):
    @unittest.skipUnless(EventAccumulator, "no tensorboard: build/venv/bin/pip install tensorboard")
    def test_tensorboard_shows_the_last_values(self):
        """Of steps taken again, by one call or several."""
        to = os.path.join(self.folder, "tb")
        first = [*LINES[:2], step(0, 7.0), step(1, 6.0), step(2, 6.5), step(3, 6.25), dict(event="end")]
        for lines in first, LINES:
            self.replace(lines)
            self.run_script(self.log, "--tensorboard", to)
        shown = EventAccumulator(to)
        shown.Reload()
        self.assertEqual({(tag, event.step): event.value for tag in shown.Tags()["scalars"] for event in shown.Scalars(tag)}, CURVES)

    def test_weights_and_biases_gets_a_run_of_the_same_group(self):
        calls, events = [], [(0, {}, CONFIG), (1, {"step/loss": 5.0}, None), (0, {}, CONFIG), (1, {"step/loss": 4.0}, None)]
        run = types.SimpleNamespace(define_metric=lambda *what, **more: calls.append(("metric", *what, more)))
        fake = types.SimpleNamespace(init=lambda **what: calls.append(("init", what)) or run, finish=lambda: calls.append("finish"),
                                     log=lambda what: calls.append(what))
        with unittest.mock.patch.dict(sys.modules, wandb=fake), unittest.mock.patch.object(watch_log, "follow", lambda _: events):
            watch_log.send_to_wandb(self.log, "p")
        begin = ["finish", ("init", dict(project="p", group="r", config=CONFIG)), ("metric", "*", dict(step_metric="steps")), {"steps": 0}]
        self.assertEqual(calls, [*begin, {"steps": 1, "step/loss": 5.0}, *begin, {"steps": 1, "step/loss": 4.0}, "finish"])

    @unittest.skipUnless(wandb, "no wandb: build/venv/bin/pip install wandb")
    def test_weights_and_biases_offline(self):
        self.write(LINES)
        self.run_script(self.log, "--wandb", "p", WANDB_MODE="offline", WANDB_SILENT="true")
        kept, = glob.glob(os.path.join(self.folder, "wandb/offline-run-*/*.wandb"))
        content = pathlib.Path(kept).read_bytes()
        for name in b"step/loss", b"val/sequences", b"step/tokens_per_s":
            self.assertIn(name, content)

    @unittest.skipUnless(matplotlib, "no matplotlib")
    def test_a_picture_of_two_logs(self):
        other, picture = os.path.join(self.folder, "other.jsonl"), os.path.join(self.folder, "a.png")
        self.write(LINES)
        self.write([CONFIG, step(0, 6.0), step(1, 5.5)], other, end="\n{\"event\":")  # still running
        self.run_script(self.log, other, "--png", picture)
        with open(picture, "rb") as file:
            self.assertEqual(struct.unpack(">II", file.read(24)[16:]), (1350, 540))
        sys.modules.pop("plots", None)
        import plots
        with unittest.mock.patch.object(plots, "save") as save:
            watch_log.draw([self.log, other], picture)
        loss, speed = save.call_args[0][0].axes
        found = [[list(map(float, values)) for values in line.get_data(orig=False)] for line in loss.get_lines()]
        self.assertEqual(found[0][0], [1, 2, 3])
        self.assertEqual(found[0][1][:2], [5.25, 5.0])
        self.assertEqual(found[1:], [[[0], [5.5]], [[1, 2], [6.0, 5.5]], [[], []]])
        self.assertEqual([list(line.get_ydata()) for line in speed.get_lines()], [[100, 101, 102], [100, 101]])
        self.assertEqual([text.get_text() for text in loss.get_legend().get_texts()], [self.log, other])

    def test_what_is_not_installed_is_named(self):
        self.write(LINES)
        done = subprocess.run([sys.executable, "-S", SCRIPT, self.log, "--wandb", "p"], capture_output=True, text=True, timeout=100,
                              cwd=self.folder)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r"\Aerror: No module named 'wandb'.*\nhint: .*--help.*\n\Z")
