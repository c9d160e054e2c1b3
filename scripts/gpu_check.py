"""Check and measure the GPU program on a machine with one NVIDIA GPU, in stages with a time budget each.

    scripts/gpu_check.sh [--out results/gpu] [--budget 540] [--quick] [--only STAGE[,STAGE]] [--plan]

    build      make the programs, the twins tool and the benchmarks, for both element types; do they start?
    device     what this machine is: GPU, driver, CUDA, cuDNN, NCCL; what the transports rely on, measured
    twins      every kernel against the CPU's, on random odd shapes, fp32 and bf16, twice for the same bits
    losses     ten steps of training against an independent reference in float64, and the CPU program where it runs
    ranks      2 and 4 ranks on the one GPU, every transport, mode and route: losses as of one rank, the same bits again
    sanitizer  compute-sanitizer over kernels and a training step
    times      step times, MFU and memory of d12 to d48, each with the micro-batch that is best; then of the same models
               in PyTorch, each beside a run of ours
    kernels    which kernel takes which part of a step, at which share of the peak; what slicing and fusing cost

A stage that is over its time is cut short and reported so; the others still run. What a stage does not use goes to
those behind it. All stages but device imply build, which is done in a second where all is built. Several calls do
more than one: --only build,device,twins,losses,ranks,sanitizer, then --only times, then --only kernels.

Nothing but a CUDA toolkit, a C compiler, make, cJSON, xxHash and Python is needed: numpy gives the reference, PyTorch
the comparison, and both are left out, with a word, where they are missing. Ranks are started by environment variables,
so MPI is not needed. What PyTorch has compiled is kept in build/inductor for the next call.

--out gets report.txt (what was printed), results.json (every figure, written anew after each stage and each line of a
table, so that nothing is lost if this script is killed) and commands.log (what every command printed). What counts
most is printed once more at the end. The exit status is 1 if a check failed.
"""
import argparse
import array
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import platform
import random
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OK, FAIL, SKIP, LATE = "ok", "FAIL", "skip", "LATE"
TYPES = "fp32", "bf16"


# ------------------------------------------------------------------------------------------ running things


class Late(Exception):
    """The stage's time is over."""


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
    """All are killed before one is waited for: who finds another one gone would report that as the error."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
    for process in processes:
        process.wait()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# Whole groups, as make and sanitizers have children of their own, which nothing but this would end with them.
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
if sys.argv[1:]:
    shutil.rmtree(sys.argv[1], True)
"""


class Reaper:
    """Outlives this script, however that ends, and clears away what it has left: processes and, if told, a directory."""

    def __init__(self, *directory):
        command = [sys.executable, "-S", "-E", "-c", REAPER, *directory]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL, start_new_session=True)

    def tell(self, sign, process):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{sign}{process.pid}\n".encode())  # at once, or not at all: it is short

    def close(self):
        self.process.stdin.close()
        self.process.wait()


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
            first, late = self.watch(processes, min(self.deadline, begin + (limit or float("inf"))))
        finally:
            self.end(*processes)
            with self.lock:
                self.running.difference_update(processes)
        result = self.result(processes, outputs, first, late, time.monotonic() - begin)
        self.write_down(commands, environments, result)
        if result.ended and time.monotonic() >= self.deadline:
            raise Late
        return result

    @staticmethod
    def watch(processes, until):
        """Until all have ended. The first that failed, and those that had not ended; both by number."""
        first = None
        while any(p.poll() is None for p in processes) and time.monotonic() < until:
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
            told = f"error: ended after {seconds:.0f} s\n" if late else ""
            return Result(status, told + "".join(texts), seconds, bool(late))
        text = texts.pop(first) + "".join(texts)
        if late:
            text += f"\nrank {', '.join(map(str, late))} had not ended by itself when rank {first} had failed"
        return Result(processes[first].returncode, text, seconds)

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


# ------------------------------------------------------------------------------------------ the whole check


class Check:
    """Options, programs, and what has been found so far."""

    def __init__(self, options):
        self.o = options
        self.build = {"fp32": options.fp32_build, "bf16": options.bf16_build}
        os.makedirs(options.out, exist_ok=True)
        self.report = open(os.path.join(options.out, "report.txt"), "w", encoding="utf-8")
        self.log = open(os.path.join(options.out, "commands.log"), "w", encoding="utf-8")
        self.scratch = tempfile.mkdtemp(prefix="gpu-check-")
        self.runner = Runner(self.log, self.scratch)
        self.rows, self.data = [], {"complete": False, "stages": {}}
        self.begin, self.stage = time.monotonic(), ""
        self.names = itertools.count(1)  # several threads ask
        self.torch = TorchSearch(self.runner)
        self.compiling = None            # fills PyTorch's cache behind the checks
        self.recomputes = False          # whether the program can leave out what backward computes again
        self.save()

    def say(self, text=""):
        print(text, flush=True)
        print(text, file=self.report, flush=True)

    def verdict(self, what, verdict, detail=""):
        self.rows.append((self.stage, what, verdict, detail))
        self.say(f"  {verdict:<5} {what}{'   ' + detail if detail else ''}")
        return verdict == OK

    def built(self, kind, name="train_gpt"):
        path = os.path.join(ROOT, self.build[kind], name)
        return path if os.access(path, os.X_OK) else None

    def program(self, kind, name="train_gpt"):
        """A built program, or None with a word about it."""
        path = self.built(kind, name)
        if not path:
            self.verdict(f"{kind} {name}", SKIP, f"{self.build[kind]}/{name} is not built")
        return path

    def path(self, name):
        return os.path.join(self.scratch, f"{next(self.names):03d}-{name}")

    def save(self):
        """Beside, synced and renamed: results.json is whole at any moment."""
        self.data["checks"] = [dict(zip(("stage", "what", "verdict", "detail"), row)) for row in self.rows]
        self.data.setdefault("device", {})["torch"] = self.torch.found
        path = os.path.join(self.o.out, "results.json")
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(self.data, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".new", path)

    def close(self):
        if self.compiling:
            self.compiling.stop()
        self.torch.stop()
        self.runner.close()  # and the scratch directory with it
        self.save()
        self.report.close()
        self.log.close()


# ------------------------------------------------------------------------------------------ build and device


WIRES = "tests/bench/bench_wires"


def targets(check):
    names = "train_gpt", "tests/layers/tool_twins", "tests/bench/bench_gpu"
    found = [f"{build}/{name}" for build in check.build.values() for name in names]
    wires = f"{check.build['bf16']}/{WIRES}"  # builds other than nvcc's have no rule for it
    found += [wires] if check.runner.run(["make", "-n", wires]).status == 0 else []
    return [*found, f"{check.o.ref_build}/tests/layers/tool_twins"]


