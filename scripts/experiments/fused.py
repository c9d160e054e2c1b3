"""One fused operation, measured by bench_fuse, and the arithmetic that says what a schedule hides.

bench_fuse lets all variants of an operation take turns and gives a line for each; accounts() sets them against each
other. The time of the communication is the wire's, payload over line rate, which no transfer can beat (headers, some 4 % of
what TCP sends, are not in it).

    hidden    1 − (T − T_compute) / T_comm; T_compute is one monolithic computation without communication
    chunking  T_nowire − T_compute: what cutting into as many slices costs by itself, part of T and never taken off
    exposed   T − T_nowire: what communication costs beside that

Whatever else a machine does only ever adds to a time, so the times in these are means over the faster half of the
repetitions. A standard error is what drawing other repetitions from those measured makes of a figure, the same ones
for all variants, since they took turns. Medians and percentiles are of all repetitions.

A machine's speed moves within minutes, a link's does not. So where a link is to take `ratio` of the computation, its rate
is set anew every twelve seconds, or ten repetitions, by what the computation took in those before. (A point that is not
measured longer than that has one link, chosen by ten repetitions of the computation alone.)
"""
import json
import os

import numpy as np

from runner import ROOT

from .place import FREE_LINK

ELEMENT = 4  # bytes, fp32

TITLES = {
    "gather_gemm": "all-gather ▸ GEMM",
    "gemm_scatter": "GEMM ▸ reduce-scatter",
    "attention_scatter": "attention + projection ▸ reduce-scatter",
    "gemm_alltoall": "GEMM ▸ all-to-all",
    "attention_alltoall": "attention ▸ all-to-all ▸ projection",
    "alltoall_gemm": "all-to-all ▸ GEMM",
    "wgrad_scatter": "wgrad ▸ reduce-scatter",
}
VARIANTS = ("compute", "comm", "none", "slice 2", "slice 4", "slice 8", "ring 1", "ring 2", "ring 4", "ring 8",
            "direct 1", "direct 2", "direct 4", "nowire 1", "nowire 2", "nowire 4", "nowire 8")
SHARES = "hidden_share", "hidden_alone_share", "hidden_error_share", "chunking_ms", "exposed_ms"  # of fused variants
FUSED = [name for name in VARIANTS if name.split()[0] in ("none", "slice", "ring", "direct")]
REPETITIONS_MIN = 10
BLOCK_S, BLOCK_REPETITIONS = 12, REPETITIONS_MIN  # about, and at least
TIMEOUT_S = 7200  # ranks that hang end themselves after a minute
DRAWINGS = 400


def shape_of(work):
    """As bench_fuse takes it. A work is a dictionary: operation, ranks, and the sizes T, B, C, columns and H."""
    return ",".join(str(work[size]) for size in ("T", "B", "C", "columns", "H"))


