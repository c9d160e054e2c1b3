"""Check and measure the GPU program on a machine with one NVIDIA GPU, in stages with a time budget each.

    scripts/gpu_check.sh [--out results/gpu] [--budget 540] [--quick] [--only STAGE[,STAGE]] [--plan]

    build      make the programs, the twins tool and the benchmark, for both element types
    device     what this machine is: GPU, driver, CUDA, cuDNN, NCCL
    twins      every kernel against the CPU's, on random odd shapes, fp32 and bf16, twice for the same bits
    losses     ten steps of training against an independent reference in float64, and the CPU program where it runs
    ranks      2 and 4 ranks on the one GPU, every transport, mode and route: losses as of one rank, the same bits again
    sanitizer  compute-sanitizer over kernels and a training step
    times      step times, MFU and memory of d12 to d48, and of the same models in PyTorch
    kernels    which kernel takes which part of a step, at which share of the peak; what slicing costs

A stage that is over its time is cut short and reported so; the others still run. What a stage does not use goes to
those behind it. Nothing but a CUDA toolkit, a C compiler, make, cJSON, xxHash and Python is needed: numpy gives the
reference, PyTorch the comparison, and both are left out, with a word, where they are missing. Ranks are started by
environment variables, so MPI is not needed.

--out gets report.txt (what was printed), results.json (every figure) and commands.log (what every command printed).
The exit status is 1 if a check failed.
"""
import argparse
import array
import collections
import concurrent.futures
import contextlib
import dataclasses
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

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OK, FAIL, SKIP, LATE = "ok", "FAIL", "skip", "LATE"
TYPES = "fp32", "bf16"


# ------------------------------------------------------------------------------------------ running things


class Late(Exception):
    """The stage's time is over."""


