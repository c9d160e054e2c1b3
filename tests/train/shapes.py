"""The tensors of a GPT-2, for reference.py and traffic.py. A module of its own because traffic.py does without numpy."""
import dataclasses

# In the order of the model file: rows and columns of one, and whether each layer has one. A number is a multiple of the channels;
# no columns: a vector.
TENSORS = {
    "wte": ("Vp", 1, False), "wpe": ("maxT", 1, False),
    "ln1w": (1, 0, True), "ln1b": (1, 0, True), "qkvw": (3, 1, True), "qkvb": (3, 0, True),
    "attprojw": (1, 1, True), "attprojb": (1, 0, True), "ln2w": (1, 0, True), "ln2b": (1, 0, True),
    "fcw": (4, 1, True), "fcb": (4, 0, True), "fcprojw": (1, 4, True), "fcprojb": (1, 0, True),
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

    def size(self, name):
        """Rows and columns of one layer's tensor; a vector has one column."""
        rows, columns, _ = TENSORS[name]
        return getattr(self, rows) if isinstance(rows, str) else rows * self.C, columns * self.C or 1

    def tensors(self):
        """Array shapes by tensor name, stacked over layers."""
        return {name: (self.L,) * layered(name) + self.size(name)[:1 + (TENSORS[name][1] > 0)] for name in NAMES}
