"""scripts/log_to.py sends all figures and samples of a log, finished or growing, to TensorBoard and to Weights & Biases."""
# python: venv
import glob
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCRIPT = os.path.join(ROOT, "scripts/log_to.py")
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import log_to

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
                                stderr=subprocess.STDOUT, env=dict(os.environ, WANDB_SILENT="true", WANDB_MODE="offline",
                                                                   PYTHONUNBUFFERED="1"))

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
                if event.session_log.status == event_pb2.SessionLog.START:  # hides what was sent from this step on
                    values = {key: value for key, value in values.items() if key[1] < event.step}
                for value in event.summary.value:
                    key = value.tag, event.step
                    if value.tag != "config/text_summary":  # those of a resumed run are of step 0 too
                        self.assertNotIn(key, values, "sent twice")
                    values[key] = value.simple_value if value.HasField("simple_value") else value.tensor.string_val[0].decode()
        return values

    def wait_for(self, condition):
        deadline = time.monotonic() + 300
        while not condition():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.1)

    def check(self, found=None):
        found = found or self.found()
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

    @unittest.skipUnless(event_pb2, "no tensorboardX: scripts/install_deps.sh --log-to")
    def test_steps_taken_again_replace_those_sent(self):
        """A resumed run leaves its lines up to a checkpoint, where others of that step may stay, and goes on with others."""
        first = [*LINES[:3], dict(event="val", step=1, loss=7.0), dict(event="step", step=1, loss=6.0, mfu=0.25),
                 dict(event="sample", step=2, text="Never"), dict(event="step", step=2, loss=5.9)]
        again = [*LINES[:3], first[3], dict(event="resume", run="r", step=1, lr=0.25), *LINES[3:-1],
                 dict(event="step", step=2, loss=4.5)]
        self.write(first)
        with self.start("--tensorboard", self.to, "--follow") as process:
            self.wait_for(lambda: ("train/loss", 3) in self.found())
            self.write(again, self.log + ".new")
            os.rename(self.log + ".new", self.log)
            self.wait_for(lambda: self.found().get(("train/loss", 3)) == 4.5)
            self.write([*again, LINES[-1]])
            out = process.communicate(timeout=400)[0]
        self.assertEqual(process.returncode, 0, out)
        found = self.found()
        self.assertEqual((found.pop(("val/loss", 1)), found.pop(("train/loss", 3))), (7.0, 4.5))
        self.check(found)

    @unittest.skipUnless(event_pb2, "no tensorboardX: scripts/install_deps.sh --log-to")
    def test_another_run_starts_anew_and_a_log_may_come_later(self):
        with self.start("--tensorboard", self.to, "--follow") as process:
            with self.assertRaises(subprocess.TimeoutExpired):
                process.wait(3)
            self.write([dict(LINES[0], run="s"), *(dict(event="step", step=i, loss=9.0) for i in range(9))])
            self.wait_for(lambda: ("train/loss", 9) in self.found())
            os.rename(self.log, self.log + ".1")
            self.write(LINES)
            out = process.communicate(timeout=400)[0]
        self.assertEqual(process.returncode, 0, out)
        self.check()

    def test_a_log_is_read_on_from_where_it_was(self):
        steps = [dict(event="step", step=i, loss=1.0) for i in range(1000)]
        more, end = (json.dumps(line) + "\n" for line in (dict(event="step", step=1000, loss=2.0), LINES[-1]))
        parse, polls = unittest.mock.Mock(wraps=json.loads), []

        def poll(_):
            polls.append(parse.call_count)
            with open(self.log, "a", encoding="utf-8") as file:
                file.write(["", more[:9], more[9:], end[:5], ""][min(len(polls) - 1, 4)])
            if len(polls) == 5:  # an editor writes the same file again, longer than it was
                self.write([LINES[0], *steps[:5], *(step | {"loss": 0.12345678} for step in steps[5:]), LINES[-1]])
            self.assertLess(len(polls), 9)
        with unittest.mock.patch.object(log_to.time, "sleep", poll), unittest.mock.patch.object(json, "loads", parse):
            self.write([LINES[0], *steps])
            sent = list(log_to.events(self.log, follow=True))
        self.assertEqual(polls, [1001, 1001, 1002, 1003, 1004])  # a cut line again at each poll
        self.assertEqual([event.get("step", event["event"]) for event in sent], ["config", *range(1001), "config", *range(1000), "end"])

    @unittest.skipUnless(wandb, "no wandb: build/venv/bin/pip install wandb")
    def test_weights_and_biases_offline(self):
        self.write(LINES)
        self.run_to_end("--wandb", "project")
        (path,) = glob.glob(os.path.join(self.folder, "wandb/offline-run-*-r/run-r.wandb"))  # by the log's run
        with open(path, "rb") as file:
            content = file.read()
        for name in b"train/exposed_comm_ms", b"val/loss", b"hellaswag/accuracy_norm", b"sample", b"lr":
            self.assertIn(name, content)
        (page,) = glob.glob(os.path.join(self.folder, "wandb/offline-run-*/files/media/html/*.html"))
        with open(page, encoding="utf-8") as file:
            self.assertIn("Once &lt;b&gt;\nupon", file.read())

    def test_what_is_no_log(self):
        self.assertIn("cannot read", self.run_to_end("--tensorboard", self.to, status=1))
        self.write(LINES[1:])
        self.assertIn("does not begin with a run's options", self.run_to_end("--tensorboard", self.to, status=1))
        self.assertIn("one of the arguments --tensorboard --wandb is required", self.run_to_end(status=2))
        self.write([])
        self.assertIn("does not begin with a run's options", self.run_to_end("--tensorboard", self.to, status=1))
        os.remove(self.log)
        os.mkfifo(self.log)
        for follow in [], ["--follow"]:
            self.assertIn("not a regular file", self.run_to_end("--tensorboard", self.to, *follow, status=1))
        os.remove(self.log)
        self.write(LINES)
        with open(self.to, "w", encoding="utf-8"):
            self.assertIn("error: Not a directory: ", self.run_to_end("--tensorboard", self.to, status=1))

    @unittest.skipUnless(event_pb2, "no tensorboardX: scripts/install_deps.sh --log-to")
    def test_unexpected_values(self):
        """What readers need is checked; other values of other kinds are left out."""
        for number, wrong in enumerate((dict(event=[]), dict(event="step", step=[1], loss=1), dict(event="step", step=1.5, loss=1),
                                        dict(event="val", step=-1, loss=1), dict(event="val", step=1 << 80, loss=1),
                                        dict(event="val", step=True, loss=1), dict(event="val", loss=1),
                                        dict(event="sample", step=1),
                                        dict(event="step", step=1, loss="1"), dict(event="step", step=1, loss=10 ** 400),
                                        dict(event="step", step=1, loss=float("nan")), dict(event="sample", step=1, text=["a"]),
                                        dict(event="sample", step=1, text="\ud800"))):
            self.write([LINES[0], wrong])
            error = self.run_to_end("--tensorboard", os.path.join(self.folder, str(number)), status=1)
            self.assertIn("run.jsonl, line 2: ", error)
            self.assertNotIn("Traceback", error)
        deep = [LINES[0] | {"run": {"a": 1}, "x": [[{}]], "step": [1]}, dict(event="plan", step="x", y=[]),
                dict(event="resume", step={})]
        self.write([*deep, LINES[1] | {"a": 10 ** 400, "b": [1], "c": "x", "d": {}, "e": float("inf")}, *LINES[2:]])
        self.run_to_end("--tensorboard", self.to)
        found = self.found()
        self.assertFalse({tag for tag, _ in found} & {f"val/{name}" for name in "abcde"})
        self.assertEqual(found["train/loss", 2], 5.0)


if __name__ == "__main__":
    unittest.main()
