"""The stage times: steps of this program, then of PyTorch, each of those beside one of ours.

What counts most comes first, as time may end anywhere. All of ours come before PyTorch, which must not cost a figure of
this program: each model with one micro-batch a step, larger and larger ones until they do not pay; then the best of
these with several a step, as GPT-2 is really trained, where the update of all weights counts for less; then with what
backward computes again. PyTorch has the same order, with a run of ours right after each of its own.
"""
import dataclasses
import re
import statistics

from runner import Late
from tables import columns
from tokens import write_tokens

from . import pytorch
from .check import FAIL, LATE, OK, SKIP
from .models import ACCUMULATION, CLOSER, MODELS, OUT_OF_MEMORY, SEQ, VOCABULARY, Step, implausible, options_of
from .nvidia import MemoryWatch, smi
from .training import train, words_of

GEMM_SIZES = 4096, 8192, 16384
MEMORY_SPARED_MIB = 1024  # by --dry-run's count, which knows nothing of libraries


# --- a run ---


def measure(check, program, model, step, tokens):
    """A row of the table, or None; and the Result."""
    before, counted = step.repeated
    with MemoryWatch() as memory:
        steps, config, result = train(check, program, limit=60, train=tokens, steps=before + counted,
                                      **options_of(check, model, step))
    if result.status or len(steps) < before + counted:
        return None, result
    if why := implausible([s["loss"] for s in steps]):
        return None, dataclasses.replace(result, output=f"error: {why}")
    for note in [line for line in result.output.splitlines() if re.match("note: .*(own|plain) kernel", line)]:
        check.verdict(f"{model.name}, {step.name}: the libraries' kernels", FAIL, note)
    timed = steps[before:]
    times = [s["step_ms"] for s in timed]
    ms = statistics.median(times)
    at = min(timed, key=lambda s: abs(s["step_ms"] - ms))
    mfu, peak = at["mfu"] and at["mfu"] * at["step_ms"] / ms, config.get("peak_tflops_all_ranks")
    return {"model": model.name, "program": "commfuse", "batch": step.batch, "accumulation": step.accumulation,
            "recompute": step.recompute, "step_ms": ms, "spread": (max(times) - min(times)) / ms,
            "tokens_per_s": step.tokens / ms * 1e3, "mfu": mfu, "tflops": mfu and peak and mfu * peak,
            "memory_mib": memory.most, "first_step_ms": steps[0]["step_ms"],
            "start_s": result.seconds - sum(s["step_ms"] for s in steps) / 1e3, "peak_tflops": peak,
            "losses": [s["loss"] for s in steps]}, result


def too_large(check, program, model, batch):
    """Why a run need not be tried; empty: it may fit."""
    total = re.match(r"(\d+) MiB", *smi(check, "memory.total") or [""]) if batch > model.torch_batch else None
    if not total:
        return ""
    words = words_of(**options_of(check, model, Step(batch)))
    needed = re.search(r"^memory +([\d.]+) MiB per rank", check.runner.printed(program, "--dry-run", *words), re.M)
    if not needed or float(needed[1]) + MEMORY_SPARED_MIB <= int(total[1]):
        return ""
    return f"not tried: {float(needed[1]) / 1024:.1f} GiB, without libraries, of {int(total[1]) / 1024:.1f}"


# --- the table ---

WIDTHS = -5, -9, 5, 5, 9, 7, 10, 7, 8, 8, 7
HEAD = columns("model,program,batch,accum,step ms,spread,tokens/s,MFU,of GEMM,mem GiB,start s".split(","), WIDTHS)


def line(check, row):
    def share(part, whole):
        return f"{100 * part / whole:.1f} %" if part and whole else "n/a"
    return columns([row["model"], "recompute" if row.get("recompute") else row["program"], row["batch"], row["accumulation"],
                    f"{row['step_ms']:.1f}", f"{100 * row['spread']:.1f}%", f"{row['tokens_per_s']:.0f}", share(row["mfu"], 1),
                    share(row["tflops"], check.data["gemm_tflops"]),
                    f"{row['memory_mib'] / 1024:.1f}" if row["memory_mib"] is not None else "n/a", f"{row['start_s']:.1f}"], WIDTHS)


