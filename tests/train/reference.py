"""GPT-2 and Llama in float64, by hand: the yardstick that the C program is measured against.

Nothing here is shared with the program. The forward pass, the backward pass, AdamW, the learning-rate
schedules and the file formats are written a second time from their definitions, in the plainest form
that numpy allows: batch-first activations (B, T, C), whole matrices, a full T x T attention matrix, no
blocking and no parallelism. test_reference.py compares the gradients with central differences, so the
chain of trust is: difference quotients -> this file -> every mesh, schedule and route of the program.

The model is GPT-2 as llm.c trains it: pre-layernorm with eps 1e-5, GELU by tanh, causal attention scaled
by 1/sqrt(D), the token table used again as the head without bias, mean cross-entropy over all B * T
targets. Rows V ... Vp - 1 of the token table only pad it to a round number: they are never looked up and
their logits are no part of the softmax, so their gradient is zero.

A Llama, or another block (Shape.block), differs in five places: norms do not subtract the mean (RMSNorm), queries and keys are
rotated by their position, several heads share keys and values, the MLP's hidden units are silu(gate) * up, and nothing has a bias.

A model is a dict of arrays by tensor name, stacked over layers, matrices (out, in): the order of
NAMES is the order in the file (shapes.py).
"""
import json
import math
import sys

import numpy as np

from shapes import BLOCKS, GPT2, NAMES, TENSORS, Shape

TOKENS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic: version, type
FP32, BF16 = 3, 5  # versions of a model file
HEADER = 256  # int32 values in front of either file
DECAYED = [name for name, (_, columns, _) in TENSORS.items() if columns]  # matrices and embeddings


# ---------------------------------------------------------------------------------------------------
# Files

def header(*values):
    full = np.zeros(HEADER, dtype="<i4")
    full[:len(values)] = values
    return full.tobytes()


def write_tokens(path, tokens, magic=None):
    """In 32 bits if a token or the caller asks for it."""
    tokens = np.asarray(tokens)
    magic = magic or (20240520 if tokens.max() < 65536 else 20240801)
    version, dtype = TOKENS[magic]
    assert tokens.min() >= 0 and tokens.max() <= np.iinfo(dtype).max
    with open(path, "wb") as file:
        file.write(header(magic, version, len(tokens)))
        file.write(tokens.astype(dtype).tobytes())


def read_tokens(path):
    with open(path, "rb") as file:
        data = file.read()
    magic, version, count = (int(x) for x in np.frombuffer(data, "<i4", 3))
    tokens = np.frombuffer(data, TOKENS[magic][1], offset=4 * HEADER)
    assert (version, count) == (TOKENS[magic][0], len(tokens)), path
    return tokens.astype(np.int64)


def samples(tokens, T):
    """All samples of one file: inputs and targets (count, T)."""
    count = (len(tokens) - 1) // T
    rows = np.arange(count)[:, None] * T + np.arange(T)
    return tokens[rows], tokens[rows + 1]


