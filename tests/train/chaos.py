"""A run whose ranks are killed at random, again and again, and started again by a loop until it is done.

    python3 tests/train/chaos.py [--steps 1000] [--kills 100] [--tp 2] [--dp 2] [--seed N]

Each start gets one SIGKILL, to one rank, as long as there are kills left: one in four while it starts, one in four after
some steps, the others after it has saved at least once more, so that the run comes on whatever happens. Saves are frequent
and moments spread over a step, so that every part of a save is hit, and steps are shared out among the kills that are
left. In the end the model and the state must be the same bits as those of a run that nobody disturbed, and the log must
have every step once. It prints what the kills have cost.
"""
import argparse
import collections
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import checkpoints
import harness
import reference

SHAPE, SEQ, BATCH = harness.TINY, 36, 16
STARTS_WITHOUT_PROGRESS = 20


@dataclasses.dataclass
class Result:
    kills: collections.Counter  # where they hit: "start", "training", "saving", "the end"
    starts: int
    seconds: float


class Chaos:
    def __init__(self, folder, steps, kills, tp, dp, seed, save_every, tell=print, env=None):
        self.folder, self.steps, self.kills, self.tp, self.dp = folder, steps, kills, tp, dp
        self.save_every, self.tell, self.env = save_every, tell, env
        self.random = random.Random(seed)
        self.out, self.log = os.path.join(folder, "chaos"), os.path.join(folder, "chaos.jsonl")
        model, tokens = os.path.join(folder, "model.bin"), os.path.join(folder, "tokens.bin")
        reference.write_model(model, SHAPE, reference.random_model(SHAPE))
        reference.write_tokens(tokens, harness.random_tokens(5 * BATCH * SEQ + 1, SHAPE.V))
        self.recipe = dict(init_from=model, train=tokens, val=tokens, seq=SEQ, steps=steps, batch=BATCH,
                           micro_batch=BATCH // dp // 2, tp=tp, dp=dp, lr=1e-3, warmup=10, val_every=17, val_batches=1,
                           threads=1, peak_tflops=1, timeout=30, reproducible=1)  # trials are timed

    def start(self, **more):
        return harness.Run(harness.options(**self.recipe, **more), self.tp * self.dp, env=self.env)

    def undisturbed(self):
        out, log = os.path.join(self.folder, "undisturbed"), os.path.join(self.folder, "undisturbed.jsonl")
        started = self.start(out=out, log=log)
        try:
            harness.wait_until(lambda: started.ended() or self.steps_are_taken(started), 60, "the first step")
            self.start_s = time.monotonic() - started.begin
            result = started.wait(60 + 0.2 * self.steps)
            self.step_s = (time.monotonic() - started.begin - self.start_s) / self.steps  # with its saves and its line of the log
        finally:
            started.close()
        assert result.status == 0, str(result)
        return out, log

    @staticmethod
    def steps_are_taken(started):
        return "MFU" in started.texts()[0]

    def last_step(self):
        """The last that the log has, while it is written."""
        with open(self.log, "rb") as file:
            file.seek(max(0, os.path.getsize(self.log) - 8192))
            lines = [line for line in file.read().split(b"\n")[1:-1] if line.startswith(b'{"event":"step"')]
        return json.loads(lines[-1])["step"] if lines else 0

    def where(self, started):
        """What a start is doing, as far as the disk and its output tell."""
        if not self.steps_are_taken(started):
            return "start"
        if any(name.endswith(".tmp") and name.startswith("step_") for name in os.listdir(self.out)):
            return "saving"
        return "training"

    def choose_moment(self, started):
        """Waits for it. False: the run has ended by itself."""
        def wait(condition, what):
            harness.wait_until(lambda: started.ended() or condition(), 60, what, interval=0.001)

        def sleep(seconds):
            end = time.monotonic() + seconds
            wait(lambda: time.monotonic() > end, "a moment")

        before, how = checkpoints.newest(self.out) if os.path.isdir(self.out) else 0, self.random.random()
        share = (self.steps - before) / (self.kills - self.hits)  # steps that this start may take
        if how < 0.25:
            sleep(self.random.uniform(0, self.start_s))
            return not started.ended()
        wait(lambda: self.steps_are_taken(started), "the first step")
        if how < 0.5:
            target = before + int(self.random.uniform(0, share))
            wait(lambda: self.last_step() >= target, f"step {target}")
        else:
            wait(lambda: checkpoints.newest(self.out) > before, "a new checkpoint")
            sleep(self.random.uniform(0, max(0, share - self.save_every)) * self.step_s)
        sleep(self.random.uniform(0, 1) * self.step_s)
        return not started.ended()

    def end_of(self, started):
        """Status of a start with a rank killed. Its ranks must end; mpirun may hang if that rank was just joining it."""
        try:
            harness.wait_until(started.ended, 60, "the end of a start with a rank killed")
        except AssertionError:
            started.leaves_nobody()
            self.tell("all ranks have ended, but mpirun hangs: killed")
            return -signal.SIGKILL
        return started.wait().status

    def disturbed(self):
        """One start, and one kill if any are left. What was hit, or None."""
        started = self.start(out=self.out, log=self.log, save_every=self.save_every)
        try:
            if self.hits < self.kills and self.choose_moment(started):
                ranks = harness.wait_until(lambda: started.processes() or started.ended() and {None: 0}, 30, "a rank",
                                           interval=0.001)
                where, rank = self.where(started), self.random.choice(list(ranks))
                if not started.ended():
                    os.kill(ranks[rank], signal.SIGKILL)
                status = self.end_of(started)
                started.leaves_nobody()
                return where if status != 0 else None  # None: it was done a moment before
            result = started.wait(60 + 0.2 * self.steps)
            assert result.status == 0, f"ended by itself, and not well:{result}"
            self.done = True
            return None
        finally:
            started.close()

    def run(self):
        begin, starts, self.hits, self.done = time.monotonic(), 0, 0, False
        where, last, idle = collections.Counter(), 0, 0
        while not self.done:
            starts += 1
            hit = self.disturbed()
            if hit:
                self.hits += 1
                where[hit] += 1
            step = checkpoints.newest(self.out)
            assert step >= last, f"the checkpoint of step {last} is lost, the newest is of step {step}"
            idle, last = (0 if step > last else idle + 1), step
            assert idle < STARTS_WITHOUT_PROGRESS, f"{idle} starts have not come beyond step {step}"
            if hit:
                self.tell(f"kill {self.hits:3d} of {self.kills} hit {hit:8s}; saved up to step {step} of {self.steps}")
        return Result(where, starts, time.monotonic() - begin)

    def check(self, undisturbed):
        """The same end, and a log that has every step once."""
        out, log = undisturbed
        found, expected = harness.read_log(self.log), harness.read_log(log)
        for kind, fields in (("step", ("step", "loss", "grad_norm", "lr")), ("val", ("step", "loss"))):
            ours, wanted = ([tuple(e[f] for f in fields) for e in harness.events(which, kind)]
                            for which in (found, expected))
            assert ours == wanted, f"{kind}s differ: {[pair for pair in zip(ours, wanted) if pair[0] != pair[1]][:3]}"
        kinds = [e["event"] for e in found]
        assert kinds[0] == "config" and kinds.count("config") == 1 and kinds[-1] == "end" and kinds.count("end") == 1, kinds
        assert checkpoints.read_bytes(self.out, "model.bin") == checkpoints.read_bytes(out, "model.bin"), "model.bin differs"
        assert checkpoints.saved_bytes(self.out, self.steps) == checkpoints.saved_bytes(out, self.steps), "the state differs"
        assert checkpoints.steps_in(self.out)[-1] == self.steps


def run(folder, steps, kills, tp, dp, seed, save_every=5, tell=print, env=None):
    chaos = Chaos(folder, steps, kills, tp, dp, seed, save_every, tell, env)
    undisturbed = chaos.undisturbed()
    result = chaos.run()
    chaos.check(undisturbed)
    return result


def describe(result):
    hits = ", ".join(f"{count} {where}" for where, count in result.kills.most_common())
    return (f"{sum(result.kills.values())} kills hit ({hits}) in {result.starts} starts and {result.seconds:.0f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    folder = tempfile.mkdtemp(prefix="commfuse-chaos-")
    try:
        result = run(folder, options.steps, options.kills, options.tp, options.dp, options.seed, options.save_every,
                     lambda text: print(text, flush=True))
    except BaseException:
        print(f"seed {options.seed}; what is there stays in {folder}", flush=True)
        raise
    shutil.rmtree(folder)
    print(describe(result))


if __name__ == "__main__":
    main()
