"""What the tests of checkpoints share: a ten-step run that is worth saving, and readers of what it saves.

The run has everything that a step may depend on: another learning rate every step, clipping in some, two micro-batches,
samples in an order of several epochs, validation in between. A checkpoint is read here by the format's description
alone: "runs" of each rank's safetensors file say where its values belong.
"""
import json
import os
import shutil
import struct

import numpy as np

import harness
import reference
import shapes

STOPPED = 75  # exit status: ended by a signal, saved, to be gone on with
STEPS = 10
MESHES = (1, 1), (2, 1), (1, 2), (2, 2), (4, 1)  # tp, dp
KINDS = "weight", "m", "v"
TYPES = {"F32": "<f4", "I64": "<i8"}


def directory(out, step):
    return os.path.join(out, f"step_{step:08d}")


def steps_in(out, killed=False):
    """The checkpoints in a directory; and, unless the run was killed, nothing unfinished is beside them."""
    names = [name for name in os.listdir(out) if name.startswith("step_") and not name.endswith(".damaged")]
    unfinished = [name for name in names if not name[5:].isdigit()]
    assert killed or not unfinished, unfinished
    return sorted(int(name[5:]) for name in names if name not in unfinished)


def newest(out):
    """The newest checkpoint that has its name, while a run may be saving; 0: none."""
    names = os.listdir(out) if os.path.isdir(out) else []
    return max((int(name[5:]) for name in names if name.startswith("step_") and name[5:].isdigit()), default=0)


def manifest(out, step):
    with open(os.path.join(directory(out, step), "manifest.json"), encoding="utf-8") as file:
        return json.load(file)


def read_bytes(*path):
    with open(os.path.join(*path), "rb") as file:
        return file.read()


def saved_bytes(out, step):
    """All files of a checkpoint but its manifest, which names the directory and the log too."""
    where = directory(out, step)
    return {name: read_bytes(where, name) for name in sorted(os.listdir(where)) if name != "manifest.json"}


