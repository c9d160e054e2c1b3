#!/usr/bin/env python3
"""Several hosts on one machine, so that communication is slow and yet every figure can be explained.

    scripts/lab.py --plan --hosts 2 --rate 2gbit                     what would be created, and on which cores
    scripts/lab.py --hosts 2 --rate 2gbit --delay 0.05ms -- build/release/train_gpt --tp 2 …

A host is a network, UTS and mount namespace: it has its own name, its own eth0 and its own /dev/shm, and so Open MPI
takes the ranks of two hosts for what they would be on two machines and moves every byte through a TCP socket. The
hosts hang on a bridge in a namespace of its own; a token bucket on each eth0 limits what the host sends, so both
directions of a link run at the full rate at the same time. mpirun runs on host 0 and starts its daemons on the others
through a remote agent that enters their namespaces.

Nothing can be left behind, because nothing has a life of its own: all of it lives in one PID namespace whose first
process reads from a pipe that this process holds. However this process ends, SIGKILL included, the pipe closes, the
first process ends, the kernel kills all others of that PID namespace, and with them go namespaces, links, mounts and
files. The machine's own network, mounts and files are not touched.

Each rank gets two cores of its own: one to compute, one for the thread that makes progress on the transport (and for
the kernel's network work, which runs where the sender runs). What the kernel does for the receiver on behalf of a
packet also happens on the sender's core until it lands in the receiver's socket. With fewer cores the figures would
show the machine's scheduler, not the schedules; the lab then refuses, unless told to --share-cores.
"""
import argparse
import math
import os
import re
import shutil
import signal
import subprocess
import sys

CORES_PER_RANK = 2  # one computes, one makes progress
MTU = 9000
TOOLS = {"ip": "iproute2", "tc": "iproute2", "mpirun": "openmpi-bin", "unshare": "util-linux", "nsenter": "util-linux",
         "taskset": "util-linux", "mount": "mount", "hostname": "hostname"}
SETUP_S = 20
UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TIMES = {"us": 1e-3, "ms": 1, "s": 1e3}

# The daemon on a host, started by mpirun as "agent HOST COMMAND…".
AGENT = """#!/bin/sh
host=$1; shift
case $host in {cases}
*) echo "the lab has no host $host" >&2; exit 1;; esac
exec nsenter --target $pid --net --uts --mount -- env TMPDIR=/dev/shm taskset -c $cores sh -c "cd '$PWD'; $*"
"""

# A rank. commfuse widens a binding of two hardware threads or fewer to that of the parent process, which is
# meant for launchers that bind to one core; this shell stays, so that the parent has the same two.
RANK = """#!/bin/sh
case $OMPI_COMM_WORLD_RANK in {cases} esac
taskset -cp $cores $$ >/dev/null
"$@"
exit $?
"""

# Takes a share of a core: busy for that share of every period, asleep for the rest.
COMPETITOR = """
import os, sys, time
core, share, period = int(sys.argv[1]), float(sys.argv[2]), 0.002
os.sched_setaffinity(0, {core})
os.setpriority(os.PRIO_PROCESS, 0, -20)
print("ready", flush=True)
begin = time.perf_counter()
while True:
    while time.perf_counter() < begin + share * period: pass
    begin = max(begin + period, time.perf_counter())
    time.sleep(max(0, begin - time.perf_counter()))
"""


class LabError(RuntimeError):
    pass


class NotEnoughCores(LabError):
    pass


