"""scripts/log_to.py sends all figures and samples of a log, finished or growing, to TensorBoard and to Weights & Biases."""
# python: venv
import glob
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCRIPT = os.path.join(ROOT, "scripts/log_to.py")
try:
    from tensorboardX.proto import event_pb2
except ImportError:
    event_pb2 = None
try:
    import wandb
except ImportError:
    wandb = None

LINES = [dict(event="config", run="r", lr=0.25, given="lr"), dict(event="val", step=0, ms=1.5, loss=5.5, sequences=8),
         dict(event="step", step=0, loss=5.25, mfu=None, exposed_comm_ms=0.75, trial=True),
         dict(event="step", step=1, loss=5.0, mfu=0.5, exposed_comm_ms=0.25),
         dict(event="sample", step=2, ms=2.5, text="Once <b>\nupon"), dict(event="save", step=2, bytes=7),
         dict(event="hellaswag", step=2, ms=3, accuracy_norm=0.375, correct=3, examples=8), dict(event="end", steps=2)]


class LogTo(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder, self.log, self.to = folder.name, os.path.join(folder.name, "run.jsonl"), os.path.join(folder.name, "tb")

    def write(self, lines, path=None):
        with open(path or self.log, "w", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def start(self, *arguments):
        return subprocess.Popen([sys.executable, SCRIPT, self.log, *arguments], cwd=self.folder, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, env=dict(os.environ, WANDB_SILENT="true", PYTHONUNBUFFERED="1"))

    def run_to_end(self, *arguments, status=0):
        process = self.start(*arguments)
        out = process.communicate(timeout=400)[0]
        self.assertEqual(process.returncode, status, out)
        return out

    def found(self):
        """(name, step) -> value of all events in the folder."""
        values = {}
        for path in sorted(glob.glob(os.path.join(self.to, "events*"))):
            with open(path, "rb") as file:
                content, at = file.read(), 0
            while at + 12 <= len(content):
                (length,) = struct.unpack_from("<Q", content, at)
                event = event_pb2.Event.FromString(content[at + 12:at + 12 + length])
                at += 16 + length
                for value in event.summary.value:
                    key = value.tag, event.step
                    self.assertNotIn(key, values, "sent twice")
                    values[key] = value.simple_value if value.HasField("simple_value") else value.tensor.string_val[0].decode()
        return values

    def check(self):
        found = self.found()
        sample = found.pop(("sample/text_summary", 2))
        config = found.pop(("config/text_summary", 0))
        self.assertIn("Once <b>", sample)
        self.assertIn('"lr": 0.25', config)
        self.assertEqual(found, {("val/ms", 0): 1.5, ("val/loss", 0): 5.5, ("val/sequences", 0): 8, ("train/loss", 1): 5.25,
                                 ("train/exposed_comm_ms", 1): 0.75, ("train/loss", 2): 5.0, ("train/mfu", 2): 0.5,
                                 ("train/exposed_comm_ms", 2): 0.25, ("hellaswag/ms", 2): 3, ("hellaswag/accuracy_norm", 2): 0.375,
                                 ("hellaswag/correct", 2): 3, ("hellaswag/examples", 2): 8})

    @unittest.skipUnless(event_pb2, "no tensorboardX: scripts/install_deps.sh --log-to")
    def test_tensorboard(self):
        self.write(LINES)
        self.run_to_end("--tensorboard", self.to)
        self.check()

    @unittest.skipUnless(event_pb2, "no tensorboardX: scripts/install_deps.sh --log-to")
    def test_a_log_that_grows_and_is_written_again(self):
        """In pieces that cut lines, then in another file that repeats the events sent already, as a resumed run leaves it."""
        self.write(LINES[:2])
        with self.start("--tensorboard", self.to, "--follow") as process, open(self.log, "a", encoding="utf-8") as file:
            text = json.dumps(LINES[2]) + "\n"
            for part in text[:7], text[7:]:
                with self.assertRaises(subprocess.TimeoutExpired):
                    process.wait(1.5)
                file.write(part)
                file.flush()
            with self.assertRaises(subprocess.TimeoutExpired):
                process.wait(1.5)
            self.write(LINES, self.log + ".new")
            os.rename(self.log + ".new", self.log)
            out = process.communicate(timeout=400)[0]
        self.assertEqual(process.returncode, 0, out)
        self.check()

    @unittest.skipUnless(wandb, "no wandb: build/venv/bin/pip install wandb")
    def test_weights_and_biases_offline(self):
        self.write(LINES)
        self.run_to_end("--wandb", "project", "--offline")
        (path,) = glob.glob(os.path.join(self.folder, "wandb/offline-run-*/*.wandb"))
        with open(path, "rb") as file:
            content = file.read()
        for name in b"train/exposed_comm_ms", b"val/loss", b"hellaswag/accuracy_norm", b"sample", b"lr":
            self.assertIn(name, content)
        (page,) = glob.glob(os.path.join(self.folder, "wandb/offline-run-*/files/media/html/*.html"))
        with open(page, encoding="utf-8") as file:
            self.assertIn("Once &lt;b&gt;\nupon", file.read())

    def test_what_is_no_log(self):
        self.assertIn("cannot read log", self.run_to_end("--tensorboard", self.to, status=1))
        self.write(LINES[1:])
        self.assertIn("does not begin with a run's options", self.run_to_end("--tensorboard", self.to, status=1))
        self.assertIn("give either", self.run_to_end(status=2))


if __name__ == "__main__":
    unittest.main()
