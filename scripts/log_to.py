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
        self.folder, self.Writer, self.writers = folder, SummaryWriter, []

    def begin(self, _):
        """Hides what was sent before, by earlier calls too."""
        self.close()
        self.writers.append(self.Writer(self.folder, purge_step=0, flush_secs=POLL_S, filename_suffix=f".{len(self.writers):06d}"))

    def numbers(self, step, values):
        for name, value in values.items():
            self.writers[-1].add_scalar(name, value, step)

    def text(self, name, step, text):
        self.writers[-1].add_text(name, "    " + text.replace("\n", "\n    "), step)  # as it is

    def config(self, options):
        self.text("config", 0, json.dumps(options, indent=1))

    def close(self):
        for writer in self.writers[-1:]:
            writer.close()


class WeightsAndBiases:
    def __init__(self, project):
        import wandb
        self.wandb, self.run, self.name, self.project = wandb, None, None, project

    def begin(self, name):
        if name != self.name:
            self.close()
            self.name, identity = name, re.sub(r"[^\w-]", "-", name)[:64] or None
            self.run = self.wandb.init(id=identity, project=self.project, resume="allow")
            self.run.define_metric("*", step_metric="step")

    def numbers(self, step, values):
        self.run.log({"step": step, **values})

    def text(self, name, step, text):
        self.numbers(step, {name: self.wandb.Html(f"<pre>{html.escape(text)}</pre>")})

    def config(self, options):
        self.run.config.update(options, allow_val_change=True)

    def close(self):
        if self.run:
            self.run.finish()


def events(path, follow):
    """The events of a log; all of them again when it has been written again, as by a resumed run."""
    log, last, no_log = (), None, Problem(f"{path} does not begin with a run's options", run_log.HINT)
    while True:
        there = os.path.exists(path) or not follow  # otherwise it may come later
        if there and not (log and log.stay()):
            log, last = run_log.Lines(path), None
        for event in log:
            if last is None and event["event"] != "config":
                raise no_log
            if event != last:  # a line of which only the end is missing comes again
                yield event
            last = event
        if last is None and not follow:
            raise no_log
        if not follow or last and last["event"] == "end":
            return
        time.sleep(POLL_S)


def send(events, target):
    """Sends what each kind of event holds. The log counts steps from 0, curves those done."""
    for event in events:
        kind = event["event"]
        if kind == "config":
            target.begin(str(event.get("run") or ""))
        if kind in ("config", "resume"):
            target.config({name: value for name, value in event.items() if name != "event" and not isinstance(value, (dict, list))})
        elif kind == "sample":
            target.text(kind, event["step"], event["text"])
        elif kind in CURVES:
            target.numbers(event["step"] + (kind == "step"), {
                f"{CURVES[kind]}/{name}": value for name, value in event.items() if name != "step" and run_log.is_number(value)})


def main():
    parser = Parser(__doc__)
    parser.add_argument("log", metavar="LOG")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--tensorboard", metavar="DIR")
    where.add_argument("--wandb", metavar="PROJECT")
    parser.add_argument("--follow", action="store_true", help="until the run has ended; the log may come later")
    given = parser.parse_args()
    try:
        target = TensorBoard(given.tensorboard) if given.tensorboard else WeightsAndBiases(given.wandb)
    except ImportError as error:
        raise Problem(str(error), "scripts/install_deps.sh --log-to (wandb: build/venv/bin/pip install wandb), then "
                      f"build/venv/bin/python {sys.argv[0]}") from None
    with contextlib.closing(target), contextlib.suppress(KeyboardInterrupt):
        send(events(given.log, given.follow), target)


if __name__ == "__main__":
    sys.exit(status_of(main))
