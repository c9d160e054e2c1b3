"""What the end-to-end tests share: starting the program, reading its log, finding its processes.

Every test runs the real executable in processes of their own, as a user would: one process directly, more
through scripts/mpirun.sh. Nothing sleeps for a fixed time: wait_until() polls a condition against a deadline, and a
program that does not come back is killed together with all its children and fails the test with what it
had printed.

    BUILD=build/san-address-undefined  runs the tests on another build (default build/release)
"""
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import uuid

import numpy as np

import reference

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests"))
import launcher

BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build/release"))
PROGRAM = os.path.join(BUILD, "train_gpt")
GRADIENTS = os.path.join(BUILD, "tests", "layers", "tool_gradients")
ROWS = os.path.join("tests", "commfuse", "tool_rows")  # of a build for CPUs
PATIENCE = 16 if "san-" in os.path.basename(BUILD) else 4  # others may use the machine, and sanitizers are slow
MPIRUN = os.path.join(ROOT, "scripts", "mpirun.sh")
MARK = "COMMFUSE_TEST_RUN"  # environment variable by which a run's processes are found

# 12 heads and T = 36, 40: not powers of two, three heads a rank for tp = 4; vocabulary and position table
# are padded, so every index computation that takes one for the other shows.
TINY = reference.Shape(maxT=48, V=101, L=2, heads=12, C=96, Vp=128)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A row of the table of algorithms (commfuse/schedule.c)."""
    name: str
    bits: str  # the row whose bits it shares; "-": nobody's
    most: int  # slices
    kind: str  # alias, bound, native or exchanges
    tail_free: bool

    def in_slices(self, slices):
        """As --overlap has it, in as many slices as it has at most."""
        return f"{self.name}:{min(slices, self.most)}"


def schedules(*kinds, **fields):
    """All rows, or those of these kinds and with these fields. Tests go through them, so that a new row is tested."""
    tool = next((path for path in (os.path.join(build, ROWS) for build in (BUILD, os.path.join(ROOT, "build/release")))
                 if os.path.exists(path)), None)
    if not tool:
        raise unittest.SkipTest(f"{ROWS} is not built")
    lines = subprocess.run([tool], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    rows = [Schedule(name, bits, int(most), kind, bool(rest)) for name, bits, most, kind, *rest in map(str.split, lines)]
    return [row for row in rows if (not kinds or row.kind in kinds)
            and all(getattr(row, field) == value for field, value in fields.items())]


def environment(**more):
    """Few cores serve many ranks here: a thread that waits for another one sleeps."""
    # Leaks are looked for by the tests of the parts: here Open MPI's own come in hundreds, and without the whole
    # stacks, which take minutes to gather, nothing tells them from ours.
    sanitizer = os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"
    # A rank that is alone has a daemon of Open MPI, which removes TMPDIR/ompi.<host> a while after the rank has ended: just when the
    # next run's mpirun relies on it, which then ends ("A call to mkdir was unable to create …: File exists").
    temporary = tempfile.mkdtemp(prefix="run-")
    os.chmod(temporary, 0o1777)  # as /tmp is
    return {**os.environ, "ASAN_OPTIONS": sanitizer, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
            "TMPDIR": temporary, **more}


def options(**values):
    """--micro-batch 2 from micro_batch=2; True: a flag; None: left out."""
    line = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        line.append("--" + name.replace("_", "-"))
        if value is not True:
            line.append(str(value))
    return line


@dataclasses.dataclass
class Result:
    command: list
    status: int
    out: str
    err: str
    seconds: float

    @property
    def text(self):
        return self.out + self.err

    def __str__(self):
        return (f"\n$ {' '.join(self.command)}\nexit status {self.status} after {self.seconds:.1f} s\n"
                f"--- stdout ---\n{self.out[-4000:]}\n--- stderr ---\n{self.err[-4000:]}")


def marked(mark, program=PROGRAM):
    """(pid, environment) of the processes of a program that were started with MARK in their environment."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/exe") != os.path.realpath(program):
                continue
            with open(f"/proc/{pid}/environ", "rb") as file:
                text = file.read().decode(errors="replace")
        except OSError:  # gone, or not ours to look at
            continue
        values = dict(v.split("=", 1) for v in text.split("\0") if "=" in v)
        if values.get(MARK) == mark:
            yield int(pid), values