@dataclasses.dataclass
class Result:
    status: int  # the first that is not 0, of several ranks
    output: str
    seconds: float

    @property
    def last(self):
        """The line that says most: an error, else the last one."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no output")


def end(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
    process.wait()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Runner:
    """Starts commands, keeps what they print, ends them when the stage is over."""

    def __init__(self, log):
        self.log, self.deadline = log, float("inf")
        self.lock, self.running = threading.Lock(), set()

    def left(self):
        return self.deadline - time.monotonic()

    def start(self, command, output, env):
        process = subprocess.Popen([str(word) for word in command], cwd=ROOT, env=dict(os.environ, **(env or {})),
                                   stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        with self.lock:
            self.running.add(process)
        return process

    def run(self, command, limit=None, env=None):
        return self.ranks([command], [env or {}], limit)

    def ranks(self, commands, environments, limit=None):
        """One process per command. If one fails, the others have a few seconds to find out by themselves."""
        if self.left() <= 0:
            raise Late
        begin = time.monotonic()
        until = min(self.deadline, begin + (limit or float("inf")))
        outputs = [tempfile.TemporaryFile() for _ in commands]
        processes = [self.start(c, o, e) for c, o, e in zip(commands, outputs, environments)]
        try:
            while any(p.poll() is None for p in processes) and time.monotonic() < until:
                if any(p.poll() for p in processes):
                    until = min(until, time.monotonic() + 8)
                time.sleep(0.01)
            timed_out = [p for p in processes if p.poll() is None]
        finally:
            for p in processes:
                end(p)
                with self.lock:
                    self.running.discard(p)
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read().decode(errors="replace"))
            output.close()
        status = next((p.returncode for p in processes if p.returncode > 0),
                      next((p.returncode for p in processes if p.returncode), 0))
        result = Result(status, "".join(texts), time.monotonic() - begin)
        with self.lock:
            extra = " ".join(f"{k}={v}" for k, v in environments[0].items())
            print(f"$ {extra} {shlex.join(map(str, commands[0]))}  [{len(commands)} processes, status {status}, "
                  f"{result.seconds:.1f} s]\n{result.output}", file=self.log, flush=True)
        if timed_out and time.monotonic() >= self.deadline:
            raise Late
        if timed_out:
            result.output += f"\nerror: ended after {result.seconds:.0f} s"
        return result

    def end_all(self):
        for process in list(self.running):
            end(process)


# ------------------------------------------------------------------------------------------ the whole check


class Check:
    """Options, programs, and what has been found so far."""

    def __init__(self, options):
        self.o = options
        self.build = {"fp32": options.fp32_build, "bf16": options.bf16_build}
        os.makedirs(options.out, exist_ok=True)
        self.report = open(os.path.join(options.out, "report.txt"), "w", encoding="utf-8")
        self.log = open(os.path.join(options.out, "commands.log"), "w", encoding="utf-8")
        self.runner = Runner(self.log)
        self.scratch = tempfile.mkdtemp(prefix="gpu-check-")
        self.rows, self.data = [], {"stages": {}}
        self.begin = time.monotonic()
        self.names = 0
        self.torch = None        # a Python that has PyTorch
        self.compiling = None    # fills PyTorch's cache behind the checks

    def say(self, text=""):
        print(text, flush=True)
        print(text, file=self.report, flush=True)

    def verdict(self, what, verdict, detail=""):
        self.rows.append((self.stage, what, verdict, detail))
        self.say(f"  {verdict:<5} {what}{'   ' + detail if detail else ''}")
        return verdict == OK

    def program(self, kind, name="train_gpt"):
        """A built program, or None with a word about it."""
        path = os.path.join(ROOT, self.build[kind], name)
        if os.access(path, os.X_OK):
            return path
        self.verdict(f"{kind} {name}", SKIP, f"{path} is not built")
        return None

    def path(self, name):
        self.names += 1
        return os.path.join(self.scratch, f"{self.names:03d}-{name}")

    def close(self):
        if self.compiling:
            self.compiling.stop()
        self.runner.end_all()
        shutil.rmtree(self.scratch, True)
        self.data["checks"] = [dict(zip(("stage", "what", "verdict", "detail"), row)) for row in self.rows]
        with open(os.path.join(self.o.out, "results.json"), "w", encoding="utf-8") as file:
            json.dump(self.data, file, indent=1)
        self.report.close()
        self.log.close()


# ------------------------------------------------------------------------------------------ build and device


def stage_build(check):
    targets = [f"{build}/{name}" for build in check.build.values()
               for name in ("train_gpt", "tests/layers/tool_twins", "tests/bench/bench_gpu")]
    targets.append(f"{check.o.ref_build}/tests/layers/tool_twins")
    result = check.runner.run(["make", "-k", "-j", os.cpu_count(), *targets])
    if result.status:  # perhaps for a warning that this compiler alone has
        check.verdict("make, warnings as errors", FAIL, "\n".join(result.output.splitlines()[-20:]))
        result = check.runner.run(["make", "-k", "-j", os.cpu_count(), "WERROR=", *targets])
    check.verdict("make", FAIL if result.status else OK,
                  "\n".join(result.output.splitlines()[-20:]) if result.status else f"{result.seconds:.0f} s")


def printed(check, *command):
    try:
        result = check.runner.run(command, limit=20)
    except FileNotFoundError:
        return ""
    return "" if result.status else result.output.strip()


def python_with_torch(check):
    ask = "import torch; print(torch.__version__, torch.version.cuda)"
    for python in dict.fromkeys((sys.executable, shutil.which("python3"), "/usr/bin/python3")):
        if python and (version := printed(check, python, "-c", ask)):
            return python, version.splitlines()[-1]
    return None, ""


def stage_device(check):
    smi = printed(check, "nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm,"
                  "compute_mode",
                  "--format=csv,noheader")
    nvcc = re.search(r"release ([\d.]+)", printed(check, "nvcc", "--version") or
                     printed(check, "/usr/local/cuda/bin/nvcc", "--version"))
    cuda = printed(check, "scripts/find_cuda.sh", "report")
    check.torch, version = python_with_torch(check)
    facts = {"gpu": smi, "nvcc": nvcc.group(1) if nvcc else "", "libraries": cuda, "torch": version,
             "cores": os.cpu_count(), "host": platform.platform(), "python": platform.python_version(),
             "commit": printed(check, "git", "describe", "--always", "--dirty")}
    check.data["device"] = facts
    for name, value in facts.items():
        check.say(f"        {name:<10} " + str(value or "unknown").replace("\n", "\n" + " " * 19))
    check.verdict("a GPU answers", OK if smi else FAIL, smi or "nvidia-smi finds none")


# ------------------------------------------------------------------------------------------ twins


# cuDNN takes a second to plan each shape, so that attention in bf16 may be late; the others must not be late with it.
OWN_KERNELS = "attention,layernorm,elementwise,embedding,crossentropy,adamw,device"  # linear is the library's
TWIN_PARTS = {"fp32": {"": "kernels"},
              "bf16": {OWN_KERNELS.replace("attention", "linear"): "kernels", "attention": "attention"}}


def twins_file(check, tool, *words):
    out = check.path("twins.bin")
    result = check.runner.run([tool, out, *words])
    return out, result


def stage_twins(check):
    reference = os.path.join(ROOT, check.o.ref_build, "tests/layers/tool_twins")
    if not os.access(reference, os.X_OK):
        return check.verdict("twins", SKIP, f"{reference} is not built")
    for seed in check.o.seeds.split(","):
        for kind in TYPES:
            tool = check.program(kind, "tests/layers/tool_twins")
            for only, what in TWIN_PARTS[kind].items() if tool else ():
                words = ["--seed", seed, *(["--round"] if kind == "bf16" else []), *(["--only", only] if only else [])]
                twins(check, f"{kind} {what}, seed {seed}", tool, reference, words)
    return None


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
    """An llm.c token file with something to learn: each token is one of four successors of the one before it."""
    draw = random.Random(seed)
    successors = [[draw.randrange(vocabulary) for _ in range(4)] for _ in range(vocabulary)]
    tokens, token = array.array("H"), 0
    for _ in range(count):
        tokens.append(token)
        token = successors[token][draw.randrange(4)]
    with open(path, "wb") as file:
        array.array("i", [20240520, 1, count] + [0] * 253).tofile(file)
        tokens.tofile(file)


def words_of(**options):
    return [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]


# Several ranks as processes of one NCCL communicator on one GPU: it must take them for different hosts, which then
# talk through sockets on the loopback device.
def environment(rank, size, port, transport):
    e = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1",
         "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    if transport == "nccl":
        e.update(NCCL_HOSTID=f"rank{rank}", NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1, NCCL_SOCKET_IFNAME="lo",
                 NCCL_IB_DISABLE=1, NCCL_NET="Socket")
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
    steps, config = [], {}
    if os.path.exists(log):
        with open(log, encoding="utf-8") as file:
            for line in file:
                event = json.loads(line)
                steps += [event] if event["event"] == "step" else []
                config = event if event["event"] == "config" else config
    return steps, config, result


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
    def name(self):
        how = f"{self.overlap} {self.route}" if self.overlap == "commfuse" else self.overlap
        return (f"{self.kind} {self.transport:<4} tp {self.tp} dp {self.dp} {self.strategy:<4} {how}"
                f"{f' m {self.slices}' if self.slices else ''}{', again' if self.again else ''}")

    @property
    def same_bits(self):
        """Runs that promise each other's bits: commfuse by any route, again and again."""
        return (self.transport, self.strategy, self.tp, self.dp, self.slices, self.kind)


