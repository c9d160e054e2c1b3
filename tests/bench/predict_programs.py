#!/usr/bin/env python3
"""Predictions beside the measured runs of other programs, with few constants of each program fitted.

    tests/bench/predict_programs.py [--data FOLDER]      # ../shared/data; what is not there is skipped

megatron    374 runs of Megatron-DeepSpeed on A100 (half of vTrain's): phases of --predict, links of a100x8.json, FIVE fitted
            constants, each with bounds. "Cells left out" are predicted by fits without any run of that width, tp and micro-batch;
            beside it the trivial rule for the best mesh
ultrascale  runs of nanotron on 8 to 512 H100, tp 16 or less (half of the Ultra-Scale Playbook's), as GPT-2 shapes of equal depth
            and FLOP: ONE constant, fitted on one node at tp 1
"""
import concurrent.futures
import csv
import json
import math
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import tables
from command import Parser, status_of
import numpy  # after command, whose errors name a Python that has it
from predict_check import predict  # beside this file


def described(name):
    return json.loads(pathlib.Path(ROOT, f"scripts/machines/{name}.json").read_text(encoding="utf-8"))


# --- phases of --predict, links of a machine's file ---

# Of what is fitted: start and bounds.
MEGATRON = {"products, times": (1, 0.8, 1.5), "bytes of a score": (80, 40, 120), "host, ms a layer": (2, 0.5, 5),
            "host, ms beside layers": (10, 1, 30), "wait for the slowest, ms": (0.02, 0.001, 0.1)}
HOST = 8


def runs_of(*paths):
    """Columns, of numbers where all are."""
    rows = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            rows += csv.DictReader(file)
    columns = {name: numpy.array([row[name] for row in rows]) for name in rows[0]}
    return {name: column if column[0][-1].isalpha() else column.astype(float) for name, column in columns.items()}


def phases(machine, runs, *names, depth=2, **more):
    """[2, phases, runs]: ms of a micro-batch beside layers and of a layer: products, attention, memory. From this depth and twice
    as many layers, as the difference of two micro-batches and one."""
    def at(shape, layers):
        one, two = (predict(machine, dp=1, layers=layers, batch=count * shape["micro_batch"], **shape, **more)["ideal"]
                    for count in (1, 2))
        return numpy.array([two[name] - one[name] for name in ("products", "attention", "memory")])

    def both(values):
        few, many = (at(dict(zip(names, values)), layers) for layers in (depth, 2 * depth))
        return 2 * few - many, (many - few) / depth

    every = list(zip(*(runs[name].astype(int).tolist() for name in names)))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        known = dict(zip(set(every), pool.map(both, set(every))))
    return numpy.array([known[values] for values in every]).transpose(1, 2, 0)


def reduced_ms(machine, ranks, megabytes, part=1):
    """An all-reduce in a ring, which crosses the network at the rate of a host's `part` of it."""
    near, far = machine["links"]
    moved = 2 * (1 - 1 / ranks) * megabytes
    share = numpy.interp(numpy.log(moved / 2 + 1e-9), *zip(*((math.log(x), y) for x, y in near["native_share"])))  # far has the same
    share *= numpy.clip(1 - far["far_loss"] * numpy.log2(numpy.maximum(4, ranks / HOST) / 4), 0.1, 1)
    rate = numpy.where(ranks > HOST, numpy.minimum(near["gb_per_s"], part * far["block_gb_per_s"]), near["gb_per_s"])
    return numpy.where(ranks > 1, moved / rate / share + 2e-3 * machine["native_us"], 0)


