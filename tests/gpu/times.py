"""The stages steps (of d12 and d48), accumulation (with several micro-batches), times (step times, MFU and memory of all models),
kernels (of each: its time, its share of the peak) and clusters (what a kernel in clusters waits for beside a product).

Time may run out, so the most important comes first. This program comes before PyTorch: each model with one micro-batch a step, with
larger ones until they do not pay; then the best of these with several a step, as in real training, where the update counts for
less. PyTorch has the same order, with a run of this program right after each.
"""
import collections
import dataclasses
import math
import os
import re

import run_log
from runner import ROOT
from tables import markdown
from tokens import write_tokens

from .check import FAIL, OK, OUT_OF_MEMORY, SKIP, train

Model = collections.namedtuple("Model", "name layers channels heads batches torch_batch")  # micro-batches to try, and PyTorch's
# By importance: if time runs out, the last ones are left out.
MODELS = (Model("d12", 12, 768, 12, (16, 32, 64, 128), 32), Model("d48", 48, 1600, 25, (4, 8, 16), 8),
          Model("d24", 24, 1024, 16, (8, 16, 32, 64), 16), Model("d36", 36, 1280, 20, (8, 16, 32), 16))
CLOSER = MODELS[:2]  # measured in more detail
SEQ, VOCABULARY, VOCABULARY_PADDED = 1024, 50257, 50304
SLOWER = "note: a slower way: "  # SLOWER_NOTE of layers/kernels/kernel.h: not by the libraries
FIRST_LOSS_BAND = 0.5  # random weights add C · 0.02² / 2 to the loss: 0.32 for d48
ACCUMULATION = 4  # micro-batches of a step as in real training, where the update counts for less
PYTHON = "python3"  # in which PyTorch may be
INDUCTOR = os.path.join(ROOT, "build", "inductor")  # stays for the next call
ENVIRONMENT = dict(TORCHINDUCTOR_CACHE_DIR=INDUCTOR, TRITON_CACHE_DIR=os.path.join(INDUCTOR, "triton"),
                   TORCHINDUCTOR_FX_GRAPH_CACHE="1", TORCHINDUCTOR_AUTOGRAD_CACHE="1", TORCHINDUCTOR_COMPILE_THREADS="4")
LIMIT_S = 200  # of a run: without a cache, compiling takes most of it


@dataclasses.dataclass(frozen=True)
class Step:
    batch: int  # sequences of a micro-batch
    accumulation: int = 1  # micro-batches, whose gradients are summed before the update
    timed: int = 12  # steps without accumulation

    @property
    def name(self):
        return f"{'micro-batch' if self.accumulation == 1 else f'{self.accumulation} micro-batches of'} {self.batch}"

    @property
    def tokens(self):
        return self.accumulation * self.batch * SEQ

    @property
    def repeated(self):
        """The numbers of untimed and of timed steps; fewer of long ones."""
        return (5, self.timed) if self.accumulation == 1 else (2, 5)

    def options(self, model):
        """The options of train_gpt."""
        return dict(model=model.name, seq=SEQ, vocab=VOCABULARY, micro_batch=self.batch, batch=self.accumulation * self.batch,
                    recompute=0)


def implausible(losses):
    """What is wrong with losses of a training from random weights; "" if nothing is. The time of a wrong step does not count."""
    if any(loss is None or not math.isfinite(loss) for loss in losses):
        return f"a loss is not finite: {losses}"
    if abs(losses[0] - math.log(VOCABULARY)) > FIRST_LOSS_BAND:
        return f"the first loss is {losses[0]:.4f}, not near log {VOCABULARY} = {math.log(VOCABULARY):.4f}"
    return "" if losses[-1] < losses[0] else f"the loss has not fallen: {losses}"


# --- a run ---


def measure(check, model, step, tokens):
    """A row of the table, or None; and the Result."""
    before, counted = step.repeated
    steps, config, result = train(check, "bf16", limit=60, train=tokens, steps=before + counted, **step.options(model))
    if result.status:
        return None, result
    if why := implausible([s["loss"] for s in steps]):
        return None, dataclasses.replace(result, output=f"error: {why}")
    for note in re.findall(f"^{SLOWER}.*", result.output, re.M):
        check.verdict(f"{model.name}, {step.name}: the libraries' kernels", FAIL, note)
    timed = steps[before:]
    times, ms = [s["step_ms"] for s in timed], run_log.median(timed, "step_ms")
    memory = re.search(r"^memory +([\d.]+) MiB", result.output, re.M)
    return {"model": model.name, "program": "commfuse", "batch": step.batch,
            "accumulation": step.accumulation, "steps": counted, "losses": [s["loss"] for s in steps],
            "step_ms": ms, "spread": (max(times) - min(times)) / ms, "tokens_per_s": step.tokens / ms * 1e3,
            "mfu": run_log.median(timed, "mfu"), "memory_mib": float(memory[1]) if memory else None,
            "peak_tflops": config.get("peak_tflops_all_ranks")}, result


def measure_torch(check, model, step, peak_tflops):
    """A row of the table, or None; and the Result."""
    before, counted = step.repeated
    command = [PYTHON, "tests/bench/torch_gpt.py", model.layers, model.channels, model.heads, step.batch, SEQ, "--vocab",
               VOCABULARY_PADDED, "--steps", counted, "--warmup", before, "--accumulate", step.accumulation]
    result = check.runner.run(command, LIMIT_S, ENVIRONMENT)
    if result.status:
        return None, result
    row = run_log.printed(result.output)[-1]
    tflops = row["tokens_per_s"] * row["flops_per_token"] * 1e-12
    return dict(row, model=model.name, program="torch", accumulation=step.accumulation, steps=counted,
                memory_mib=row["allocated_mib"], mfu=tflops / peak_tflops if peak_tflops else None), result