def to_bf16_bits(values):
    """Round to nearest even; finite values only."""
    bits = np.asarray(values, dtype="<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def write_model(path, shape, model, version=FP32):
    common, more = (version, shape.maxT, shape.V, shape.L, shape.heads, shape.C, shape.Vp), ()
    if shape.block != GPT2:
        *stretch, original = shape.stretch or (0, 0, 0, 0)
        floats = np.array([shape.eps, shape.theta, *stretch], "<f4").view("<i4")
        more = shape.KV, shape.units, *floats, original
    with open(path, "wb") as file:
        file.write(header(shape.block.magic, *common, *more))
        for name, dimensions in shape.tensors().items():
            assert model[name].shape == dimensions, (name, model[name].shape, dimensions)
            values = np.asarray(model[name], dtype="<f4") if version == FP32 else to_bf16_bits(model[name])
            file.write(values.tobytes())


def read_model(path):
    with open(path, "rb") as file:
        data = file.read()
    head = np.frombuffer(data, "<i4", HEADER)
    assert head[0] in BLOCKS and head[1] in (FP32, BF16), (path, head[:2])
    fields = [int(x) for x in head[2:8]]
    if head[0] != GPT2.magic:
        eps, theta, *stretch = (float(f"{x:.7g}") for x in head[10:15].view("<f4"))  # 1e-5, not the float32 nearest to it
        fields += int(head[8]), int(head[9]), eps, theta, (*stretch, int(head[15])) if stretch[0] else ()
    shape = Shape(*fields, block=BLOCKS[head[0]])
    if head[1] == FP32:
        flat = np.frombuffer(data, "<f4", offset=4 * HEADER)
    else:
        flat = (np.frombuffer(data, "<u2", offset=4 * HEADER).astype("<u4") << 16).view("<f4")
    model, at = {}, 0
    for name, dimensions in shape.tensors().items():
        size = math.prod(dimensions)
        model[name] = flat[at:at + size].astype(np.float64).reshape(dimensions)
        at += size
    assert at == len(flat), (path, "parameters", len(flat), "expected", at)
    return shape, model


def random_model(shape, seed=1, scale=0.08):
    """Weights with every term of the gradient alive: biases and layer-norm parameters are random too, and
    so are the padding rows of the token table, which must not matter. Exact in float32."""
    random = np.random.default_rng(seed)
    model = {}
    for name, dimensions in shape.tensors().items():
        values = random.normal(0, scale, dimensions)
        if name in ("ln1w", "ln2w", "lnfw"):
            values += 1
        model[name] = values.astype(np.float32).astype(np.float64)
    return model


# ---------------------------------------------------------------------------------------------------
# Layers. Each forward returns its output and what its backward needs.

def layernorm(x, w, b=0.0, eps=1e-5, rms=False):
    mean = 0 if rms else x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + eps)
    normal = (x - mean) * rstd
    return normal * w + b, (normal, rstd, w, rms)


def layernorm_backward(dy, kept):
    normal, rstd, w, rms = kept
    C = dy.shape[-1]
    dw = (dy * normal).reshape(-1, C).sum(0)
    db = dy.reshape(-1, C).sum(0)
    dn = dy * w
    dx = rstd * (dn - (0 if rms else dn.mean(-1, keepdims=True)) - normal * (dn * normal).mean(-1, keepdims=True))
    return dx, dw, db


def linear(x, w, b=0.0):
    return x @ w.T + b, (x, w)


def linear_backward(dy, kept):
    x, w = kept
    rows_dy, rows_x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    return dy @ w, rows_dy.T @ rows_x, rows_dy.sum(0)


GELU_SCALE = math.sqrt(2 / math.pi)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(GELU_SCALE * (x + 0.044715 * x ** 3)))


def gelu_backward(dy, x):
    t = np.tanh(GELU_SCALE * (x + 0.044715 * x ** 3))
    slope = GELU_SCALE * (1 + 3 * 0.044715 * x ** 2)
    return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t ** 2) * slope)


def swiglu(x):
    gate, up = np.split(x, 2, -1)
    return gate / (1 + np.exp(-gate)) * up


def swiglu_backward(dy, x):
    gate, up = np.split(x, 2, -1)
    s = 1 / (1 + np.exp(-gate))
    return np.concatenate([dy * up * s * (1 + gate * (1 - s)), dy * gate * s], -1)


def angles(shape, T):
    """Of positions and pairs (T, D / 2); element i of a head is paired with element i + D / 2."""
    D = shape.C // shape.heads
    turn = shape.theta ** (-2 * np.arange(D // 2) / D)  # of one position
    if shape.stretch:
        factor, low, high, original = shape.stretch
        kept = np.clip((original * turn / (2 * math.pi) - low) / (high - low), 0, 1)  # turns in the original positions
        turn = turn * (kept + (1 - kept) / factor)
    return np.arange(T)[:, None] * turn


def rotate(x, by):
    """x (..., T, D), by (T, D / 2)."""
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * np.cos(by) - b * np.sin(by), b * np.cos(by) + a * np.sin(by)], -1)


