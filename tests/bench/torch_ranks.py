#!/usr/bin/env python3
"""Steps of the GPT-2 of torch_gpt.py on several ranks of CPUs in PyTorch, as a user would write them today.

    scripts/mpirun.sh -np 2 INTERPRETER tests/bench/torch_ranks.py MODEL TOKENS [--way tp|sequence|ddp|fsdp|one] [--steps 3]
        [--compile blocks|no]

MODEL and TOKENS are files of llm.c, as train_gpt reads them, and every step trains on all samples of TOKENS, so losses can be
compared with train_gpt's. Ranks meet over gloo at MASTER_ADDR (127.0.0.1). Each has one thread, fp32, fused AdamW, gradients
clipped by their global norm: the recipe of train_gpt with --min-lr as --lr.

tp        parallelize_module: columns, then rows; activations are whole on every rank; embedding and head split by vocabulary
sequence  the same with SequenceParallel: between the products a rank holds its part of the sequence
ddp       DistributedDataParallel, which reduces buckets during backward
fsdp      fully_shard (FSDP2), each block and the rest
one       one process, nothing is communicated

PyTorch has no asynchronous tensor parallelism on CPUs: torch.distributed._symmetric_memory, which fuses products with their
collectives, wants GPUs. Rank 0 prints a line of JSON: the times and losses of the steps.
"""
import argparse
import contextlib
import json
import math
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel, SequenceParallel, loss_parallel,
                                               parallelize_module)

from torch_gpt import GPT, compiled

HEADER = 256  # int32 values before the content of either file
OF_BLOCK = "norm1", "qkv", "attproj", "norm2", "fc", "fcproj"