def stage_build(check):
    make = ["make", "-k", "-j", os.cpu_count()]
    wanted = targets(check)
    result = check.runner.run([*make, *wanted])
    if result.status:  # perhaps for a warning that this compiler alone has
        check.verdict("make, warnings as errors", FAIL, "\n".join(result.output.splitlines()[-20:]))
        result = check.runner.run([*make, "WERROR=", *wanted])
    check.verdict("make", FAIL if result.status else OK,
                  "\n".join(result.output.splitlines()[-20:]) if result.status else f"{result.seconds:.0f} s")
    for kind in TYPES:
        if check.built(kind):
            starts(check, kind)


def starts(check, kind):
    """The linker finds libraries in places of which the loader knows nothing."""
    program = check.built(kind)
    result = check.runner.run([program, "--help"], limit=60)
    lost = re.findall(r"\S+ => not found", printed(check, "ldd", program)) if result.status else []
    told = f"{', '.join(lost)}; hint: set LD_LIBRARY_PATH to where it is (ldd {program})" if lost else result.last
    check.verdict(f"{kind} program starts", FAIL if result.status else OK, told if result.status else "")


def printed(check, *command, limit=20):
    try:
        result = check.runner.run(command, limit)
    except FileNotFoundError:
        return ""
    return "" if result.status else result.output.strip()


def version_of_tree(check):
    """Of the repository; where this is none, of what the programs were built from."""
    if os.path.exists(os.path.join(ROOT, ".git")):
        return printed(check, "git", "describe", "--always", "--dirty")
    program = check.built("bf16") or check.built("fp32")
    banner = printed(check, program, "--dry-run") if program else ""
    version = re.search(r"^commfuse (\S+):", banner, re.M)
    return f"{version.group(1)}, say the programs" if version else ""


def smi(check, *names):
    """What nvidia-smi says of the first GPU, a text for each name."""
    text = printed(check, "nvidia-smi", "--query-gpu=" + ",".join(names), "--format=csv,noheader")
    return [word.strip() for word in text.splitlines()[0].split(",")] if text else []


def stage_device(check):
    names = "name", "driver_version", "memory.total", "power.limit", "clocks.max.sm", "compute_mode"
    gpu = smi(check, *names)
    nvcc = re.search(r"release ([\d.]+)", printed(check, "nvcc", "--version") or
                     printed(check, "/usr/local/cuda/bin/nvcc", "--version"))
    facts = {"gpu": ", ".join(gpu), "nvcc": nvcc.group(1) if nvcc else "",
             "libraries": printed(check, "scripts/find_cuda.sh", "report"), "cores": os.cpu_count(),
             "host": platform.platform(), "python": platform.python_version(), "commit": version_of_tree(check)}
    check.data["device"] = facts
    for name, value in facts.items():
        check.say(f"        {name:<10} " + str(value or "unknown").replace("\n", "\n" + " " * 19))
    check.verdict("a GPU answers", OK if gpu else FAIL, facts["gpu"] or "nvidia-smi finds none")
    wires(check)
    torch = check.torch.version(min(20, check.runner.left()))
    check.say(f"        {'torch':<10} {torch or ('not yet found' if check.torch.thread.is_alive() else 'not found')}")


def wires(check):
    """What the transports rely on and no emulator can tell."""
    program = check.built("bf16", WIRES)
    if not program:
        check.verdict("wires", SKIP, f"{check.build['bf16']}/{WIRES} is not built")
        return
    result = check.runner.run([program], limit=40)
    check.data["wires"] = result.output.splitlines()
    check.say("\n".join("        " + line for line in check.data["wires"]))
    check.verdict("wires measured", FAIL if result.status else OK, result.last if result.status else "")


class TorchSearch:
    """A Python that has PyTorch. Importing it takes a minute on a cold disk: begun at once, waited for when needed."""

    def __init__(self, runner):
        self.python, self.found, self.process = None, "", None
        self.thread = threading.Thread(target=self.work, args=(runner,), daemon=True)
        self.thread.start()

    def work(self, runner):
        ask = "import torch; print('torch', torch.__version__, torch.version.cuda)"
        for python in dict.fromkeys((sys.executable, shutil.which("python3"), "/usr/bin/python3")):
            with contextlib.suppress(OSError), tempfile.TemporaryFile() as output:
                self.process = runner.start([python, "-c", ask], output)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(120)
                runner.end(self.process)
                output.seek(0)
                version = re.findall(r"^torch (.*)", output.read().decode(errors="replace"), re.M)
                if self.process.returncode == 0 and version:
                    self.python, self.found = python, version[-1]
                    return

    def version(self, patience):
        """Empty: there is none, or it has not been found yet."""
        self.thread.join(max(0, patience))
        return self.found

    def stop(self):
        while self.thread.is_alive():
            if self.process:
                end(self.process)
            self.thread.join(0.1)


# ------------------------------------------------------------------------------------------ twins


# cuDNN takes up to a second to plan each shape, so that attention may be late; the others must not be late with it.
KERNELS, ATTENTION = "linear,layernorm,elementwise,embedding,crossentropy,adamw,device", "attention"


def twins_file(check, tool, *words):
    out = check.path("twins.bin")
    result = check.runner.run([tool, out, *words])
    return out, result


def stage_twins(check):
    reference = os.path.join(ROOT, check.o.ref_build, "tests/layers/tool_twins")
    if not os.access(reference, os.X_OK):
        return check.verdict("twins", SKIP, f"{reference} is not built")
    for only, what in (KERNELS, "kernels"), (ATTENTION, "attention"):
        for seed in check.o.seeds.split(","):
            for kind in TYPES:
                twins_of(check, kind, seed, only, f"{kind} {what}, seed {seed}", reference)
    return None


def twins_of(check, kind, seed, only, name, reference):
    tool = check.program(kind, "tests/layers/tool_twins")
    words = ["--seed", seed, *(["--round"] if kind == "bf16" else []), "--only", only]
    try:
        if tool:
            twins(check, name, tool, reference, words)
    except Late:
        check.verdict(name, LATE, "cut short: the stage's time is over")


def twins(check, name, tool, reference, words):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ours = pool.submit(twins_file, check, tool, *words, "--repeat")
        theirs = pool.submit(twins_file, check, reference, *words)
        (found, made), (expected, cpu) = ours.result(), theirs.result()
    faults = [line for line in made.output.splitlines() if line.startswith("FAULT")]
    notes = [line for line in made.output.splitlines() if line.startswith("note:")]
    check.verdict(f"{name}: written where it should be, same bits twice", FAIL if made.status else OK,
                  "; ".join(faults[:5] + notes) or made.last)
    if cpu.status:
        check.verdict(f"{name}: the CPU's side", FAIL, cpu.last)
        return
    compared = check.runner.run([sys.executable, "tests/layers/compare_twins.py", found, expected])
    check.say("\n".join("        " + line for line in compared.output.splitlines()))
    check.verdict(f"{name}: agrees with the CPU", FAIL if compared.status else OK,
                  compared.output.splitlines()[-1] if compared.output else "no output")
    os.remove(found)
    os.remove(expected)


