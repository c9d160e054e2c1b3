"""The stage losses: ten steps against an independent reference in float64, and, at the size of the timed models, steps of one large
micro-batch against the same steps of several small ones."""
import json
import sys

from tokens import write_tokens

from .check import FAIL, OUT_OF_MEMORY, SKIP, TYPES, relative, train
from .times import MODELS, VOCABULARY, Step, implausible

# Models that a reference in float64 trains in seconds, on one batch that every step sees whole.
SMALL = {"d2 of 128 channels, T 64": (dict(layers=2, channels=128, heads=2, vocab=101, seq=64), 8, 3e-3),  # shape, batch, lr
         "d6, T 256": (dict(layers=6, channels=384, heads=6, vocab=256, seq=256), 2, 1e-3)}
RECIPE = dict(steps=10, schedule="cosine", warmup=3, clip=1.5, weight_decay=0.1)
BANDS = {"fp32": (1e-4, 1e-3), "bf16": (2e-2, 1e-1)}  # of losses and of norms
LARGE, PARTS = Step(64), Step(16, 4)  # d12 has 3.3e9 logits, more than 2^31, and a quarter of them
LARGE_STEPS, LARGE_BANDS = 3, (1e-3, 1e-2)


def figures(check, what, kind, **options):
    """([losses], [norms]) of a run; None, and a verdict, if it fails."""
    steps, _, result = train(check, kind, **options)
    if result.status:
        return check.verdict(what, SKIP if OUT_OF_MEMORY.search(result.output) else FAIL, result.reason)
    return [step["loss"] for step in steps], [step["grad_norm"] for step in steps]


def agree(check, what, found, expected, bands):
    """Checks that losses and norms are within their bands and the loss falls."""
    losses, (loss, norm) = found[0], map(relative, found, expected)
    check.judge(what, loss <= bands[0] and norm <= bands[1] and losses[-1] < losses[0],
                f"loss {loss:.1e} (band {bands[0]:.0e}), norm {norm:.1e} (band {bands[1]:.0e}), "
                f"{losses[0]:.4f} to {losses[-1]:.4f}")


def against_reference(check, name):
    tokens, model, (shape, batch, lr) = check.path("tokens.bin"), check.path("model.bin"), SMALL[name]
    write_tokens(tokens, batch * shape["seq"] + 1, shape["vocab"])
    recipe = dict(RECIPE, lr=lr, min_lr=lr / 10)
    result = check.runner.run([sys.executable, "tests/train/reference.py", tokens, model, json.dumps(shape), json.dumps(recipe)],
                              limit=0.6 * check.runner.left())
    if result.status:  # perhaps there is no numpy
        return check.verdict(f"{name}: float64 reference", SKIP, result.reason)
    expected = json.loads(next(line for line in result.output.splitlines() if line.startswith("[[")))
    for kind in TYPES:
        found = figures(check, f"{name}: {kind}", kind, train=tokens, seq=shape["seq"], batch=batch, micro_batch=batch,
                        timeout=60, init_from=model, **recipe)
        if found:
            agree(check, f"{name}: {kind}", found, expected, BANDS[kind])


def large_against_parts(check):
    """The only check of the results of such large products."""
    model, what = MODELS[0], f"{MODELS[0].name}: {LARGE.name} and {PARTS.name}"
    tokens = check.path("tokens.bin")
    write_tokens(tokens, LARGE_STEPS * LARGE.tokens + 1, VOCABULARY)
    large, parts = (figures(check, f"{what}: {step.name}", "bf16", steps=LARGE_STEPS, train=tokens, **step.options(model))
                    for step in (LARGE, PARTS))
    if large and parts:
        check.judge(f"{what}: from random weights", not implausible(parts[0]), implausible(parts[0]))
        agree(check, what, parts, large, LARGE_BANDS)


def run(check):
    for name in SMALL:
        against_reference(check, name)
    large_against_parts(check)
