"""Running things: commands and groups of ranks, whose output is kept and which end when the time of a stage is over."""
import contextlib
import dataclasses
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time

from .reaper import Reaper

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PATIENCE_S = 10  # with a process that has been killed: one whose driver has lost the GPU may not end


class Late(Exception):
    """The stage's time is over. What was cut short had printed .output."""

    def __init__(self, output=""):
        super().__init__()
        self.output = output


@dataclasses.dataclass
class Result:
    status: int  # of the first rank that failed
    output: str  # its own first
    seconds: float
    ended: bool = False  # by us, at its limit

    @property
    def last(self):
        """The line that says most: an error, else the last one."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no output")


def end(*processes):
    """All are stopped before one is killed: who finds another one gone would report that as the error."""
    for number in signal.SIGSTOP, signal.SIGKILL:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)  # it leads a session of its own
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)


class Runner:
    """Starts commands, keeps what they print, ends them when the stage is over."""

    def __init__(self, log, *directory):
        self.log, self.deadline = log, float("inf")
        self.lock, self.running, self.reaper = threading.Lock(), set(), Reaper(*directory)

    def left(self):
        return self.deadline - time.monotonic()

    def start(self, command, output, env=None):
        process = subprocess.Popen([str(word) for word in command], cwd=ROOT, env=dict(os.environ, **(env or {})),
                                   stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        self.reaper.tell("+", process)
        return process

    def end(self, *processes):
        end(*processes)
        for process in processes:
            self.reaper.tell("-", process)

    def run(self, command, limit=None, env=None):
        return self.ranks([command], [env or {}], limit)

    def ranks(self, commands, environments, limit=None):
        """One process per command. If one fails, the others have a few seconds to find out by themselves."""
        if self.left() <= 0:
            raise Late
        begin = time.monotonic()
        outputs = [tempfile.TemporaryFile() for _ in commands]
        processes = [self.start(c, o, e) for c, o, e in zip(commands, outputs, environments)]
        with self.lock:
            self.running.update(processes)
        try:
            first, late = self.watch(processes, begin + (limit or float("inf")))
        finally:
            self.end(*processes)
            with self.lock:
                self.running.difference_update(processes)
        result = self.result(processes, outputs, first, late, time.monotonic() - begin)
        self.write_down(commands, environments, result)
        if result.ended and time.monotonic() >= self.deadline:
            raise Late(result.output)
        return result

    def watch(self, processes, until):
        """Until all have ended, or the stage. The first that failed, and those that had not ended; both by number."""
        first = None
        while any(p.poll() is None for p in processes) and time.monotonic() < min(until, self.deadline):
            if first is None and any(p.poll() for p in processes):
                first = next(i for i, p in enumerate(processes) if p.poll())
                until = min(until, time.monotonic() + 8)
            time.sleep(0.01)
        late = [i for i, p in enumerate(processes) if p.poll() is None]
        return next((i for i, p in enumerate(processes) if p.poll()), None) if first is None else first, late

    @staticmethod
    def result(processes, outputs, first, late, seconds):
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read().decode(errors="replace"))
            output.close()
        if first is None:
            status = processes[late[0]].returncode if late else 0
            status = -signal.SIGKILL if status is None else status  # it has not even ended by that
            told = f"error: ended after {seconds:.0f} s\n" if late else ""
            return Result(status, told + "".join(texts), seconds, bool(late))
        text = texts.pop(first) + "".join(texts)
        if late:
            text += f"\nrank {', '.join(map(str, late))} had not ended by itself when rank {first} had failed"
        return Result(processes[first].returncode, text, seconds)

    def printed(self, *command, limit=20):
        """What a command tells; empty if it is not there or fails."""
        try:
            result = self.run(command, limit)
        except FileNotFoundError:
            return ""
        return "" if result.status else result.output.strip()

    def write_down(self, commands, environments, result):
        extra = " ".join(f"{k}={v}" for k, v in environments[0].items())
        with self.lock:
            print(f"$ {extra} {shlex.join(map(str, commands[0]))}  [{len(commands)} processes, status {result.status}, "
                  f"{result.seconds:.1f} s]\n{result.output}", file=self.log, flush=True)

    def end_all(self):
        with self.lock:
            running = list(self.running)
        end(*running)

    def close(self):
        self.end_all()
        self.reaper.close()
