"""The place of an experiment: the hosts of a lab (scripts/lab.py), or this machine over shared memory.

Only a lab's links have a rate. In both a rank has one compute thread.
"""
import os
import re

import lab
from runner import Failed, Runner, shown

TIMEOUT_S = 7200    # only a limit: ranks that hang end themselves after a minute
FREE_LINK = 40e9    # bits per second: practically unlimited


class Place:
    """kind: lab, local, or auto (a lab if possible). ratio: of the transfers of `training` to its ideal step. rate: of the lab's
    links, bits per second each way. commands: what was run, in a form that can be typed."""

    def __init__(self, kind="auto", ratio=0.5):
        obstacle = kind != "local" and lab.obstacle()
        if kind == "lab" and obstacle:
            raise Failed(obstacle, "--place local measures over shared memory")
        self.kind, self.ratio = "local" if kind == "local" or obstacle else "lab", ratio
        self.cores, self.runner = len(os.sched_getaffinity(0)), Runner(gently=True, bound=True)
        self.rate, self.commands = FREE_LINK, []
        self.ranks = max(2, min(8, self.cores // lab.CORES_PER_RANK))

    def run(self, ranks, command, timeout=TIMEOUT_S):
        """Runs a command on a number of ranks and returns its output."""
        launcher = ["scripts/mpirun.sh", "-np", ranks]
        if self.kind == "lab":
            launcher = ["scripts/lab.py", "--hosts", ranks, "--rate", f"{self.rate / 1e6:.6g}mbit", "--"]
        command = [*launcher, *command]
        text = re.sub(r"\S*/commfuse-report-\w+/", "$DIR/", shown(command))
        if text not in self.commands:
            self.commands.append(text)
        return self.runner.output(command, timeout, OMP_NUM_THREADS="1")
