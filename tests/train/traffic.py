"""What a training step puts on the wire: the formula, and what a trace says.

The formula knows the algorithms, not the program: per rank and step, in bytes sent, for --overlap ring and all that send as much. With
N = tp, D = dp, W = N·D ranks, a micro-batch of B sequences of T tokens a replica, A micro-batches a step, and
S = T/N · B · C elements in a shard of activations:

  TPSP     a layer gathers and scatters 4 times forward and 4 times backward, with --recompute 1 6 times, (N − 1)·S
           each; the head once each way, and three numbers a token for the loss
  UP       a layer exchanges queries, keys and values (3·S, fewer of a Llama that shares keys) and heads (S) forward, the same
           backward, of which a rank keeps 1/N: 8·(N − 1)/N·S
  weights  gradients leave by reduce-scatter, weights come back by all-gather: (G − 1) shards of every bucket, G = D
           for what is split over tp (TPSP), W otherwise
  lookup   (N − 1)·S each way (TPSP; UP: nothing). Where the table has G > 1 owners besides, in forward of the first
           micro-batch and backward of the last one: (G − 1) lists of rows, as long as the longest of any rank for any
           owner, in which each row that the rank's tokens name is once; and the tokens of either
"""
import collections
import itertools
import json
import re
import subprocess

from shapes import NAMES, layered

SHARD_BYTES_MIN = 64 << 10
OWNER_ROWS_MIN = 64  # layers/kernels/linear.c
SPLIT = {"wte", "qkvw", "qkvb", "attprojw", "fcw", "fcb", "fcprojw"}
BUCKETS = {*NAMES, "thin matrices", "split vectors", "wpe, vectors"}
REAL, TOKEN = 4, 4  # bytes