# ------------------------------------------------------------------------------------------ training runs


def write_tokens(path, count, vocabulary, seed=7):
    """An llm.c token file with something to learn: each token is one of four successors of the one before it. Tokens are
    as uneven as words of text, the commonest one in twenty of 50257: embeddings have long runs of one token to add up."""
    draw = random.Random(seed)
    tokens = draw.sample(range(vocabulary), vocabulary)
    weights = list(itertools.accumulate(1 / (rank + 2) for rank in range(vocabulary)))
    drawn = draw.choices(tokens, cum_weights=weights, k=4 * vocabulary)
    text, token = array.array("H"), tokens[0]
    for _ in range(count):
        text.append(token)
        token = drawn[4 * token + draw.randrange(4)]
    with open(path, "wb") as file:
        array.array("i", [20240520, 1, count] + [0] * 253).tofile(file)
        text.tofile(file)


def words_of(**options):
    return [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]


# Several ranks as processes of one NCCL communicator on one GPU: it must take them for different hosts, which then
# talk through sockets on the loopback device. Few blocks each: a kernel that waits for a peer's must leave it some.
def environment(rank, size, port, transport):
    e = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1",
         "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    if transport in ("nccl", "auto"):
        e.update(NCCL_HOSTID=f"rank{rank}", NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1, NCCL_SOCKET_IFNAME="lo",
                 NCCL_IB_DISABLE=1, NCCL_NET="Socket", NCCL_MAX_CTAS=4)
    return {name: str(value) for name, value in e.items()}


def train(check, program, ranks=1, transport="auto", limit=None, **options):
    """(steps of the log, config of the log, Result)"""
    log = check.path("log.jsonl")
    command = [program, *words_of(log=log, transport=transport, val_every=0, **options)]
    if ranks == 1:
        result = check.runner.run(command, limit)
    else:
        port = free_port()
        result = check.runner.ranks([command] * ranks, [environment(r, ranks, port, transport) for r in range(ranks)],
                                    limit)
    events = read_log(log)
    config = next((event for event in events if event["event"] == "config"), {})
    return [event for event in events if event["event"] == "step"], config, result


def read_log(path):
    """Events up to the first line that is not whole: whoever writes it may have been killed."""
    events = []
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError), open(path, encoding="utf-8") as file:
        for line in file:
            events.append(json.loads(line))
    return events


def relative(found, expected):
    """Largest relative difference of two lists of losses; infinite if they do not match at all."""
    pairs = list(zip(found, expected))
    if not pairs or len(found) != len(expected) or any(x is None or x != x for x in found):
        return float("inf")
    return max(abs(a / b - 1) for a, b in pairs)


# ------------------------------------------------------------------------------------------ losses


@dataclasses.dataclass(frozen=True)
class Small:
    """A model that a reference in float64 trains in seconds, and one batch that every step sees whole."""
    name: str
    layers: int
    channels: int
    heads: int
    seq: int
    vocabulary: int
    batch: int
    lr: float
    steps: int = 10


SMALL = Small("d2 of 128 channels, T 64", 2, 128, 2, 64, 101, 8, 3e-3), Small("d6, T 256", 6, 384, 6, 256, 256, 2, 1e-3)
LOSS_BAND = {"fp32": 1e-4, "bf16": 2e-2}
NORM_BAND = {"fp32": 1e-3, "bf16": 1e-1}


def recipe(small):
    return dict(seq=small.seq, batch=small.batch, micro_batch=small.batch, steps=small.steps, schedule="cosine",
                lr=small.lr, min_lr=small.lr / 10, warmup=3, clip=1.5, weight_decay=0.1, timeout=60)


def shape_words(small):
    return dict(layers=small.layers, channels=small.channels, heads=small.heads, vocab=small.vocabulary)


def reference(small, tokens, model):
    """In a process of its own: writes the model file, then prints losses and norms of an independent implementation in
    float64 (tests/train/reference.py)."""
    sys.path.insert(0, os.path.join(ROOT, "tests", "train"))
    import reference as gpt
    padded = (small.vocabulary + 127) // 128 * 128
    shape = gpt.Shape(small.seq, small.vocabulary, small.layers, small.heads, small.channels, padded)
    weights = gpt.random_model(shape, scale=0.05)
    gpt.write_model(model, shape, weights)
    batch = gpt.samples(gpt.read_tokens(tokens), small.seq)
    history = gpt.train(shape, weights, [batch] * small.steps, schedule="cosine", lr=small.lr, min_lr=small.lr / 10,
                        warmup=3, clip=1.5, weight_decay=0.1)
    print(json.dumps([[h[0] for h in history], [h[1] for h in history]]))


def have_numpy():
    try:
        import numpy  # noqa: F401, only to know whether it is there
        return True
    except ImportError:
        return False


def agree(check, what, kind, steps, result, expected):
    losses, norms = expected
    if result.status or len(steps) != len(losses):
        return check.verdict(what, FAIL, result.last)
    loss = relative([s["loss"] for s in steps], losses)
    norm = relative([s["grad_norm"] for s in steps], norms)
    good = loss <= LOSS_BAND[kind] and norm <= NORM_BAND[kind] and steps[-1]["loss"] < steps[0]["loss"]
    return check.verdict(what, OK if good else FAIL,
                         f"loss {loss:.1e} (band {LOSS_BAND[kind]:.0e}), norm {norm:.1e} (band {NORM_BAND[kind]:.0e}), "
                         f"{steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f}")


def expected_losses(check, small, tokens, model):
    """([losses], [norms]) of the reference, or None; and the options that start a program from the same weights."""
    if not have_numpy():
        check.verdict(f"{small.name}: float64 reference", SKIP, "no numpy")
        return None, shape_words(small)
    command = [sys.executable, "scripts/gpu_check.py", "--reference", SMALL.index(small), tokens, model]
    result = check.runner.run(command, limit=0.6 * check.runner.left())
    if result.status:
        check.verdict(f"{small.name}: float64 reference", SKIP, result.last)
        return None, dict(init_from=model) if os.path.exists(model) else shape_words(small)
    return json.loads(result.output), dict(init_from=model)


def losses_of(check, small, cpu):
    tokens, model = check.path("tokens.bin"), check.path("model.bin")
    write_tokens(tokens, small.batch * small.seq + 1, small.vocabulary)
    expected, start = expected_losses(check, small, tokens, model)
    record = check.data["losses"][small.name] = {"reference": expected and expected[0]}
    if cpu:
        steps, _, result = train(check, cpu, train=tokens, peak_tflops=1, **start, **recipe(small))
        record["cpu"] = [s["loss"] for s in steps]
        if expected:
            agree(check, f"{small.name}: CPU program and reference", "fp32", steps, result, expected)
        elif result.status == 0:
            expected = [s["loss"] for s in steps], [s["grad_norm"] for s in steps]
    if not expected:
        return check.verdict(small.name, SKIP, "neither the reference nor the CPU program is here to compare with")
    for kind in TYPES:
        program = check.program(kind)
        if program:
            steps, _, result = train(check, program, train=tokens, **start, **recipe(small))
            record[kind] = [s["loss"] for s in steps]
            agree(check, f"{small.name}: {kind}", kind, steps, result, expected)
    return None