# --- the table ---


def cells(row):
    return {"model": row["model"], "program": row["program"], "batch": row["batch"], "accum": row["accumulation"],
            "step ms": f"{row['step_ms']:.1f}", "spread": f"{100 * row['spread']:.1f} %", "tokens/s": f"{row['tokens_per_s']:.0f}",
            "MFU": f"{100 * row['mfu']:.1f} %" if row["mfu"] else "n/a",
            "mem GiB": f"{row['memory_mib'] / 1024:.1f}" if row["memory_mib"] else "n/a", "steps": row["steps"]}


def table(check):
    """The table with the meaning of its columns; "" if there is none."""
    if not check.times:
        return ""
    torch = next((row for row in check.times if row["program"] == "torch"), None)
    return "\n".join([
        markdown(map(cells, check.times)),
        f"T {SEQ}, bf16. batch: sequences of a micro-batch; accum: micro-batches of a step, with one update. step: median of so "
        "many steps, after a few. mem: what the program has allocated, PyTorch at most.",
        *([f"torch: {torch['framework']}, compiled: {torch['compiled']}, flash attention (its backward gives other bits in "
           "every run, ours the same), fused AdamW."] if torch else []),
        *(f"PyTorch's step over ours{f', {many} micro-batches a step' * (many > 1)}: " +
          ", ".join(f"{name} {ratio:.2f}" for name, ratio in found.items()) for many, found in check.torch_over_ours.items())])


# --- the order of the runs ---


def add(check, what, row, result, otherwise):
    """Adds a row to the table, or says why there is none."""
    if row:
        check.show([", ".join(f"{name} {cell}" for name, cell in cells(row).items())])
        check.times.append(row)
    else:
        check.verdict(what, otherwise, result.reason)
    return row


def one_more(check, model, tokens, step, can_be_full=True):
    """Measures this program. Returns the row, or None if the run fails."""
    row, result = measure(check, model, step, tokens)
    full = can_be_full and OUT_OF_MEMORY.search(result.output)
    return add(check, f"{model.name}, {step.name}", row, result, SKIP if full else FAIL)


def search(check, model, tokens):
    """Tries larger and larger micro-batches until they do not pay. Returns the best; None: none runs."""
    found = {}  # tokens/s → micro-batch
    for batch in model.batches:
        row, best = one_more(check, model, tokens, Step(batch), bool(found)), max(found, default=0)
        if row:
            found.setdefault(row["tokens_per_s"], batch)
        if not row or batch >= model.torch_batch and row["tokens_per_s"] < 1.01 * best:
            break
    return found[max(found)] if found else None


def beside_torch(check, model, tokens, step):
    """PyTorch's time and, right after it, ours, so that their ratio is of neighbouring runs."""
    peak = next((row["peak_tflops"] for row in check.times if row["program"] == "commfuse"), None)
    theirs = add(check, f"{model.name} in PyTorch, {step.name}", *measure_torch(check, model, step, peak), SKIP)
    ours = theirs and one_more(check, model, tokens, step)
    if ours:
        ratio = theirs["step_ms"] / ours["step_ms"]
        check.torch_over_ours.setdefault(step.accumulation, {})[model.name] = ratio
        check.verdict(f"{model.name}: PyTorch's step over ours, {step.name}", OK, f"{ratio:.2f}")


def tokens_of(check, most):
    write_tokens(tokens := check.path("tokens.bin"), most * SEQ + 1, VOCABULARY)  # no sequence is twice in a step of so many
    return tokens


def steps(check, accumulation=1):
    """The steps that matter most; a second run of d12 must have the same losses to the last bit."""
    (d12, d48), tokens = CLOSER, tokens_of(check, accumulation * CLOSER[0].torch_batch)
    first, _, again = (one_more(check, model, tokens, Step(model.torch_batch, accumulation, timed), False)
                       for model, timed in ((d12, 55), (d48, 15), (d12, 55)))
    check.judge("d12: a second run has the same bits", bool(first and again and first["losses"] == again["losses"]))


def run(check):
    tokens = tokens_of(check, ACCUMULATION * max(max(model.batches) for model in MODELS))
    best = {model: search(check, model, tokens) for model in MODELS}
    for model in filter(best.get, MODELS):
        one_more(check, model, tokens, Step(best[model], ACCUMULATION))
    # Not imported, which takes a minute from a cold disk.
    if not check.runner.printed(PYTHON, "-c", "import importlib.metadata as m; print(m.version('torch'))"):
        return check.verdict("PyTorch", SKIP, f"{PYTHON} does not have it")
    for accumulation, models in (1, MODELS), (ACCUMULATION, CLOSER):
        for model in models:
            beside_torch(check, model, tokens, Step(model.torch_batch, accumulation))


def kernels(check):
    bench = check.program("bf16", "tests/bench/bench_gpu")
    for model in CLOSER:
        sizes = model.layers, model.channels, model.heads, model.torch_batch, SEQ, VOCABULARY_PADDED
        check.show_run(f"{model.name}: kernels timed", check.runner.run([bench, *sizes, 10]), f"micro-batch {model.torch_batch}")


def clusters(check):
    bench = f"{check.build['bf16']}/tests/bench/bench_beside"
    check.show_run("clusters beside products", check.runner.run(["sh", "-c", f"make -s WERROR= {bench} && {bench} clusters"]))
