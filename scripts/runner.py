"""Commands and groups of ranks: started, listened to, and ended in time, whatever ends this script.

    Runner().run(["make", "all"], limit=60).status

Every command leads a session, so that it is ended with all its children.
"""
import contextlib
import dataclasses
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = str(pathlib.Path(__file__).resolve().parents[1])
PATIENCE_S = 10  # with a process that was asked to end, or killed: one whose driver has lost the GPU may not end
OTHERS_S = 8     # that ranks have to find out by themselves that one has failed

# Its input is a pipe from the script, which closes however the script ends.
REAPER = """
import os, shutil, signal, sys
alive = set()
for line in sys.stdin:
    (alive.add if line[0] == "+" else alive.discard)(int(line[1:]))
for group in alive:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
shutil.rmtree(sys.argv[1], True)
"""


class Reaper:
    """A process that outlives this script, ends what it has left running and removes its folder."""

    def __init__(self, folder):
        self.process = subprocess.Popen([sys.executable, "-S", "-E", "-c", REAPER, folder], stdin=subprocess.PIPE, bufsize=0,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    def watch(self, sign, process):
        """+: from now on; -: no more."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{sign}{process.pid}\n".encode())  # short, so all of it or nothing

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Late(Exception):
    """The time of the runner is over. `output` is what the command printed before."""

    def __init__(self, output=""):
        super().__init__()
        self.output = output


@dataclasses.dataclass
class Result:
    status: int  # of the first rank that failed
    output: str  # of that rank first; of each rank what it printed, then its errors
    seconds: float
    ended: bool = False  # by the runner, at the limit

    @property
    def last(self):
        """The line that says most: the first about an error, or the last one."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no output")


class Runner:
    """gently: a launcher gets SIGTERM first, and ends what it has started on other hosts. Nothing runs past `deadline`."""

    def __init__(self, log=None, reaper=None, gently=False, cwd=ROOT):
        self.log, self.reaper, self.gently, self.cwd, self.deadline = log, reaper, gently, cwd, float("inf")
        self.lock, self.running = threading.Lock(), set()

    def left(self):
        return self.deadline - time.monotonic()

    def start(self, command, output, errors=subprocess.STDOUT, env=None):
        process = subprocess.Popen([str(word) for word in command], cwd=self.cwd, env=dict(os.environ, **(env or {})),
                                   stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True)
        if self.reaper:
            self.reaper.watch("+", process)
        with self.lock:
            self.running.add(process)
        return process

    def end(self, *processes):
        """All are stopped before one is killed: a rank that finds another one gone would report that as the error."""
        for number in (*[signal.SIGTERM] * self.gently, signal.SIGSTOP, signal.SIGKILL):
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            for process in processes if number != signal.SIGSTOP else ():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(PATIENCE_S)
        for process in processes if self.reaper else ():
            self.reaper.watch("-", process)
        with self.lock:
            self.running.difference_update(processes)

    def run(self, command, limit=None, env=None):
        return self.ranks([command], [env or {}], limit)

    def ranks(self, commands, environments, limit=None):
        """One process per command."""
        if self.left() <= 0:
            raise Late
        begin, processes = time.monotonic(), []
        files = [[tempfile.TemporaryFile(), tempfile.TemporaryFile()] for _ in commands]
        try:
            for command, environment, (output, errors) in zip(commands, environments, files):
                processes.append(self.start(command, output, errors, environment))
            first, late = self.watch(processes, begin + (limit or float("inf")))
        finally:
            self.end(*processes)
            texts = [self.text(*pair) for pair in files]
        result = self.result(processes, texts, first, late, time.monotonic() - begin)
        self.write_down(commands, environments, result)
        if result.ended and time.monotonic() >= self.deadline:
            raise Late(result.output)
        return result

    def watch(self, processes, until):
        """Until all have ended or time is over. The number of the first that failed, and of those that had not ended."""
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
        """What they hold; then they are closed."""
        found = b""
        for file in files:
            file.seek(0)
            found += file.read()
            file.close()
        return found.decode(errors="replace")

    @staticmethod
    def result(processes, texts, first, late, seconds):
        if first is None:
            status = (processes[late[0]].returncode or -signal.SIGKILL) if late else 0
            return Result(status, f"error: ended after {seconds:.0f} s\n" * bool(late) + "".join(texts), seconds, bool(late))
        text = texts.pop(first) + "".join(texts)
        if late:
            text += f"\nrank {', '.join(map(str, late))} had not ended by itself when rank {first} had failed"
        return Result(processes[first].returncode, text, seconds)

    def printed(self, *command, limit=20):
        """What a command prints; empty if there is no such command or it fails."""
        try:
            result = self.run(command, limit)
        except OSError:
            return ""
        return "" if result.status else result.output.strip()

    def write_down(self, commands, environments, result):
        if not self.log:
            return
        extra = " ".join(f"{k}={v}" for k, v in environments[0].items())
        with self.lock:
            print(f"$ {extra} {shlex.join(map(str, commands[0]))}  [{len(commands)} processes, status {result.status}, "
                  f"{result.seconds:.1f} s]\n{result.output}", file=self.log, flush=True)

    def close(self):
        """Ends what still runs, in whatever thread."""
        self.end(*list(self.running))
