"""The state of a check: options, programs, and findings, which are always on the disk."""
import contextlib
import os
import tempfile
import time

from command import opened
from runner import ROOT, Runner

OK, FAIL, SKIP, LATE = "ok", "FAIL", "skip", "LATE"
TYPES = "fp32", "bf16"


class Check:
    """A stage is a function that gets a Check and reports by verdict() and show(). When its time is over, the runner raises Late.
    times: rows of its table."""

    def __init__(self, options):
        self.build = {kind: f"{options.builds}-{kind}" for kind in TYPES}
        os.makedirs(options.out, exist_ok=True)
        self.report = opened(os.path.join(options.out, "report.txt"), "w", encoding="utf-8")
        self.log = opened(os.path.join(options.out, "commands.log"), "w", encoding="utf-8")
        self.scratch = tempfile.TemporaryDirectory(prefix="gpu-check-")
        self.runner = Runner(self.log, bound=True)
        with contextlib.suppress(OSError):  # keeps the driver open: otherwise each program waits seconds for the GPU to start
            self.gpu = os.open("/dev/nvidia0", os.O_RDWR)
        self.rows, self.seconds, self.times, self.torch_over_ours = [], {}, [], {}
        self.begin, self.stage = time.monotonic(), ""

    def say(self, text=""):
        for file in None, self.report:
            print(text, file=file, flush=True)

    def show(self, lines):
        """Prints figures, indented below their verdict."""
        self.say("\n".join("        " + line for line in lines))

    def verdict(self, what, verdict, detail=""):
        self.rows.append((self.stage, what, verdict, detail))
        self.say(f"  {verdict:<5} {what}{'   ' + detail if detail else ''}")

    def judge(self, what, good, detail=""):
        self.verdict(what, OK if good else FAIL, detail)

    def show_run(self, what, result, detail=""):
        """What a command has printed, and whether it has succeeded."""
        self.show(result.output.splitlines())
        self.judge(what, result.status == 0, result.reason if result.status else detail)

    def program(self, kind, name="train_gpt"):
        return os.path.join(ROOT, self.build[kind], name)

    def path(self, name):
        """Of a temporary file."""
        return os.path.join(tempfile.mkdtemp(dir=self.scratch.name), name)

    def close(self):
        self.scratch.cleanup()
        self.report.close()
        self.log.close()
