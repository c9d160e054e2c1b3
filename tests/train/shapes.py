"""The tensors of a GPT-2 and of a Llama, for reference.py and traffic.py. Apart because traffic.py does without numpy."""
import dataclasses

# In the order of the model file: rows and columns of one, and whether each layer has one. A number is a multiple of the channels;
# no columns: a vector.
TENSORS = {
    "wte": ("Vp", 1, False), "wpe": ("maxT", 1, False),
    "ln1w": (1, 0, True), "ln1b": (1, 0, True), "qkvw": ("qkv", 1, True), "qkvb": ("qkv", 0, True),
    "attprojw": (1, 1, True), "attprojb": (1, 0, True), "ln2w": (1, 0, True), "ln2b": (1, 0, True),
    "fcw": ("gated", 1, True), "fcb": ("gated", 0, True), "fcprojw": (1, "units", True), "fcprojb": (1, 0, True),
    "lnfw": (1, 0, False), "lnfb": (1, 0, False)}
NAMES = tuple(TENSORS)


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
    KV: int = 0  # of a Llama, and all that follows: heads of keys and values; 0: a GPT-2
    F: int = 0   # units of its MLP
    eps: float = 1e-5
    theta: float = 10000.0
    stretch: tuple = ()  # as transformers' "llama3": factor, low, high, original

    @property
    def qkv(self):
        return self.C + 2 * (self.KV or self.heads) * self.C // self.heads

    @property
    def units(self):
        return self.F or 4 * self.C

    @property
    def gated(self):
        return 2 * self.units if self.KV else self.units

    def size(self, name):
        """Rows and columns of one layer's tensor; a vector has one column."""
        rows, columns = (getattr(self, n) if isinstance(n, str) else n * self.C for n in TENSORS[name][:2])
        return rows, columns or 1

    def names(self):
        """A Llama has no biases and no table of positions."""
        return [name for name in NAMES if not self.KV or (name[-1] == "w" or name == "wte")]

    def tensors(self):
        """Array shapes by tensor name, stacked over layers."""
        return {name: (self.L,) * layered(name) + self.size(name)[:1 + (TENSORS[name][1] != 0)] for name in self.names()}
