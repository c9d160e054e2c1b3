"""Where an experiment runs: on the hosts of a lab (scripts/lab.py), or on this machine as it is.

    with open_place("auto") as place:
        place.link(2e9, delay_ms=0.05)
        output = place.run(2, ["build/release/tests/bench/bench_fuse", …])

A lab has a link whose rate and delay are asked for; the local place has shared memory, whose speed is the machine's.
Both give a rank one thread to compute, and both say whether it has two cores, one to compute and one for progress, or
cores are shared (lab.SHARED).
"""
import contextlib
import os
import platform
import re
import shlex

import lab as laboratory
from runner import ROOT, Runner

TIMEOUT_S = 300
FREE_LINK = 40e9  # bits per second: as good as none


class PlaceError(RuntimeError):
    pass


class Place:
    """`commands` are those that were run here, as they can be typed."""

    def __init__(self, lab=None):
        self.lab, self.kind, self.hosts = lab, "lab" if lab else "local", lab.hosts if lab else 1
        self.cores, self.runner, self.commands = len(os.sched_getaffinity(0)), Runner(gently=True), []

    @property
    def ranks(self):
        return self.lab.hosts if self.lab else self.cores // laboratory.CORES_PER_RANK

    def enough(self, ranks):
        return laboratory.enough(ranks, self.cores)

    def link(self, rate, delay_ms=0):
        """rate: bits per second, each way."""
        if not self.lab:
            raise PlaceError(f"the link of this machine's shared memory cannot be set to {rate / 1e9:g} Gbit/s; "
                             "a lab can: scripts/lab.py (Linux, root)")
        self.lab.set_link(rate, delay_ms)

    def link_text(self):
        if not self.lab:
            return "shared memory"
        return f"TCP, {self.lab.rate / 1e9:g} Gbit/s each way, {self.lab.delay_ms:g} ms delay" if self.lab.rate else "TCP"

    def describe(self):
        mpi = self.runner.printed("mpirun", "--version").splitlines()
        # A virtual machine's name may say no more than who made it.
        cpu = [re.search(rf"^{field}: *(.+)$", self.runner.printed("lscpu"), re.MULTILINE)
               for field in ("Model name", "CPU family", "Model")]
        return {"place": self.kind, "hosts": self.hosts, "ranks": self.ranks, "cores": self.cores,
                "processor": "{} (family {}, model {})".format(*(field[1] for field in cpu)) if all(cpu) else platform.machine(),
                "kernel": platform.release(), "system": platform.system(), "mpi": mpi[0] if mpi else "none",
                "link": self.link_text()}

    def run(self, ranks, command, env=None, timeout=TIMEOUT_S):
        """What it prints."""
        command = list(map(str, command))
        self.write_down(ranks, command, env or {})
        if self.lab:
            result = self.runner.run([*self.lab.mpirun(ranks, env), *command], timeout)
        else:
            result = self.runner.run([f"{ROOT}/scripts/mpirun.sh", "-np", ranks, *command], timeout,
                                     {"OMP_NUM_THREADS": "1", **(env or {})})
        if result.status:
            why = (f"ran past {timeout} s" if result.ended else "killed, perhaps for want of memory"
                   if result.status == 137 else f"exit status {result.status}")
            raise PlaceError(f"{why}: {shlex.join(command)} on {ranks} ranks ({self.kind}, {self.link_text()})\n"
                             + result.output[-4000:])
        return result.output

    def write_down(self, ranks, command, env):
        launcher = ["scripts/mpirun.sh", "-np", str(ranks)]
        if self.lab:
            launcher = ["scripts/lab.py", "--hosts", str(ranks)]
            launcher += ["--rate", f"{self.lab.rate / 1e6:.6g}mbit"] if self.lab.rate else []
            launcher += ["--delay", f"{self.lab.delay_ms:g}ms"] if self.lab.delay_ms else []
            launcher += ["--"]
        text = shlex.join([*(f"{name}={value}" for name, value in env.items()), *launcher, *command])
        text = re.sub(r"\S*/commfuse-report-\w+/", "$DIR/", text).replace(f"{ROOT}/", "")
        if text not in self.commands:
            self.commands.append(text)


@contextlib.contextmanager
def open_place(kind="auto"):
    """kind: lab, local, or auto (a lab where one can be had). As many hosts as the cores serve, two at least."""
    if kind == "local" or kind == "auto" and laboratory.obstacle():
        yield Place()
        return
    with laboratory.Lab(max(2, min(8, len(os.sched_getaffinity(0)) // laboratory.CORES_PER_RANK))) as lab:
        yield Place(lab)
