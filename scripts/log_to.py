#!/usr/bin/env python3
"""Send the log of a run to TensorBoard or Weights & Biases, while it grows or when it is finished.

    scripts/install_deps.sh --log-to                                          # tensorboardX, in build/venv
    build/venv/bin/python scripts/log_to.py run.jsonl --tensorboard DIR       # then: tensorboard --logdir DIR
    build/venv/bin/pip install wandb
    build/venv/bin/python scripts/log_to.py run.jsonl --wandb PROJECT         # WANDB_MODE=offline: into ./wandb, for `wandb sync`
             … --follow                                                       # until the run has ended

All numbers of steps, validation and HellaSwag become curves over the steps done (exposed_comm_ms is the time in which ranks waited
for each other), samples become texts, options the run's configuration. A resumed run rewrites its log: all is sent again. In
TensorBoard it replaces what was sent before, as another run does; in Weights & Biases the log's run is the id, which later calls
continue.
"""
import contextlib
import html
import itertools
import json
import os
import re
import sys
import time

import run_log
from command import Parser, Problem, status_of

POLL_S = 1.0
CURVES = {"step": "train", "val": "val", "hellaswag": "hellaswag"}


class TensorBoard:
    def __init__(self, folder):
        from tensorboardX import SummaryWriter
        files = itertools.count()
        self.writer, self.new = None, lambda: SummaryWriter(folder, purge_step=0, flush_secs=POLL_S,
                                                            filename_suffix=f".{next(files):06d}")

    def begin(self, _):
        """Hides what was sent before, by earlier calls too."""
        self.close()
        self.writer = self.new()

    def show(self, kind, step, what):
        if kind == "numbers":
            for name, value in what.items():
                self.writer.add_scalar(name, value, step)
        else:
            text = what if kind == "sample" else json.dumps(what, indent=1)
            self.writer.add_text(kind, "    " + text.replace("\n", "\n    "), step)  # as it is

    def close(self):
        if self.writer:
            self.writer.close()


class WeightsAndBiases:
    def __init__(self, project):
        import wandb
        self.wandb, self.run, self.name = wandb, None, None
        self.options = dict(project=project, resume="allow")

    def begin(self, name):
        if name != self.name:
            self.close()
            self.name, self.run = name, self.wandb.init(id=re.sub(r"[^\w-]", "-", name)[:64] or None, **self.options)
            self.run.define_metric("*", step_metric="step")

    def show(self, kind, step, what):
        if kind == "config":
            self.run.config.update(what, allow_val_change=True)
        else:
            self.run.log({"step": step, **(what if kind == "numbers" else
                                           {"sample": self.wandb.Html(f"<pre>{html.escape(what)}</pre>")})})

    def close(self):
        if self.run:
            self.run.finish()


def steps_done(event):
    """-1: it does not belong to one."""
    return event["step"] + (event["event"] == "step") if event["event"] in run_log.NEEDED else -1  # the log counts steps from 0


def changes(path, follow):
    """Yields the events of a log with kind and steps done, first ("begin", 0, run); all of them again when it has been written
    again, as by a resumed run."""
    log, begun, ended, last = (), False, False, None
    no_log = Problem(f"{path} does not begin with a run's options", run_log.HINT)
    while True:
        there = os.path.exists(path) or not follow  # otherwise it may come later
        if there and not (log and log.stay()):
            log, begun = run_log.Lines(path), False
        for event in log:
            kind = event["event"]
            if kind == "config":
                begun = True
                yield "begin", 0, event.get("run")
            if not begun:
                raise no_log
            if event != last:  # a line of which only the end is missing comes again
                yield kind, steps_done(event), event
            last, ended = event, kind == "end"
        if not (begun or follow):
            raise no_log
        if ended or not follow:
            return
        time.sleep(POLL_S)


def send(changes, target):
    """Sends what each kind of event holds."""
    for kind, step, event in changes:
        if kind == "begin":
            target.begin(str(event or ""))
        elif kind in ("config", "resume"):
            target.show("config", 0, {name: value for name, value in event.items()
                                      if name != "event" and not isinstance(value, (dict, list))})
        elif kind == "sample":
            target.show(kind, step, event["text"])
        elif kind in CURVES:
            target.show("numbers", step, {f"{CURVES[kind]}/{name}": value for name, value in event.items()
                                          if name != "step" and run_log.is_number(value)})


def main():
    parser = Parser(__doc__)
    parser.add_argument("log", metavar="LOG")
    parser.add_argument("--tensorboard", metavar="DIR")
    parser.add_argument("--wandb", metavar="PROJECT")
    parser.add_argument("--follow", action="store_true", help="until the run has ended; the log may come later")
    given = parser.parse_args()
    if bool(given.tensorboard) == bool(given.wandb):
        parser.error("give either --tensorboard DIR or --wandb PROJECT")
    try:
        target = TensorBoard(given.tensorboard) if given.tensorboard else WeightsAndBiases(given.wandb)
    except ImportError as error:
        raise Problem(str(error), "scripts/install_deps.sh --log-to (wandb: build/venv/bin/pip install wandb), then "
                      f"build/venv/bin/python {sys.argv[0]}") from None
    try:
        with contextlib.suppress(KeyboardInterrupt):
            send(changes(given.log, given.follow), target)
    finally:
        target.close()


if __name__ == "__main__":
    sys.exit(status_of(main))