def stage_losses(check):
    cpu = os.path.join(ROOT, check.o.cpu_program)
    cpu_runs = os.access(cpu, os.X_OK) and check.runner.run([cpu, "--help"]).status == 0
    check.data["losses"] = {}
    for small in SMALL:
        losses_of(check, small, cpu if cpu_runs else None)


# ------------------------------------------------------------------------------------------ ranks


@dataclasses.dataclass(frozen=True)
class Mesh:
    transport: str
    strategy: str
    tp: int
    dp: int
    overlap: str
    route: str = "ring"
    slices: int = 0
    kind: str = "fp32"
    again: bool = False

    @property
    def how(self):
        return (f"{self.transport} {self.overlap}{' ' + self.route if self.overlap == 'commfuse' else ''}"
                f"{f' m {self.slices}' if self.slices else ''}")

    @property
    def name(self):
        return f"{self.kind} {self.strategy:<4} tp {self.tp} dp {self.dp} {self.how}{', again' if self.again else ''}"

    @property
    def same_bits(self):
        """Runs that promise each other's bits: commfuse by any route over any transport, again and again."""
        return (self.strategy, self.tp, self.dp, self.slices, self.kind)


def meshes(transports):
    """What tells most first, in case that time runs out. auto, exchanges over ipc and native collectives over NCCL in one
    process, is what hosts of several GPUs get."""
    return [mesh for t in transports for mesh in (auto_meshes() if t == "auto" else all_meshes(t))]


def auto_meshes():
    return [Mesh("auto", "tpsp", 2, 1, how) for how in ("commfuse", "none", "slice")]


def all_meshes(t):
    plan = [Mesh(t, "tpsp", 2, 1, "commfuse"), Mesh(t, "up", 2, 1, "commfuse", "direct"),
            Mesh(t, "tpsp", 2, 2, "commfuse"), Mesh(t, "tpsp", 2, 1, "commfuse", kind="bf16"),
            Mesh(t, "tpsp", 2, 1, "commfuse", kind="bf16", again=True), Mesh(t, "tpsp", 2, 1, "none"),
            Mesh(t, "tpsp", 2, 1, "slice"), Mesh(t, "tpsp", 1, 2, "commfuse"),
            Mesh(t, "tpsp", 2, 1, "commfuse", "direct"), Mesh(t, "tpsp", 4, 1, "commfuse", "direct"),
            Mesh(t, "up", 2, 2, "commfuse", "direct"),
            Mesh(t, "up", 4, 1, "commfuse"), Mesh(t, "tpsp", 4, 1, "commfuse"), Mesh(t, "up", 2, 1, "none"),
            Mesh(t, "tpsp", 1, 2, "none"), Mesh(t, "up", 2, 1, "slice"), Mesh(t, "tpsp", 1, 2, "slice"),
            Mesh(t, "tpsp", 2, 1, "commfuse", again=True), Mesh(t, "tpsp", 1, 4, "commfuse", "direct"),
            Mesh(t, "up", 2, 1, "commfuse"), Mesh(t, "tpsp", 2, 1, "commfuse", "ring", 2),
            Mesh(t, "up", 2, 2, "commfuse", "direct", kind="bf16"), Mesh(t, "tpsp", 4, 1, "none"),
            Mesh(t, "up", 4, 1, "none"), Mesh(t, "tpsp", 2, 2, "none"), Mesh(t, "tpsp", 4, 1, "slice"),
            Mesh(t, "up", 4, 1, "commfuse", again=True), Mesh(t, "tpsp", 1, 4, "commfuse")]
    native = [mesh for mesh in plan if mesh.overlap != "commfuse"]
    return [mesh for mesh in plan if t != "ipc" or mesh not in native[1:]]  # which ipc refuses, and does so once


# 12 heads of 16: for tp 4 three a rank. The vocabulary is padded, the last rank's part holds padding alone. With a larger
# lr losses jump on such tokens, and what is rounded in another order differs by more than the band.
RANKS_MODEL = dict(layers=2, channels=192, heads=12, vocab=101, seq=40, batch=8, steps=5, lr=1e-3, timeout=20)
MESH_LIMIT = 35  # s; the program's own patience ends before
MESH_BAND = {"fp32": 1e-5, "bf16": 1e-2}
# At a time. Processes take turns on the one GPU, and a kernel of NCCL that waits for a peer keeps its turn.
JOBS = {"ipc": 3}
HANGS_MAX = 2  # a transport that has hung so often, alone, is not tried again


class Turns:
    """A few at a time, or one alone."""

    def __init__(self, count):
        self.count, self.gate, self.free = count, threading.Lock(), threading.Semaphore(count)

    @contextlib.contextmanager
    def one(self):
        with self.gate:
            self.free.acquire()
        try:
            yield
        finally:
            self.free.release()

    @contextlib.contextmanager
    def alone(self):
        with self.gate:  # nobody begins meanwhile
            for _ in range(self.count):
                self.free.acquire()
            try:
                yield
            finally:
                self.free.release(self.count)


def timed_out(result):
    """By us, or by its own patience: slow, or stuck."""
    return result.ended or (result.status != 0 and result.seconds >= RANKS_MODEL["timeout"])


