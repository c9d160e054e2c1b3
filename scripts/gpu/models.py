"""The models that are timed, their steps, and when losses are no losses."""
import dataclasses
import math
import re


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    layers: int
    channels: int
    heads: int
    batches: tuple  # micro-batches to try, the smallest first
    torch_batch: int


# By importance: where time runs out, the last ones are left out.
MODELS = (Model("d12", 12, 768, 12, (16, 32, 64, 128), 32), Model("d48", 48, 1600, 25, (4, 8, 16), 8),
          Model("d24", 24, 1024, 16, (8, 16, 32, 64), 16), Model("d36", 36, 1280, 20, (8, 16, 32), 16))
CLOSER = MODELS[:2]  # at which the stages look more closely
SEQ, VOCABULARY, VOCABULARY_PADDED = 1024, 50257, 50304
ACCUMULATION = 4  # micro-batches of a step as training takes it, where the update counts for less
OUT_OF_MEMORY = re.compile("no memory:|out of memory|cudaErrorMemoryAllocation")  # an illegal access is something else
FIRST_LOSS_BAND = 0.5  # random weights know a little, and that wrong: C · 0.02² / 2, 0.32 for d48


@dataclasses.dataclass(frozen=True)
class Step:
    batch: int  # sequences of a micro-batch
    accumulation: int = 1  # micro-batches, whose gradients are added up before the one update
    recompute: int = 0

    @property
    def name(self):
        several = f"{self.accumulation} micro-batches of {self.batch}"
        return f"micro-batch {self.batch}" if self.accumulation == 1 else several

    @property
    def tokens(self):
        return self.accumulation * self.batch * SEQ

    @property
    def repeated(self):
        """How many times before it is timed, and then timed: long steps less often."""
        return (5, 12) if self.accumulation == 1 else (2, 5)

    def options(self, model):
        """Of train_gpt."""
        return dict(model=model.name, seq=SEQ, vocab=VOCABULARY, micro_batch=self.batch, batch=self.accumulation * self.batch,
                    recompute=self.recompute)


def implausible(losses):
    """The fault of these losses, from random weights on; empty: none. A step that computes nonsense is no figure."""
    if any(loss is None or not math.isfinite(loss) for loss in losses):
        return f"a loss is not finite: {losses}"
    if abs(losses[0] - math.log(VOCABULARY)) > FIRST_LOSS_BAND:
        return f"the first loss is {losses[0]:.4f}, not near log {VOCABULARY} = {math.log(VOCABULARY):.4f}"
    return "" if losses[-1] < losses[0] else f"the loss has not fallen: {losses}"