def payload_bytes(work):
    """What each rank sends in one run, headers left out."""
    ranks, operation = work["ranks"], work["operation"]
    if operation == "wgrad_scatter":
        return (ranks - 1) * (work["columns"] // ranks) * work["C"] * ELEMENT
    width = work["columns"] // ranks if "alltoall" in operation else work["C"]
    return (ranks - 1) * (work["T"] // ranks) * work["B"] * width * ELEMENT


# --- running ---


def run(place, work, repetitions, only=None):
    """bench_fuse's lines, each labelled as tables call it: "none", "slice 4", "ring 2"."""
    command = [os.path.join(ROOT, os.environ.get("BUILD", "build/release"), "tests/bench/bench_fuse"), "--op", work["operation"],
               "--shape", shape_of(work), "--repetitions", str(repetitions), "--json"]
    output = place.run(work["ranks"], command + (["--only", only] if only else []), timeout=TIMEOUT_S)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{' '.join(command)} printed no result:\n{output[-2000:]}")
    for line in lines:
        name = line["route"] if line["variant"] == "commfuse" else line["variant"]
        line["label"] = name if name in ("compute", "comm", "none") else f"{name} {line['slices']}"
    return lines


def repetitions_for(compute, ratio, seconds):
    """As many as fit, at least REPETITIONS_MIN. The library's collective is taken to need little more than the wire."""
    native = 1.1 * ratio
    in_computations = 9 + 2 * native + 3 * max(1, native) + 7 * max(1, ratio + 0.3)
    return max(REPETITIONS_MIN, min(1000, int(seconds * 1e3 / (compute * in_computations)) - 2))


def computations(lines):
    return next(line["samples_ms"] for line in lines if line["label"] == "compute")


def measure(place, work, seconds, ratio, delay_ms=0):
    """(lines, the wire's ms meanwhile, bits per second on average), block by block over links that follow the computation, of
    whose time the wire takes `ratio`. The wire's ms are those of the repetitions that the computation's time is the mean of."""
    bits = 8 * payload_bytes(work)
    compute = undisturbed_ms(computations(run(place, work, REPETITIONS_MIN, only="compute")))
    repetitions, found, rates = repetitions_for(compute, ratio, seconds), [], []
    blocks = max(1, min(round(seconds / BLOCK_S), repetitions // BLOCK_REPETITIONS))
    for _ in range(blocks):
        rates.append(min(FREE_LINK, 1e3 * bits / (ratio * float(compute))))
        place.link(rates[-1], delay_ms)
        found.append(run(place, work, repetitions // blocks))
        compute = undisturbed_ms(computations(found[-1]))  # the machine's speed moves
    samples = [computations(lines) for lines in found]
    wires = np.repeat([1e3 * bits / rate for rate in rates], list(map(len, samples)))
    return ([joined(same) for same in zip(*found)], float(np.mean(wires[faster_half(np.concatenate(samples))])),
            float(np.mean(rates)))


def joined(lines):
    """One variant's lines as one."""
    samples = sum((line["samples_ms"] for line in lines), [])
    low, middle, high = map(float, np.percentile(samples, [10, 50, 90]))
    return dict(lines[0], samples_ms=samples, ms=middle, p10_ms=low, p90_ms=high)


# --- arithmetic ---


def faster_half(samples):
    """Which they are."""
    return np.argsort(samples, kind="stable")[:(len(samples) + 1) // 2]


def undisturbed_ms(samples):
    """Mean over the faster half, for each row of samples."""
    ordered = np.sort(samples, axis=-1)
    return ordered[..., :(ordered.shape[-1] + 1) // 2].mean(axis=-1)


def accounts(lines, wire_ms):
    """The lines with repetitions and undisturbed_ms; compute_ms, native_ms and wire_ms of the operation; and for fused ones
    hidden_share, the same without what chunking costs and its standard error, chunking_ms and exposed_ms."""
    repetitions = min(len(line["samples_ms"]) for line in lines)  # some variants have several turns in each
    drawn = np.random.default_rng(1).integers(repetitions, size=(DRAWINGS, repetitions))
    turns = {line["label"]: np.reshape(line["samples_ms"], (repetitions, -1)).T for line in lines}
    # Turn by turn: the faster half of many is faster than that of a few.
    times = {name: float(undisturbed_ms(one).mean()) for name, one in turns.items()}
    redrawn = {name: undisturbed_ms(one[:, drawn]).mean(axis=0) for name, one in turns.items()}
    rows = []
    for line in lines:
        name = line["label"]
        row = dict(line, repetitions=repetitions, compute_ms=times["compute"], native_ms=times["comm"], wire_ms=wire_ms,
                   undisturbed_ms=times[name], **dict.fromkeys(SHARES))
        del row["samples_ms"]
        if name in FUSED:
            same = "compute" if name == "none" else f"nowire {line['slices']}"
            chunking, exposed = times[same] - times["compute"], times[name] - times[same]
            row.update(chunking_ms=chunking, exposed_ms=exposed, hidden_share=1 - (chunking + exposed) / wire_ms,
                       hidden_alone_share=1 - exposed / wire_ms,
                       hidden_error_share=float(np.std(redrawn[name] - redrawn[same])) / wire_ms)
        rows.append(row)
    return rows