def ceil_div(a, b):
    return -(-a // b)


def round_up(n, to=8):
    return ceil_div(n, to) * to


def local(name, size, strategy, tp):
    """Rows and columns that one rank holds."""
    rows, columns = size
    if name == "wte":
        return round_up(ceil_div(rows, 1 if strategy == "up" else tp)), columns
    if name == "attprojw" and strategy == "up":  # head group by head group
        return tp * rows, columns // tp
    if strategy == "up" or name not in SPLIT:
        return rows, columns
    return (rows, columns // tp) if name in ("attprojw", "fcprojw") else (ceil_div(rows, tp), columns)


def bucket_shards(shape, strategy, tp, dp):
    """[(members of the group, elements of a shard)] of every bucket of the model."""
    def group(name):
        return dp if strategy == "tpsp" and name in SPLIT else tp * dp

    shards, thin, vectors = [], 0, collections.Counter()
    for name in shape.names():
        rows, columns = local(name, shape.size(name), strategy, tp)
        layers = shape.L if layered(name) else 1
        if name == "wte" or (layered(name) and columns > 1 and rows >= OWNER_ROWS_MIN * group(name)):
            shards += layers * [(group(name), ceil_div(rows, group(name)) * columns)]
        elif layered(name) and columns > 1:  # too thin for a bucket of its own; one group for all of them
            thin += rows * columns
        else:
            vectors[strategy == "tpsp" and tp > 1 and name in SPLIT] += layers * rows * columns
    members = group("fcw")
    first, most = 0, ceil_div(members * SHARD_BYTES_MIN // REAL, thin) if thin else 0
    while thin and first < shape.L:  # few layers share the first buckets
        layers = min(first + 1, most, shape.L - first)
        shards.append((members, round_up(ceil_div(layers * thin, members))))
        first += layers
    for split, count in vectors.items():
        members = dp if split else tp * dp
        shards.append((members, round_up(ceil_div(count, members))))
    return shards


def shuffled(samples, position, seed=1337):
    """The sample at a position of the training order (data/tokens.c)."""
    def mix(x):
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    epoch, x = divmod(position, samples)
    key, half = mix((mix(seed) + epoch) % 2**64), next(h for h in itertools.count() if 4**h >= samples)
    while True:
        left, right = x >> half, x % 2**half
        for round in range(8):
            left, right = right, left ^ mix(right ^ mix((key + round) % 2**64)) % 2**half
        x = left << half | right
        if x < samples:
            return x


def table_owners(shape, strategy, tp, dp):
    """Among how many ranks a part of the table is split, rows of the part and of an owner."""
    owners, part = (tp * dp if strategy == "up" else dp), local("wte", shape.size("wte"), strategy, tp)[0]
    return owners, part, ceil_div(part, owners)


def longest_list(shape, strategy, tp, dp, inputs):
    """Of each rank's part of the table: the most rows of one owner that tokens of one rank name. inputs: (dp, B, T)."""
    _, part, owned = table_owners(shape, strategy, tp, dp)
    T, longest = len(inputs[0][0]), collections.Counter()
    for replica in inputs:
        for rank in range(tp if strategy == "up" else 1):  # UP: each has tokens of its own
            shard = slice(rank * T // tp, (rank + 1) * T // tp) if strategy == "up" else slice(T)
            rows = {int(token) for sequence in replica for token in sequence[shard]}
            for owner, count in collections.Counter((row // part, row % part // owned) for row in rows).items():
                longest[owner[0]] = max(longest[owner[0]], count)
    return [longest[0 if strategy == "up" else rank % tp] for rank in range(tp * dp)]


def longest_lists(shape, strategy, tp, dp, samples, micro_batch, step, accumulation=1):
    """The same of the first and of the last micro-batch of a step, for formula(). samples: (count, T), of the token file."""
    def of(micro):
        first = (step * accumulation + micro) * dp * micro_batch
        numbers = [shuffled(len(samples), first + i) for i in range(dp * micro_batch)]
        inputs = [[samples[i] for i in numbers[d * micro_batch:(d + 1) * micro_batch]] for d in range(dp)]
        return longest_list(shape, strategy, tp, dp, inputs)
    return list(zip(of(0), of(accumulation - 1)))


def formula(shape, strategy, tp, dp, T, micro_batch, accumulation=1, lists=None, recompute=0):
    """Bytes that a rank sends in a step, by what they are. lists: the lengths of longest_lists(); None: the longest that can be."""
    S = T // tp * micro_batch * shape.C
    if strategy == "tpsp":
        activations = (tp - 1) * ((8 + 2 * recompute) * shape.L * S + 2 * S + 3 * T * micro_batch)
    else:
        activations = (tp - 1) * 2 * shape.L * S * (shape.qkv + shape.C) // shape.C // tp
    near = 2 * (tp - 1) * S * REAL if strategy == "tpsp" else 0
    owners, _, owned = table_owners(shape, strategy, tp, dp)
    tokens = (T // tp if strategy == "up" else T) * micro_batch
    rows = sum(lists or 2 * [min(tokens, owned)])
    lookup = accumulation * near + (owners - 1) * (rows * shape.C * REAL + min(accumulation, 2) * tokens * TOKEN)
    parameters = REAL * sum((members - 1) * shard for members, shard in bucket_shards(shape, strategy, tp, dp))
    return {"activations": accumulation * activations * REAL, "lookup": lookup, "gradients": parameters,
            "weights": parameters}


def posted(program, *options):
    """What --dry-run says that rank 0 posts in a step: exchanges, units of them, native collectives."""
    done = subprocess.run([program, "--dry-run", *map(str, options)], stdout=subprocess.PIPE, text=True, check=True)
    return tuple(map(int, re.search(r"(\d+) exchanges of rank 0 in (\d+) units, (\d+) native", done.stdout).groups()))


def kind(event):
    """What a transfer carries; None: a report."""
    operation, name = event["name"].split(" ", 1)
    if name in BUCKETS:
        return "gradients" if operation == "reduce-scatter" else "weights"
    return {"embedding": "lookup", "tokens": "lookup", "report": None}.get(name, "activations")


class Trace:
    def __init__(self, path):
        with open(path) as file:
            events = [e for e in json.load(file)["traceEvents"] if e["ph"] == "X"]
        self.ranks = sorted({e["pid"] for e in events})
        self.steps = sorted({e["args"]["step"] for e in events})
        self.events = events

    def of(self, rank, step, category):
        return [e for e in self.events if e["pid"] == rank and e["args"]["step"] == step and e["cat"] == category]

    def bytes_sent(self, rank, step, which=lambda event: True):
        sent = dict.fromkeys(("activations", "lookup", "gradients", "weights"), 0)
        for event in self.of(rank, step, "comm"):
            if kind(event) and which(event):
                sent[kind(event)] += event["args"].get("bytes", 0)
        return sent

    def last_computation(self, rank, step):
        """Begin and end of the last computation of backward: additions wait for what has been sent, they are none."""
        compute = self.of(rank, step, "compute")
        block = max((e for e in compute if e["name"] == "block backward"), key=lambda e: e["ts"])
        inside = [e for e in compute if e["name"] not in ("add", "block backward")
                  and block["ts"] <= e["ts"] <= block["ts"] + block["dur"]]
        last = max(inside, key=lambda e: e["ts"]) if inside else block
        return last["ts"], block["ts"] + block["dur"]

    def gradient_sync(self, rank, step):
        """Transfers of gradients, the lookup's rows among them, from backward on."""
        begin = min(e["ts"] for e in self.of(rank, step, "compute") if e["name"] == "head backward")
        return [e for e in self.of(rank, step, "comm") if e["args"]["posted"] >= begin
                and (kind(e) == "gradients" or e["name"].endswith(" embedding"))]
