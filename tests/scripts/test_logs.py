"""scripts/plot_loss.py and scripts/compare_runs.py on logs as runs leave them: steps left out, lines cut off, damage."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
LOSSES = [5.0, None, 4.0, 3.5, 3.25]  # null: a step that --skip-nonfinite has left out


def step(number, loss):
    return {"event": "step", "step": number, "loss": loss, "step_ms": 10 + number, "comm_ms": 2, "exposed_comm_ms": 1}


def log_of(losses, *more):
    events = {"event": "config"}, *(step(i, loss) for i, loss in enumerate(losses)), {"event": "skip", "step": 1}, *more
    return "".join(json.dumps(event) + "\n" for event in events).encode()


class Logs(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="commfuse-test-")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def log(self, name, content):
        path = os.path.join(self.folder, name)
        with open(path, "wb") as file:
            file.write(content)
        return path

    def script(self, name, *words):
        return subprocess.run([sys.executable, "-B", SCRIPTS / name, *words], capture_output=True, text=True)

    def fails(self, *words, script):
        done = self.script(*script)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        for word in "error: ", "hint: ", *words:
            self.assertIn(word, done.stderr)


class Compare(Logs):
    def compare(self, first, second):
        return "compare_runs.py", f"a={self.log('a', first)}", f"b={self.log('b', second)}"

    def test_steps_left_out_and_a_line_cut_off(self):
        cut = log_of(LOSSES) + '{"event":"sample","text":"é'.encode()[:-1]  # within a letter
        done = self.script(*self.compare(log_of(LOSSES), cut))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"loss, last step +3.250000 +3.250000")
        self.assertRegex(done.stdout, r"largest difference +0.0e\+00 +0.0e\+00")

    def test_a_line_that_lacks_nothing_but_its_end_counts(self):
        done = self.script(*self.compare(log_of([5, 4]), log_of([5]) + json.dumps(step(1, 4)).encode()))
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_other_steps(self):
        for losses in LOSSES[:-1], [5.0, 4.5, *LOSSES[2:]]:
            with self.subTest(losses):
                self.fails("steps of b are not those of a", script=self.compare(log_of(LOSSES), log_of(losses)))

    def test_other_losses(self):
        done = self.script(*self.compare(log_of([5, 4]), log_of([5, 4.01])))
        self.assertEqual(done.returncode, 1)
        self.assertIn("losses differ by 2.5e-03", done.stderr)

    def test_losses_of_zero(self):
        done = self.script(*self.compare(log_of([5, 0]), log_of([5, 0])))
        self.assertEqual(done.returncode, 0, done.stderr)
        done = self.script(*self.compare(log_of([5, 4]), log_of([5, 0])))
        self.assertIn("losses differ by 1.0e+00", done.stderr)

    def test_one_name_for_two(self):
        script, first, _ = self.compare(log_of([5]), log_of([4]))
        self.fails("the same name", script=(script, first, first))

    def test_no_loss_at_all(self):
        self.fails("no step with a loss in the log of b", script=self.compare(log_of(LOSSES), log_of([None])))

    def test_damage_is_named_with_its_line(self):
        for line, what in ((b'{"event":"st\n', "no JSON object"), (b"\n", "no JSON object"), (b"7\n", "no event"),
                           (b'{"loss":3}\n', "no event"), (b'{"event":"step"}\n', "a step without step"),
                           (b'{"event":"step","step":1,"loss":3}\n', "a step without step_ms")):
            with self.subTest(line):
                self.fails(os.path.join(self.folder, "b") + ", line 2: " + what,
                           script=self.compare(log_of([5]), b'{"event":"config"}\n' + line + log_of([5])))

    def test_missing(self):
        self.fails("nowhere", "No such file", script=("compare_runs.py", "a=nowhere"))


class Plot(Logs):
    def setUp(self):
        super().setUp()
        try:
            import matplotlib  # noqa: F401, only to know whether it is there
        except ImportError:
            self.skipTest("no matplotlib")

    def plot(self, content):
        return "plot_loss.py", self.log("log", content), os.path.join(self.folder, "loss.png")

    def test_steps_left_out_and_a_line_cut_off(self):
        validation = [{"event": "val", "step": 0, "loss": 5.5}, {"event": "val", "step": 4, "loss": None}]
        done = self.script(*self.plot(log_of(LOSSES, *validation) + b'{"event":"st'))
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(os.path.join(self.folder, "loss.png"), "rb") as file:
            self.assertEqual(file.read(4), b"\x89PNG")

    def test_damage_and_nothing(self):
        self.fails("log, line 1: no JSON object", script=self.plot(b"step 1 loss 5\n" + log_of(LOSSES)))
        self.fails("no step with a loss", script=self.plot(log_of([])))


if __name__ == "__main__":
    unittest.main()