def gradients_ms(machine, tp, dp, megabytes):
    """Within a host, then between hosts, where each rank of a host has its part."""
    inside = numpy.maximum(1, numpy.minimum(dp, HOST // numpy.minimum(tp, HOST)))
    return reduced_ms(machine, inside, megabytes) + reduced_ms(
        machine, numpy.where(dp > inside, HOST * dp / inside, 1), megabytes / inside, 1 / HOST)


# --- Megatron ---

def megatron_model(runs, known, machine):
    """A function from the constants to the steps in ms. Segments of a layer: its kernels or its host, whichever takes longer, then
    the collectives, which block."""
    tp, dp, L, C, micro, T = (runs[name] for name in ("tp", "dp", "layers", "channels", "micro_batch", "seq"))
    scores = micro * runs["heads"] / tp * T * T / 1e6 / machine["memory_gb_per_s"]  # softmax runs in memory
    reduced, waits = reduced_ms(machine, tp, 2 * T * micro * C / 1e6), numpy.log2(tp)
    weights = (12 * L * C * C + 50257 * C) / tp / 1e6
    once = gradients_ms(machine, tp, dp, 2 * weights) + 28 * weights / machine["memory_gb_per_s"]  # every replica updates all
    micro_batches = runs["global_batch"] / micro / dp

    def model(constants):
        products, score_bytes, host, beside, wait = constants
        rest, layer = 4 / 3 * (known[:, 0] * products + known[:, 2])  # forward is computed twice
        blocked = 6 * (reduced + wait * waits)  # two collectives in each of three passes
        return micro_batches * (L * (numpy.maximum(layer + score_bytes * scores, host) + blocked) +
                                numpy.maximum(rest, beside)) + once

    return model


def fitted(model, measured, weight):
    from scipy.optimize import minimize
    logs, low, high = numpy.log(numpy.array(list(MEGATRON.values())).T)

    def cost(logs):
        inside = numpy.clip(logs, low, high)
        return numpy.average(abs(model(numpy.exp(inside)) / measured - 1), weights=weight) + abs(logs - inside).sum()

    for _ in range(3):
        logs = minimize(cost, logs, method="Nelder-Mead", options={"maxfev": 1000, "adaptive": True}).x
    return numpy.exp(numpy.clip(logs, low, high))


def megatron(folder):
    import scipy.optimize, scipy.stats  # before the work
    machine = described("a100x8")
    runs = runs_of(folder / "single_node.csv", folder / "several_nodes.csv")
    known = phases("a100x8", runs, "channels", "heads", "seq", "tp", "micro_batch", recompute=1)
    measured, tp, several = runs["step_ms"], runs["tp"], runs["gpus"] > HOST
    weight = numpy.where(several, 6.0, 1.0)  # only 14 of the 374 runs are on several hosts
    model = megatron_model(runs, known, machine)
    constants = fitted(model, measured, weight)
    predicted, apart = model(constants), numpy.empty_like(measured)
    cells = numpy.array(list(zip(runs["channels"], tp, runs["micro_batch"])))
    for cell in numpy.unique(cells, axis=0):
        out = (cells == cell).all(axis=1)
        apart[out] = model(fitted(model, measured, weight * ~out))[out]
    groups = {"one host": ~several, **{f"one host, tp {n}": ~several & (tp == n) for n in (1, 2, 4, 8)}, "several hosts": several,
              "all": several | ~several}
    lines = [{"runs": name, "number": which.sum(), "mean error": f"{100 * (predicted / measured - 1)[which].mean():+.1f} %",
              **{title: f"{100 * abs(ms / measured - 1)[which].mean():.1f} %" for title, ms in (
                  ("mean absolute", predicted), ("of cells left out", apart))},
              "largest": f"{100 * abs(predicted / measured - 1)[which].max():.0f} %"} for name, which in groups.items()]
    return (tables.markdown(lines) + "\nFitted: " + ", ".join(f"{n} {v:.3g}" for n, v in zip(MEGATRON, constants)) + "\n\n" +
            "".join(best_meshes(runs, name, choose) for name, choose in (
                ("the prediction", predicted), ("the prediction without the cell", apart),
                ("the rule, lowest tp, then largest micro-batch,", tp - runs["micro_batch"] / 1e4))))


def best_meshes(runs, name, scores):
    """Among runs of the same training on as many GPUs: is the run with the lowest score the shortest one?"""
    from scipy.stats import spearmanr
    groups = {}
    for *key, ms, score in zip(*(runs[k] for k in ("gpus", "global_batch", "channels", "layers")), runs["step_ms"], scores):
        groups.setdefault(tuple(key), []).append((ms, score))
    groups = [g for g in groups.values() if len(g) > 1]
    losses = [min(g, key=lambda point: point[1])[0] / min(g)[0] - 1 for g in groups]
    ranks = statistics.mean(spearmanr(*zip(*g))[0] for g in groups if len(g) > 2)
    return (f"* {name} finds the best of {sum(loss == 0 for loss in losses)} of {len(groups)} models and sizes; its choice takes "
            f"{100 * statistics.mean(losses):.1f} % longer on average, at most {100 * max(losses):.0f} %; rank correlation "
            f"{ranks:.2f}\n")


# --- nanotron ---

SHAPES = {"1B": (16, 2048, 8192, 2496, 64), "3B": (28, 3072, 8192, 3136, 64), "8B": (32, 4096, 14336, 4544, 64),
          "80B": (80, 8192, 28672, 9088, 128)}  # layers, channels, inner; of a GPT-2 of equal FLOP a token: channels, heads


def ultrascale(folder):
    machine = described("h100x8")
    runs = runs_of(folder / "runs.csv")
    runs = {name: column[runs["tp"] <= 16] for name, column in runs.items()}  # tp 32 takes too long
    L, C, inner, runs["channels"], runs["heads"] = numpy.array([SHAPES[model] for model in runs["model"]]).T
    tp, dp, micro, nodes, count = (runs[name] for name in ("tp", "dp", "micro_batch", "nodes", "accumulation"))
    rest, layer = phases("h100x8", runs, "channels", "heads", "tp", "micro_batch", depth=1, seq=4096, vocab=65536).sum(axis=1)
    weights = (L * (4 * C * C + 3 * C * inner) + 131072 * C) / tp / 1e6
    blocked = 4 * L * reduced_ms(machine, tp, 2 * 4096 * micro * C / 1e6)
    gradients = gradients_ms(machine, tp, dp, 4 * weights)
    update = 28 * weights / machine["memory_gb_per_s"] / numpy.where(runs["zero"] == 1, dp, 1)
    measured = runs["global_batch_sequences"] * 4096e3 / runs["tokens_per_s_per_gpu"] / (8 * nodes)

    def model(times):  # of the kernels; gradients travel beside the last micro-batch's backward, two thirds of its time
        kernels = times * (L * layer + rest)
        return count * (kernels + blocked) + numpy.maximum(0, gradients - kernels * 2 / 3) + update

    alone = (nodes == 1) & (tp == 1)
    times, plain = 1.0, model(1)
    for _ in range(20):
        times /= numpy.median((model(times) / measured)[alone])
    error, unfitted, few = (100 * (model(times) / measured - 1), 100 * (plain / measured - 1), (nodes <= 8) & (tp <= 8))

    def cell(which):
        return f"{numpy.median(error[which]):+.0f} %, {abs(error[which]).mean():.0f} % of {which.sum()}" if any(which) else ""

    lines = [{"nodes": int(n), **{f"tp {int(t)}": cell((nodes == n) & (tp == t)) for t in numpy.unique(tp)}}
             for n in numpy.unique(nodes)]
    return (tables.markdown(lines) + f"\nMedian and mean absolute error. Fitted: kernels, times {times:.2f}, on the {alone.sum()} "
            f"runs of tp 1 on one node. The {few.sum()} runs of tp 8 or less on 8 nodes or fewer: mean absolute error "
            f"{abs(error)[few].mean():.0f} %; with nothing fitted {abs(unfitted)[few].mean():.0f} %, median "
            f"{numpy.median(unfitted[few]):+.0f} %\n")


def main():
    parser = Parser(__doc__)
    parser.add_argument("--data", type=pathlib.Path, default=ROOT / "../shared/data")
    data = parser.parse_args().data
    for program, folder in (megatron, data / "megatron_a100"), (ultrascale, data / "ultrascale"):
        print(f"### {program.__name__}\n\n{program(folder) if folder.is_dir() else f'Skipped: {folder} is not here'}", flush=True)


if __name__ == "__main__":
    sys.exit(status_of(main))
