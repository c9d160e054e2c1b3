"""The stages ranks (2 and 4 ranks on the one GPU must have the losses of one rank, and the same bits in every run) and overlap (they
run side by side, under MPS: steps of all modes over an imitated link, which overlap.py compares with the imagined clock's)."""
import collections
import itertools
import os
import sys

from runner import Late
from tokens import write_tokens

from .check import LATE, TYPES, relative, train

# 12 heads of 16 channels: three a rank with tp 4. The last of four ranks has five tokens of the vocabulary; the rest is padding.
# With a larger lr losses jump on such tokens, and another order of rounding exceeds the band.
RANKS_MODEL = dict(layers=2, channels=192, heads=12, vocab=101, seq=40, batch=8, steps=5, lr=1e-3, timeout=15)
MESH_LIMIT_S = 25  # the program's --timeout ends before
MESH_BAND = {"fp32": 1e-5, "bf16": 1e-2}
NATIVE = "none", "slice", "auto"  # have native collectives; auto may have
# The most important ones come first, because time may run out. Hosts of several GPUs use auto: exchanges over ipc and native
# collectives over NCCL in one process. Processes take turns on the one GPU, so meshes run one after another.
AUTO_MESHES = "tpsp 2 2 auto", "up 2 1 auto bf16", "tpsp 2 1 ring", "tpsp 2 1 none", "tpsp 2 1 slice"
MESHES = (
    "tpsp 2 1 ring", "up 2 1 direct", "tpsp 2 1 none", "tpsp 2 2 ring", "tpsp 2 1 ring bf16",
    "tpsp 2 1 ring bf16 again", "tpsp 2 1 slice", "tpsp 1 2 ring", "tpsp 2 1 direct", "tpsp 4 1 direct",
    "up 2 2 direct", "up 4 1 ring", "tpsp 4 1 ring", "up 2 1 none", "tpsp 1 2 none", "up 2 1 slice",
    "tpsp 1 2 slice", "tpsp 2 1 ring fp32 again", "tpsp 1 4 direct", "up 2 1 ring", "tpsp 2 1 ring:2",
    "up 2 2 direct bf16", "tpsp 4 1 none", "up 4 1 none", "tpsp 2 2 none", "tpsp 4 1 slice",
    "up 4 1 ring fp32 again", "tpsp 1 4 ring")

Mesh = collections.namedtuple("Mesh", "transport strategy tp dp mode kind again", defaults=("fp32", ""))


def mesh_of(transport, text):
    strategy, tp, dp, *more = text.split()
    return Mesh(transport, strategy, int(tp), int(dp), *more)


def name_of(mesh):
    return f"{mesh.kind} {mesh.strategy:<4} tp {mesh.tp} dp {mesh.dp} {mesh.transport} {mesh.mode}{', again' * bool(mesh.again)}"


def meshes(transport):
    return [mesh_of(transport, text) for text in (AUTO_MESHES if transport == "auto" else MESHES)]


def plan():
    """One rank of each type, twice, then every transport in turn."""
    alone = [mesh_of("auto", f"tpsp 1 1 ring {kind} {again}") for kind in TYPES for again in ("", "again")]
    return alone + [mesh for turn in itertools.zip_longest(*map(meshes, ("ipc", "auto", "nccl"))) for mesh in turn if mesh]


def run(check):
    tokens, bits, alone = check.path("tokens.bin"), {}, {}
    write_tokens(tokens, RANKS_MODEL["batch"] * RANKS_MODEL["seq"] * 3 + 1, RANKS_MODEL["vocab"])
    todo = plan()
    for number, mesh in enumerate(todo):
        try:
            steps, _, result = train(check, mesh.kind, mesh.tp * mesh.dp, mesh.transport, MESH_LIMIT_S, train=tokens,
                                     micro_batch=8 // mesh.dp, strategy=mesh.strategy, tp=mesh.tp, dp=mesh.dp, overlap=mesh.mode,
                                     **RANKS_MODEL)
        except Late:
            return check.verdict(f"{len(todo) - number} of {len(todo)} meshes", LATE, "not run, time is over")
        losses = [step["loss"] for step in steps]
        judge_mesh(check, mesh, steps, result, alone.setdefault(mesh.kind, losses), bits)


def judge_mesh(check, mesh, steps, result, expected, bits):
    """Ring and direct have the same bits over every transport, however often. bits: of the first run of a kind, and its mesh."""
    if result.status:
        return check.judge(name_of(mesh), False, f"status {result.status}: {result.reason}")
    far = relative([step["loss"] for step in steps], expected)
    note, same = f"{far:.1e} from one rank, {result.seconds:.1f} s", True
    if mesh.mode not in NATIVE:
        mine, slices = [(step["loss"], step["grad_norm"]) for step in steps], mesh.mode.partition(":")[2]
        first, other = bits.setdefault((mesh.strategy, mesh.tp, mesh.dp, slices, mesh.kind), (mine, mesh))
        same = first == mine
        if other != mesh:
            note += f", bits {'of' if same else 'DIFFER from'} {other.transport} {other.mode}"
    return check.judge(name_of(mesh), far <= MESH_BAND[mesh.kind] and same, note)


def overlap(check):
    made = check.runner.run(["make", "-j", os.cpu_count(), "WERROR=", f"{check.build['bf16']}/tests/bench/bench_train"])
    check.judge("make bench_train", made.status == 0, made.reason if made.status else "")
    seconds = max(1, check.runner.left() - 15)  # it has to end the MPS that it starts
    check.show_run("steps of ranks side by side", check.runner.run(
        [sys.executable, "tests/bench/overlap.py", "--build", check.build["bf16"], "--seconds", f"{seconds:.0f}", "--measured",
         os.path.join(os.path.dirname(check.log.name), "overlap.json")]))
