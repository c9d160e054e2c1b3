"""The table of times: its rows, its lines, and what its columns are."""
from .models import ACCUMULATION, SEQ, Step


def head():
    return (f"{'model':<5} {'program':<9} {'batch':>5} {'accum':>5} {'step ms':>9} {'spread':>7} {'tokens/s':>10} "
            f"{'MFU':>7} {'of GEMM':>8} {'mem GiB':>8} {'start s':>7}")


def share(part, whole):
    return f"{100 * part / whole:.1f} %" if part and whole else "n/a"


def line(check, row):
    memory = f"{row['memory_mib'] / 1024:.1f}" if row["memory_mib"] is not None else "n/a"
    program = "recompute" if row.get("recompute") else row["program"]
    return (f"{row['model']:<5} {program:<9} {row['batch']:>5} {row['accumulation']:>5} {row['step_ms']:>9.1f} "
            f"{100 * row['spread']:>6.1f}% {row['tokens_per_s']:>10.0f} {share(row['mfu'], 1):>7} "
            f"{share(row['tflops'], check.data['gemm_tflops']):>8} {memory:>8} {row['start_s']:>7.1f}")


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


def keep(check, row):
    check.show([line(check, row)])
    check.data["times"].append(row)
    check.save()


def plain_rows(check, model):
    """This program's, of steps of one micro-batch in which nothing is computed again."""
    return [row for row in check.data.get("times", []) if
            (row["model"], row["program"], row["accumulation"], row.get("recompute")) == (model.name, "commfuse", 1, 0)]
