"""The stage ranks: 2 and 4 ranks on the one GPU must have the losses of one rank, and the same bits in every run."""
import dataclasses
import time

from runner import Late
from tokens import write_tokens

from .check import LATE, SKIP, TYPES
from .training import relative, train

# 12 heads of 16 channels: three a rank with tp 4. The last of four ranks has five tokens of the vocabulary; the rest is padding.
# With a larger lr losses jump on such tokens, and another order of rounding exceeds the band.
RANKS_MODEL = dict(layers=2, channels=192, heads=12, vocab=101, seq=40, batch=8, steps=5, lr=1e-3, timeout=15)
MESH_LIMIT_S = 25  # the program's --timeout ends before
MESH_BAND = {"fp32": 1e-5, "bf16": 1e-2}
# The most important ones come first, because time may run out. Hosts of several GPUs use auto: exchanges over ipc and native
# collectives over NCCL in one process. ipc refuses native collectives, which is checked once. Processes take turns on the one GPU,
# so meshes run one after another.
AUTO_MESHES = "tpsp 2 2 auto", "up 2 1 auto bf16", "tpsp 2 1 ring", "tpsp 2 1 none", "tpsp 2 1 slice"
MESHES = (
    "tpsp 2 1 ring", "up 2 1 direct", "tpsp 2 1 none", "tpsp 2 2 ring", "tpsp 2 1 ring bf16",
    "tpsp 2 1 ring bf16 again", "tpsp 2 1 slice", "tpsp 1 2 ring", "tpsp 2 1 direct", "tpsp 4 1 direct",
    "up 2 2 direct", "up 4 1 ring", "tpsp 4 1 ring", "up 2 1 none", "tpsp 1 2 none", "up 2 1 slice",
    "tpsp 1 2 slice", "tpsp 2 1 ring fp32 again", "tpsp 1 4 direct", "up 2 1 ring", "tpsp 2 1 ring:2",
    "up 2 2 direct bf16", "tpsp 4 1 none", "up 4 1 none", "tpsp 2 2 none", "tpsp 4 1 slice",
    "up 4 1 ring fp32 again", "tpsp 1 4 ring")


@dataclasses.dataclass(frozen=True)
class Mesh:
    transport: str
    strategy: str
    tp: int
    dp: int
    mode: str
    kind: str = "fp32"
    again: str = ""

    @classmethod
    def of(cls, transport, text):
        strategy, tp, dp, *more = text.split()
        return cls(transport, strategy, int(tp), int(dp), *more)

    @property
    def native(self):
        """Has native collectives; auto may have."""
        return self.mode in ("none", "slice", "auto")

    @property
    def options(self):
        return dict(tp=self.tp, dp=self.dp, strategy=self.strategy, overlap=self.mode)

    @property
    def name(self):
        again = ", again" if self.again else ""
        return f"{self.kind} {self.strategy:<4} tp {self.tp} dp {self.dp} {self.transport} {self.mode}{again}"

    @property
    def same_bits(self):
        """Runs with the same key must have the same bits: ring and direct over any transport, however often."""
        return (self.strategy, self.tp, self.dp, self.mode.partition(":")[2], self.kind)


def meshes(transport):
    plan = [Mesh.of(transport, text) for text in (AUTO_MESHES if transport == "auto" else MESHES)]
    native = [mesh for mesh in plan if mesh.native]
    return [mesh for mesh in plan if transport != "ipc" or mesh not in native[1:]]


def run(check):
    tokens, alone, bits, transports = check.path("tokens.bin"), {}, {}, ("ipc", "auto", "nccl")
    write_tokens(tokens, RANKS_MODEL["batch"] * RANKS_MODEL["seq"] * 3 + 1, RANKS_MODEL["vocab"])
    end_of_stage = check.runner.deadline
    ranks_over(check, "auto", [Mesh.of("auto", f"tpsp 1 1 ring {kind} {again}") for kind in TYPES if check.program(kind)
                               for again in ("", "again")], tokens, alone, bits)
    for i, transport in enumerate(transports):  # each gets its share of the time left
        plan = [mesh for mesh in meshes(transport) if mesh.kind in alone]
        check.runner.deadline = time.monotonic() + (end_of_stage - time.monotonic()) / (len(transports) - i)
        ranks_over(check, transport, plan, tokens, alone, bits)
    check.runner.deadline = end_of_stage


def ranks_over(check, transport, plan, tokens, alone, bits):
    """alone: the losses of one rank, by type; the first whole run of a type adds them."""
    for number, mesh in enumerate(plan):
        try:
            steps, _, result = train(check, check.built(mesh.kind), mesh.tp * mesh.dp, mesh.transport, MESH_LIMIT_S, train=tokens,
                                     micro_batch=8 // mesh.dp, **mesh.options, **RANKS_MODEL)
        except Late:
            check.verdict(f"{len(plan) - number} of {len(plan)} meshes over {transport}", LATE, "not run, time is over")
            return
        losses = [s["loss"] for s in steps]
        if result.status == 0 and len(losses) == RANKS_MODEL["steps"]:
            alone.setdefault(mesh.kind, losses)
        judge_mesh(check, mesh, steps, result, alone.get(mesh.kind, ()), bits)


def judge_mesh(check, mesh, steps, result, expected, bits):
    if result.status and "native collectives need NCCL" in result.output and mesh.native:
        return check.verdict(mesh.name, SKIP, "refused: " + result.reason)
    if result.status or len(steps) != len(expected):
        return check.judge(mesh.name, False, f"status {result.status}: {result.reason}")
    far = relative([s["loss"] for s in steps], expected)
    good, note = far <= MESH_BAND[mesh.kind], f"{far:.1e} from one rank, {result.seconds:.1f} s"
    if not mesh.native:
        mine = [(s["loss"], s["grad_norm"]) for s in steps]
        first, other = bits.setdefault(mesh.same_bits, (mine, mesh))
        if first is not mine:
            same = first == mine
            good = good and same
            note += f", bits {'of' if same else 'DIFFER from'} {other.transport} {other.mode}"
    return check.judge(mesh.name, good, note)