def meshes(transports):
    """What matters most first, in case that time runs out."""
    plan = []
    for t in transports:
        plan += [Mesh(t, "tpsp", 2, 1, "commfuse"), Mesh(t, "up", 2, 1, "commfuse", "direct"),
                 Mesh(t, "tpsp", 1, 2, "commfuse"), Mesh(t, "tpsp", 2, 1, "none")]
    for t in transports:
        plan += [Mesh(t, "tpsp", 4, 1, "commfuse", "direct"), Mesh(t, "tpsp", 4, 1, "commfuse"),
                 Mesh(t, "up", 4, 1, "commfuse"), Mesh(t, "tpsp", 2, 2, "commfuse"),
                 Mesh(t, "up", 2, 2, "commfuse", "direct"), Mesh(t, "tpsp", 2, 1, "commfuse", again=True),
                 Mesh(t, "tpsp", 2, 1, "commfuse", "direct"), Mesh(t, "tpsp", 2, 1, "commfuse", kind="bf16")]
    for t in transports:
        plan += [Mesh(t, "tpsp", 2, 1, "slice"), Mesh(t, "up", 2, 1, "none"), Mesh(t, "tpsp", 1, 2, "none"),
                 Mesh(t, "up", 2, 1, "slice"), Mesh(t, "tpsp", 1, 2, "slice"), Mesh(t, "tpsp", 4, 1, "none"),
                 Mesh(t, "tpsp", 1, 4, "commfuse", "direct"), Mesh(t, "up", 2, 1, "commfuse", "ring"),
                 Mesh(t, "tpsp", 2, 1, "commfuse", "ring", 2), Mesh(t, "up", 4, 1, "commfuse", again=True),
                 Mesh(t, "up", 2, 2, "commfuse", "direct", kind="bf16"), Mesh(t, "up", 4, 1, "none"),
                 Mesh(t, "tpsp", 2, 2, "none"), Mesh(t, "tpsp", 4, 1, "slice"), Mesh(t, "tpsp", 1, 4, "commfuse")]
    return plan


