"""Runs of train_gpt with one or several ranks on the one GPU; and the stage losses: ten steps against an independent reference in
float64, and, at the size of the timed models, steps of one large micro-batch against the same steps of several small ones."""
import contextlib
import importlib.util
import json
import os
import socket
import sys

import run_log
from runner import ROOT, words_of
from tokens import write_tokens

from .check import FAIL, SKIP, TYPES
from .models import MODELS, OUT_OF_MEMORY, VOCABULARY, Step, implausible


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# NCCL accepts several ranks on one GPU only if it takes them for different hosts, which use sockets on the loopback device. Each
# gets few thread blocks, because a kernel that waits for a peer's kernel must leave it some.
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
    """The events before the first damaged line: the writer may have been killed."""
    events = []
    with contextlib.suppress(FileNotFoundError, run_log.Damaged):
        events.extend(run_log.events(path))
    return events


def figures_of(steps):
    """([losses], [norms])"""
    return [step["loss"] for step in steps], [step["grad_norm"] for step in steps]


def relative(found, expected):
    """The largest relative difference of two lists; infinite if they have different lengths or missing values."""
    pairs = list(zip(found, expected))
    if not pairs or len(found) != len(expected) or any(x is None or x != x for x in found):
        return float("inf")
    return max(abs(a / b - 1) for a, b in pairs)


# --- losses ---


# Models that a reference in float64 trains in seconds, on one batch that every step sees whole.
SMALL = {"d2 of 128 channels, T 64": dict(layers=2, channels=128, heads=2, vocab=101, seq=64, batch=8, lr=3e-3),
         "d6, T 256": dict(layers=6, channels=384, heads=6, vocab=256, seq=256, batch=2, lr=1e-3)}
SMALL_STEPS, RECIPE = 10, dict(schedule="cosine", warmup=3, clip=1.5, weight_decay=0.1)
BANDS = {"fp32": (1e-4, 1e-3), "bf16": (2e-2, 1e-1)}  # of losses and of norms
LARGE, PARTS = Step(64), Step(16, 4)  # d12 has 3.3e9 logits, more than 2^31, and a quarter of them
LARGE_STEPS, LARGE_BANDS = 3, (1e-3, 1e-2)


def reference(name, tokens, model):
    """Runs in a separate process: writes the model file, then prints losses and norms of an independent implementation in float64
    (tests/train/reference.py)."""
    sys.path.insert(0, os.path.join(ROOT, "tests", "train"))
    import reference as gpt
    o = SMALL[name]
    shape = gpt.Shape(o["seq"], o["vocab"], o["layers"], o["heads"], o["channels"], (o["vocab"] + 127) // 128 * 128)
    weights = gpt.random_model(shape, scale=0.05)
    gpt.write_model(model, shape, weights)
    batch = gpt.samples(gpt.read_tokens(tokens), o["seq"])
    history = gpt.train(shape, weights, [batch] * SMALL_STEPS, lr=o["lr"], min_lr=o["lr"] / 10, **RECIPE)
    print(json.dumps([[h[0] for h in history], [h[1] for h in history]]))


def agree(check, what, found, expected, bands, more=True):
    """Checks that losses and norms are within their bands and the loss falls."""
    (losses, _), (loss, norm) = found, map(relative, found, expected)
    return check.judge(what, loss <= bands[0] and norm <= bands[1] and losses[-1] < losses[0] and more,
                       f"loss {loss:.1e} (band {bands[0]:.0e}), norm {norm:.1e} (band {bands[1]:.0e}), "
                       f"{losses[0]:.4f} to {losses[-1]:.4f}")


def losses_of(check, name):
    tokens, model, o = check.path("tokens.bin"), check.path("model.bin"), SMALL[name]
    write_tokens(tokens, o["batch"] * o["seq"] + 1, o["vocab"])
    result = check.runner.run([sys.executable, "scripts/gpu_check.py", "--reference", name, tokens, model],
                              limit=0.6 * check.runner.left())
    if result.status:
        check.verdict(f"{name}: float64 reference", SKIP, result.last)
        return
    expected = json.loads(next(line for line in result.output.splitlines() if line.startswith("[[")))
    record = check.data["losses"][name] = {"reference": expected[0]}
    for kind in TYPES:
        program = check.program(kind)
        if not program:
            continue
        steps, _, result = train(check, program, train=tokens, seq=o["seq"], batch=o["batch"], micro_batch=o["batch"],
                                 steps=SMALL_STEPS, lr=o["lr"], min_lr=o["lr"] / 10, timeout=60, init_from=model, **RECIPE)
        found = figures_of(steps)
        record[kind] = found[0]
        if result.status or len(steps) != SMALL_STEPS:
            check.judge(f"{name}: {kind}", False, result.last)
        else:
            agree(check, f"{name}: {kind}", found, expected, BANDS[kind])


def large_against_parts(check):
    """The only check of the results of such large products."""
    model, what = MODELS[0], f"{MODELS[0].name}: {LARGE.name} and {PARTS.name}"
    program, tokens = check.program("bf16"), check.path("tokens.bin")
    if not program:
        return
    write_tokens(tokens, LARGE_STEPS * LARGE.tokens + 1, VOCABULARY)
    found = []
    for step in (LARGE, PARTS):
        steps, _, result = train(check, program, train=tokens, steps=LARGE_STEPS, **step.options(model))
        if result.status or len(steps) != LARGE_STEPS:
            full = OUT_OF_MEMORY.search(result.output)
            check.verdict(what, SKIP if full else FAIL, f"{step.name}: {result.last}")
            return
        found.append(figures_of(steps))
    check.data["losses"][what] = found
    agree(check, what, *found[::-1], LARGE_BANDS, not implausible(found[1][0]))


def losses(check):
    check.data["losses"] = {}
    if importlib.util.find_spec("numpy"):
        for name in SMALL:
            losses_of(check, name)
    else:
        check.verdict("float64 reference", SKIP, "no numpy")
    large_against_parts(check)