def train_mesh(check, mesh, tokens):
    program = os.path.join(ROOT, check.build[mesh.kind], "train_gpt")
    steps, _, result = train(check, program, mesh.tp * mesh.dp, mesh.transport, MESH_LIMIT, train=tokens, tp=mesh.tp,
                             dp=mesh.dp, strategy=mesh.strategy, overlap=mesh.overlap, route=mesh.route,
                             slices=mesh.slices, micro_batch=8 // mesh.dp, **RANKS_MODEL)
    return steps, result


def mesh_run(check, mesh, tokens, turns):
    """(steps, Result, tries): what has timed out beside others is tried once more without them."""
    with turns.one():
        steps, result = train_mesh(check, mesh, tokens)
    if not timed_out(result):
        return steps, result, 1
    try:
        with turns.alone():
            return *train_mesh(check, mesh, tokens), 2
    except Late:
        return steps, result, 1


def train_alone(check, kind, tokens):
    """Losses of one rank, run twice; None if they are not to be had."""
    program, name = check.program(kind), f"{kind} one rank"
    if not program:
        return None
    runs = [train(check, program, train=tokens, micro_batch=8, **RANKS_MODEL) for _ in range(2)]
    for steps, _, result in runs:
        if result.status or len(steps) != RANKS_MODEL["steps"]:
            check.verdict(name, FAIL, f"status {result.status}: {result.last}")
            return None
    first, again = [[(s["loss"], s["grad_norm"]) for s in steps] for steps, _, _ in runs]
    check.verdict(name, OK if first == again else FAIL, "twice the same bits" if first == again else
                  "two runs DIFFER: " + ", ".join(f"step {i}" for i, (a, b) in enumerate(zip(first, again)) if a != b))
    return [loss for loss, _ in first]


def stage_ranks(check):
    tokens, bits, transports = check.path("tokens.bin"), {}, check.o.transports.split(",")
    write_tokens(tokens, RANKS_MODEL["batch"] * RANKS_MODEL["seq"] * 3 + 1, RANKS_MODEL["vocab"])
    alone = {kind: losses for kind in TYPES if (losses := train_alone(check, kind, tokens))}
    check.data["ranks"], end_of_stage = [], check.runner.deadline
    for i, transport in enumerate(transports):  # each gets its share of what is left
        plan = [mesh for mesh in meshes([transport]) if mesh.kind in alone]
        check.runner.deadline = time.monotonic() + (end_of_stage - time.monotonic()) / (len(transports) - i)
        ranks_over(check, transport, plan, tokens, alone, bits)
        check.save()
    check.runner.deadline = end_of_stage


def ranks_over(check, transport, plan, tokens, alone, bits):
    late = hangs = 0
    turns = Turns(JOBS.get(transport, 1))
    with concurrent.futures.ThreadPoolExecutor(turns.count) as pool:
        futures = [(mesh, pool.submit(mesh_run, check, mesh, tokens, turns)) for mesh in plan]
        for mesh, future in futures:
            try:
                steps, result, tries = future.result()
            except (Late, concurrent.futures.CancelledError):
                late += 1
                continue
            check.data["ranks"].append(dict(dataclasses.asdict(mesh), losses=[s["loss"] for s in steps],
                                            seconds=result.seconds, tries=tries))
            judge_mesh(check, mesh, steps, result, alone[mesh.kind], bits, tries)
            hangs += timed_out(result) and tries == 2
            if hangs == HANGS_MAX:
                pool.shutdown(wait=False, cancel_futures=True)
    if late:
        why = f"{transport} has hung {hangs} times, alone" if hangs >= HANGS_MAX else "time is over"
        check.verdict(f"{late} of {len(plan)} meshes over {transport}", LATE, f"not run, {why}")


def judge_mesh(check, mesh, steps, result, expected, bits, tries=1):
    if result.status and "native collectives need NCCL" in result.output and mesh.overlap != "commfuse":
        return check.verdict(mesh.name, SKIP, "refused: " + result.last)
    if timed_out(result) and tries == 1:
        return check.verdict(mesh.name, LATE, f"{result.last}; no time to try it alone")
    twice = ", at the second try, alone" if tries == 2 else ""
    if result.status or len(steps) != len(expected):
        return check.verdict(mesh.name, FAIL, f"status {result.status}{twice}: {result.last}")
    far = relative([s["loss"] for s in steps], expected)
    good, note = far <= MESH_BAND[mesh.kind], f"{far:.1e} from one rank, {result.seconds:.1f} s{twice}"
    if mesh.overlap == "commfuse":
        mine = [(s["loss"], s["grad_norm"]) for s in steps]
        first, other = bits.setdefault(mesh.same_bits, (mine, mesh))
        if first is not mine:
            same = first == mine
            good, note = good and same, f"{note}, bits {'of' if same else 'DIFFER from'} {other.how}"
    return check.verdict(mesh.name, OK if good else FAIL, note)


# ------------------------------------------------------------------------------------------ sanitizer


def stage_sanitizer(check):
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.access(sanitizer, os.X_OK):
        return check.verdict("compute-sanitizer", SKIP, "not installed")
    tokens = check.path("tokens.bin")
    write_tokens(tokens, 200, 101)
    tiny = words_of(train=tokens, layers=1, channels=64, heads=1, vocab=101, seq=24, micro_batch=2, steps=1,
                    val_every=0)
    work = []
    for tool in ("memcheck", "racecheck"):  # initcheck is blind here: all memory is zeroed, then poisoned
        for kind in TYPES:
            twins = check.program(kind, "tests/layers/tool_twins")
            if not twins:
                continue
            rounding = ["--round"] if kind == "bf16" else []
            line = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "5"]
            line += ["--report-api-errors", "no"] if tool == "memcheck" else []  # libraries try things that may fail
            own = KERNELS if tool == "memcheck" else KERNELS.replace("linear,", "")  # which is the library's
            only = ["--only", f"{own},{ATTENTION}" if kind == "fp32" else own]  # in bf16 it is cuDNN's
            work.append((f"{tool}, {kind} kernels",
                         [*line, twins, check.path("twins.bin"), "--small", *rounding, *only]))
            if tool == "memcheck" and kind == "fp32":
                program = os.path.join(ROOT, check.build[kind], "train_gpt")
                work.append((f"{tool}, a {kind} step", [*line, program, *tiny]))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for (name, _), future in zip(work, [pool.submit(check.runner.run, command) for _, command in work]):
            try:
                result = future.result()
            except Late:
                check.verdict(name, LATE, "did not end in time")
                continue
            summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY.*)", result.output)
            check.verdict(name, FAIL if result.status or not summary else OK,
                          summary[-1] if summary else result.last)
            if result.status:
                check.say("\n".join("        " + line for line in result.output.splitlines()[:25]))
    return None


# ------------------------------------------------------------------------------------------ times


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    layers: int
    channels: int
    heads: int
    batches: tuple  # micro-batches to try, the smallest first
    torch_batch: int


# By importance: what time does not allow is left out from the end.
MODELS = (Model("d12", 12, 768, 12, (16, 32, 64, 128), 32), Model("d48", 48, 1600, 25, (4, 8, 16), 8),
          Model("d24", 24, 1024, 16, (8, 16, 32, 64), 16), Model("d36", 36, 1280, 20, (8, 16, 32), 16))
SEQ, VOCABULARY, VOCABULARY_PADDED = 1024, 50257, 50304
WARM_UP, TIMED = 5, 12
GEMM_SIZES = 4096, 8192, 16384
OUT_OF_MEMORY = re.compile("no memory:|out of memory|cudaErrorMemoryAllocation")  # an illegal access is something else
MEMORY_SPARED_MIB = 1024  # by --dry-run's count, which knows nothing of libraries


# --- PyTorch


INDUCTOR = os.path.join(ROOT, "build", "inductor")  # stays for the next call


def torch_environment():
    return dict(TORCHINDUCTOR_CACHE_DIR=INDUCTOR, TRITON_CACHE_DIR=os.path.join(INDUCTOR, "triton"),
                TORCHINDUCTOR_FX_GRAPH_CACHE="1", TORCHINDUCTOR_AUTOGRAD_CACHE="1", TORCHINDUCTOR_COMPILE_THREADS="4")


