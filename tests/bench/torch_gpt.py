#!/usr/bin/env python3
"""The same GPT-2 or Llama in PyTorch, for a comparison of step times, as a user would write it today.

    torch_gpt.py LAYERS CHANNELS HEADS BATCH SEQ [--vocab 50304] [--steps 12] [--warmup 5] [--accumulate 1]
                 [--compile blocks|model|no] [--device cuda|cpu] [--dtype bf16|fp32]
                 [--block gpt2|llama] [--kv-heads HEADS] [--ffn 0]

fp32 master weights under bf16 autocast, torch.compile, flash attention (scaled_dot_product_attention), fused AdamW,
gradient clipping by the global norm, tied embeddings, biases, GELU by tanh: the model and the recipe of train_gpt.
--block llama: RMSNorm, rotary positions, shared keys and values (enable_gqa), SwiGLU, no biases, --ffn as train_gpt's. A
step has --accumulate micro-batches of BATCH sequences, on the GPU already, whose gradients are added up before one
update. Tokens are drawn as scripts/tokens.py draws them: as uneven as words of text.

--compile blocks, the default, compiles the block once for all layers, and the head with the loss, as PyTorch advises for
models of repeated blocks: the time for it does not grow with the layers, and the cache serves any number of them.
--compile model compiles the whole model, with the lookups of the embeddings. Clipping and the update are PyTorch's kernels
in both.

Attention's backward adds in the order in which blocks finish, which is PyTorch's default; train_gpt's gives the same bits in
every run, which costs time, see layers/kernels/attention_cudnn.cu.

Times are between two CUDA events around a step, on CPUs by the clock. --device cpu computes in as many threads as
OMP_NUM_THREADS says; --dtype fp32 is without autocast. Prints one JSON object: median step_ms of the timed steps and their
spread (slowest - fastest) / median, tokens_per_s, flops_per_token = 6 P + 6 L C T with P without the position
embedding, peak memory as the allocator counts it, seconds of the first step with compiling, how many graphs were
compiled, the last loss.
"""
import argparse
import json
import math
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.attproj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.fc, self.fcproj = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x):  # (B, T, C)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attproj(mixed.transpose(1, 2).flatten(2))
        return x + self.fcproj(F.gelu(self.fc(self.norm2(x)), approximate="tanh"))


def rotate(x, cos, sin):  # (B, heads, T, D), (T, D / 2); element i is paired with i + D / 2
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class LlamaBlock(nn.Module):
    def __init__(self, channels, heads, seq, kv_heads, units):
        super().__init__()
        self.widths = [heads, kv_heads, kv_heads]
        self.size, self.shared = channels // heads, kv_heads < heads
        self.norm1, self.norm2 = nn.RMSNorm(channels, 1e-5), nn.RMSNorm(channels, 1e-5)
        self.qkv = nn.Linear(channels, sum(self.widths) * self.size, bias=False)
        self.attproj = nn.Linear(channels, channels, bias=False)
        self.fc, self.fcproj = nn.Linear(channels, 2 * units, bias=False), nn.Linear(units, channels, bias=False)
        turn = torch.arange(seq)[:, None] * 10000.0 ** (-2 * torch.arange(self.size // 2) / self.size)
        self.register_buffer("cos", turn.cos(), persistent=False)
        self.register_buffer("sin", turn.sin(), persistent=False)

    def forward(self, x):  # (B, T, C)
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, -1, self.size).transpose(1, 2).split(self.widths, 1)
        cos, sin = self.cos[:T].to(q.dtype), self.sin[:T].to(q.dtype)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=self.shared)
        x = x + self.attproj(mixed.transpose(1, 2).reshape(B, T, C))
        gate, up = self.fc(self.norm2(x)).chunk(2, -1)
        return x + self.fcproj(F.silu(gate) * up)


