"""The stage ranks: 2 and 4 ranks on the one GPU must have the losses of one rank, and the same bits again."""
import concurrent.futures
import dataclasses
import os
import time

from .check import FAIL, LATE, OK, SKIP, TYPES
from .meshes import meshes
from .runner import ROOT, Late
from tokens import write_tokens
from .training import relative, train
from .turns import Turns

# 12 heads of 16: for tp 4 three a rank. Of the vocabulary the last of four has five tokens, all else is padding. With a
# larger lr losses jump on such tokens, and what is rounded in another order differs by more than the band.
RANKS_MODEL = dict(layers=2, channels=192, heads=12, vocab=101, seq=40, batch=8, steps=5, lr=1e-3, timeout=15)
MESH_LIMIT = 25  # s; the program's own patience ends before
MESH_BAND = {"fp32": 1e-5, "bf16": 1e-2}
# At a time. Processes take turns on the one GPU, and a kernel of NCCL that waits for a peer keeps its turn.
JOBS = {"ipc": 3}
HANGS_MAX = 2  # a transport that has hung so often, alone, is not tried again


def jobs(transport):
    return JOBS.get(transport, 1)


def by_itself(mesh, tries):
    """Whether nobody ran beside the run that counts."""
    return tries == 2 or jobs(mesh.transport) == 1


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
    if turns.count == 1 or not timed_out(result):
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


def run(check):
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
    turns = Turns(jobs(transport))
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
            hangs += timed_out(result) and by_itself(mesh, tries)
            if hangs == HANGS_MAX:
                pool.shutdown(wait=False, cancel_futures=True)
    if late:
        why = f"{transport} has hung {hangs} times, alone" if hangs >= HANGS_MAX else "time is over"
        check.verdict(f"{late} of {len(plan)} meshes over {transport}", LATE, f"not run, {why}")


def judge_mesh(check, mesh, steps, result, expected, bits, tries=1):
    if result.status and "native collectives need NCCL" in result.output and mesh.overlap != "commfuse":
        return check.verdict(mesh.name, SKIP, "refused: " + result.last)
    twice = ", at the second try, alone" if tries == 2 else ""
    if result.status or len(steps) != len(expected):  # in time or not: one that is stuck is not told from one that is slow
        beside = timed_out(result) and not by_itself(mesh, tries)
        left = "; beside others, and no time was left to try it alone" if beside else ""
        return check.verdict(mesh.name, FAIL, f"status {result.status}{twice}: {result.last}{left}")
    far = relative([s["loss"] for s in steps], expected)
    good, note = far <= MESH_BAND[mesh.kind], f"{far:.1e} from one rank, {result.seconds:.1f} s{twice}"
    if mesh.overlap == "commfuse":
        mine = [(s["loss"], s["grad_norm"]) for s in steps]
        first, other = bits.setdefault(mesh.same_bits, (mine, mesh))
        if first is not mine:
            same = first == mine
            good, note = good and same, f"{note}, bits {'of' if same else 'DIFFER from'} {other.how}"
    return check.verdict(mesh.name, OK if good else FAIL, note)
