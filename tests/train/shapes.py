"""The tensors of a GPT-2 and of a Llama, for reference.py and traffic.py. Apart because traffic.py does without numpy."""
import dataclasses
import typing

# In the order of the model file: rows and columns of one, and whether each layer has one. A number is a multiple of the channels;
# no columns: a vector.
TENSORS = {
    "wte": ("Vp", 1, False), "wpe": ("maxT", 1, False),
    "ln1w": (1, 0, True), "ln1b": (1, 0, True), "qkvw": ("qkv", 1, True), "qkvb": ("qkv", 0, True),
    "attprojw": (1, 1, True), "attprojb": (1, 0, True), "ln2w": (1, 0, True), "ln2b": (1, 0, True),
    "fcw": ("fc", 1, True), "fcb": ("fc", 0, True), "fcprojw": (1, "units", True), "fcprojb": (1, 0, True),
    "lnfw": (1, 0, False), "lnfb": (1, 0, False)}
NAMES = tuple(TENSORS)


class Block(typing.NamedTuple):
    """A row of layers/params.h: the first number of its model files; whether its norms are RMS norms, its positions rotary, its MLP
    SwiGLU, and whether its linear layers have biases."""
    magic: int
    rms: bool
    rotary: bool
    swiglu: bool
    biases: bool


GPT2, LLAMA = Block(20240326, False, False, False, True), Block(20261129, True, True, True, False)
BLOCKS = {block.magic: block for block in (GPT2, LLAMA)}


def layered(name):
    return TENSORS[name][2]


@dataclasses.dataclass(frozen=True)
class Shape:
    maxT: int
    V: int
    L: int
    heads: int
    C: int
    Vp: int
    KV: int = 0  # of all but a GPT-2, as all that follows: heads of keys and values
    F: int = 0   # units of its MLP
    eps: float = 1e-5
    theta: float = 10000.0
    stretch: tuple = ()  # as transformers' "llama3": factor, low, high, original
    block: Block = None  # GPT2 or, with KV, LLAMA

    def __post_init__(self):
        object.__setattr__(self, "block", self.block or (LLAMA if self.KV else GPT2))

    @property
    def qkv(self):
        return self.C + 2 * (self.KV or self.heads) * self.C // self.heads

    @property
    def units(self):
        return self.F or 4 * self.C

    @property
    def fc(self):
        return 2 * self.units if self.block.swiglu else self.units

    def size(self, name):
        """Rows and columns of one layer's tensor; a vector has one column."""
        rows, columns = (getattr(self, n) if isinstance(n, str) else n * self.C for n in TENSORS[name][:2])
        return rows, columns or 1

    def names(self):
        """Rotary positions have no table; layer norms alone have biases, and linear layers if the block says so."""
        def there(name):
            return not self.block.rms if name in ("ln1b", "ln2b", "lnfb") else self.block.biases or name[-1] != "b"
        return [name for name in NAMES if (name != "wpe" or not self.block.rotary) and there(name)]

    def tensors(self):
        """Array shapes by tensor name, stacked over layers."""
        return {name: (self.L,) * layered(name) + self.size(name)[:1 + (TENSORS[name][1] != 0)] for name in self.names()}