class Run:
    """A program that has been started. wait() for its Result."""

    def __init__(self, arguments, ranks=1, program=PROGRAM, mpi=(), env=None, wrapper=(), **popen):
        self.mark = uuid.uuid4().hex
        self.program = program
        launcher = [MPIRUN, "-np", str(ranks), *mpi] if ranks > 1 or mpi else []
        self.command = [*launcher, *wrapper, program, *map(str, arguments)]
        self.begin = time.monotonic()
        self.files = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            self.command, cwd=ROOT, env=environment(**{MARK: self.mark}, **(env or {})), stdin=subprocess.DEVNULL,
            stdout=self.files[0], stderr=self.files[1], **popen)

    def ended(self):
        return self.process.poll() is not None

    def texts(self):
        """What it has printed so far: standard output, standard error."""
        return [os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace") for file in self.files]

    def processes(self):
        """Rank -> pid of the program's own processes that still live (zombies do not)."""
        return {launcher.rank_of(values): pid for pid, values in marked(self.mark, self.program)}

    def kill(self):
        for pid in self.processes().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def wait(self, timeout=60):
        timeout *= PATIENCE
        try:
            self.process.wait(max(0.1, self.begin + timeout - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"did not end within {timeout} s:{self.result()}") from None
        return self.result()

    def leaves_nobody(self, timeout=5):
        """The ranks that mpirun has killed end a moment after it."""
        wait_until(lambda: not self.processes(), timeout, lambda: f"the end of {self.processes()}{self.result()}")

    def result(self):
        return Result(self.command, self.process.returncode, *self.texts(), time.monotonic() - self.begin)

    def close(self):
        if not self.ended():
            self.kill()
        for file in self.files:
            file.close()


def run(arguments, ranks=1, timeout=60, **more):
    started = Run(arguments, ranks, **more)
    try:
        return started.wait(timeout)
    finally:
        started.close()


def wait_until(condition, timeout, what, interval=0.02):
    """The first true value of condition(), or a failure that says what did not happen, a text or what gives one."""
    deadline = time.monotonic() + timeout * PATIENCE
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout * PATIENCE} s in vain: {what() if callable(what) else what}")
        time.sleep(interval)


def read_log(path):
    """The complete lines of a log, as objects; NaN and Infinity are no JSON and fail."""
    def refuse(constant):
        raise ValueError(f"{path}: {constant} in JSON")
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:  # at once: line by line, one that grows meanwhile would come in two parts
        text = file.read()
    return [json.loads(line, parse_constant=refuse) for line in text.split("\n")[:-1]]


def events(log, kind):
    return [entry for entry in log if entry["event"] == kind]


def random_tokens(count, vocab, seed=7):
    """Tokens with something to learn: each is drawn from a few successors of the one before it."""
    random = np.random.default_rng(seed)
    successors = random.integers(0, vocab, (vocab, 4))
    tokens = np.zeros(count, dtype=np.int64)
    choices = random.integers(0, 4, count)
    for i in range(1, count):
        tokens[i] = successors[tokens[i - 1], choices[i]]
    return tokens


def temporary_directory(case):
    """For one test; gone when it has ended."""
    folder = tempfile.TemporaryDirectory(prefix="commfuse-test-")
    case.addCleanup(folder.cleanup)
    return folder.name


class Case(unittest.TestCase):
    """A test with a directory of its own, a tiny model and a token file."""
    shape, T, samples = TINY, 36, 8

    @classmethod
    def setUpClass(cls):
        if not os.path.exists(PROGRAM):
            raise unittest.SkipTest(f"{PROGRAM} is not built")
        cls.folder = tempfile.mkdtemp(prefix="commfuse-test-")
        cls.addClassCleanup(shutil.rmtree, cls.folder, True)
        cls.model = cls.path("model.bin")
        cls.tokens = cls.path("tokens.bin")
        cls.parameters = reference.random_model(cls.shape)
        reference.write_model(cls.model, cls.shape, cls.parameters)
        reference.write_tokens(cls.tokens, random_tokens(cls.samples * cls.T + 1, cls.shape.V))

    @classmethod
    def path(cls, name):
        return os.path.join(cls.folder, name)

    @classmethod
    def fresh(cls, name):
        """A path that no other test uses."""
        return cls.path(f"{uuid.uuid4().hex[:8]}-{name}")

    def arguments(self, **more):
        """Train the tiny model for a few steps; keyword arguments change and add options."""
        values = dict(init_from=self.model, train=self.tokens, seq=self.T, steps=3, batch=self.samples,
                      micro_batch=self.samples, val_every=0, threads=1, peak_tflops=1, timeout=30)
        return options(**{**values, **more})

    def train(self, ranks=1, timeout=60, **more):
        """Runs to a good end; returns the log's objects and the result."""
        log = self.fresh("log.jsonl")
        result = run(self.arguments(log=log, **more), ranks, timeout)
        self.assertEqual(result.status, 0, str(result))
        return read_log(log), result

    def assertFails(self, result, *words):
        """Not status 0, not a crash, and every word in the message, whatever its case."""
        self.assertNotEqual(result.status, 0, str(result))
        self.assertGreater(result.status, 0, f"ended by a signal{result}")
        self.assertIn("error:", result.err, str(result))
        self.assertIsNone(re.search(r"hint: *\n", result.err), f"an empty hint{result}")
        for word in words:
            self.assertIn(word.lower(), result.err.lower(), f"the message lacks '{word}'{result}")
        for crash in ("segmentation fault", "signal code", "addresssanitizer", "runtime error:"):
            self.assertNotIn(crash, result.err.lower(), str(result))
