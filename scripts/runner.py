"""Run commands and groups of ranks with a time limit.

    Runner().run(["make", "all"], limit=60).status

Every command leads a session, so that all its children can be ended with it.
"""
import contextlib
import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time

from command import Problem

ROOT = str(pathlib.Path(__file__).resolve().parents[1])
GRACE_S = 10   # for a process to end after a signal: if its driver has lost the GPU, it may never end
OTHERS_S = 8   # for the other ranks to notice that one has failed


def words_of(**options):
    """Options of train_gpt as words of a command."""
    return [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]


def shown(command):
    """As it can be typed in the root of the repository."""
    return shlex.join(map(str, command)).replace(f"{ROOT}/", "")


class Failed(Problem):
    """A command that was expected to succeed."""


class Late(Exception):
    """The runner's deadline has passed. output: of the command so far."""

    def __init__(self, output=""):
        super().__init__()
        self.output = output


@dataclasses.dataclass
class Result:
    status: int  # of the first rank that failed
    output: str  # of that rank first; for each rank standard output, then standard error
    seconds: float
    ended: bool = False  # the runner ended it at the limit

    @property
    def reason(self):
        """Why it failed: the program's error, else a launcher's between two lines of dashes, else the first line with "error" that
        does not report the end of a rank, else the last line."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        boxes = re.findall(r"^-{9,}\n(.+?)(?:\n\n|\n-{9,}$)", self.output, re.MULTILINE | re.DOTALL)
        found = [line for line in lines if re.search(r"error\b(?! message)", line, re.IGNORECASE) and "xited with" not in line]
        text = next(iter([*errors, *boxes, *found, *lines[-1:], "it printed nothing"]))
        return re.sub(r"^error: rank \d+ of \d+ \([^)]*\): ", "", " ".join(text.split()))


class Runner:
    """gently: send SIGTERM first, so that a launcher can end its processes on other hosts. bound: a command ends when this script
    ends, even by SIGKILL. Nothing runs past `deadline`. Threads may share a runner."""

    def __init__(self, log=None, gently=False, bound=False, cwd=ROOT):
        self.log, self.gently, self.cwd, self.deadline = log, gently, cwd, float("inf")
        self.prefix = ["setpriv", "--pdeathsig", "KILL", "--"] if bound and shutil.which("setpriv") else []

    def left(self):
        return self.deadline - time.monotonic()

    def start(self, command, output, errors=subprocess.STDOUT, env=None):
        return subprocess.Popen([*self.prefix, *map(str, command)], cwd=self.cwd, env=dict(os.environ, **(env or {})),
                                stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True)

    def end(self, *processes):
        """Stops all before it kills one, because a rank that notices the end of another would report that as the error."""
        for number in (*[signal.SIGTERM] * self.gently, signal.SIGSTOP, signal.SIGKILL):
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            for process in processes if number != signal.SIGSTOP else ():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)

    def run(self, command, limit=None, env=None):
        return self.ranks([command], [env or {}], limit)

    def ranks(self, commands, environments, limit=None):
        """One process per command."""
        if self.left() <= 0:
            raise Late
        begin, processes = time.monotonic(), []
        files = [(tempfile.TemporaryFile(), tempfile.TemporaryFile()) for _ in commands]
        try:
            for command, environment, (output, errors) in zip(commands, environments, files):
                processes.append(self.start(command, output, errors, environment))
            first, late = self.wait(processes, begin + (limit or float("inf")))
        finally:
            self.end(*processes)
        seconds, texts = time.monotonic() - begin, [self.text(*pair) for pair in files]
        if first is not None:
            text = texts.pop(first) + "".join(texts)
            if late:
                text += f"\nrank {', '.join(map(str, late))} did not end by itself after rank {first} had failed"
            result = Result(processes[first].returncode, text, seconds)
        elif late:
            status = processes[late[0]].returncode or -signal.SIGKILL
            result = Result(status, f"error: ended after {seconds:.0f} s\n" + "".join(texts), seconds, True)
        else:
            result = Result(0, "".join(texts), seconds)
        if self.log:
            extra = " ".join(f"{k}={v}" for k, v in environments[0].items())
            self.log.write(f"$ {extra} {shlex.join(map(str, commands[0]))}  [{len(commands)} processes, status {result.status}, "
                           f"{seconds:.1f} s]\n{result.output}\n")
            self.log.flush()
        if result.ended and self.left() <= 0:
            raise Late(result.output)
        return result

    def wait(self, processes, until):
        """Waits until all have ended or time is up; another thread may set the deadline. Returns the first rank that failed, and
        the ranks that have not ended."""
        first, running = None, True
        while running and time.monotonic() < min(until, self.deadline):
            running = any([p.poll() is None for p in processes])
            failed = [i for i, p in enumerate(processes) if p.poll()]
            if first is None and failed:
                first, until = failed[0], min(until, time.monotonic() + OTHERS_S)
            time.sleep(0.01 * running)
        return first, [i for i, p in enumerate(processes) if p.poll() is None]

    @staticmethod
    def text(*files):
        """Reads and closes the files."""
        found = b""
        for file in files:
            file.seek(0)
            found += file.read()
            file.close()
        return found.decode(errors="replace")

    def output(self, command, limit=None, copies=1, **environment):
        """The output of a command that must succeed; of copies that run at the same time, that of the first comes first."""
        result = self.ranks([command] * copies, [environment] * copies, limit)
        if result.status:
            why = (f"ran past {limit:g} s" if result.ended else "killed, perhaps out of memory" if result.status == 137 else
                   f"exit status {result.status}")
            raise Failed(f"{why}: {shown(command)}\n{result.output[-4000:]}")
        return result.output

    def printed(self, *command, limit=20):
        """The output of a command; "" if it fails or does not exist."""
        try:
            result = self.run(command, limit)
        except OSError:
            return ""
        return "" if result.status else result.output.strip()
