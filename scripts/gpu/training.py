"""Runs of train_gpt with one or several ranks on the one GPU; and the stage losses: ten steps against an independent reference in
float64, and, at the size of the timed models, steps of one large micro-batch against the same steps of several small ones."""
import dataclasses
import json
import math
import os
import re
import socket
import sys

import run_log
from runner import words_of
from tokens import write_tokens

from .check import FAIL, SKIP, TYPES


# --- the models that are timed, and their steps ---


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    layers: int
    channels: int
    heads: int
    batches: tuple  # micro-batches to try, the smallest first
    torch_batch: int


# By importance: if time runs out, the last ones are left out.
MODELS = (Model("d12", 12, 768, 12, (16, 32, 64, 128), 32), Model("d48", 48, 1600, 25, (4, 8, 16), 8),
          Model("d24", 24, 1024, 16, (8, 16, 32, 64), 16), Model("d36", 36, 1280, 20, (8, 16, 32), 16))
CLOSER = MODELS[:2]  # measured in more detail
SEQ, VOCABULARY, VOCABULARY_PADDED = 1024, 50257, 50304
ACCUMULATION = 4  # micro-batches of a step as in real training, where the update counts for less
OUT_OF_MEMORY = re.compile("no memory:|out of memory|cudaErrorMemoryAllocation")  # not an illegal access
FIRST_LOSS_BAND = 0.5  # random weights add C · 0.02² / 2 to the loss: 0.32 for d48


@dataclasses.dataclass(frozen=True)
class Step:
    batch: int  # sequences of a micro-batch
    accumulation: int = 1  # micro-batches, whose gradients are summed before the update

    @property
    def name(self):
        several = f"{self.accumulation} micro-batches of {self.batch}"
        return f"micro-batch {self.batch}" if self.accumulation == 1 else several

    @property
    def tokens(self):
        return self.accumulation * self.batch * SEQ

    @property
    def repeated(self):
        """The numbers of untimed and of timed steps; fewer of long ones."""
        return (5, 12) if self.accumulation == 1 else (2, 5)

    def options(self, model):
        """The options of train_gpt."""
        return dict(model=model.name, seq=SEQ, vocab=VOCABULARY, micro_batch=self.batch, batch=self.accumulation * self.batch,
                    recompute=0)


def implausible(losses):
    """What is wrong with the losses of a training from random weights; "" if nothing is. The time of a wrong step does not count."""
    if any(loss is None or not math.isfinite(loss) for loss in losses):
        return f"a loss is not finite: {losses}"
    if abs(losses[0] - math.log(VOCABULARY)) > FIRST_LOSS_BAND:
        return f"the first loss is {losses[0]:.4f}, not near log {VOCABULARY} = {math.log(VOCABULARY):.4f}"
    return "" if losses[-1] < losses[0] else f"the loss has not fallen: {losses}"


# --- runs ---


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
    events = list(run_log.Lines(log)) if os.path.exists(log) else []
    config = next((event for event in events if event["event"] == "config"), {})
    return [event for event in events if event["event"] == "step"], config, result


def figures(check, what, program, steps, **options):
    """([losses], [norms]) of a run; None, and a verdict, if it fails."""
    taken, _, result = train(check, program, steps=steps, **options)
    if result.status == 0 and len(taken) == steps:
        return [step["loss"] for step in taken], [step["grad_norm"] for step in taken]
    check.verdict(what, SKIP if OUT_OF_MEMORY.search(result.output) else FAIL, result.reason)
    return None


def relative(found, expected):
    """The largest relative difference of two lists; infinite if they have different lengths or missing values."""
    pairs = list(zip(found, expected))
    if not pairs or len(found) != len(expected) or any(x is None or x != x for x in found):
        return float("inf")
    return max(abs(a / b - 1) for a, b in pairs)


# --- losses ---


# Models that a reference in float64 trains in seconds, on one batch that every step sees whole.
SMALL = {"d2 of 128 channels, T 64": (dict(layers=2, channels=128, heads=2, vocab=101, seq=64), 8, 3e-3),  # shape, batch, lr
         "d6, T 256": (dict(layers=6, channels=384, heads=6, vocab=256, seq=256), 2, 1e-3)}
RECIPE = dict(steps=10, schedule="cosine", warmup=3, clip=1.5, weight_decay=0.1)
BANDS = {"fp32": (1e-4, 1e-3), "bf16": (2e-2, 1e-1)}  # of losses and of norms
LARGE, PARTS = Step(64), Step(16, 4)  # d12 has 3.3e9 logits, more than 2^31, and a quarter of them
LARGE_STEPS, LARGE_BANDS = 3, (1e-3, 1e-2)


def agree(check, what, found, expected, bands, more=True):
    """Checks that losses and norms are within their bands and the loss falls."""
    (losses, _), (loss, norm) = found, map(relative, found, expected)
    return check.judge(what, loss <= bands[0] and norm <= bands[1] and losses[-1] < losses[0] and more,
                       f"loss {loss:.1e} (band {bands[0]:.0e}), norm {norm:.1e} (band {bands[1]:.0e}), "
                       f"{losses[0]:.4f} to {losses[-1]:.4f}")


def losses_of(check, name):
    tokens, model, (shape, batch, lr) = check.path("tokens.bin"), check.path("model.bin"), SMALL[name]
    write_tokens(tokens, batch * shape["seq"] + 1, shape["vocab"])
    recipe = dict(RECIPE, lr=lr, min_lr=lr / 10)
    result = check.runner.run([sys.executable, "tests/train/reference.py", tokens, model, json.dumps(shape), json.dumps(recipe)],
                              limit=0.6 * check.runner.left())
    if result.status:  # perhaps there is no numpy
        check.verdict(f"{name}: float64 reference", SKIP, result.reason)
        return
    expected = json.loads(next(line for line in result.output.splitlines() if line.startswith("[[")))
    for kind in TYPES:
        program = check.program(kind)
        if not program:
            continue
        found = figures(check, f"{name}: {kind}", program, train=tokens, seq=shape["seq"], batch=batch, micro_batch=batch,
                        timeout=60, init_from=model, **recipe)
        if found:
            agree(check, f"{name}: {kind}", found, expected, BANDS[kind])


def large_against_parts(check):
    """The only check of the results of such large products."""
    model, what = MODELS[0], f"{MODELS[0].name}: {LARGE.name} and {PARTS.name}"
    program, tokens = check.program("bf16"), check.path("tokens.bin")
    if not program:
        return
    write_tokens(tokens, LARGE_STEPS * LARGE.tokens + 1, VOCABULARY)
    found = [figures(check, f"{what}: {step.name}", program, steps=LARGE_STEPS, train=tokens, **step.options(model))
             for step in (LARGE, PARTS)]
    if None in found:
        return
    agree(check, what, *found[::-1], LARGE_BANDS, not implausible(found[1][0]))


def losses(check):
    for name in SMALL:
        losses_of(check, name)
    large_against_parts(check)