def torch_command(check, model, layers, steps, warmup):
    words = (layers, model.channels, model.heads, model.torch_batch, SEQ, "--vocab", VOCABULARY_PADDED, "--steps", steps,
             "--warmup", warmup, "--compile", check.o.torch_compile)
    return [check.torch.python, "tests/bench/torch_gpt.py", *map(str, words)]


class Compiling:
    """PyTorch compiles every model once behind checks that time nothing; timed runs, in this call or another, find it in
    the cache. A compiled block serves any number of layers, so that one is enough."""

    def __init__(self, check, models):
        self.check, self.running, self.stopped = check, set(), False
        self.pool = concurrent.futures.ThreadPoolExecutor(2)
        self.futures = [self.pool.submit(self.work, model) for model in models]

    def work(self, model):
        layers = 1 if self.check.o.torch_compile == "blocks" else model.layers
        if self.stopped:
            return
        process = self.check.runner.start(torch_command(self.check, model, layers, 0, 0), subprocess.DEVNULL,
                                          torch_environment())
        self.running.add(process)
        process.wait()
        self.check.runner.end(process)
        self.running.discard(process)

    def stop(self):
        self.stopped = True
        self.pool.shutdown(wait=False, cancel_futures=True)
        while not all(future.done() for future in self.futures):  # one may just have begun
            end(*list(self.running))
            time.sleep(0.05)


class MemoryWatch:
    """Most memory in use on the GPU while this is open, in MiB, by looking twice a second; None: nobody knows."""

    def __enter__(self):
        self.most, self.over = None, threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()
        return self

    def work(self):
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            while not self.over.is_set():
                told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
                used = [int(word) for word in told.split() if word.isdigit()]
                self.most = max([*used, *([] if self.most is None else [self.most])], default=None)
                self.over.wait(0.5)

    def __exit__(self, *_):
        self.over.set()
        self.thread.join(12)


# --- one line of the table


def shape_of(model):
    return dict(model=model.name)


def our_options(check, model, batch, recompute):
    options = dict(shape_of(model), seq=SEQ, vocab=VOCABULARY, micro_batch=batch)
    return dict(options, recompute=recompute) if check.recomputes else options


def our_time(check, program, model, batch, tokens, recompute=0):
    """A row of the table, or None; and the Result."""
    with MemoryWatch() as memory:
        steps, config, result = train(check, program, limit=60, train=tokens, steps=WARM_UP + TIMED,
                                      **our_options(check, model, batch, recompute))
    timed = [s["step_ms"] for s in steps[WARM_UP:]]
    if result.status or len(timed) < TIMED:
        return None, result
    ms = statistics.median(timed)
    for note in [line for line in result.output.splitlines() if re.match("note: .*(own|plain) kernel", line)]:
        check.verdict(f"{model.name}, micro-batch {batch}: the libraries' kernels", FAIL, note)
    at = min(steps[WARM_UP:], key=lambda s: abs(s["step_ms"] - ms))
    mfu, peak = at["mfu"] and at["mfu"] * at["step_ms"] / ms, config.get("peak_tflops_all_ranks")
    return {"model": model.name, "program": "commfuse", "batch": batch, "recompute": recompute, "step_ms": ms,
            "spread": (max(timed) - min(timed)) / ms, "tokens_per_s": batch * SEQ / ms * 1e3, "mfu": mfu,
            "tflops": mfu and peak and mfu * peak, "memory_mib": memory.most, "first_step_ms": steps[0]["step_ms"],
            "start_s": result.seconds - sum(s["step_ms"] for s in steps) / 1e3, "peak_tflops": peak,
            "losses": [s["loss"] for s in steps]}, result


def torch_time(check, model, peak_tflops):
    """The same of PyTorch."""
    with MemoryWatch() as memory:
        result = check.runner.run(torch_command(check, model, model.layers, TIMED, WARM_UP), 200, torch_environment())
    lines = [line for line in result.output.splitlines() if line.startswith("{")]
    if result.status or not lines:
        return None, result
    row = json.loads(lines[-1])
    tflops = row["tokens_per_s"] * row["flops_per_token"] * 1e-12
    return dict(row, model=model.name, program="torch", tflops=tflops, memory_mib=memory.most,
                mfu=tflops / peak_tflops if peak_tflops else None, start_s=result.seconds), result


def time_head():
    return (f"{'model':<5} {'program':<9} {'batch':>5} {'step ms':>9} {'spread':>7} {'tokens/s':>10} {'MFU':>7} "
            f"{'of GEMM':>8} {'mem GiB':>8} {'start s':>7}")


def share(part, whole):
    return f"{100 * part / whole:.1f} %" if part and whole else "n/a"


def time_line(check, row):
    memory = f"{row['memory_mib'] / 1024:.1f}" if row["memory_mib"] is not None else "n/a"
    program = "recompute" if row.get("recompute") else row["program"]
    return (f"{row['model']:<5} {program:<9} {row['batch']:>5} {row['step_ms']:>9.1f} {100 * row['spread']:>6.1f}% "
            f"{row['tokens_per_s']:>10.0f} {share(row['mfu'], 1):>7} "
            f"{share(row['tflops'], check.data['gemm_tflops']):>8} {memory:>8} {row['start_s']:>7.1f}")


def time_legend(check):
    """What the columns are, and what is compared."""
    torch = next((row for row in check.data["times"] if row["program"] == "torch"), {})
    how = {"blocks": "the block and head with loss compiled", "model": "the whole model compiled"}.get(
        torch.get("compiled"), "not compiled")
    rate = f"{check.data['gemm_tflops']:.0f} TFLOP/s" if check.data["gemm_tflops"] else "what"
    return [f"T {SEQ}, bf16; step: median of {TIMED} after {WARM_UP}. commfuse keeps what backward needs, as PyTorch "
            "does; recompute: backward computes GELU and layer norms again.",
            f"of GEMM: share of {rate} that large products reach here. Memory: most in use on the GPU, with libraries "
            "and reserves."] + ([f"torch: {torch['framework']}, {how}, flash attention, fused AdamW."] if torch else [])


def keep_time(check, row):
    check.say("        " + time_line(check, row))
    check.data["times"].append(row)
    check.save()


# --- the stage


def memory_needed(check, program, model, batch):
    """MiB that a run will ask for; None: not known."""
    words = words_of(**our_options(check, model, batch, 0))
    memory = re.search(r"^memory +([\d.]+) MiB per rank", printed(check, program, "--dry-run", *words), re.M)
    return float(memory.group(1)) if memory else None


def too_large(check, program, model, batch):
    """Why a run need not be tried; empty: it may fit."""
    total = re.match(r"(\d+) MiB", *smi(check, "memory.total") or [""]) if batch > model.torch_batch else None
    needed = memory_needed(check, program, model, batch) if total else None
    if not needed or needed + MEMORY_SPARED_MIB <= int(total.group(1)):
        return ""
    return f"not tried: {needed / 1024:.1f} GiB, without libraries, of {int(total.group(1)) / 1024:.1f}"