# 12 heads of 16: for tp 4 three a rank. The vocabulary is padded, the last rank's part holds padding alone.
RANKS_MODEL = dict(layers=2, channels=192, heads=12, vocab=101, seq=40, batch=8, steps=5, lr=3e-3, timeout=30)
MESH_BAND = {"fp32": 1e-5, "bf16": 1e-2}
# At a time. Processes take turns on the one GPU, and a kernel of NCCL that waits for a peer keeps its turn.
JOBS = {"ipc": 3, "nccl": 1}
HANGS_MAX = 2  # a transport that has been ended so often is not tried again


def mesh_run(check, mesh, tokens):
    program = os.path.join(ROOT, check.build[mesh.kind], "train_gpt")
    return train(check, program, mesh.tp * mesh.dp, mesh.transport, 45, train=tokens, tp=mesh.tp, dp=mesh.dp,
                 strategy=mesh.strategy, overlap=mesh.overlap, route=mesh.route, slices=mesh.slices,
                 micro_batch=8 // mesh.dp, **RANKS_MODEL)


def stage_ranks(check):
    tokens, alone, bits = check.path("tokens.bin"), {}, {}
    write_tokens(tokens, RANKS_MODEL["batch"] * RANKS_MODEL["seq"] * 3 + 1, RANKS_MODEL["vocab"])
    for kind in TYPES:
        program = check.program(kind)
        if program:
            steps, _, result = train(check, program, train=tokens, micro_batch=8, **RANKS_MODEL)
            check.verdict(f"{kind} one rank", OK if len(steps) == RANKS_MODEL["steps"] else FAIL, result.last)
            alone[kind] = [s["loss"] for s in steps]
    plan = [mesh for mesh in meshes(check.o.transports.split(",")) if alone.get(mesh.kind)]
    check.data["ranks"] = []
    transports, end = check.o.transports.split(","), check.runner.deadline
    for i, transport in enumerate(transports):  # each gets its share of what is left
        check.runner.deadline = time.monotonic() + (end - time.monotonic()) / (len(transports) - i)
        ranks_over(check, transport, [mesh for mesh in plan if mesh.transport == transport], tokens, alone, bits)
    check.runner.deadline = end


def ranks_over(check, transport, plan, tokens, alone, bits):
    late = hangs = 0
    with concurrent.futures.ThreadPoolExecutor(JOBS.get(transport, 1)) as pool:
        futures = [(mesh, pool.submit(mesh_run, check, mesh, tokens)) for mesh in plan]
        for mesh, future in futures:
            try:
                steps, _, result = future.result()
            except (Late, concurrent.futures.CancelledError):
                late += 1
                continue
            check.data["ranks"].append(dict(dataclasses.asdict(mesh), losses=[s["loss"] for s in steps],
                                            seconds=result.seconds))
            judge_mesh(check, mesh, steps, result, alone[mesh.kind], bits)
            hangs += "error: ended after" in result.output
            if hangs == HANGS_MAX:
                pool.shutdown(wait=False, cancel_futures=True)
    if late:
        why = f"{transport} has hung {hangs} times" if hangs >= HANGS_MAX else "time is over"
        check.verdict(f"{late} of {len(plan)} meshes over {transport}", LATE, f"not run, {why}")


def judge_mesh(check, mesh, steps, result, expected, bits):
    if result.status and "native collectives need NCCL" in result.output and mesh.overlap != "commfuse":
        return check.verdict(mesh.name, SKIP, "refused: " + result.last)
    if result.status or len(steps) != len(expected):
        return check.verdict(mesh.name, FAIL, f"status {result.status}: {result.last}")
    far = relative([s["loss"] for s in steps], expected)
    good, note = far <= MESH_BAND[mesh.kind], f"{far:.1e} from one rank, {result.seconds:.1f} s"
    if mesh.overlap == "commfuse":
        mine = [(s["loss"], s["grad_norm"]) for s in steps]
        first, other = bits.setdefault(mesh.same_bits, (mine, mesh))
        if first is not mine:
            note += ", bits of " + other.name.split(other.strategy)[1].strip()
            if first != mine:
                good, note = False, note + " DIFFER"
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
    for tool in ("memcheck", "racecheck", "initcheck"):
        for kind in TYPES:
            twins = check.program(kind, "tests/layers/tool_twins")
            if not twins:
                continue
            rounding = ["--round"] if kind == "bf16" else []
            line = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "5"]
            line += ["--report-api-errors", "no"] if tool == "memcheck" else []  # libraries try things that may fail
            own = OWN_KERNELS if kind == "fp32" else OWN_KERNELS.replace("attention,", "")  # in bf16 it is cuDNN's
            only = ["--only", f"linear,{own}" if tool == "memcheck" else own]
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
MODELS = (Model("d12", 12, 768, 12, (16, 32, 64), 32), Model("d48", 48, 1600, 25, (4, 8, 16), 8),
          Model("d24", 24, 1024, 16, (8, 16, 32), 16), Model("d36", 36, 1280, 20, (8, 16), 16))