def attention(qkv, heads, KV=0, by=None):
    """qkv (B, T, C + 2 KV D): queries, keys, values of all heads one after another. Head h reads keys h * KV // heads. Queries and
    keys are rotated by angles `by`."""
    B, T, width = qkv.shape
    KV = KV or heads
    D = width // (heads + 2 * KV)
    q, k, v = (part.reshape(B, T, -1, D).transpose(0, 2, 1, 3) for part in np.split(qkv, [heads * D, (heads + KV) * D], -1))
    if by is not None:
        q, k = rotate(q, by), rotate(k, by)
    k, v = (np.repeat(x, heads // KV, 1) for x in (k, v))  # each (B, heads, T, D)
    scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(D)
    scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = (weights @ v).transpose(0, 2, 1, 3).reshape(B, T, heads * D)
    return out, (q, k, v, weights, KV, by)


def attention_backward(dout, kept):
    q, k, v, weights, KV, by = kept
    B, heads, T, D = q.shape
    dout = dout.reshape(B, T, heads, D).transpose(0, 2, 1, 3)
    dv = weights.transpose(0, 1, 3, 2) @ dout
    dweights = dout @ v.transpose(0, 1, 3, 2)
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True)) / math.sqrt(D)
    dq = dscores @ k
    dk = dscores.transpose(0, 1, 3, 2) @ q
    dk, dv = (x.reshape(B, KV, heads // KV, T, D).sum(2) for x in (dk, dv))
    if by is not None:
        dq, dk = rotate(dq, -by), rotate(dk, -by)
    return np.concatenate([x.transpose(0, 2, 1, 3).reshape(B, T, -1) for x in (dq, dk, dv)], -1)


# ---------------------------------------------------------------------------------------------------
# The model

def forward(shape, model, inputs, targets):
    """Mean cross-entropy of inputs, targets (B, T), and what backward needs."""
    B, T = inputs.shape
    assert T <= shape.maxT and inputs.max() < shape.V and targets.max() < shape.V
    kept, block = [], shape.block
    by, hidden = angles(shape, T) if block.rotary else None, swiglu if block.swiglu else gelu
    x = model["wte"][inputs] + (0 if block.rotary else model["wpe"][:T])

    def norm(x, *parameters):
        return layernorm(x, *parameters, eps=shape.eps, rms=block.rms)
    for l in range(shape.L):
        def p(kind):
            return [model[name][l] for name in (kind + "w", kind + "b") if name in model]
        normal1, k_ln1 = norm(x, *p("ln1"))
        qkv, k_qkv = linear(normal1, *p("qkv"))
        mixed, k_attention = attention(qkv, shape.heads, shape.KV, by)
        projected, k_projection = linear(mixed, *p("attproj"))
        x = x + projected
        normal2, k_ln2 = norm(x, *p("ln2"))
        wide, k_fc = linear(normal2, *p("fc"))
        narrow, k_fcproj = linear(hidden(wide), *p("fcproj"))
        x = x + narrow
        kept.append((k_ln1, k_qkv, k_attention, k_projection, k_ln2, k_fc, wide, k_fcproj))
    final, k_lnf = norm(x, *(model[name] for name in ("lnfw", "lnfb") if name in model))
    logits = final @ model["wte"][:shape.V].T
    top = logits.max(-1, keepdims=True)
    exponentials = np.exp(logits - top)
    total = exponentials.sum(-1, keepdims=True)
    chosen = np.take_along_axis(logits, targets[..., None], -1)
    lse = np.log(total) + top
    losses = (lse - chosen)[..., 0]  # (B, T)
    return losses.mean(), (inputs, targets, kept, final, k_lnf, lse, exponentials / total)


def backward(shape, model, cache, z_loss=0):
    """Gradients of the mean loss and of z_loss times the mean of the squared log-sum-exp."""
    inputs, targets, kept, final, k_lnf, lse, probabilities = cache
    B, T = inputs.shape
    gradients = {name: np.zeros(dimensions) for name, dimensions in shape.tensors().items()}
    one_hot = np.zeros_like(probabilities)
    np.put_along_axis(one_hot, targets[..., None], 1, -1)
    dlogits = (probabilities * (1 + 2 * z_loss * lse) - one_hot) / (B * T)
    gradients["wte"][:shape.V] = dlogits.reshape(-1, shape.V).T @ final.reshape(-1, shape.C)
    dx, gradients["lnfw"], dlnfb = layernorm_backward(dlogits @ model["wte"][:shape.V], k_lnf)
    for l in reversed(range(shape.L)):
        k_ln1, k_qkv, k_attention, k_projection, k_ln2, k_fc, wide, k_fcproj = kept[l]

        def keep(kind, dw, db):
            gradients[kind + "w"][l] = dw
            if kind + "b" in gradients:
                gradients[kind + "b"][l] = db
        dhidden, *parameters = linear_backward(dx, k_fcproj)
        keep("fcproj", *parameters)
        dnormal, *parameters = linear_backward((swiglu_backward if shape.block.swiglu else gelu_backward)(dhidden, wide), k_fc)
        keep("fc", *parameters)
        dbranch, *parameters = layernorm_backward(dnormal, k_ln2)
        keep("ln2", *parameters)
        dx = dx + dbranch
        dmixed, *parameters = linear_backward(dx, k_projection)
        keep("attproj", *parameters)
        dnormal, *parameters = linear_backward(attention_backward(dmixed, k_attention), k_qkv)
        keep("qkv", *parameters)
        dbranch, *parameters = layernorm_backward(dnormal, k_ln1)
        keep("ln1", *parameters)
        dx = dx + dbranch
    np.add.at(gradients["wte"], inputs, dx)
    if "wpe" in gradients:
        gradients["wpe"][:T] = dx.sum(0)
    if "lnfb" in gradients:
        gradients["lnfb"] = dlnfb
    return gradients


def loss_and_gradients(shape, model, inputs, targets, z_loss=0):
    loss, cache = forward(shape, model, inputs, targets)
    return loss, backward(shape, model, cache, z_loss)


# ---------------------------------------------------------------------------------------------------
# Training

def learning_rate(schedule, step, steps, lr, min_lr, warmup):
    """Of step 0 ... steps - 1, and what stays behind them. The warm-up rises linearly and reaches lr in its last step; cosine and
    linear then fall to min_lr; wsd holds lr for the first 80 % of the run and falls by 1 - sqrt."""
    if step < warmup:
        return lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    if schedule == "constant":
        return lr
    if step >= steps:
        return min_lr
    if schedule == "linear":
        return lr + (min_lr - lr) * done
    if schedule == "cosine":
        return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * done))
    if schedule == "wsd":
        hold = 0.8 * steps
        return lr if step < hold else min_lr + (lr - min_lr) * (1 - math.sqrt((step - hold) / (steps - hold)))
    raise ValueError(schedule)


