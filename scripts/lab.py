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

Each rank gets two cores of its own: its main thread computes on one, its other threads, those of the transport, get
the other. The kernel's network work, the receiver's share of it included, is done where the packet was sent: counted in
/proc/softirqs, 99 in 100 of these interrupts land on the progress cores, so the link does not slow computation down by
itself. Where there are fewer, a rank's threads share what it gets: see SHARED. The lab says so, and so does every report.

What is not exact: an idle link lets the first 68 KiB pass at once (a quarter of a millisecond above 2 Gbit/s), as a
token bucket does; the rate includes headers, about 1 %; a delay is longer by some tens of microseconds, the wake-ups of
the delay line (delay_line.c); Lab.round_trip_ms() measures what it has become.
"""
import argparse
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

CORES_PER_RANK = 2  # one computes, one makes progress
SHARED = ("cores are shared: threads that move bytes take time from those that compute, so steps with transfers take longer, "
          "and overlapping gains less, than on cores of their own")
MTU = 9000
HOSTS_MAX = 250  # of one /24 network
TOOLS = {"ip": "iproute2", "tc": "iproute2", "bridge": "iproute2", "mpirun": "openmpi-bin", "unshare": "util-linux",
         "nsenter": "util-linux", "taskset": "util-linux", "mount": "mount", "hostname": "hostname"}

# A bucket that one of the largest segments fills, or a fraction of a millisecond: timers are late by tens of
# microseconds, and what the bucket does not hold then is lost for the rate.
BURST_BYTES_MIN, BURST_S = 68 << 10, 250e-6
QUEUE_BYTES = 64 << 20  # nothing is dropped
# Windows wide enough for a long link, though little that is unsent waits in a socket: a message that the other side
# waits for would have to wait behind it. A link that was idle for a moment does not start slowly again.
TCP = {"tcp_rmem": "4096 4194304 33554432", "tcp_wmem": "4096 4194304 33554432", "tcp_notsent_lowat": "131072",
       "tcp_slow_start_after_idle": "0", "tcp_no_metrics_save": "1"}
EAGER_BYTES = 4 << 20
DELAY_LINE = "/dev/shm/delay_line"
HERE = pathlib.Path(__file__).resolve().parent
SLOWER_MAX = 10  # what takes more of a core than this is held back by the kernel's own limit on real-time processes
SETUP_S = 20
UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TIMES = {"us": 1e-3, "ms": 1, "s": 1e3}

# The daemon on a host, started by mpirun as "agent HOST COMMAND…".
AGENT = """#!/bin/sh
host=$1; shift
case $host in {cases}
*) echo "the lab has no host $host" >&2; exit 1;; esac
exec nsenter --target $pid --net --uts --mount -- env TMPDIR=/dev/shm taskset -c $cores sh -c 'cd "$0"; eval "$1"' "$PWD" "$*"
"""

# A rank: its main thread computes, on a core of its own; its other threads, which are the transport's, get another.
# The program makes its threads when it likes, so they are sorted for as long as it may still be starting. commfuse
# widens a binding of one core to that of the parent process, which is this shell, so that does no harm.
RANK = """#!/bin/sh
case $OMPI_COMM_WORLD_RANK in {cases} esac
taskset -cp $compute,$progress $$ >/dev/null
"$@" <&0 &
child=$!
sort_threads() {
    for task in /proc/$child/task/*; do
        [ -d $task ] || exit
        [ ${task##*/} = $child ] && core=$compute || core=$progress
        taskset -cp $core ${task##*/}
    done
}
(for pause in 0.2 0.3 0.5 1 2 4; do sleep $pause; sort_threads; done) </dev/null >/dev/null 2>&1 &
trap 'kill -TERM $child 2>/dev/null' TERM
while :; do
    wait $child
    status=$?
    kill -0 $child 2>/dev/null || exit $status
done
"""
RANK_ON_SHARED_CORES = "#!/bin/sh\nexec \"$@\"\n"

# Takes a share of a core: busy for that share of every period, asleep for the rest.
COMPETITOR = """
import os, sys, time
core, share, period = int(sys.argv[1]), float(sys.argv[2]), 0.002
os.sched_setaffinity(0, {core})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
print(os.getpid(), flush=True)
begin = time.perf_counter()
while True:
    while time.perf_counter() < begin + share * period: pass
    begin = max(begin + period, time.perf_counter())
    time.sleep(max(0, begin - time.perf_counter()))
"""


ECHO = """
import socket, sys
server = socket.create_server(("0.0.0.0", 0))
server.settimeout(float(sys.argv[1]))
print(server.getsockname()[1], flush=True)
peer, _ = server.accept()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while data := peer.recv(8): peer.sendall(data)
"""
PING = """
import socket, statistics, sys, time
peer, times = socket.create_connection((sys.argv[1], int(sys.argv[2]))), []
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(100):
    begin = time.perf_counter()
    peer.sendall(bytes(8)); peer.recv(8)
    times.append(time.perf_counter() - begin)