SEQ, VOCABULARY, VOCABULARY_PADDED = 1024, 50257, 50304
WARM_UP, TIMED = 5, 12


class Compiling:
    """PyTorch compiles every model once behind checks that time nothing; the timed runs find it in the cache."""

    def __init__(self, check, models):
        self.check, self.processes, self.stopped = check, [], False
        self.cache = os.path.join(check.scratch, "inductor")
        self.thread = threading.Thread(target=self.work, args=(models,), daemon=True)
        self.thread.start()

    def work(self, models):
        for model in models:
            if self.stopped:
                return
            process = subprocess.Popen(torch_command(self.check, model, model.torch_batch, 1, 0), cwd=ROOT,
                                       env=self.env(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                       start_new_session=True)
            self.processes.append(process)
            process.wait()

    def env(self):
        return dict(os.environ, TORCHINDUCTOR_CACHE_DIR=self.cache, TORCHINDUCTOR_FX_GRAPH_CACHE="1",
                    TORCHINDUCTOR_COMPILE_THREADS="4",
                    TRITON_CACHE_DIR=os.path.join(self.cache, "triton"))

    def stop(self):
        self.stopped = True
        for process in self.processes:
            end(process)
        self.thread.join(5)


def torch_command(check, model, batch, steps, warmup):
    words = model.layers, model.channels, model.heads, batch, SEQ, "--vocab", VOCABULARY_PADDED
    return [check.torch, "tests/bench/torch_gpt.py", *map(str, (*words, "--steps", steps, "--warmup", warmup))]


class MemoryWatch:
    """Most memory in use on the GPU while this is open, in MiB."""

    def __enter__(self):
        self.file, self.most = tempfile.TemporaryFile(), 0
        try:
            self.process = subprocess.Popen(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits",
                                             "-lms", "200"], stdout=self.file, stderr=subprocess.DEVNULL,
                                            start_new_session=True)
        except FileNotFoundError:
            self.process = None
        return self

    def __exit__(self, *_):
        if self.process:
            end(self.process)
        self.file.seek(0)
        self.most = max((int(x) for x in self.file.read().split() if x.isdigit()), default=0)
        self.file.close()


