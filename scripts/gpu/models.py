"""The models that are timed, their steps, and a check of their losses."""
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


# By importance: if time runs out, the last ones are left out.
MODELS = (Model("d12", 12, 768, 12, (16, 32, 64, 128), 32), Model("d48", 48, 1600, 25, (4, 8, 16), 8),
          Model("d24", 24, 1024, 16, (8, 16, 32, 64), 16), Model("d36", 36, 1280, 20, (8, 16, 32), 16))
CLOSER = MODELS[:2]  # measured in more detail
SEQ, VOCABULARY, VOCABULARY_PADDED = 1024, 50257, 50304
ACCUMULATION = 4  # micro-batches of a step as in real training, where the update counts for less
OUT_OF_MEMORY = re.compile("no memory:|out of memory|cudaErrorMemoryAllocation")  # not an illegal access
FIRST_LOSS_BAND = 0.5  # random weights add C · 0.02² / 2 to the loss: 0.32 for d48


@dataclasses.dataclass(frozen=True)
class Step:
    batch: int  # sequences of a micro-batch
    accumulation: int = 1  # micro-batches, whose gradients are summed before the update
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
        """The numbers of untimed and of timed steps; fewer of long ones."""
        return (5, 12) if self.accumulation == 1 else (2, 5)

    def options(self, model):
        """The options of train_gpt."""
        return dict(model=model.name, seq=SEQ, vocab=VOCABULARY, micro_batch=self.batch, batch=self.accumulation * self.batch,
                    recompute=self.recompute)


def implausible(losses):
    """What is wrong with the losses of a training from random weights; "" if nothing is. The time of a wrong step does not count."""
    if any(loss is None or not math.isfinite(loss) for loss in losses):
        return f"a loss is not finite: {losses}"
    if abs(losses[0] - math.log(VOCABULARY)) > FIRST_LOSS_BAND:
        return f"the first loss is {losses[0]:.4f}, not near log {VOCABULARY} = {math.log(VOCABULARY):.4f}"
    return "" if losses[-1] < losses[0] else f"the loss has not fallen: {losses}"