class GPT(nn.Module):
    def __init__(self, layers, channels, heads, seq, vocab, block="gpt2", kv_heads=0, units=0):
        super().__init__()
        self.wte = nn.Embedding(vocab, channels)
        self.wpe = nn.Embedding(seq, channels) if block == "gpt2" else None
        units = units or -(-8 * channels // 384) * 128
        self.blocks = nn.ModuleList(Block(channels, heads) if block == "gpt2" else
                                    LlamaBlock(channels, heads, seq, kv_heads or heads, units) for _ in range(layers))
        self.norm = nn.LayerNorm(channels) if block == "gpt2" else nn.RMSNorm(channels, 1e-5)
        for name, w in self.named_parameters():
            if w.dim() == 2:
                nn.init.normal_(w, std=0.02 / math.sqrt(2 * layers) if "proj" in name else 0.02)

    def loss(self, x, targets):  # (B, T, C), (B, T)
        logits = F.linear(self.norm(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    def forward(self, inputs, targets):  # (B, T)
        x = self.wte(inputs)
        if self.wpe is not None:
            x = x + self.wpe.weight[:inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.loss(x, targets)


def compiled(model, what):
    """What is called in place of the model."""
    if what == "model":
        return torch.compile(model)
    if what == "blocks":
        for block in model.blocks:
            block.compile()
        model.loss = torch.compile(model.loss)
    return model


def graphs():
    """Compiled so far. Of blocks: two or three, or the layers did not share theirs, and some may run uncompiled."""
    from torch._dynamo.utils import counters
    return counters["stats"]["unique_graphs"]


def draw_tokens(vocab, accumulate, batch, seq, device):
    """Inputs and targets of all micro-batches. The commonest token is one in twenty of 50304, the next ones 1/2, 1/3,
    ... as frequent."""
    weights = 1 / (torch.arange(vocab, device=device, dtype=torch.float32) + 2)
    of_rank = torch.randperm(vocab, device=device)
    drawn = torch.multinomial(weights, 2 * accumulate * batch * seq, replacement=True)
    return of_rank[drawn].view(2, accumulate, batch, seq)


def optimizer_of(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)


def gradients(run, inputs, targets, bf16=True, device="cuda"):
    """Of the mean over all micro-batches, left in the parameters; and that mean."""
    total = 0
    for x, y in zip(inputs, targets):
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = run(x, y) / len(inputs)
        loss.backward()
        total += loss.detach()
    return total


class Moment:
    """What a CUDA event is, on CPUs."""
    def record(self):
        self.s = time.monotonic()

    def elapsed_time(self, later):
        return 1e3 * (later.s - self.s)


def train(model, run, inputs, targets, steps, bf16=True, cuda=True):
    """Times of the steps in ms, and the last loss."""
    optimizer = optimizer_of(model)
    marks = [torch.cuda.Event(enable_timing=True) if cuda else Moment() for _ in range(steps + 1)]
    marks[0].record()
    for step in range(steps):
        loss = gradients(run, inputs, targets, bf16, "cuda" if cuda else "cpu")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks[step + 1].record()
    if cuda:
        torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(marks, marks[1:])], float(loss)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("layers", "channels", "heads", "batch", "seq"):
        parser.add_argument(name, type=int)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--steps", type=int, default=12, help="timed; 0: none, only compile")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--compile", choices=("blocks", "model", "no"), default="blocks")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--block", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--kv-heads", type=int, default=0, help="of llama; 0: as many as heads")
    parser.add_argument("--ffn", type=int, default=0, help="units of llama's MLP; 0: 8/3 of the channels, up to a multiple of 128")
    return parser.parse_args()


def main():
    o = parse()
    cuda, bf16 = o.device == "cuda", o.dtype == "bf16"
    if cuda and not torch.cuda.is_available():
        sys.exit("torch sees no GPU")
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")  # what is left in fp32 may use TF32
    model = GPT(o.layers, o.channels, o.heads, o.seq, o.vocab, o.block, o.kv_heads, o.ffn).to(o.device)
    run = compiled(model, o.compile)
    inputs, targets = draw_tokens(o.vocab, o.accumulate, o.batch, o.seq, o.device)
    begin = time.monotonic()
    train(model, run, inputs, targets, 1, bf16, cuda)
    first_s = time.monotonic() - begin
    if not o.steps:
        return
    ms, loss = train(model, run, inputs, targets, o.warmup + o.steps, bf16, cuda)
    ms = ms[o.warmup:]
    median = statistics.median(ms)
    parameters = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("wpe"))
    print(json.dumps({
        "framework": f"torch {torch.__version__}", "device": torch.cuda.get_device_name() if cuda else "cpu", "block": o.block, "layers": o.layers,
        "channels": o.channels, "heads": o.heads, "batch": o.batch, "accumulation": o.accumulate, "seq": o.seq,
        "vocab": o.vocab, "compiled": o.compile, "graphs": graphs(), "steps": len(ms), "step_ms": median,
        "spread": (max(ms) - min(ms)) / median, "tokens_per_s": o.accumulate * o.batch * o.seq / median * 1e3,
        "flops_per_token": 6 * parameters + 6 * o.layers * o.channels * o.seq,
        "allocated_mib": torch.cuda.max_memory_allocated() / 2**20 if cuda else None, "first_step_s": first_s, "loss": loss}))


if __name__ == "__main__":
    main()