def our_time(check, program, model, batch, tokens):
    """A row of the table, or the reason why there is none."""
    with MemoryWatch() as memory:
        steps, config, result = train(check, program, limit=60, train=tokens, model=model.name, seq=SEQ,
                                      vocab=VOCABULARY, micro_batch=batch, steps=WARM_UP + TIMED)
    timed = [s["step_ms"] for s in steps[WARM_UP:]]
    if result.status or len(timed) < TIMED:
        return result.last
    ms = statistics.median(timed)
    for note in [line for line in result.output.splitlines() if re.match("note: .*(own|plain) kernel", line)]:
        check.verdict(f"{model.name}, micro-batch {batch}: the libraries' kernels", FAIL, note)
    at = min(steps[WARM_UP:], key=lambda s: abs(s["step_ms"] - ms))
    return {"model": model.name, "program": "commfuse", "batch": batch, "step_ms": ms,
            "spread": (max(timed) - min(timed)) / ms, "tokens_per_s": batch * SEQ / ms * 1e3,
            "mfu": at["mfu"] and at["mfu"] * at["step_ms"] / ms, "memory_mib": memory.most,
            "first_step_ms": steps[0]["step_ms"], "losses": [s["loss"] for s in steps],
            "start_s": result.seconds - sum(s["step_ms"] for s in steps) / 1e3,
            "peak_tflops": config.get("peak_tflops_all_ranks")}


def torch_time(check, model, peak_tflops):
    result = check.runner.run(torch_command(check, model, model.torch_batch, TIMED, WARM_UP), limit=200,
                              env=check.compiling.env() if check.compiling else None)
    if result.status:
        return result.last
    row = json.loads(result.output.splitlines()[-1])
    flops = row["tokens_per_s"] * row["flops_per_token"]
    return dict(row, model=model.name, program="torch", mfu=flops / peak_tflops * 1e-12 if peak_tflops else None,
                start_s=result.seconds)


def show_time(check, row):
    mfu = f"{100 * row['mfu']:5.1f} %" if row["mfu"] else "    n/a"
    check.say(f"        {row['model']:<5} {row['program']:<9} {row['batch']:>5} {row['step_ms']:>9.1f} "
              f"{100 * row['spread']:>6.1f}% {row['tokens_per_s']:>10.0f} {mfu:>8} {row['memory_mib'] / 1024:>9.1f} "
              f"{row['start_s']:>7.1f}")
    check.data.setdefault("times", []).append(row)


def model_times(check, program, model, tokens):
    ours, best = [], 0
    for batch in model.batches:
        row = our_time(check, program, model, batch, tokens)
        if isinstance(row, str):
            check.verdict(f"{model.name}, micro-batch {batch}", OK if ours and "memory" in row.lower() else FAIL, row)
            break
        show_time(check, row)
        ours.append(row)
        if batch >= model.torch_batch and row["tokens_per_s"] < 1.01 * best:
            break  # larger does not pay
        best = max(best, row["tokens_per_s"])
    if not ours or not check.torch:
        return
    row = torch_time(check, model, ours[0]["peak_tflops"])
    if isinstance(row, str):
        check.verdict(f"{model.name} in PyTorch", SKIP, row)
        return
    show_time(check, row)
    again = our_time(check, program, model, model.torch_batch, tokens)
    if isinstance(again, dict):
        show_time(check, again)
        before = [r["step_ms"] for r in ours if r["batch"] == model.torch_batch]
        faster = row["step_ms"] / statistics.mean([*before, again["step_ms"]])
        check.verdict(f"{model.name}: PyTorch's step over ours, micro-batch {model.torch_batch}", OK, f"{faster:.2f}")
        check.data.setdefault("torch_over_ours", {})[model.name] = faster


def stage_times(check):
    program = check.program("bf16")
    if not program:
        return
    if check.compiling:
        check.compiling.stop()
    check.torch = check.torch or python_with_torch(check)[0]
    if not check.torch:
        check.verdict("PyTorch", SKIP, "no Python here has it")
    tokens = check.path("tokens.bin")
    write_tokens(tokens, 64 * SEQ * 2 + 1, VOCABULARY)
    check.say(f"        {'model':<5} {'program':<9} {'batch':>5} {'step ms':>9} {'spread':>7} {'tokens/s':>10} "
              f"{'MFU':>8} {'mem GiB':>9} {'start s':>7}   (T {SEQ}, bf16; median of {TIMED} steps after {WARM_UP})")
    for model in MODELS:
        model_times(check, program, model, tokens)


