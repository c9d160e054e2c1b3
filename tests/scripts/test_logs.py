"""scripts/plot_loss.py on logs as runs leave them: steps left out, lines cut off, damage."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import run_log

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
        cut_in_a_letter = '{"event":"sample","text":"é'.encode()[:-1]
        for end in b'{"event":"st', cut_in_a_letter, json.dumps(step(5, 3)).encode():
            with self.subTest(end):
                done = self.script(*self.plot(log_of(LOSSES, *validation) + end))
                self.assertEqual(done.returncode, 0, done.stderr)
                with open(os.path.join(self.folder, "loss.png"), "rb") as file:
                    self.assertEqual(file.read(4), b"\x89PNG")

    def test_a_line_that_lacks_only_its_end_counts(self):
        path = self.log("log", log_of([5]) + json.dumps(step(1, 4)).encode())
        self.assertEqual([step["loss"] for step in run_log.steps(run_log.lines(path))], [5, 4])

    def test_damage_is_named_with_its_line(self):
        for line, what in ((b'{"event":"st\n', "not a JSON object"), (b"\n", "not a JSON object"), (b"7\n", "not a JSON object"),
                           (b'{"loss":3}\n', "not an event")):
            with self.subTest(line):
                self.fails(os.path.join(self.folder, "log") + ", line 2: " + what,
                           script=self.plot(b'{"event":"config"}\n' + line + log_of([5])))
        self.fails("an event without a step and a loss", script=self.plot(b'{"event":"step","step":1}\n'))
        deep = b"[" * 100_000
        for line in (b'{"event":["step"],"step":1,"loss":1}', b'{"event":"step","step":"1","loss":1}',
                     b'{"event":"step","step":1,"loss":"x"}', b'{"event":"val","step":1,"loss":[1]}',
                     b'{"event":"step","step":null,"loss":1}', deep, b'{"event":"step","x":' + deep,
                     b'{"event":"step","step":1,"loss":1e999}', b'{"event":"step","step":1,"loss":' + b"9" * 400 + b"}"):
            with self.subTest(line[:60]):
                self.fails("log, line 1: ", script=self.plot(line + b"\n"))

    def test_what_cannot_be_read_or_written(self):
        _, log, picture = self.plot(log_of(LOSSES))
        os.mkfifo(os.path.join(self.folder, "fifo"))
        self.fails("It is not a regular file", script=("plot_loss.py", os.path.join(self.folder, "fifo"), picture))
        self.fails("no picture can be made", ".png", script=("plot_loss.py", log, os.path.join(self.folder, "loss.txt")))
        done = self.script("plot_loss.py", log, os.path.join(self.folder, "nowhere/loss.png"))
        self.assertEqual((done.returncode, done.stderr), (1, f"error: No such file or directory: {self.folder}/nowhere\n"))
        os.symlink(log, picture)
        before = pathlib.Path(log).read_bytes()
        self.assertEqual(self.script("plot_loss.py", log, picture).returncode, 0)
        self.assertEqual(pathlib.Path(log).read_bytes(), before)
        self.assertEqual((sorted(os.listdir(self.folder)), os.path.islink(picture)), (["fifo", "log", "loss.png"], False))

    def test_no_loss_and_no_log(self):
        self.fails("no step with a loss", script=self.plot(log_of([])))
        self.fails("no step with a loss", script=self.plot(log_of([None])))
        self.fails("nowhere", "No such file", script=("plot_loss.py", "nowhere", "loss.png"))


if __name__ == "__main__":
    unittest.main()