class Ranks(GPT):
    """Whose activations may be one rank's part of the sequence, and whose head is split."""
    mesh, sequence = None, False

    def forward(self, inputs, targets):
        x = self.wte(inputs) + (self.wpe.weight.to_local() if self.sequence else self.wpe.weight)
        for block in self.blocks:
            x = block(x)
        return self.loss(x, targets)

    def loss(self, x, targets):
        if not self.mesh:
            return super().loss(x, targets)
        x = self.norm(x)
        x = x.redistribute(placements=[Replicate()]) if self.sequence else DTensor.from_local(x, self.mesh, [Replicate()])
        logits = nn.functional.linear(x, self.wte.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_model(path, head):
    """The model of a file, whose tensors are stacked over layers. head: whether rows of qkv are those of each of so many ranks in
    turn, as tensor parallelism splits them."""
    shape = torch.from_file(path, size=HEADER, dtype=torch.int32).tolist()
    seq, _, layers, heads, channels, vocab = shape[2:8]
    values = torch.from_file(path, size=os.path.getsize(path) // 4, dtype=torch.float32)[HEADER:]
    model = Ranks(layers, channels, heads, seq, vocab)

    def take(*tensors):
        nonlocal values
        for tensor in tensors:
            found, values = values[:tensor.numel()].view(tensor.shape), values[tensor.numel():]
            if tensor.shape[0] == 3 * channels:  # q, k, v → q, k, v of rank 0, of rank 1, …
                found = found.view(3, head, channels // head, -1).transpose(0, 1).reshape(tensor.shape)
            tensor.data.copy_(found)

    take(model.wte.weight, model.wpe.weight)
    for name in OF_BLOCK:
        modules = [getattr(block, name) for block in model.blocks]
        take(*(module.weight for module in modules))
        take(*(module.bias for module in modules))
    take(model.norm.weight, model.norm.bias)
    assert not len(values), f"{path} has {len(values)} values too many"
    return model, seq


def read_tokens(path, seq):
    """Inputs and targets of all samples."""
    words = torch.from_file(path, size=os.path.getsize(path) // 2, dtype=torch.int16)[2 * HEADER:].long() & 0xFFFF
    samples = (len(words) - 1) // seq
    return words[:samples * seq].view(samples, seq), words[1:samples * seq + 1].view(samples, seq)


def split(model, mesh, sequence):
    """Tensor parallelism."""
    part = Shard(1) if sequence else Replicate()
    norm = {"norm1": SequenceParallel(), "norm2": SequenceParallel()} if sequence else {}
    parallelize_module(model, mesh, {"wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=part),
                                     **({"norm": SequenceParallel()} if sequence else {})})
    for block in model.blocks:
        block.heads //= mesh.size()
        parallelize_module(block, mesh, {
            **norm, "qkv": ColwiseParallel(input_layouts=part), "attproj": RowwiseParallel(output_layouts=part),
            "fc": ColwiseParallel(input_layouts=part), "fcproj": RowwiseParallel(output_layouts=part)})
    if sequence:
        model.wpe.weight = nn.Parameter(distribute_tensor(model.wpe.weight.data, mesh, [Shard(0)]))
    model.mesh, model.sequence = mesh, sequence
    return model


def kinds(parameters):
    """DTensors and others, which one call cannot mix."""
    parameters = list(parameters)
    return [group for kind in (True, False) if (group := [p for p in parameters if isinstance(p, DTensor) == kind])]


def optimizer_of(model):
    groups = [dict(params=group, weight_decay=0.1 * matrices) for matrices in (True, False)
              for group in kinds(p for p in model.parameters() if (p.dim() == 2) == matrices)]
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)


def clip(model):
    """By the norm of all gradients."""
    groups = kinds(model.parameters())
    norms = [nn.utils.get_total_norm([p.grad for p in group]) for group in groups]
    norm = math.hypot(*(float(one.full_tensor() if isinstance(one, DTensor) else one) for one in norms))
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, 1.0, torch.tensor(norm))


def train(model, run, inputs, targets, steps, mean):
    """Times and losses. mean: of a loss over the ranks."""
    optimizer, ms, losses = optimizer_of(model), [], []
    for _ in range(steps):
        if dist.is_initialized():
            dist.barrier()
        begin = time.monotonic()
        with loss_parallel() if model.mesh else contextlib.nullcontext():
            loss = run(inputs, targets)
            loss.backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(mean(loss.detach()))
        if dist.is_initialized():
            dist.barrier()
        ms.append(1e3 * (time.monotonic() - begin))
    return ms, losses


def mean_of(way, ranks):
    def mean(loss):
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss.clone()
        if way in ("ddp", "fsdp"):
            dist.all_reduce(loss)
            loss /= ranks
        return float(loss)
    return mean


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tokens")
    parser.add_argument("--way", choices=("tp", "sequence", "ddp", "fsdp", "one"), default="sequence")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--compile", choices=("blocks", "no"), default="no")
    o = parser.parse_args()
    torch.set_num_threads(1)
    rank, ranks = (int(os.environ.get(f"OMPI_COMM_WORLD_{what}", other)) for what, other in (("RANK", 0), ("SIZE", 1)))
    mesh = None
    if o.way != "one":
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29511")
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (ranks,))
    model, seq = read_model(o.model, ranks if o.way in ("tp", "sequence") else 1)
    inputs, targets = read_tokens(o.tokens, seq)
    if o.way in ("ddp", "fsdp"):
        inputs, targets = (whole.chunk(ranks)[rank].contiguous() for whole in (inputs, targets))
    if o.way in ("tp", "sequence"):
        split(model, mesh, o.way == "sequence")
    run = compiled(model, o.compile)
    if o.way == "ddp":
        run = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if o.way == "fsdp":
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    ms, losses = train(model, run, inputs, targets, o.steps, mean_of(o.way, ranks))
    if rank == 0:
        print(json.dumps({"framework": f"torch {torch.__version__}", "way": o.way, "compiled": o.compile, "step_ms": ms,
                          "loss": losses}), flush=True)
    if dist.is_initialized():
        dist.barrier()
        os._exit(0)  # gloo's threads sometimes abort a process that ends them ("terminate called without an active exception")


if __name__ == "__main__":
    main()
