"""Runs of train_gpt on the one GPU: the models that are timed and their steps, and runs of one or several ranks."""
import collections
import dataclasses
import math
import os
import re
import socket

import run_log
from runner import words_of


Model = collections.namedtuple("Model", "name layers channels heads batches torch_batch")  # micro-batches to try, and PyTorch's
# By importance: if time runs out, the last ones are left out.
MODELS = (Model("d12", 12, 768, 12, (16, 32, 64, 128), 32), Model("d48", 48, 1600, 25, (4, 8, 16), 8),
          Model("d24", 24, 1024, 16, (8, 16, 32, 64), 16), Model("d36", 36, 1280, 20, (8, 16, 32), 16))
CLOSER = MODELS[:2]  # measured in more detail
SEQ, VOCABULARY, VOCABULARY_PADDED = 1024, 50257, 50304
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
    """What is wrong with losses of a training from random weights; "" if nothing is. The time of a wrong step does not count."""
    if any(loss is None or not math.isfinite(loss) for loss in losses):
        return f"a loss is not finite: {losses}"
    if abs(losses[0] - math.log(VOCABULARY)) > FIRST_LOSS_BAND:
        return f"the first loss is {losses[0]:.4f}, not near log {VOCABULARY} = {math.log(VOCABULARY):.4f}"
    return "" if losses[-1] < losses[0] else f"the loss has not fallen: {losses}"


def relative(found, expected):
    """The largest relative difference of two lists; infinite if they have different lengths or missing values."""
    if not found or len(found) != len(expected) or any(x is None or x != x for x in found):
        return float("inf")
    return max(abs(a / b - 1) for a, b in zip(found, expected))


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


def train(check, kind, ranks=1, transport="auto", limit=None, **options):
    """(steps of the log, config of the log, Result); a run that takes fewer steps than it should has failed."""
    log, port = check.path("log.jsonl"), free_port()
    command = [check.program(kind), *words_of(log=log, transport=transport, val_every=0, **options)]
    environments = [environment(rank, ranks, port, transport) if ranks > 1 else {} for rank in range(ranks)]
    result = check.runner.ranks([command] * ranks, environments, limit)
    events = list(run_log.lines(log)) if os.path.exists(log) else []
    steps, config = run_log.steps(events), next((event for event in events if event["event"] == "config"), {})
    if result.status == 0 and len(steps) != options.get("steps", len(steps)):
        result = dataclasses.replace(result, status=1)
    return steps, config, result
