#!/usr/bin/env python3
"""Send a log of train_gpt to TensorBoard or Weights & Biases while it grows, or draw losses and speed of one or several.

    scripts/install_deps.sh --bpe && build/venv/bin/pip install tensorboard wandb    # or one of them
    build/venv/bin/python scripts/watch_log.py run.jsonl --tensorboard DIR           # then: tensorboard --logdir DIR
    build/venv/bin/python scripts/watch_log.py run.jsonl --wandb PROJECT             # WANDB_MODE=offline: into ./wandb
    scripts/watch_log.py first.jsonl second.jsonl --png loss.png

All numbers of steps and validations become curves over the steps done. It waits for a log that is not there yet, and ends when its
run has taken all steps. A resumed run writes its log again, and all is sent again: in TensorBoard it replaces what was sent into DIR;
Weights & Biases, which replaces nothing, gets another run of the same group.
"""
import contextlib
import os
import sys
import time

import run_log
from command import Parser, status_of

POLL_S = 1.0


def follow(log):
    """(step, numbers, None) until the run is done; (0, {}, options) where all begins, or begins again."""
    def grown(file):
        """Whole lines, until another file has the log's name."""
        line = b""
        while os.path.samestat(os.stat(log), os.fstat(file.fileno())):
            line += file.readline()
            if line.endswith(b"\n"):
                yield line
                line = b""
            else:
                time.sleep(POLL_S)

    while True:
        try:
            for event in run_log.lines(log, read=grown):
                kind = event["event"]
                if kind == "end" and "stopped_by" not in event:
                    return
                if kind in ("step", "val"):
                    yield event["step"] + (kind == "step"), {f"{kind}/{name}": value for name, value in event.items()
                                                             if name != "step" and type(value) in (int, float)}, None
                elif kind == "config":
                    yield 0, {}, event
        except FileNotFoundError:  # it may come
            time.sleep(POLL_S)


def send_to_tensorboard(log, folder):
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    with contextlib.closing(EventFileWriter(folder, flush_secs=POLL_S)) as writer:
        for step, numbers, options in follow(log):
            event = Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START) if options else None)
            for name, value in numbers.items():
                event.summary.value.add(tag=name, simple_value=value)
            writer.add_event(event)


def send_to_wandb(log, project):
    import wandb
    for step, numbers, options in follow(log):
        if options:
            wandb.finish()
            wandb.init(project=project, group=options["run"], config=options).define_metric("*", step_metric="steps")
        wandb.log({"steps": step, **numbers})
    wandb.finish()


def draw(logs, picture):
    import plots
    figure, (loss, speed) = plots.plt.subplots(1, 2, figsize=(9, 3.6))
    for log in logs:
        steps, vals = ([event for event in run_log.lines(log) if event["event"] == kind] for kind in ("step", "val"))
        line, = loss.plot([event["step"] + 1 for event in steps], [event["loss"] for event in steps], linewidth=0.7, label=log)
        loss.plot([event["step"] for event in vals], [event["loss"] for event in vals], "o-", markersize=3, color=line.get_color())
        speed.plot([event["step"] + 1 for event in steps], [event["tokens_per_s"] for event in steps], linewidth=0.7)
    loss.set(xlabel="steps", ylabel="loss, nats per token; dots: validation")
    speed.set(xlabel="steps", ylabel="tokens/s", ylim=(0, None))
    loss.legend()
    plots.save(figure, picture)


def main():
    parser = Parser(__doc__)
    parser.add_argument("log", metavar="LOG", nargs="+")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--tensorboard", metavar="DIR")
    where.add_argument("--wandb", metavar="PROJECT")
    where.add_argument("--png", metavar="FILE")
    given = parser.parse_args()
    if given.png:
        draw(given.log, given.png)
    elif len(given.log) > 1:
        parser.error("several logs are for --png")
    elif given.tensorboard:
        send_to_tensorboard(given.log[0], given.tensorboard)
    else:
        send_to_wandb(given.log[0], given.wandb)


if __name__ == "__main__":
    sys.exit(status_of(main))
