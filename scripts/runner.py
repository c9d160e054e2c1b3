"""Run commands and groups of ranks with a time limit.

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
from functools import partial

from command import Problem

ROOT = str(pathlib.Path(__file__).resolve().parents[1])
GRACE_S = 10   # for a process to end after a signal: if its driver has lost the GPU, it may never end
OTHERS_S = 8   # for the other ranks to notice that one has failed


def words_of(**options):
    """Options of train_gpt, but those that are None, as words of a command."""
    return [word for name, value in options.items() if value is not None for word in ("--" + name.replace("_", "-"), str(value))]


def shown(command):
    """As it can be typed in the root of the repository."""
    return shlex.join(map(str, command)).replace(f"{ROOT}/", "")


def text_of(file):
    file.seek(0)
    return file.read().decode(errors="replace")


class Failed(Problem):
    """A command that was expected to succeed."""


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


class Late(Exception):
    """The runner's deadline has passed. Its argument: the Result of the command so far."""


class Runner:
    """gently: send SIGTERM first, so that a launcher can end its processes on other hosts. bound: a command ends when this script
    ends, even by SIGKILL. Nothing runs past `deadline`. Threads may share a runner. log: a file for all commands and outputs.
    What a command prints is in files beside it, running-…, until it is there. env: of all commands."""

    def __init__(self, log=None, gently=False, bound=False, cwd=ROOT):
        self.log, self.gently, self.cwd, self.deadline, self.env = log, gently, cwd, float("inf"), {}
        self.file = tempfile.TemporaryFile if not log else partial(tempfile.NamedTemporaryFile, prefix="running-",
                                                                   dir=os.path.dirname(log.name))
        self.prefix = ["setpriv", "--pdeathsig", "KILL", "--"] if bound and shutil.which("setpriv") else []

    def left(self):
        return self.deadline - time.monotonic()

    def end(self, *processes):
        """Stops all before it kills one, because a rank that notices the end of another would report that as the error."""
        for number in (*[signal.SIGTERM] * self.gently, signal.SIGSTOP, signal.SIGKILL):
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            for process in processes if number != signal.SIGSTOP else ():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)

    def wait(self, processes, until):
        """Waits until all have ended or time is up; another thread may set the deadline. Returns the first rank that failed, and
        the ranks that have not ended."""
        first, late = None, [*range(len(processes))]
        while late and time.monotonic() < min(until, self.deadline):
            late = [i for i, p in enumerate(processes) if p.poll() is None]
            failed = [i for i, p in enumerate(processes) if p.poll()]
            if first is None and failed:
                first, until = failed[0], min(until, time.monotonic() + OTHERS_S)
            time.sleep(0.01 * bool(late))
        return first, late

    def run(self, command, limit=None, env=None):
        return self.ranks([command], [env or {}], limit)

    def ranks(self, commands, environments, limit=None):
        """One process per command."""
        if self.left() <= 0:
            raise Late(Result(0, "", 0, True))
        begin, processes = time.monotonic(), []
        with contextlib.ExitStack() as stack:
            files = [[stack.enter_context(self.file()) for _ in ("output", "errors")] for _ in commands]
            try:
                for command, environment, (output, errors) in zip(commands, environments, files):
                    processes.append(subprocess.Popen(
                        [*self.prefix, *map(str, command)], cwd=self.cwd, env={**os.environ, **self.env, **environment},
                        stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True))
                first, late = self.wait(processes, begin + (limit or float("inf")))
            finally:
                self.end(*processes)
                texts = ["".join(map(text_of, pair)) for pair in files]
                if self.log:
                    extra = "".join(f"{name}={value} " for name, value in {**self.env, **environments[0]}.items())
                    print(f"$ {extra}{shlex.join(map(str, commands[0]))}  [{len(commands)} processes, status "
                          f"{', '.join(str(p.returncode) for p in processes)}, {time.monotonic() - begin:.1f} s]\n{''.join(texts)}",
                          file=self.log, flush=True)
        seconds = time.monotonic() - begin
        if first is not None:
            texts.insert(0, texts.pop(first))
            if late:
                texts.append(f"\nrank {', '.join(map(str, late))} did not end by itself after rank {first} had failed")
            result = Result(processes[first].returncode, "".join(texts), seconds)
        elif late:
            status = processes[late[0]].returncode or -signal.SIGKILL
            result = Result(status, f"error: ended after {seconds:.0f} s\n" + "".join(texts), seconds, True)
        else:
            result = Result(0, "".join(texts), seconds)
        if result.ended and self.left() <= 0:
            raise Late(result)
        return result

    def output(self, command, limit=None, copies=1, **environment):
        """The output of a command that must succeed; of copies that run at the same time, that of the first comes first."""
        result = self.ranks([command] * copies, [environment] * copies, limit)
        if result.status:
            why = f"ran past {limit:g} s" if result.ended else f"exit status {result.status}"
            raise Failed(f"{why}: {shown(command)}\n{result.output[-4000:]}")
        return result.output

    def printed(self, *command, limit=20):
        """The output of a command; "" if it fails or does not exist."""
        try:
            return self.output(command, limit).strip()
        except (OSError, Failed):
            return ""
