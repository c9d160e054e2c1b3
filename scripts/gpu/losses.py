"""The stage losses: ten steps of training against an independent reference in float64, and against the CPU program; and,
at the size of what is timed, steps of one large micro-batch against the same of several small ones."""
import dataclasses
import json
import os
import sys

from . import ours
from .check import FAIL, OK, SKIP, TYPES
from .models import MODELS, Step
from .runner import ROOT
from tokens import write_tokens
from .training import relative, train


@dataclasses.dataclass(frozen=True)
class Small:
    """A model that a reference in float64 trains in seconds, and one batch that every step sees whole."""
    name: str
    layers: int
    channels: int
    heads: int
    seq: int
    vocabulary: int
    batch: int
    lr: float
    steps: int = 10


SMALL = Small("d2 of 128 channels, T 64", 2, 128, 2, 64, 101, 8, 3e-3), Small("d6, T 256", 6, 384, 6, 256, 256, 2, 1e-3)
LOSS_BAND = {"fp32": 1e-4, "bf16": 2e-2}
NORM_BAND = {"fp32": 1e-3, "bf16": 1e-1}


def recipe(small):
    return dict(seq=small.seq, batch=small.batch, micro_batch=small.batch, steps=small.steps, schedule="cosine",
                lr=small.lr, min_lr=small.lr / 10, warmup=3, clip=1.5, weight_decay=0.1, timeout=60)


def shape_words(small):
    return dict(layers=small.layers, channels=small.channels, heads=small.heads, vocab=small.vocabulary)


def reference(small, tokens, model):
    """In a process of its own: writes the model file, then prints losses and norms of an independent implementation in
    float64 (tests/train/reference.py)."""
    sys.path.insert(0, os.path.join(ROOT, "tests", "train"))
    import reference as gpt
    padded = (small.vocabulary + 127) // 128 * 128
    shape = gpt.Shape(small.seq, small.vocabulary, small.layers, small.heads, small.channels, padded)
    weights = gpt.random_model(shape, scale=0.05)
    gpt.write_model(model, shape, weights)
    batch = gpt.samples(gpt.read_tokens(tokens), small.seq)
    history = gpt.train(shape, weights, [batch] * small.steps, schedule="cosine", lr=small.lr, min_lr=small.lr / 10,
                        warmup=3, clip=1.5, weight_decay=0.1)
    print(json.dumps([[h[0] for h in history], [h[1] for h in history]]))


def have_numpy():
    try:
        import numpy  # noqa: F401, only to know whether it is there
        return True
    except ImportError:
        return False


def agree(check, what, kind, steps, result, expected):
    losses, norms = expected
    if result.status or len(steps) != len(losses):
        return check.verdict(what, FAIL, result.last)
    loss = relative([s["loss"] for s in steps], losses)
    norm = relative([s["grad_norm"] for s in steps], norms)
    good = loss <= LOSS_BAND[kind] and norm <= NORM_BAND[kind] and steps[-1]["loss"] < steps[0]["loss"]
    return check.verdict(what, OK if good else FAIL,
                         f"loss {loss:.1e} (band {LOSS_BAND[kind]:.0e}), norm {norm:.1e} (band {NORM_BAND[kind]:.0e}), "
                         f"{steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f}")


def expected_losses(check, small, tokens, model):
    """([losses], [norms]) of the reference, or None; and the options that start a program from the same weights."""
    if not have_numpy():
        check.verdict(f"{small.name}: float64 reference", SKIP, "no numpy")
        return None, shape_words(small)
    command = [sys.executable, "scripts/gpu_check.py", "--reference", SMALL.index(small), tokens, model]
    result = check.runner.run(command, limit=0.6 * check.runner.left())
    if result.status:
        check.verdict(f"{small.name}: float64 reference", SKIP, result.last)
        return None, dict(init_from=model) if os.path.exists(model) else shape_words(small)
    return json.loads(result.output), dict(init_from=model)


def losses_of(check, small, cpu):
    tokens, model = check.path("tokens.bin"), check.path("model.bin")
    write_tokens(tokens, small.batch * small.seq + 1, small.vocabulary)
    expected, start = expected_losses(check, small, tokens, model)
    record = check.data["losses"][small.name] = {"reference": expected and expected[0]}
    if cpu:
        steps, _, result = train(check, cpu, train=tokens, peak_tflops=1, **start, **recipe(small))
        record["cpu"] = [s["loss"] for s in steps]
        if expected:
            agree(check, f"{small.name}: CPU program and reference", "fp32", steps, result, expected)
        elif result.status == 0:
            expected = [s["loss"] for s in steps], [s["grad_norm"] for s in steps]
    if not expected:
        return check.verdict(small.name, SKIP, "neither the reference nor the CPU program is here to compare with")
    for kind in TYPES:
        program = check.program(kind)
        if program:
            steps, _, result = train(check, program, train=tokens, **start, **recipe(small))
            record[kind] = [s["loss"] for s in steps]
            agree(check, f"{small.name}: {kind}", kind, steps, result, expected)
    return None


# Of d12's logits 3.3e9 elements, more than 31 bits count, and a quarter of them.
LARGE, PARTS = Step(64), Step(16, 4)
LARGE_STEPS, LARGE_LOSS_BAND, LARGE_NORM_BAND = 3, 1e-3, 1e-2


def large_against_parts(check):
    """Nothing else looks at what products of such sizes compute."""
    model, what = MODELS[0], f"{MODELS[0].name}: {LARGE.name} and {PARTS.name}"
    program, tokens = check.program("bf16"), check.path("tokens.bin")
    if not program:
        return None
    write_tokens(tokens, LARGE_STEPS * LARGE.tokens + 1, ours.VOCABULARY)
    found = []
    for step in (LARGE, PARTS):
        steps, _, result = train(check, program, train=tokens, steps=LARGE_STEPS, **ours.options_of(check, model, step))
        if result.status or len(steps) != LARGE_STEPS:
            full = ours.OUT_OF_MEMORY.search(result.output)
            return check.verdict(what, SKIP if full else FAIL, f"{step.name}: {result.last}")
        found.append(([s["loss"] for s in steps], [s["grad_norm"] for s in steps]))
    check.data["losses"][what] = found
    loss, norm = (relative(*pair) for pair in zip(*found))
    good = loss <= LARGE_LOSS_BAND and norm <= LARGE_NORM_BAND and not ours.implausible(found[1][0])
    return check.verdict(what, OK if good else FAIL,
                         f"loss {loss:.1e} (band {LARGE_LOSS_BAND:.0e}), norm {norm:.1e} (band {LARGE_NORM_BAND:.0e}), "
                         f"{found[1][0][0]:.4f} to {found[1][0][-1]:.4f}")


def run(check):
    cpu = os.path.join(ROOT, check.o.cpu_program)
    cpu_runs = os.access(cpu, os.X_OK) and check.runner.run([cpu, "--help"]).status == 0
    check.data["losses"] = {}
    for small in SMALL:
        losses_of(check, small, cpu if cpu_runs else None)
    large_against_parts(check)
