"""What is printed last: all that counts, once more, short enough for who sees the end of a long output alone."""
import collections
import time

from . import table
from .check import FAIL, LATE, OK, SKIP
from .kernels import share_lines
from .models import ACCUMULATION

LAST_WORDS = 11500  # characters: who reads the end of a long output alone shall miss nothing that counts


def failures(check):
    found = [f"{verdict:<5} {stage}: {what}   {detail}".splitlines()[0][:200]
             for stage, what, verdict, detail in check.rows if verdict in (FAIL, LATE)]
    return found[:25] + ([f"and {len(found) - 25} more"] if len(found) > 25 else [])


def costs(check):
    """GELU fused over apart, the library's first algorithms over its best, chunking loss by number of ranks, a line each."""
    lines = []
    for name, rows in check.data.get("kernels", {}).items():
        losses = collections.defaultdict(list)
        for row in rows:
            if "fused" in row and row["ratio"] is not None:
                lines.append(f"{name} {row['fused']}: GELU in the epilogue takes {row['ratio']:.2f} of apart")
            if "products" in row and row["ratio"] is not None:
                lines.append(f"{name} products of a step: {row['first_ms']:.2f} ms by the library's first algorithms, "
                             f"{row['best_ms']:.2f} by the best of its lists, {row['ratio']:.3f} of that")
            if "operation" in row and row["loss"] is not None:
                losses[row["operation"]].append(f"{row['ranks']} ranks {100 * row['loss']:+.1f} %" + (
                    " (host-bound)" if row.get("host_bound") else ""))
        lines += [f"{name} {operation}, in slices: {', '.join(each)}" for operation, each in losses.items()]
    return lines


def ratios(check):
    """PyTorch's step over ours, a line for each number of micro-batches."""
    kinds = ("torch_over_ours", ""), ("torch_over_ours_accumulated", f", {ACCUMULATION} micro-batches a step")
    each = {what: [f"{name} {ratio:.2f}" for name, ratio in check.data.get(key, {}).items()] for key, what in kinds}
    return [f"PyTorch's step over ours{what}: {', '.join(found)}" for what, found in each.items() if found]


def sections(check):
    """(name, lines), what counts most first."""
    times, shares = check.data.get("times"), check.data.get("shares", {})
    lines = [table.head(), *(table.line(check, row) for row in times), *table.legend(check)] if times else []
    return [("failures", failures(check)), ("times", lines + ratios(check)),
            ("shares", [line for name in shares for line in share_lines(name, shares[name])]),
            ("costs", costs(check)), ("wires", check.data.get("wires", []))]


def last_words(check):
    """What counts, the table last, in no more than LAST_WORDS characters."""
    counts = collections.Counter(row[2] for row in check.rows)
    seconds = ", ".join(f"{name} {s:.0f} s" for name, s in check.data["stages"].items())
    end_line = f"{counts[OK]} ok, {counts[FAIL]} failed, {counts[LATE]} late, {counts[SKIP]} skipped"
    first_line = f"{time.monotonic() - check.begin:.0f} s: {seconds}"
    room, kept = LAST_WORDS - len(first_line) - len(end_line) - 400, {}
    for name, lines in sections(check):
        text = "\n".join(lines)
        if text and len(text) + 2 > room:
            text = f"({name}: see report.txt)"
        room -= len(text) + 2
        kept[name] = text
    parts = [kept[name] for name in ("wires", "costs", "shares", "failures", "times") if kept[name]]
    return "\n" + "\n\n".join([first_line, *parts, end_line])


def conclude(check):
    """Prints them; the exit status."""
    check.data["complete"] = True
    check.say(last_words(check))
    return 1 if any(row[2] == FAIL for row in check.rows) or not any(row[2] == OK for row in check.rows) else 0