class AdamW:
    """Decoupled decay on matrices and embeddings, bias correction, clipping by the global norm."""

    def __init__(self, model, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip=1.0):
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.weight_decay, self.clip = weight_decay, clip
        self.m = {name: np.zeros_like(w) for name, w in model.items()}
        self.v = {name: np.zeros_like(w) for name, w in model.items()}
        self.steps = 0

    def update(self, model, gradients, lr):
        """Changes model; returns the norm before clipping. clip = 0: no clipping."""
        norm = math.sqrt(sum(float((g ** 2).sum()) for g in gradients.values()))
        scale = self.clip / norm if 0 < self.clip < norm else 1.0
        self.steps += 1
        for name, w in model.items():
            g = gradients[name] * scale
            self.m[name] += (1 - self.beta1) * (g - self.m[name])
            self.v[name] += (1 - self.beta2) * (g * g - self.v[name])
            m = self.m[name] / (1 - self.beta1 ** self.steps)
            v = self.v[name] / (1 - self.beta2 ** self.steps)
            decay = self.weight_decay * w if name in DECAYED else 0
            w -= lr * (m / (np.sqrt(v) + self.eps) + decay)
        return norm


def train(shape, model, batches, schedule="constant", lr=1e-3, min_lr=0.0, warmup=0, z_loss=0, **adamw):
    """One step per (inputs, targets) of batches, a list. Changes model; returns (loss, norm, lr) by step."""
    optimizer, history = AdamW(model, **adamw), []
    for step, (inputs, targets) in enumerate(batches):
        loss, gradients = loss_and_gradients(shape, model, inputs, targets, z_loss)
        rate = learning_rate(schedule, step, len(batches), lr, min_lr, warmup)
        norm = optimizer.update(model, gradients, rate)
        history.append((loss, norm, rate))
    return history


def main(tokens, model, shape, recipe):
    """For scripts/gpu_check.sh: writes a random model file, trains it on all samples of a token file in each step, and prints
    losses and norms. Shape and recipe are JSON of train_gpt's options."""
    o, recipe = json.loads(shape), json.loads(recipe)
    shape = Shape(o["seq"], o["vocab"], o["layers"], o["heads"], o["channels"], (o["vocab"] + 127) // 128 * 128)
    weights = random_model(shape, scale=0.05)
    write_model(model, shape, weights)
    batch = samples(read_tokens(tokens), o["seq"])
    history = train(shape, weights, [batch] * recipe.pop("steps"), **recipe)
    print(json.dumps([[h[0] for h in history], [h[1] for h in history]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
