"""The state of a check: options, programs, and findings, which are always on the disk; and runs of one or several ranks."""
import contextlib
import dataclasses
import os
import re
import socket
import tempfile
import time

import run_log
from command import opened
from runner import ROOT, Runner, words_of

OK, FAIL, SKIP, LATE = "ok", "FAIL", "skip", "LATE"
TYPES = "fp32", "bf16"
OUT_OF_MEMORY = re.compile("no memory:|out of memory|cudaErrorMemoryAllocation")  # not an illegal access


class Check:
    """A stage is a function that gets a Check and reports by verdict() and show(). When its time is over, the runner raises Late.
    times: rows of its table."""

    def __init__(self, options):
        self.build = {kind: f"{options.builds}-{kind}" for kind in TYPES}
        os.makedirs(options.out, exist_ok=True)
        self.report, self.log = files = [opened(os.path.join(options.out, name), "a", encoding="utf-8")
                                         for name in ("report.txt", "commands.log")]
        for file in files:  # not before both are there
            file.truncate(0)
        self.scratch = tempfile.TemporaryDirectory(prefix="gpu-check-")
        self.runner = Runner(self.log, bound=True)
        with contextlib.suppress(OSError):  # keeps the driver open: otherwise each program waits seconds for the GPU to start
            self.gpu = os.open("/dev/nvidia0", os.O_RDWR)
        self.rows, self.seconds, self.times, self.torch_over_ours = [], {}, [], {}
        self.begin, self.stage = time.monotonic(), ""

    def say(self, text=""):
        for file in None, self.report:
            print(text, file=file, flush=True)

    def show(self, lines):
        """Prints figures, indented below their verdict."""
        self.say("\n".join("        " + line for line in lines))

    def verdict(self, what, verdict, detail=""):
        self.rows.append((self.stage, what, verdict, detail))
        self.say(f"  {verdict:<5} {what}{'   ' + detail if detail else ''}")

    def judge(self, what, good, detail=""):
        self.verdict(what, OK if good else FAIL, detail)

    def show_run(self, what, result, detail=""):
        """What a command has printed, and whether it has succeeded."""
        self.show(result.output.splitlines())
        self.judge(what, result.status == 0, result.reason if result.status else detail)

    def program(self, kind, name="train_gpt"):
        return os.path.join(ROOT, self.build[kind], name)

    def path(self, name):
        """Of a temporary file, which goes when the program ends."""
        return os.path.join(tempfile.mkdtemp(dir=self.scratch.name), name)


def relative(found, expected):
    """The largest relative difference of two lists; infinite if they have different lengths or missing values."""
    if not found or len(found) != len(expected) or any(x is None or x != x for x in found):
        return float("inf")
    return max(abs(a / b - 1) for a, b in zip(found, expected))


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


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