def search(check, program, model, tokens):
    """The best micro-batch of ours: larger ones are tried until they do not pay."""
    best = 0
    for batch in model.batches:
        name = f"{model.name}, micro-batch {batch}"
        if why := too_large(check, program, model, batch):
            check.verdict(name, SKIP, why)
            return
        row, result = our_time(check, program, model, batch, tokens)
        if not row:
            full = best and OUT_OF_MEMORY.search(result.output)
            check.verdict(name, SKIP if full else FAIL, result.last)
            return
        keep_time(check, row)
        if batch >= model.torch_batch and row["tokens_per_s"] < 1.01 * best:
            return
        best = max(best, row["tokens_per_s"])


def one_more(check, program, model, tokens, recompute):
    row, result = our_time(check, program, model, model.torch_batch, tokens, recompute)
    if row:
        keep_time(check, row)
    else:
        full = OUT_OF_MEMORY.search(result.output)
        check.verdict(f"{model.name}, micro-batch {model.torch_batch}", SKIP if full else FAIL, result.last)
    return row


def beside_torch(check, program, model, tokens):
    """PyTorch's time and, right behind it, ours: their ratio is of neighbours."""
    peak = next((row["peak_tflops"] for row in check.data["times"] if row["program"] == "commfuse"), None)
    row, result = torch_time(check, model, peak)
    if not row:
        check.verdict(f"{model.name} in PyTorch", SKIP, result.last)
        return
    keep_time(check, row)
    ours = one_more(check, program, model, tokens, 0)
    if not ours:
        return
    ratio = row["step_ms"] / ours["step_ms"]
    many = row["compiled"] == "blocks" and row["graphs"] > 3
    check.data.setdefault("torch_over_ours", {})[model.name] = ratio
    check.verdict(f"{model.name}: PyTorch's step over ours, micro-batch {model.torch_batch}", OK, f"{ratio:.2f}" + (
        f"; layers did not share what was compiled: {row['graphs']} graphs" if many else ""))


def for_each(check, what, models, work):
    """Says what has not been reached when time is over."""
    for i, model in enumerate(models):
        try:
            work(model)
        except Late:
            check.verdict(f"{what}: {', '.join(m.name for m in models[i:])}", LATE, "the stage's time is over")
            return


def gemm_rate(check):
    """TFLOP/s of the largest products that this GPU keeps up, for the share that a step reaches; None: not known."""
    bench = check.program("bf16", "tests/bench/bench_gpu")
    result = check.runner.run([bench, "gemm", *GEMM_SIZES], limit=40) if bench else None
    best = re.search(r"^best ([\d.e+-]+) TFLOP/s", result.output, re.M) if result else None
    if best and result.status == 0:
        check.say("\n".join("        " + line for line in result.output.splitlines() if "TFLOP/s" in line))
        return float(best.group(1))
    if bench:
        check.verdict("large products", FAIL, result.last)
    return None


def stage_times(check):
    """All of ours first: what PyTorch takes must not cost a figure of this program."""
    program = check.program("bf16")
    if not program:
        return
    if check.compiling:
        check.compiling.stop()
    check.data.update(times=[], gemm_tflops=gemm_rate(check))
    check.recomputes = "--recompute" in printed(check, program, "--help")
    tokens = check.path("tokens.bin")
    write_tokens(tokens, 2 * SEQ * max(max(model.batches) for model in MODELS) + 1, VOCABULARY)
    check.say("        " + time_head())
    for_each(check, "ours", MODELS, lambda model: search(check, program, model, tokens))
    if check.recomputes:
        for_each(check, "recomputing", MODELS[:2], lambda model: one_more(check, program, model, tokens, 1))
    if check.torch.version(min(120, check.runner.left())):
        for_each(check, "beside PyTorch", MODELS, lambda model: beside_torch(check, program, model, tokens))
    else:
        check.verdict("PyTorch", SKIP, "no Python here has it")
    check.say("\n".join("        " + line for line in time_legend(check)))


# ------------------------------------------------------------------------------------------ kernels


def share_of_step(check, model, batch, rows):
    """Kernel by kernel, what part of the measured step its calls would take one after another."""
    times = [t["step_ms"] for t in check.data.get("times", [])
             if (t["model"], t["program"], t["batch"], t.get("recompute")) == (model.name, "commfuse", batch, 0)]
    kernels = [r for r in rows if r.get("step_ms")]  # others are there to be compared
    total = sum(r["step_ms"] for r in kernels)
    step = statistics.mean(times) if times else None
    groups = collections.Counter()
    for row in kernels:
        name = row["kernel"]
        gemm = re.search(r"forward|dgrad|wgrad", name) and re.match(r"qkv|attproj|fc|head", name)
        group = "products" if gemm else name.split()[0]
        groups[group] += row["step_ms"]
    shares = {"batch": batch, "kernels_ms": total, "groups": dict(groups), "step_ms": step}
    check.data.setdefault("shares", {})[model.name] = shares
    check.say("\n".join("        " + line for line in share_lines(model.name, shares)))


def share_lines(name, shares):
    whole = shares["step_ms"] or shares["kernels_ms"]
    took = f"{shares['step_ms']:.1f} ms" if shares["step_ms"] else "(not measured in this call)"
    lines = [f"{name}, micro-batch {shares['batch']}: kernels add up to {shares['kernels_ms']:.1f} ms, "
             f"the step takes {took}"]
    for group, ms in collections.Counter(shares["groups"]).most_common():
        lines.append(f"  {group:<24} {ms:>9.2f} ms {100 * ms / whole:>6.1f} %")
    return lines


def kernel_rows(file):
    rows = []
    with contextlib.suppress(FileNotFoundError), open(file, encoding="utf-8") as lines:
        rows = [json.loads(re.sub(r":-?(nan|inf)", ":null", line)) for line in lines if line.endswith("\n")]
    return rows


def stage_kernels(check):
    bench = check.program("bf16", "tests/bench/bench_gpu")
    if not bench:
        return
    for model in MODELS[:2]:
        file, batch = check.path("kernels.jsonl"), model.torch_batch
        sizes = model.layers, model.channels, model.heads, batch, SEQ, VOCABULARY_PADDED
        try:
            result = check.runner.run([bench, *sizes, 10, file])
            check.say("\n".join("        " + line for line in result.output.splitlines()))
            check.verdict(f"{model.name}: kernels timed", FAIL if result.status else OK, f"{result.seconds:.0f} s")
        finally:  # what it has measured, if it was late
            rows = kernel_rows(file)
            check.data.setdefault("kernels", {})[model.name] = rows
            if rows:
                share_of_step(check, model, batch, rows)
            check.save()


# ------------------------------------------------------------------------------------------ the plan


@dataclasses.dataclass(frozen=True)
class Stage:
    name: str
    budget: float  # seconds of the default 540
    run: object
    slow: bool = False  # left out by --quick
    runs_programs: bool = True