def legend(check):
    """What the columns are, and what is compared."""
    torch = next((row for row in check.data["times"] if row["program"] == "torch"), {})
    how = {"blocks": "the block and head with loss compiled", "model": "the whole model compiled"}.get(
        torch.get("compiled"), "not compiled")
    rate = f"{check.data['gemm_tflops']:.0f} TFLOP/s" if check.data["gemm_tflops"] else "what"
    (before, counted), (before_long, counted_long) = Step(1).repeated, Step(1, ACCUMULATION).repeated
    return [f"T {SEQ}, bf16; step: median of {counted} after {before}. commfuse keeps what backward needs, as PyTorch "
            "does; recompute: backward computes GELU and layer norms again.",
            "batch: sequences of a micro-batch. accum: micro-batches of a step, whose gradients are added up before "
            f"one update; steps of {ACCUMULATION}: median of {counted_long} after {before_long}.",
            f"of GEMM: share of {rate} that large products reach here. Memory: most in use on the GPU, with libraries "
            "and reserves."] + ([
                f"torch: {torch['framework']}, {how}, flash attention (its backward gives other bits in every run, ours the "
                "same), fused AdamW."] if torch else [])


def table(check):
    return [HEAD, *(line(check, row) for row in check.data["times"]), *legend(check)] if check.data.get("times") else []


def ratios(check):
    """PyTorch's step over ours, a line for each number of micro-batches."""
    kinds = ("torch_over_ours", ""), ("torch_over_ours_accumulated", f", {ACCUMULATION} micro-batches a step")
    each = {what: [f"{name} {ratio:.2f}" for name, ratio in check.data.get(key, {}).items()] for key, what in kinds}
    return [f"PyTorch's step over ours{what}: {', '.join(found)}" for what, found in each.items() if found]


def add_row(check, row):
    check.show([line(check, row)])
    check.data["times"].append(row)
    check.save()


def plain_rows(check, model):
    """This program's, of steps of one micro-batch in which nothing is computed again."""
    return [row for row in check.data.get("times", []) if
            (row["model"], row["program"], row["accumulation"], row.get("recompute")) == (model.name, "commfuse", 1, 0)]


# --- the order of the runs ---


def one_more(check, program, model, tokens, step, can_be_full=True):
    """The row of one of our runs, which is in the table then; None: there is none."""
    row, result = measure(check, program, model, step, tokens)
    if row:
        add_row(check, row)
    else:
        full = can_be_full and OUT_OF_MEMORY.search(result.output)
        check.verdict(f"{model.name}, {step.name}", SKIP if full else FAIL, result.last)
    return row


def search(check, program, model, tokens):
    """The best micro-batch of ours: larger ones are tried until they do not pay."""
    best = 0
    for step in map(Step, model.batches):
        if why := too_large(check, program, model, step.batch):
            check.verdict(f"{model.name}, {step.name}", SKIP, why)
            return
        row = one_more(check, program, model, tokens, step, best > 0)
        if not row or step.batch >= model.torch_batch and row["tokens_per_s"] < 1.01 * best:
            return
        best = max(best, row["tokens_per_s"])


def accumulated(check, program, model, tokens):
    """What the search has found best, several times a step."""
    best = max(plain_rows(check, model), key=lambda row: row["tokens_per_s"], default=None)
    if best:
        one_more(check, program, model, tokens, Step(best["batch"], ACCUMULATION))


def beside_torch(check, program, model, tokens, accumulation):
    """PyTorch's time and, right after it, ours: their ratio is of neighbours."""
    peak = next((row["peak_tflops"] for row in check.data["times"] if row["program"] == "commfuse"), None)
    step = Step(model.torch_batch, accumulation)
    theirs, result = pytorch.measure(check, model, step, peak)
    if not theirs:
        check.verdict(f"{model.name} in PyTorch, {step.name}", SKIP, result.last)
        return
    add_row(check, theirs)
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
    several = f", {ACCUMULATION} micro-batches a step"
    check.show([HEAD])
    for_each(check, "ours", MODELS, lambda model: search(check, program, model, tokens))
    for_each(check, "ours" + several, MODELS, lambda model: accumulated(check, program, model, tokens))
    if check.recomputes:
        for_each(check, "recomputing", CLOSER,
                 lambda model: one_more(check, program, model, tokens, Step(model.torch_batch, recompute=1)))
    if check.torch.version(min(120, check.runner.left())):
        for_each(check, "beside PyTorch", MODELS, lambda model: beside_torch(check, program, model, tokens, 1))
        for_each(check, "beside PyTorch" + several, CLOSER,
                 lambda model: beside_torch(check, program, model, tokens, ACCUMULATION))
    else:
        check.verdict("PyTorch", SKIP, "no Python here has it")
    check.show(legend(check))
