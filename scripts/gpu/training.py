"""Runs of train_gpt, of one rank or of several on the one GPU; and the stage losses: ten steps of training against an
independent reference in float64, and against the CPU program; and, at the size of what is timed, steps of one large
micro-batch against the same of several small ones."""
import contextlib
import dataclasses
import importlib.util
import json
import os
import socket
import sys

import run_log
from runner import ROOT
from tokens import write_tokens

from .check import SKIP, TYPES
from .models import MODELS, OUT_OF_MEMORY, VOCABULARY, Step, implausible, options_of


def words_of(**options):
    return [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# Several ranks as processes of one NCCL communicator on one GPU: it must take them for different hosts, which then
# talk through sockets on the loopback device. Few blocks each: a kernel that waits for a peer's must leave it some.
def environment(rank, size, port, transport):
    e = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1",
         "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    if transport in ("nccl", "auto"):
        e.update(NCCL_HOSTID=f"rank{rank}", NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1, NCCL_SOCKET_IFNAME="lo",
                 NCCL_IB_DISABLE=1, NCCL_NET="Socket", NCCL_MNNVL_ENABLE=0, NCCL_MAX_CTAS=4, NCCL_DEBUG="WARN")
    return {name: str(value) for name, value in e.items()}


def train(check, program, ranks=1, transport="auto", limit=None, **options):
    """(steps of the log, config of the log, Result)"""
    log, port = check.path("log.jsonl"), free_port()
    command = [program, *words_of(log=log, transport=transport, val_every=0, **options)]
    environments = [environment(rank, ranks, port, transport) if ranks > 1 else {} for rank in range(ranks)]
    result = check.runner.ranks([command] * ranks, environments, limit)
    events = read_log(log)
    config = next((event for event in events if event["event"] == "config"), {})
    return [event for event in events if event["event"] == "step"], config, result


def read_log(path):
    """Events up to the first line that is none: whoever writes it may have been killed."""
    events = []
    with contextlib.suppress(FileNotFoundError, run_log.Damaged):
        for _, event in run_log.events(path):
            events.append(event)
    return events


def figures_of(steps):
    """([losses], [norms])"""
    return [step["loss"] for step in steps], [step["grad_norm"] for step in steps]


def relative(found, expected):
    """Largest relative difference of two lists of losses; infinite if they do not match at all."""
    pairs = list(zip(found, expected))
    if not pairs or len(found) != len(expected) or any(x is None or x != x for x in found):
        return float("inf")
    return max(abs(a / b - 1) for a, b in pairs)


# --- losses ---


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

    @property
    def shape(self):
        return dict(layers=self.layers, channels=self.channels, heads=self.heads, vocab=self.vocabulary)

    @property
    def recipe(self):
        return dict(schedule="cosine", lr=self.lr, min_lr=self.lr / 10, warmup=3, clip=1.5, weight_decay=0.1)


SMALL = Small("d2 of 128 channels, T 64", 2, 128, 2, 64, 101, 8, 3e-3), Small("d6, T 256", 6, 384, 6, 256, 256, 2, 1e-3)
BANDS = {"fp32": (1e-4, 1e-3), "bf16": (2e-2, 1e-1)}  # of losses and of norms
LARGE, PARTS = Step(64), Step(16, 4)  # of d12's logits 3.3e9 elements, more than 31 bits count, and a quarter of them
LARGE_STEPS, LARGE_BANDS = 3, (1e-3, 1e-2)


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
    history = gpt.train(shape, weights, [batch] * small.steps, **small.recipe)
    print(json.dumps([[h[0] for h in history], [h[1] for h in history]]))


def agree(check, what, found, expected, bands, more=True):
    """Losses and norms, each within its band; and the loss falls."""
    (losses, _), (loss, norm) = found, map(relative, found, expected)
    return check.judge(what, loss <= bands[0] and norm <= bands[1] and losses[-1] < losses[0] and more,
                       f"loss {loss:.1e} (band {bands[0]:.0e}), norm {norm:.1e} (band {bands[1]:.0e}), "
                       f"{losses[0]:.4f} to {losses[-1]:.4f}")


def expected_losses(check, small, tokens, model):
    """([losses], [norms]) of the reference, or None; and the options that start a program from the same weights."""
    if not importlib.util.find_spec("numpy"):
        check.verdict(f"{small.name}: float64 reference", SKIP, "no numpy")
        return None, small.shape
    command = [sys.executable, "scripts/gpu_check.py", "--reference", SMALL.index(small), tokens, model]
    result = check.runner.run(command, limit=0.6 * check.runner.left())
    if result.status:
        check.verdict(f"{small.name}: float64 reference", SKIP, result.last)
        return None, dict(init_from=model) if os.path.exists(model) else small.shape
    return json.loads(result.output), dict(init_from=model)


def losses_of(check, small, cpu):
    """Of every program that runs here, the CPU's first: without the reference, the others are compared with it."""
    tokens, model = check.path("tokens.bin"), check.path("model.bin")
    write_tokens(tokens, small.batch * small.seq + 1, small.vocabulary)
    expected, start = expected_losses(check, small, tokens, model)
    record = check.data["losses"][small.name] = {"reference": expected and expected[0]}
    for kind in ("cpu", *TYPES):
        program = cpu if kind == "cpu" else check.program(kind)
        if not program or not expected and kind != "cpu":
            continue
        more = dict(peak_tflops=1) if kind == "cpu" else {}
        steps, _, result = train(check, program, train=tokens, seq=small.seq, batch=small.batch, micro_batch=small.batch,
                                 steps=small.steps, timeout=60, **start, **small.recipe, **more)
        found = figures_of(steps)
        record[kind] = found[0]
        what = f"{small.name}: {'CPU program and reference' if kind == 'cpu' else kind}"
        if result.status or len(steps) != small.steps:
            check.judge(what, False, result.last)
        elif expected:
            agree(check, what, found, expected, BANDS.get(kind, BANDS["fp32"]))
        else:
            expected = found
    if not expected:
        check.verdict(small.name, SKIP, "neither the reference nor the CPU program is here to compare with")


def large_against_parts(check):
    """Nothing else looks at what products of such sizes compute."""
    model, what = MODELS[0], f"{MODELS[0].name}: {LARGE.name} and {PARTS.name}"
    program, tokens = check.program("bf16"), check.path("tokens.bin")
    if not program:
        return
    write_tokens(tokens, LARGE_STEPS * LARGE.tokens + 1, VOCABULARY)
    found = []
    for step in (LARGE, PARTS):
        steps, _, result = train(check, program, train=tokens, steps=LARGE_STEPS, **options_of(check, model, step))
        if result.status or len(steps) != LARGE_STEPS:
            if OUT_OF_MEMORY.search(result.output):
                check.verdict(what, SKIP, f"{step.name}: {result.last}")
            else:
                check.judge(what, False, f"{step.name}: {result.last}")
            return
        found.append(figures_of(steps))
    check.data["losses"][what] = found
    agree(check, what, *found[::-1], LARGE_BANDS, not implausible(found[1][0]))


def losses(check):
    cpu = os.path.join(ROOT, check.o.cpu_program)
    cpu_runs = os.access(cpu, os.X_OK) and check.runner.run([cpu, "--help"]).status == 0
    check.data["losses"] = {}
    for small in SMALL:
        losses_of(check, small, cpu if cpu_runs else None)
    large_against_parts(check)