STAGES = (Stage("build", 75, stage_build, runs_programs=False), Stage("device", 40, stage_device, runs_programs=False),
          Stage("twins", 50, stage_twins), Stage("losses", 30, stage_losses), Stage("ranks", 85, stage_ranks),
          Stage("sanitizer", 35, stage_sanitizer), Stage("times", 145, stage_times, True),
          Stage("kernels", 80, stage_kernels, True))


def chosen(options):
    names = options.only.split(",") if options.only else [s.name for s in STAGES if not (options.quick and s.slow)]
    unknown = set(names) - {s.name for s in STAGES}
    if unknown:
        sys.exit(f"no such stage: {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in STAGES)}")
    if any(s.name in names and s.runs_programs for s in STAGES):
        names = ["build", *names]
    return [s for s in STAGES if s.name in names]


def plan_of(stages, budget):
    """(stage, seconds, second at which it should have ended)"""
    scale, at, plan = budget / sum(s.budget for s in STAGES), 0.0, []
    for stage in stages:
        at += stage.budget * scale
        plan.append((stage, stage.budget * scale, at))
    spare = budget - at  # of stages that are not run
    return [(stage, seconds, planned + spare) for stage, seconds, planned in plan]


def run_stage(check, stage, seconds, planned):
    """Until its planned end; if earlier stages were late, at least half of what it should have."""
    begin = time.monotonic()
    check.stage = stage.name
    last = check.begin + check.o.budget
    check.runner.deadline = min(last, max(check.begin + planned, begin + seconds / 2))
    check.say(f"\n{stage.name}: from second {begin - check.begin:.0f}, at most {max(0, check.runner.left()):.0f} s")
    try:
        stage.run(check)
    except Late:
        check.verdict(stage.name, LATE, "cut short: its time is over")
    except Exception as error:  # one stage's accident must not cost the others
        check.verdict(stage.name, FAIL, f"{type(error).__name__}: {error}")
        traceback.print_exc(file=check.log)
    check.runner.end_all()
    check.data["stages"][stage.name] = time.monotonic() - begin
    check.save()
    if stage.name == "ranks" and check.torch.python and not check.o.quick:
        check.compiling = Compiling(check, MODELS)


# ------------------------------------------------------------------------------------------ what is printed last


LAST_WORDS = 11500  # characters: who reads the end of a long output alone shall miss nothing that counts


def failures(check):
    found = [f"{verdict:<5} {stage}: {what}   {detail}".splitlines()[0][:200]
             for stage, what, verdict, detail in check.rows if verdict in (FAIL, LATE)]
    return found[:25] + ([f"and {len(found) - 25} more"] if len(found) > 25 else [])


def costs(check):
    """Chunking loss by number of ranks, and GELU fused over apart, a line each."""
    lines = []
    for name, rows in check.data.get("kernels", {}).items():
        losses = collections.defaultdict(list)
        for row in rows:
            if "fused" in row and row["ratio"] is not None:
                lines.append(f"{name} {row['fused']}: GELU in the epilogue takes {row['ratio']:.2f} of apart")
            if "operation" in row and row["loss"] is not None:
                losses[row["operation"]].append(f"{row['ranks']} ranks {100 * row['loss']:+.1f} %")
        lines += [f"{name} {operation}, in slices: {', '.join(each)}" for operation, each in losses.items()]
    return lines


def sections(check):
    """(name, lines), what counts most first."""
    times, shares = check.data.get("times"), check.data.get("shares", {})
    ratios = [f"{name} {ratio:.2f}" for name, ratio in check.data.get("torch_over_ours", {}).items()]
    table = [time_head(), *(time_line(check, row) for row in times), *time_legend(check)] if times else []
    table += [f"PyTorch's step over ours: {', '.join(ratios)}"] if ratios else []
    return [("failures", failures(check)), ("times", table),
            ("shares", [line for name in shares for line in share_lines(name, shares[name])]),
            ("costs", costs(check)), ("wires", check.data.get("wires", []))]


def last_words(check):
    """What counts, the table last, in no more than LAST_WORDS characters."""
    counts = collections.Counter(row[2] for row in check.rows)
    seconds = ", ".join(f"{name} {s:.0f} s" for name, s in check.data["stages"].items())
    end_line = f"{counts[OK]} ok, {counts[FAIL]} failed, {counts[LATE]} late, {counts[SKIP]} skipped"
    first_line = f"{time.monotonic() - check.begin:.0f} s: {seconds}"
    room, kept = LAST_WORDS - len(first_line) - len(end_line) - 400, {}
    for name, lines in sections(check):
        text = "\n".join(lines)
        if text and len(text) + 2 > room:
            text = f"({name}: see report.txt)"
        room -= len(text) + 2
        kept[name] = text
    parts = [kept[name] for name in ("wires", "costs", "shares", "failures", "times") if kept[name]]
    return "\n" + "\n\n".join([first_line, *parts, end_line])


def summary(check):
    check.data["complete"] = True
    check.say(last_words(check))
    return 1 if any(row[2] == FAIL for row in check.rows) or not any(row[2] == OK for row in check.rows) else 0


# ------------------------------------------------------------------------------------------ options


def parse(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="results/gpu", help="directory for the report (default results/gpu)")
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything (default 540)")
    parser.add_argument("--quick", action="store_true", help="no times")
    parser.add_argument("--only", default="", metavar="STAGES",
                        help="these stages, with commas between them; build comes with all but device")
    parser.add_argument("--plan", action="store_true", help="print the stages and their times, run nothing")
    parser.add_argument("--seeds", default="1", help="of the twins' inputs (default 1)")
    parser.add_argument("--transports", default="ipc,auto,nccl", help="of several ranks (default ipc,auto,nccl)")
    parser.add_argument("--torch-compile", choices=("blocks", "model"), default="blocks",
                        help="what PyTorch compiles: the repeated block, and head with loss (default); or all at once")
    parser.add_argument("--fp32-build", default="build/cuda-fp32")
    parser.add_argument("--bf16-build", default="build/cuda-bf16")
    parser.add_argument("--ref-build", default="build/ref", help="the CPU's twins, without any library")
    parser.add_argument("--reference", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--cpu-program", default="train_gpt", help="compared with where it runs")
    return parser.parse_args(words)


def main():
    options = parse()
    os.chdir(ROOT)
    if options.reference:
        number, tokens, model = options.reference
        return reference(SMALL[int(number)], tokens, model)
    plan = plan_of(chosen(options), options.budget)
    if options.plan:
        for stage, seconds, planned in plan:
            print(f"{stage.name:<10} {seconds:5.0f} s, ends by second {planned:.0f}")
        return 0
    check = Check(options)
    try:
        for stage, seconds, planned in plan:
            run_stage(check, stage, seconds, planned)
        return summary(check)
    finally:
        check.close()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
