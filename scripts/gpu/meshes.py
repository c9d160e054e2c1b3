"""How several ranks train: which meshes, modes, routes and transports are tried, and in which order."""
import dataclasses


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
    """What tells most first, in case that time runs out. auto, exchanges over ipc and native collectives over NCCL in
    one process, is what hosts of several GPUs get."""
    return [mesh for t in transports for mesh in (auto_meshes() if t == "auto" else all_meshes(t))]


def auto_meshes():
    return [Mesh("auto", "tpsp", 2, 1, how) for how in ("commfuse", "none", "slice")]


def all_meshes(t):
    plan = [Mesh(t, "tpsp", 2, 1, "commfuse"), Mesh(t, "up", 2, 1, "commfuse", "direct"),
            Mesh(t, "tpsp", 2, 1, "none"), Mesh(t, "tpsp", 2, 2, "commfuse"),
            Mesh(t, "tpsp", 2, 1, "commfuse", kind="bf16"), Mesh(t, "tpsp", 2, 1, "commfuse", kind="bf16", again=True),
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