# ------------------------------------------------------------------------------------------ kernels


def share_of_step(check, model, batch, rows):
    """Kernel by kernel, what part of the measured step its calls would take one after another."""
    times = [t["step_ms"] for t in check.data.get("times", [])
             if (t["model"], t["program"], t["batch"]) == (model.name, "commfuse", batch)]
    kernels = [r for r in rows if "kernel" in r]
    total = sum(r["step_ms"] for r in kernels)
    step = statistics.mean(times) if times else total
    groups = collections.Counter()
    for row in kernels:
        name = row["kernel"]
        gemm = re.search(r"forward|dgrad|wgrad", name) and re.match(r"qkv|attproj|fc|head", name)
        group = "products" if gemm else name.split()[0]
        groups[group] += row["step_ms"]
    check.say(f"        {model.name}, micro-batch {batch}: kernels add up to {total:.1f} ms, the step takes "
              + (f"{step:.1f} ms" if times else "(not measured)"))
    for group, ms in groups.most_common():
        check.say(f"        {group:<24} {ms:>9.2f} ms {100 * ms / step:>6.1f} %")
    check.data.setdefault("shares", {})[model.name] = {"batch": batch, "kernels_ms": total, "groups": dict(groups),
                                                       "step_ms": step if times else None}


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


# ------------------------------------------------------------------------------------------ the plan


@dataclasses.dataclass(frozen=True)
class Stage:
    name: str
    budget: float  # seconds of the default 540
    run: object
    slow: bool = False  # left out by --quick


STAGES = (Stage("build", 80, stage_build), Stage("device", 20, stage_device), Stage("twins", 50, stage_twins),
          Stage("losses", 35, stage_losses), Stage("ranks", 85, stage_ranks), Stage("sanitizer", 45, stage_sanitizer),
          Stage("times", 185, stage_times, True), Stage("kernels", 40, stage_kernels, True))


def chosen(options):
    names = options.only.split(",") if options.only else [s.name for s in STAGES if not (options.quick and s.slow)]
    unknown = set(names) - {s.name for s in STAGES}
    if unknown:
        sys.exit(f"no such stage: {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in STAGES)}")
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
    check.runner.end_all()
    check.data["stages"][stage.name] = time.monotonic() - begin
    if stage.name == "ranks" and check.torch and not check.o.quick and "times" in check.planned:
        check.compiling = Compiling(check, MODELS)


def summary(check):
    counts = collections.Counter(row[2] for row in check.rows)
    seconds = ", ".join(f"{name} {s:.0f} s" for name, s in check.data["stages"].items())
    check.say(f"\n{time.monotonic() - check.begin:.0f} s: {seconds}")
    for stage, what, verdict, detail in check.rows:
        if verdict in (FAIL, LATE):
            check.say(f"{verdict:<5} {stage}: {what}   {detail.splitlines()[0] if detail else ''}")
    check.say(f"{counts[OK]} ok, {counts[FAIL]} failed, {counts[LATE]} late, {counts[SKIP]} skipped")
    return 1 if counts[FAIL] or not counts[OK] else 0


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="results/gpu", help="directory for the report (default results/gpu)")
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything (default 540)")
    parser.add_argument("--quick", action="store_true", help="no times")
    parser.add_argument("--only", default="", metavar="STAGES", help="these stages, with commas between them")
    parser.add_argument("--plan", action="store_true", help="print the stages and their times, run nothing")
    parser.add_argument("--seeds", default="1", help="of the twins' inputs (default 1)")
    parser.add_argument("--transports", default="ipc,nccl", help="of several ranks (default ipc,nccl)")
    parser.add_argument("--fp32-build", default="build/cuda-fp32")
    parser.add_argument("--bf16-build", default="build/cuda-bf16")
    parser.add_argument("--ref-build", default="build/ref", help="the CPU's twins, without any library")
    parser.add_argument("--reference", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--cpu-program", default="train_gpt", help="compared with where it runs")
    return parser.parse_args()


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
    check.planned = {stage.name for stage, _, _ in plan}
    try:
        for stage, seconds, planned in plan:
            run_stage(check, stage, seconds, planned)
        return summary(check)
    finally:
        check.close()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
