"""The stage times: steps of this program, then of PyTorch, each of those beside one of ours.

What counts most comes first, as time may end anywhere. All of ours come before PyTorch, which must not cost a figure of
this program: each model with one micro-batch a step, larger and larger ones until they do not pay; then the best of
these with several a step, as GPT-2 is really trained, where the update of all weights counts for less; then with what
backward computes again. PyTorch has the same order, with a run of ours right behind each of its own.
"""
import re

from . import ours, pytorch, table
from .check import FAIL, LATE, OK, SKIP
from .models import ACCUMULATION, CLOSER, MODELS, VOCABULARY, Step
from .runner import Late
from tokens import write_tokens

GEMM_SIZES = 4096, 8192, 16384


def search(check, program, model, tokens):
    """The best micro-batch of ours: larger ones are tried until they do not pay."""
    best = 0
    for step in map(Step, model.batches):
        name = f"{model.name}, {step.name}"
        if why := ours.too_large(check, program, model, step.batch):
            check.verdict(name, SKIP, why)
            return
        row, result = ours.measure(check, program, model, step, tokens)
        if not row:
            full = best and ours.OUT_OF_MEMORY.search(result.output)
            check.verdict(name, SKIP if full else FAIL, result.last)
            return
        table.keep(check, row)
        if step.batch >= model.torch_batch and row["tokens_per_s"] < 1.01 * best:
            return
        best = max(best, row["tokens_per_s"])


def one_more(check, program, model, tokens, step):
    row, result = ours.measure(check, program, model, step, tokens)
    if row:
        table.keep(check, row)
    else:
        full = ours.OUT_OF_MEMORY.search(result.output)
        check.verdict(f"{model.name}, {step.name}", SKIP if full else FAIL, result.last)
    return row


def accumulated(check, program, model, tokens):
    """What the search has found best, several times a step."""
    best = max(table.plain_rows(check, model), key=lambda row: row["tokens_per_s"], default=None)
    if best:
        one_more(check, program, model, tokens, Step(best["batch"], ACCUMULATION))


def beside_torch(check, program, model, tokens, accumulation):
    """PyTorch's time and, right behind it, ours: their ratio is of neighbours."""
    peak = next((row["peak_tflops"] for row in check.data["times"] if row["program"] == "commfuse"), None)
    step = Step(model.torch_batch, accumulation)
    theirs, result = pytorch.measure(check, model, step, peak)
    if not theirs:
        check.verdict(f"{model.name} in PyTorch, {step.name}", SKIP, result.last)
        return
    table.keep(check, theirs)
    row = one_more(check, program, model, tokens, step)
    if not row:
        return
    ratio = theirs["step_ms"] / row["step_ms"]
    many = theirs["compiled"] == "blocks" and theirs["graphs"] > 3
    name = "torch_over_ours" if accumulation == 1 else "torch_over_ours_accumulated"
    check.data.setdefault(name, {})[model.name] = ratio
    check.verdict(f"{model.name}: PyTorch's step over ours, {step.name}", OK, f"{ratio:.2f}" + (
        f"; layers did not share what was compiled: {theirs['graphs']} graphs" if many else ""))


def for_each(check, what, models, work):
    """Says what has not been reached when time is over."""
    for i, model in enumerate(models):
        try:
            if check.runner.left() <= 0:
                raise Late
            work(model)
        except Late:
            check.verdict(f"{what}: {', '.join(m.name for m in models[i:])}", LATE, "the stage's time is over")
            return


def gemm_rate(check):
    """TFLOP/s of the largest products that this GPU keeps up, for the share that a step reaches; None: not known."""
    bench = check.program("bf16", "tests/bench/bench_gpu")
    result = check.runner.run([bench, "gemm", *GEMM_SIZES], limit=40) if bench else None
    best = re.search(r"^best ([\d.e+-]+) TFLOP/s", result.output, re.M) if result else None
    if best and result.status == 0:
        check.show([line for line in result.output.splitlines() if "TFLOP/s" in line])
        return float(best.group(1))
    if bench:
        check.verdict("large products", FAIL, result.last)
    return None


def time_ours(check, program, tokens):
    for_each(check, "ours", MODELS, lambda model: search(check, program, model, tokens))
    for_each(check, f"ours, {ACCUMULATION} micro-batches a step", MODELS,
             lambda model: accumulated(check, program, model, tokens))
    if check.recomputes:
        for_each(check, "recomputing", CLOSER,
                 lambda model: one_more(check, program, model, tokens, Step(model.torch_batch, recompute=1)))


def time_torch(check, program, tokens):
    if not check.torch.version(min(120, check.runner.left())):
        check.verdict("PyTorch", SKIP, "no Python here has it")
        return
    for_each(check, "beside PyTorch", MODELS, lambda model: beside_torch(check, program, model, tokens, 1))
    for_each(check, f"beside PyTorch, {ACCUMULATION} micro-batches a step", CLOSER,
             lambda model: beside_torch(check, program, model, tokens, ACCUMULATION))


def run(check):
    program = check.program("bf16")
    if not program:
        return
    if check.compiling:
        check.compiling.stop()
    check.data.update(times=[], gemm_tflops=gemm_rate(check))
    check.recomputes = "--recompute" in check.runner.printed(program, "--help")
    tokens, most = check.path("tokens.bin"), max(max(model.batches) for model in MODELS)
    write_tokens(tokens, Step(most, ACCUMULATION).tokens + 1, VOCABULARY)  # no sequence is twice in a step
    check.show([table.head()])
    time_ours(check, program, tokens)
    time_torch(check, program, tokens)
    check.show(table.legend(check))
