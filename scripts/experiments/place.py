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
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import lab as laboratory

TIMEOUT_S = 300
FREE_LINK = 40e9  # bits per second: as good as none


class PlaceError(RuntimeError):
    pass


def processor():
    with contextlib.suppress(OSError):
        text = pathlib.Path("/proc/cpuinfo").read_text()
        found = [re.search(rf"^{field}\s*:\s*(.+)$", text, re.MULTILINE)
                 for field in ("model name", "cpu family", "model")]
        if all(found):  # a virtual machine's name may say no more than who made it
            return "{} (family {}, model {})".format(*(field[1] for field in found))
        if found[0]:
            return found[0][1]
    return platform.machine()


def mpi_version():
    with contextlib.suppress(OSError, IndexError):
        return subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout.splitlines()[0]
    return "none"


class Place:
    kind = None
    hosts = 1
    rate, delay_ms, jitter_ms = None, 0.0, 0.0

    def __init__(self):
        self.cores = len(os.sched_getaffinity(0))

    @property
    def ranks(self):
        return self.cores // laboratory.CORES_PER_RANK

    def enough(self, ranks):
        return laboratory.enough(ranks, self.cores)

    def link(self, rate_bits_per_s, delay_ms=0, jitter_ms=0):
        raise PlaceError(f"the link of this machine's shared memory cannot be set to {rate_bits_per_s / 1e9:g} Gbit/s; "
                         "a lab can: scripts/lab.py (Linux, root)")

    def slow(self, host, factor):
        raise PlaceError("only the hosts of a lab can be slowed down: scripts/lab.py (Linux, root)")

    def round_trip_ms(self):
        raise PlaceError("shared memory has no round trip; a lab's link has")

    def link_text(self):
        return "shared memory"

    def describe(self):
        return {"place": self.kind, "hosts": self.hosts, "ranks": self.ranks, "processor": processor(),
                "cores": self.cores, "kernel": platform.release(), "system": platform.system(), "mpi": mpi_version(),
                "link": self.link_text()}

    def run(self, ranks, command, env=None, timeout=TIMEOUT_S, each_line=None):
        """What it prints; each_line(line) is called for every line as it comes."""
        begin = time.monotonic()
        status, output, errors = listened(*self.start(ranks, list(map(str, command)), env or {}, timeout), each_line)
        if status:
            late = status in (124, 137) and time.monotonic() - begin >= timeout
            why = (f"ran past {timeout} s" if late else "killed, perhaps for want of memory" if status == 137
                   else f"exit status {status}")
            raise PlaceError(f"{why}: {' '.join(map(str, command))} on {ranks} ranks ({self.kind}, {self.link_text()})\n"
                             + (output + errors)[-4000:])
        return output


def listened(command, env, each_line=None):
    """Status, output and errors of a command."""
    with tempfile.TemporaryFile("w+") as errors, subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE,
                                                                  stderr=errors, text=True) as process:
        lines, problem = [], None
        for line in process.stdout:
            lines.append(line)
            try:
                if each_line and not problem:
                    each_line(line)
            except Exception as error:  # told when the command has ended: in a lab nobody here could end its ranks
                problem = error
        status = process.wait()
        if problem:
            raise problem
        errors.seek(0)
        return status, "".join(lines), errors.read()


class LocalPlace(Place):
    kind = "local"

    def start(self, ranks, command, env, timeout):
        return (["timeout", "--kill-after=5", str(timeout), ROOT / "scripts/mpirun.sh", "-np", str(ranks), *command],
                {**os.environ, "OMP_NUM_THREADS": "1", **env})


class LabPlace(Place):
    kind = "lab"

    def __init__(self, lab):
        super().__init__()
        self.lab, self.hosts = lab, lab.hosts

    @property
    def ranks(self):
        return self.lab.ranks()

    def link(self, rate_bits_per_s, delay_ms=0, jitter_ms=0):
        self.lab.set_link(rate_bits_per_s, delay_ms, jitter_ms)
        self.rate, self.delay_ms, self.jitter_ms = rate_bits_per_s, delay_ms, jitter_ms

    def slow(self, host, factor):
        self.lab.slow(host, factor)

    def round_trip_ms(self):
        return self.lab.round_trip_ms()

    def link_text(self):
        if self.rate is None:
            return "TCP, no rate set"
        return (f"TCP, {self.rate / 1e9:g} Gbit/s each way, {self.delay_ms:g} ms delay"
                + (f", {self.jitter_ms:g} ms jitter" if self.jitter_ms else ""))

    def start(self, ranks, command, env, timeout):
        return [*self.lab.mpirun(ranks, env, timeout), *command], None


@contextlib.contextmanager
def open_place(kind="auto", hosts=None):
    """kind: lab, local, or auto (a lab where one can be had). As many hosts as the cores serve, two at least."""
    if kind == "auto":
        kind = "local" if laboratory.obstacle() else "lab"
    if kind == "local":
        yield LocalPlace()
        return
    hosts = hosts or max(2, min(8, len(os.sched_getaffinity(0)) // laboratory.CORES_PER_RANK))
    with laboratory.Lab(hosts) as lab:
        yield LabPlace(lab)