print(1e3 * statistics.median(times))
"""


class LabError(RuntimeError):
    pass


def run_checked(command, **options):
    try:
        done = subprocess.run(command, capture_output=True, text=True, **options)
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{' '.join(command)}: not done within {error.timeout:g} s") from None
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def obstacle():
    """Why there can be no lab here, or None."""
    if sys.platform != "linux":
        return "the lab needs Linux: it is made of Linux's network namespaces"
    if os.geteuid() != 0:
        return "the lab needs root, to create network namespaces and to shape their links: run this as root, or with sudo"
    missing = sorted({package for tool, package in TOOLS.items() if not shutil.which(tool)})
    if missing:
        return f"the lab needs tools that are missing: apt-get install {' '.join(missing)}"
    done = subprocess.run(["unshare", "--net", "--pid", "--fork", "--mount", "true"], capture_output=True, text=True)
    if done.returncode:
        return ("the lab needs namespaces, which this system refuses (a container without CAP_SYS_ADMIN?): "
                + done.stderr.strip())
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


def enough(ranks, cores):
    """Whether every rank gets its cores, and why."""
    need = CORES_PER_RANK * ranks
    return cores >= need, (f"{ranks} ranks need {need} cores (one to compute and one for progress each), this machine gives "
                           f"{cores}")


class Lab:
    """with Lab(hosts=2) as lab: lab.set_link(2e9, delay_ms=0.05); lab.run(2, ["build/release/train_gpt", …])"""

    def __init__(self, hosts=2, ranks_per_host=1):
        if not 1 <= hosts <= HOSTS_MAX or ranks_per_host < 1:
            raise LabError(f"no such lab: {hosts} hosts (1 to {HOSTS_MAX}) of {ranks_per_host} ranks")
        self.hosts, self.ranks_per_host = hosts, ranks_per_host
        self.cores = sorted(os.sched_getaffinity(0))
        self.rate, self.delay_ms, self.jitter_ms = None, 0.0, 0.0
        self.init = None        # the first process; its end is the lab's
        self.first_pid = None   # as the machine sees it
        self.holders = []       # each host's first process
        self.host_pids = []     # its number, as the lab sees it
        self.lines = []         # each host's delay line, if there is a delay
        self.competitors = {}   # host → the processes that slow it down

    # --- what it is ---

    def host_name(self, host):
        return f"lab{os.getpid()}h{host}"

    @staticmethod
    def address(host):
        return f"10.0.0.{host + 1}"

    @staticmethod
    def hardware_address(host):
        return f"02:00:00:00:00:{host + 1:02x}"

    def ranks(self):
        return self.hosts * self.ranks_per_host

    def enough(self):
        return enough(self.ranks(), len(self.cores))

    def rank_cores(self, rank):
        """The compute core and the progress core. Where they do not suffice: one for both, and perhaps for other ranks."""
        if self.enough()[0]:
            return self.cores[CORES_PER_RANK * rank:CORES_PER_RANK * (rank + 1)]
        return [self.cores[rank % len(self.cores)]]

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
        lines.append(text + ("" if ok else f": {SHARED}"))
        return "\n".join(lines)

    # --- its life ---

    def __enter__(self):
        if reason := obstacle():
            raise LabError(reason)
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def start(self):
        # /proc still shows the machine's processes when the first process reads its number there. It stays a shell,
        # which takes note of the deaths of orphans.
        script = ("read pid rest </proc/self/stat && mount -t proc proc /proc"
                  " && mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
                  " && exec 3<&0 && { cat <&3 >/dev/null & } && echo $pid && exec 3<&- >&- && wait")
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
        script = (f"hostname {self.host_name(host)} && mount -t tmpfs -o mode=1777 tmpfs /dev/shm && echo $$"
                  " && exec sleep infinity")
        holder = subprocess.Popen([*self.hub(), "unshare", "--net", "--uts", "--mount", "sh", "-c", script],
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.holders.append(holder)
        self.host_pids.append(holder.stdout.readline().strip())
        if not self.host_pids[host]:
            raise LabError(f"host {host} did not start")
        self.at_hub("ip", "link", "add", f"port{host}", "mtu", str(MTU), "type", "veth",
                    "peer", "name", "eth0", "address", self.hardware_address(host), "mtu", str(MTU),
                    "netns", self.host_pids[host])
        self.at_hub("ip", "link", "set", f"port{host}", "master", "bridge", "up")
        self.at_hub("bridge", "link", "set", "dev", f"port{host}", "learning", "off")
        self.at_hub("bridge", "fdb", "add", self.hardware_address(host), "dev", f"port{host}", "master", "static")
        self.at(host, "ip", "link", "set", "lo", "up")
        self.at(host, "ip", "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        self.at(host, "ip", "link", "set", "eth0", "up")
        for name, value in TCP.items():
            self.at(host, "sh", "-c", f"echo {value} >/proc/sys/net/ipv4/{name}")

    def write_files(self, host):
        names = "127.0.0.1 localhost\n" + "".join(f"{self.address(h)} {self.host_name(h)}\n" for h in range(self.hosts))
        self.write(host, "/dev/shm/hosts", names)
        self.at(host, "mount", "--bind", "/dev/shm/hosts", "/etc/hosts")
        agent = " ".join(f"{self.host_name(h)}) pid={pid} cores={core_list(self.host_cores(h))};;"
                         for h, pid in enumerate(self.host_pids))
        rank = RANK_ON_SHARED_CORES
        if self.enough()[0]:
            rank = RANK.replace("{cases}", " ".join(
                "{}) compute={} progress={};;".format(r, *self.rank_cores(r)) for r in range(self.ranks())))
        slots = "".join(f"{self.host_name(h)} slots={self.ranks_per_host}\n" for h in range(self.hosts))
        self.write(host, "/dev/shm/agent", AGENT.replace("{cases}", agent))
        self.write(host, "/dev/shm/rank", rank)
        self.write(host, "/dev/shm/hostfile", slots)
        self.at(host, "chmod", "+x", "/dev/shm/agent", "/dev/shm/rank")

    def write(self, host, path, text):
        self.at(host, "sh", "-c", f"cat >{path}", input=text)

    def close(self):
        if self.init is None:
            return
        for process in [self.init, *self.holders, *self.lines, *sum(self.competitors.values(), [])]:
            process.communicate()  # closes the pipe to the first one, and waits
        self.init, self.holders, self.host_pids, self.lines, self.competitors = None, [], [], [], {}
        self.delay_ms, self.jitter_ms = 0.0, 0.0

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
        """What every host can send, and how long that is under way."""
        if rate_bits_per_s <= 0 or delay_ms < 0 or not 0 <= jitter_ms <= delay_ms:
            raise LabError(f"no such link: {rate_bits_per_s:g} bit/s, delay {delay_ms:g} ms, jitter {jitter_ms:g} ms "
                           "(the jitter is at most the delay)")
        self.set_rate(rate_bits_per_s)
        if (delay_ms, jitter_ms) != (self.delay_ms, self.jitter_ms):
            self.set_delay(delay_ms, jitter_ms)
        self.rate, self.delay_ms, self.jitter_ms = rate_bits_per_s, delay_ms, jitter_ms

    def set_rate(self, rate):
        burst = max(BURST_BYTES_MIN, math.ceil(rate / 8 * BURST_S))
        for host in range(self.hosts):
            self.at(host, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", f"{rate:.0f}bit",
                    "burst", str(burst), "limit", str(QUEUE_BYTES))

    def set_delay(self, delay_ms, jitter_ms):
        """What a host sends comes in at its port, is redirected into the delay line and enters the bridge from there.
        The bridge never learns where a host is, it has been told: what is for the host still leaves by its port."""
        for host, line in enumerate(self.lines):
            self.at_hub("tc", "qdisc", "del", "dev", f"port{host}", "clsact")
            self.end_helper(line)
        self.lines = []
        if not delay_ms:
            return
        self.build_delay_line()
        for host in range(self.hosts):
            device, port = f"delay{host}", f"port{host}"
            core = self.rank_cores(host * self.ranks_per_host)[-1]
            self.lines.append(self.start_helper(self.hub(), ["taskset", "-c", str(core), DELAY_LINE, device,
                                                             f"{delay_ms * 1e3:g}", f"{jitter_ms * 1e3:g}"]))
            self.at_hub("ip", "link", "set", device, "mtu", str(MTU), "master", "bridge")
            self.at_hub("bridge", "link", "set", "dev", device, "learning", "off", "flood", "off", "mcast_flood", "off",
                        "bcast_flood", "off")
            self.at_hub("ip", "link", "set", device, "up")
            self.at_hub("tc", "qdisc", "add", "dev", port, "clsact")
            self.at_hub("tc", "filter", "add", "dev", port, "ingress", "protocol", "all", "u32",
                        "match", "u32", "0", "0", "action", "mirred", "egress", "redirect", "dev", device)

    def build_delay_line(self):
        try:
            self.at_hub("test", "-x", DELAY_LINE)
        except LabError:
            self.at_hub("cc", "-std=gnu11", "-O2", "-o", DELAY_LINE, str(HERE / "delay_line.c"))

    def round_trip_ms(self):
        """Of eight bytes from host 0 to host 1 and back, the median: the delay as it really is, processes included."""
        with subprocess.Popen([*self.enter(1), sys.executable, "-c", ECHO, str(SETUP_S)], stdout=subprocess.PIPE,
                              text=True) as echo:
            return float(self.at(0, sys.executable, "-c", PING, self.address(1), echo.stdout.readline().strip()))

    def slow(self, host, factor):
        """From now on this host computes `factor` times slower; 1 ends it."""
        for competitor in self.competitors.pop(host, []):
            self.end_helper(competitor)
        if not 1 <= factor <= SLOWER_MAX:
            raise LabError(f"a host can be made 1 to {SLOWER_MAX} times slower, not {factor:g} times")
        if factor > 1:
            self.competitors[host] = [
                self.start_helper(self.enter(host), [sys.executable, "-c", COMPETITOR, str(self.rank_cores(rank)[0]),
                                                     str(1 - 1 / factor)]) for rank in self.host_ranks(host)]

    def start_helper(self, entrance, command):
        """A process that says its number once it is ready, and lives until it or the lab is ended."""
        helper = subprocess.Popen([*entrance, *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True, start_new_session=True)
        helper.number = helper.stdout.readline().strip()
        if not helper.number:
            raise LabError(f"{command[0]}: {helper.stderr.read().strip()}")
        return helper

    def end_helper(self, helper):
        self.at_hub("kill", helper.number)  # not helper.kill(), which would only end nsenter
        helper.communicate()

    # --- programs ---

    def mpirun(self, ranks, env=None, timeout_s=None):
        """The command that goes before PROGRAM ARGUMENTS. Open MPI would push a whole message into the connection
        at once, and what it says about the next one would wait behind it, so the two directions of a link would take
        turns: flags 9 make it send fragments. Nor should a message have to ask first whether it may come, and that
        question wait behind what the other side sends: up to EAGER_BYTES it does not, which is more than a chunk of
        ours (commfuse/transport_mpi.c) and than most of what the native collectives send. The sizes of socket buffers
        are left to the kernel (see TCP)."""
        if ranks > self.ranks():
            raise LabError(f"{ranks} ranks on {self.hosts} hosts of {self.ranks_per_host}")
        settings = {"plm_rsh_agent": "/dev/shm/agent", "pml": "ob1", "btl": "tcp,self", "btl_tcp_if_include": "eth0",
                    "oob_tcp_if_include": "eth0", "btl_tcp_links": "1", "btl_tcp_flags": "9",
                    "btl_tcp_eager_limit": str(EAGER_BYTES),
                    "btl_tcp_sndbuf": "0", "btl_tcp_rcvbuf": "0", "orte_tmpdir_base": "/dev/shm"}
        exports = {"OMP_NUM_THREADS": "1", **(env or {})}
        # Entering a mount namespace leads to /, and PROGRAM may be named from where its user stands.
        command = [*self.enter(0), "env", f"--chdir={os.getcwd()}", "OMPI_ALLOW_RUN_AS_ROOT=1",
                   "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "TMPDIR=/dev/shm", "taskset", "-c", core_list(self.host_cores(0))]
        if timeout_s:
            command += ["timeout", "--kill-after=5", str(timeout_s)]
        command += ["mpirun", "-np", str(ranks), "--hostfile", "/dev/shm/hostfile", "--bind-to", "none"]
        for name, value in settings.items():
            command += ["--mca", name, value]
        for name, value in exports.items():
            command += ["-x", f"{name}={value}"]
        return [*command, "/dev/shm/rank"]

    def run(self, ranks, program, env=None, timeout_s=None, **options):
        return subprocess.run([*self.mpirun(ranks, env, timeout_s), *program], text=True, **options)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rate", type=parse_rate, default=1e9, help="of each host: 500mbit, 2gbit (default 1gbit)")
    parser.add_argument("--delay", type=parse_ms, default=0, help="how long a packet is under way: 0.05ms, 50us")
    parser.add_argument("--jitter", type=parse_ms, default=0, help="by how much that varies, up and down")
    parser.add_argument("--plan", action="store_true", help="say what would be created, create nothing")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ARGUMENTS")
    o = parser.parse_args()
    program = o.program[1:] if o.program[:1] == ["--"] else o.program
    if not program and not o.plan:
        parser.error("no program given; --plan shows what would be created")
    try:
        lab = Lab(o.hosts, o.ranks_per_host)
        if o.plan:
            print(lab.plan())
            return 0
        with lab:
            lab.set_link(o.rate, o.delay, o.jitter)
            if not lab.enough()[0]:
                print(f"lab: {lab.enough()[1]}: {SHARED}", file=sys.stderr)
            return lab.run(lab.ranks(), program).returncode
    except LabError as error:
        sys.exit(f"lab: {error}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