def run_checked(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def obstacle():
    """Why there can be no lab here, or None."""
    if sys.platform != "linux":
        return "the lab needs Linux: it is made of Linux's network namespaces"
    if os.geteuid() != 0:
        return "the lab needs root, to create network namespaces and to shape their links: sudo " + " ".join(sys.argv)
    missing = sorted({package for tool, package in TOOLS.items() if not shutil.which(tool)})
    if missing:
        return f"the lab needs tools that are missing: apt-get install {' '.join(missing)}"
    done = subprocess.run(["unshare", "--net", "--pid", "--fork", "--mount", "true"], capture_output=True, text=True)
    if done.returncode:
        return f"the lab needs namespaces, which this system refuses: {done.stderr.strip()} (a container without CAP_SYS_ADMIN?)"
    if "Open MPI" not in subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout:
        return "the lab needs Open MPI; the mpirun found is another"
    return None


def parse_rate(text):
    found = re.fullmatch(r"([\d.]+)\s*([kmg]?bit)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate; say 500mbit or 2gbit")
    return float(found[1]) * UNITS[found[2]]


def parse_ms(text):
    found = re.fullmatch(r"([\d.]+)\s*(us|ms|s)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; say 0.05ms or 50us")
    return float(found[1]) * TIMES[found[2]]


def core_list(cores):
    return ",".join(map(str, cores))


class Lab:
    """with Lab(hosts=2) as lab: lab.set_link(2e9, delay_ms=0.05); lab.run(2, ["build/release/train_gpt", …])"""

    def __init__(self, hosts=2, ranks_per_host=1, share_cores=False):
        self.hosts, self.ranks_per_host, self.share_cores = hosts, ranks_per_host, share_cores
        self.cores = sorted(os.sched_getaffinity(0))
        self.rate, self.delay_ms, self.jitter_ms = None, 0.0, 0.0
        self.init = None        # the first process; its end is the lab's
        self.first_pid = None   # as the machine sees it
        self.host_pids = []     # of each host's first process, as the lab sees them
        self.competitors = {}   # host → the process that slows it down

    # --- what it is ---

    def host_name(self, host):
        return f"lab{os.getpid()}h{host}"

    @staticmethod
    def address(host):
        return f"10.0.0.{host + 1}"

    def ranks(self):
        return self.hosts * self.ranks_per_host

    def cores_needed(self, ranks=None):
        return CORES_PER_RANK * (self.ranks() if ranks is None else ranks)

    def enough(self, ranks=None):
        ranks = self.ranks() if ranks is None else ranks
        need, have = self.cores_needed(ranks), len(self.cores)
        return have >= need, (f"{ranks} ranks need {need} cores (one to compute and one for progress each), "
                              f"this machine gives {have}")

    def rank_cores(self, rank):
        """The compute core and the progress core. Where they do not suffice: all cores, nothing to conclude."""
        mine = self.cores[CORES_PER_RANK * rank:CORES_PER_RANK * (rank + 1)]
        return mine if self.enough()[0] else self.cores

    def host_ranks(self, host):
        return range(host * self.ranks_per_host, (host + 1) * self.ranks_per_host)

    def host_cores(self, host):
        return sorted({core for rank in self.host_ranks(host) for core in self.rank_cores(rank)})

    def plan(self):
        lines = ["one PID namespace that ends with this process; in it one network namespace with a bridge, and"]
        for host in range(self.hosts):
            ranks = ", ".join(f"rank {r} on cores {core_list(self.rank_cores(r))}" for r in self.host_ranks(host))
            lines.append(f"host {host}: {self.host_name(host)}, eth0 {self.address(host)}/24, mtu {MTU}; {ranks}")
        ok, text = self.enough()
        lines.append(text + ("" if ok else ": TOO FEW, no conclusions can be drawn"))
        return "\n".join(lines)

    # --- its life ---

    def __enter__(self):
        if reason := obstacle():
            raise LabError(reason)
        ok, text = self.enough()
        if not ok and not self.share_cores:
            raise NotEnoughCores(text)
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def start(self):
        # /proc still shows the machine's processes when the first process reads its number there.
        script = "read pid rest </proc/self/stat && mount -t proc proc /proc && echo $pid && exec cat"
        self.init = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--net", "--mount", "--uts", "sh", "-c", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        line = self.init.stdout.readline()
        if not line:
            raise LabError("the lab's first process did not start")
        self.first_pid = int(line)
        self.at_hub("ip", "link", "add", "bridge", "mtu", str(MTU), "type", "bridge")
        self.at_hub("ip", "link", "set", "bridge", "up")
        for host in range(self.hosts):
            self.add_host(host)
        for host in range(self.hosts):
            self.write_files(host)

    def add_host(self, host):
        script = f"hostname {self.host_name(host)} && mount -t tmpfs -o mode=1777 tmpfs /dev/shm && echo $$ && exec sleep infinity"
        holder = subprocess.Popen([*self.hub(), "unshare", "--net", "--uts", "--mount", "sh", "-c", script],
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True)
        line = holder.stdout.readline()
        if not line:
            raise LabError(f"host {host} did not start")
        self.host_pids.append(line.strip())
        self.at_hub("ip", "link", "add", f"port{host}", "mtu", str(MTU), "type", "veth",
                    "peer", "name", "eth0", "mtu", str(MTU), "netns", self.host_pids[host])
        self.at_hub("ip", "link", "set", f"port{host}", "master", "bridge", "up")
        self.at(host, "ip", "link", "set", "lo", "up")
        self.at(host, "ip", "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        self.at(host, "ip", "link", "set", "eth0", "up")

    def write_files(self, host):
        names = "127.0.0.1 localhost\n" + "".join(f"{self.address(h)} {self.host_name(h)}\n" for h in range(self.hosts))
        self.write(host, "/dev/shm/hosts", names)
        self.at(host, "mount", "--bind", "/dev/shm/hosts", "/etc/hosts")
        agent = " ".join(f"{self.host_name(h)}) pid={pid} cores={core_list(self.host_cores(h))};;"
                         for h, pid in enumerate(self.host_pids))
        ranks = " ".join(f"{r}) cores={core_list(self.rank_cores(r))};;" for r in range(self.ranks()))
        slots = "".join(f"{self.host_name(h)} slots={self.ranks_per_host}\n" for h in range(self.hosts))
        self.write(host, "/dev/shm/agent", AGENT.replace("{cases}", agent))
        self.write(host, "/dev/shm/rank", RANK.replace("{cases}", ranks))
        self.write(host, "/dev/shm/hostfile", slots)
        self.at(host, "chmod", "+x", "/dev/shm/agent", "/dev/shm/rank")

    def write(self, host, path, text):
        self.at(host, "sh", "-c", f"cat >{path}", input=text)

    def close(self):
        if self.init is None:
            return
        self.init.stdin.close()
        self.init.wait()
        self.init.stdout.close()
        self.init, self.host_pids, self.competitors = None, [], {}

    # --- entering it ---

    def hub(self):
        return ["nsenter", "--target", str(self.first_pid), "--pid", "--mount", "--net", "--"]

    def enter(self, host):
        return [*self.hub(), "nsenter", "--target", self.host_pids[host], "--net", "--uts", "--mount", "--"]

    def at_hub(self, *command):
        return run_checked([*self.hub(), *command], timeout=SETUP_S)

    def at(self, host, *command, **options):
        return run_checked([*self.enter(host), *command], timeout=SETUP_S, **options)

    # --- its links and its speeds ---

    def set_link(self, rate_bits_per_s, delay_ms=0.0, jitter_ms=0.0):
        """What every host can send, and how long it is under way."""
        if delay_ms or jitter_ms:
            raise LabError("delay: not yet")
        # A bucket of one large segment at least, else of a hundred microseconds; a queue that drops nothing.
        burst = max(2 * 65536, math.ceil(rate_bits_per_s / 8 * 100e-6))
        for host in range(self.hosts):
            self.at(host, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", f"{rate_bits_per_s:.0f}bit",
                    "burst", str(burst), "limit", str(64 << 20))
        self.rate, self.delay_ms, self.jitter_ms = rate_bits_per_s, delay_ms, jitter_ms

    def slow(self, host, factor):
        """From now on this host computes `factor` times slower; 1 ends it."""
        for process in self.competitors.pop(host, []):
            process.stdin.close()
            process.kill()
            process.wait()
            process.stdout.close()
        if factor == 1:
            return
        raise LabError("slow: not yet")

    # --- programs ---

    def mpirun(self, ranks, env=None, timeout_s=None):
        """The command that goes before PROGRAM ARGUMENTS. Open MPI would push a whole message into the connection
        at once, and what it says about the next one would wait behind it, so the two directions of a link would take
        turns: flags 9 make it send fragments, and small socket buffers keep the queue before the link short."""
        settings = {"plm_rsh_agent": "/dev/shm/agent", "pml": "ob1", "btl": "tcp,self", "btl_tcp_if_include": "eth0",
                    "oob_tcp_if_include": "eth0", "btl_tcp_links": "1", "btl_tcp_flags": "9",
                    "btl_tcp_sndbuf": "131072", "btl_tcp_rcvbuf": "131072", "orte_tmpdir_base": "/dev/shm"}
        exports = {"OMP_NUM_THREADS": "1", **(env or {})}
        command = [*self.enter(0), "env", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                   "TMPDIR=/dev/shm", "taskset", "-c", core_list(self.host_cores(0))]
        if timeout_s:
            command += ["timeout", "--kill-after=5", str(timeout_s)]
        command += ["mpirun", "-np", str(ranks), "--hostfile", "/dev/shm/hostfile", "--bind-to", "none"]
        for name, value in settings.items():
            command += ["--mca", name, value]
        for name, value in exports.items():
            command += ["-x", f"{name}={value}"]
        return [*command, "/dev/shm/rank"]

    def run(self, ranks, program, env=None, timeout_s=None, **options):
        if ranks > self.ranks():
            raise LabError(f"{ranks} ranks on {self.hosts} hosts of {self.ranks_per_host}")
        return subprocess.run([*self.mpirun(ranks, env, timeout_s), *program], text=True, **options)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rate", type=parse_rate, default=1e9, help="what each host can send: 500mbit, 2gbit (default 1gbit)")
    parser.add_argument("--delay", type=parse_ms, default=0, help="how long a packet is under way: 0.05ms, 50us")
    parser.add_argument("--jitter", type=parse_ms, default=0, help="by how much that varies, up and down")
    parser.add_argument("--share-cores", action="store_true", help="run although cores do not suffice; times mean nothing")
    parser.add_argument("--plan", action="store_true", help="say what would be created and on which cores; create nothing")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ARGUMENTS")
    o = parser.parse_args()
    lab = Lab(o.hosts, o.ranks_per_host, o.share_cores)
    if o.plan:
        print(lab.plan())
        return 0
    program = o.program[1:] if o.program[:1] == ["--"] else o.program
    if not program:
        parser.error("no program given; --plan shows what would be created")
    try:
        with lab:
            lab.set_link(o.rate, o.delay, o.jitter)
            if not lab.enough()[0]:
                print(f"lab: {lab.enough()[1]}: TOO FEW, times mean nothing", file=sys.stderr)
            return lab.run(lab.ranks(), program).returncode
    except NotEnoughCores as few:
        sys.exit(f"lab: {few}; use fewer hosts, or --share-cores to see that it runs")
    except LabError as error:
        sys.exit(f"lab: {error}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