def read_safetensors(path):
    data = read_bytes(path)
    length, = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, entry in json.loads(data[8:8 + length]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            tensors[name] = np.frombuffer(data[8 + length:][begin:end], TYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def assemble(out, step, shape, kinds=KINDS):
    """{"weight": {"wte": array, ...}, "m": ..., "v": ...} of the whole model. Every element is there once."""
    stacked = shape.tensors()
    flat = {kind: {} for kind in kinds}
    for name, dimensions in stacked.items():
        layers = shape.L if shapes.layered(name) else 1
        for kind in kinds:
            flat[kind][name] = np.full((layers, int(np.prod(dimensions)) // layers), np.nan, "<f4")
    seen = {name: np.zeros(values.shape, int) for name, values in flat["weight"].items()}
    for rank in range(manifest(out, step)["ranks"]):
        tensors = read_safetensors(os.path.join(directory(out, step), f"rank_{rank:05d}.safetensors"))
        for tensor, layer, whole, count, at in tensors["runs"]:
            name = reference.NAMES[tensor]
            seen[name][layer, whole:whole + count] += 1
            for kind in kinds:
                flat[kind][name][layer, whole:whole + count] = tensors[kind][at:at + count]
    for name, times in seen.items():
        assert (times == 1).all(), f"{name}: saved {times.min()} to {times.max()} times"
    return {kind: {name: flat[kind][name].reshape(stacked[name]) for name in stacked} for kind in kinds}


def damage(path, at):
    """Changes one byte, `at` a share of the file's size."""
    with open(path, "r+b") as file:
        file.seek(min(int(at * os.path.getsize(path)), os.path.getsize(path) - 1))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


class Case(harness.Case):
    samples, steps = 8, STEPS  # of a batch; an epoch has three

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.val = cls.tokens
        cls.train_tokens = cls.path("train.bin")
        reference.write_tokens(cls.train_tokens, harness.random_tokens(3 * cls.samples * cls.T + 1, cls.shape.V, seed=3))
        cls.cache = {}

    @classmethod
    def recipe(cls, tp=1, dp=1, **more):
        # A longer run looks for a plan, and which bits come out depends on what it finds (test_plan.py).
        overlap = "commfuse" if cls.steps >= 200 else None
        return dict(overlap=overlap, init_from=cls.model, train=cls.train_tokens, val=cls.val, seq=cls.T, steps=cls.steps,
                    batch=cls.samples, micro_batch=cls.samples // (dp or 1) // 2, tp=tp, dp=dp, schedule="cosine", lr=3e-3,
                    min_lr=3e-4, warmup=3, clip=1.5, val_every=3, val_batches=1, threads=1, peak_tflops=1,
                    timeout=30) | more

    def run_with(self, ranks=None, timeout=60, status=0, **values):
        """One run, that ends with this status: its result."""
        values = self.recipe(**values)
        ranks = ranks or (values["tp"] or 1) * (values["dp"] or 1)
        result = harness.run(harness.options(**values), ranks, timeout)
        self.assertEqual(result.status, status, str(result))
        return result

    def start(self, ranks=None, mpi=(), env=None, wrapper=(), **values):
        values = self.recipe(**values)
        ranks = ranks or (values["tp"] or 1) * (values["dp"] or 1)
        started = harness.Run(harness.options(**values), ranks, mpi=mpi, env=env, wrapper=wrapper)
        self.addCleanup(started.close)
        return started

    @classmethod
    def undisturbed(cls, tp, dp, **more):
        """(OUT, path of its log) of a run that nothing stops, with a checkpoint of every step; made once."""
        key = tp, dp, *sorted(more.items())
        if key not in cls.cache:
            out, log = cls.fresh("out"), cls.fresh("log.jsonl")
            values = cls.recipe(**dict(tp=tp, dp=dp, out=out, log=log, save_every=1, keep=0) | more)
            result = harness.run(harness.options(**values), tp * dp, 120)
            assert result.status == 0, str(result)
            cls.cache[key] = out, log
        return cls.cache[key]

    def with_only(self, out, *steps):
        """A new OUT with these checkpoints alone."""
        fresh = self.fresh("out")
        os.mkdir(fresh)
        for step in steps:
            shutil.copytree(directory(out, step), directory(fresh, step))
        return fresh

    def assertSameRun(self, log, expected, first=0):
        """What two logs (paths) say of steps and validation is the same to the last bit, from step `first` on, with
        neither a gap nor a repeat, and the first is whole."""
        log, expected = harness.read_log(log), harness.read_log(expected)
        # A validation at the place where a run was stopped has been done before.
        for kind, fields, begin in (("step", ("step", "loss", "grad_norm", "lr"), first),
                                    ("val", ("step", "loss"), first + (first > 0))):
            found, wanted = ([tuple(e[f] for f in fields) for e in harness.events(which, kind) if e["step"] >= begin]
                             for which in (log, expected))
            self.assertEqual(found, wanted, f"{kind}s differ")
        self.assertWhole(log, first)
        return log

    def assertWhole(self, log, first=0, steps=None):
        self.assertEqual([e["event"] for e in log].count("config"), 1)
        self.assertEqual(log[0]["event"], "config")
        self.assertEqual([e["event"] for e in log].count("end"), 1)
        self.assertEqual(log[-1]["event"], "end")
        taken = [e["step"] for e in harness.events(log, "step")]
        self.assertEqual(taken, list(range(first, steps or self.steps)))
        for kind in ("val", "sample"):
            at = [e["step"] for e in harness.events(log, kind)]
            self.assertEqual(at, sorted(set(at)), f"{kind}: a repeat, or out of order")

    def assertSameEnd(self, out, expected, step=None):
        """Model and state at the end are the same to the last bit."""
        step = step or self.steps
        self.assertTrue(read_bytes(out, "model.bin") == read_bytes(expected, "model.bin"), "model.bin differs")
        found, wanted = saved_bytes(out, step), saved_bytes(expected, step)
        self.assertEqual(list(found), list(wanted))
        for name, content in found.items():
            self.assertTrue(content == wanted[name], f"{name} of step {step} differs")
