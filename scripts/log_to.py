#!/usr/bin/env python3
"""Send the log of a run to TensorBoard or Weights & Biases, while it grows or when it is finished.

    scripts/install_deps.sh --log-to                                          # tensorboardX, in build/venv
    build/venv/bin/python scripts/log_to.py run.jsonl --tensorboard DIR       # then: tensorboard --logdir DIR
    build/venv/bin/pip install wandb
    build/venv/bin/python scripts/log_to.py run.jsonl --wandb PROJECT         # --offline: into ./wandb, for `wandb sync`
             … --follow                                                       # until the run has ended

All numbers of steps, validation and HellaSwag become curves over the steps done (exposed_comm_ms is the time in which ranks waited
for each other), samples become texts, options the run's configuration. No event is sent twice, although a resumed run rewrites its
log.
"""
import argparse
import contextlib
import html
import json
import os
import sys
import time

import run_log

POLL_S = 1.0
CURVES = {"step": "train", "val": "val", "hellaswag": "hellaswag"}


def tensorboard(folder):
    """Returns two functions: one sends a kind, a step and its values, the other closes."""
    from tensorboardX import SummaryWriter
    writer = SummaryWriter(folder, purge_step=0)  # hides what an earlier call has written there

    def show(kind, step, what):
        if kind == "numbers":
            for name, value in what.items():
                writer.add_scalar(name, value, step)
        else:
            text = what if kind == "sample" else json.dumps(what, indent=1)
            writer.add_text(kind, "    " + text.replace("\n", "\n    "), step)  # as it is
    return show, writer.close


def weights_and_biases(project, offline):
    import wandb
    run = wandb.init(project=project, mode="offline" if offline else "online")
    run.define_metric("*", step_metric="step")

    def show(kind, step, what):
        if kind == "config":
            run.config.update(what, allow_val_change=True)
        else:
            run.log({"step": step, **(what if kind == "numbers" else {"sample": wandb.Html(f"<pre>{html.escape(what)}</pre>")})})
    return show, run.finish


def events(path, follow):
    """Yields each event once, although the log may be rewritten."""
    sent, before = set(), None
    while True:
        stat = os.stat(path)
        if before == (stat.st_ino, stat.st_size):
            time.sleep(POLL_S)
            continue
        before, ended = (stat.st_ino, stat.st_size), False
        for event in run_log.events(path):
            ended = event["event"] == "end"
            key = event["event"], event.get("step")
            if key not in sent:
                sent.add(key)
                yield event
        if ended or not follow:
            return


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", metavar="LOG")
    parser.add_argument("--tensorboard", metavar="DIR")
    parser.add_argument("--wandb", metavar="PROJECT")
    parser.add_argument("--offline", action="store_true", help="with --wandb: send nothing, write ./wandb")
    parser.add_argument("--follow", action="store_true", help="continue until the run has ended")
    given = parser.parse_args()
    if bool(given.tensorboard) == bool(given.wandb):
        parser.error("give either --tensorboard DIR or --wandb PROJECT")
    try:
        with run_log.readable(given.log):
            first = next(events(given.log, follow=False), None)
            if first is None or first["event"] != "config":
                sys.exit(f"error: {given.log} does not begin with a run's options\nhint:  {run_log.HINT}")
            show, close = tensorboard(given.tensorboard) if given.tensorboard else weights_and_biases(given.wandb, given.offline)
            with contextlib.suppress(KeyboardInterrupt):
                for event in events(given.log, given.follow):
                    kind, step = event["event"], event.get("step", 0)
                    if kind in ("config", "resume"):
                        show("config", 0, {name: value for name, value in event.items() if name != "event"})
                    elif kind == "sample":
                        show("sample", step, event["text"])
                    elif kind in CURVES:
                        show("numbers", step + (kind == "step"), {  # the log counts these from 0
                            f"{CURVES[kind]}/{name}": value for name, value in event.items()
                            if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)})
            close()
    except ImportError as error:
        sys.exit(f"error: {error}\nhint:  scripts/install_deps.sh --log-to (wandb: build/venv/bin/pip install wandb), then "
                 f"build/venv/bin/python {sys.argv[0]}")


if __name__ == "__main__":
    main()
