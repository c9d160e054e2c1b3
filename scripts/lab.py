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
the delay line (delay_line.py).
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
# waits for would have to wait for it to pass. A link that was idle for a moment does not start slowly again.
TCP = {"tcp_rmem": "4096 4194304 33554432", "tcp_wmem": "4096 4194304 33554432", "tcp_notsent_lowat": "131072",
       "tcp_slow_start_after_idle": "0", "tcp_no_metrics_save": "1"}
EAGER_BYTES = 4 << 20
DELAY_LINE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "delay_line.py")
SETUP_S = 20

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


def quantity(units):
    """A parser of a number with one of these units."""
    def parse(text):
        found = re.fullmatch(r"([\d.]+)\s*([a-z]+)", text)
        if not found or found[2] not in units:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number and {', '.join(units)}")
        return float(found[1]) * units[found[2]]
    return parse


def enough(ranks, cores):
    """Whether every rank gets its cores, and why."""
    need = CORES_PER_RANK * ranks
    return cores >= need, (f"{ranks} ranks need {need} cores (one to compute and one for progress each), this machine gives "
                           f"{cores}")


class Lab:
    """A rank on each host: with Lab(2) as lab: lab.set_link(2e9, delay_ms=0.05); lab.run(2, ["build/release/train_gpt", …])"""

    def __init__(self, hosts=2):
        if not 1 <= hosts <= HOSTS_MAX:
            raise LabError(f"no such lab: {hosts} hosts (1 to {HOSTS_MAX})")
        self.hosts, self.cores = hosts, sorted(os.sched_getaffinity(0))
        self.rate, self.delay_ms = None, 0.0
        self.init = None        # the first process; its end is the lab's
        self.first_pid = None   # as the machine sees it
        self.holders = []       # each host's first process
        self.host_pids = []     # its number, as the lab sees it
        self.lines = []         # each host's delay line, if there is a delay

    # --- what it is ---

    def host_name(self, host):
        return f"lab{os.getpid()}h{host}"

    @staticmethod
    def address(host):
        return f"10.0.0.{host + 1}"

    def enough(self):
        return enough(self.hosts, len(self.cores))

    def host_cores(self, host):
        """The compute core and the progress core. Where they do not suffice: one for both, and perhaps for other hosts."""
        if self.enough()[0]:
            return "{},{}".format(*self.cores[CORES_PER_RANK * host:CORES_PER_RANK * (host + 1)])
        return str(self.cores[host % len(self.cores)])

    def plan(self):
        lines = ["one PID namespace that ends with this process; in it one network namespace with a bridge, and"]
        lines += [f"host {host}: {self.host_name(host)}, eth0 {self.address(host)}/24, mtu {MTU}; rank {host} on cores "
                  f"{self.host_cores(host)}" for host in range(self.hosts)]
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
        self.at_hub(f"ip link add bridge mtu {MTU} type bridge; ip link set bridge up")
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
        port, hardware = f"port{host}", f"02:00:00:00:00:{host + 1:02x}"
        self.at_hub(f"""
            ip link add {port} mtu {MTU} type veth peer name eth0 address {hardware} mtu {MTU} netns {self.host_pids[host]}
            ip link set {port} master bridge up
            bridge link set dev {port} learning off
            bridge fdb add {hardware} dev {port} master static""")
        limits = "".join(f"; echo {value} >/proc/sys/net/ipv4/{name}" for name, value in TCP.items())
        self.at(host, "sh", "-ec",
                f"ip link set lo up; ip address add {self.address(host)}/24 dev eth0; ip link set eth0 up{limits}")

    def write_files(self, host):
        everyone = range(self.hosts)
        names = "127.0.0.1 localhost\n" + "".join(f"{self.address(h)} {self.host_name(h)}\n" for h in everyone)
        self.write(host, "/dev/shm/hosts", names)
        self.at(host, "mount", "--bind", "/dev/shm/hosts", "/etc/hosts")
        cases = " ".join(f"{self.host_name(h)}) pid={self.host_pids[h]} cores={self.host_cores(h)};;" for h in everyone)
        self.write(host, "/dev/shm/agent", AGENT.replace("{cases}", cases))
        rank = RANK_ON_SHARED_CORES
        if self.enough()[0]:
            rank = RANK.replace("{cases}", " ".join(
                "{}) compute={} progress={};;".format(h, *self.host_cores(h).split(",")) for h in everyone))
        self.write(host, "/dev/shm/rank", rank)
        self.write(host, "/dev/shm/hostfile", "".join(f"{self.host_name(h)} slots=1\n" for h in everyone))
        self.at(host, "chmod", "+x", "/dev/shm/agent", "/dev/shm/rank")

    def write(self, host, path, text):
        self.at(host, "sh", "-c", f"cat >{path}", input=text)

    def close(self):
        if self.init is None:
            return
        for process in [self.init, *self.holders, *self.lines]:
            process.communicate()  # closes the pipe to the first one, and waits
        self.init, self.holders, self.host_pids, self.lines, self.delay_ms = None, [], [], [], 0.0

    # --- entering it ---

    def hub(self):
        return ["nsenter", "--target", str(self.first_pid), "--pid", "--mount", "--net", "--"]

    def enter(self, host):
        return [*self.hub(), "nsenter", "--target", self.host_pids[host], "--net", "--uts", "--mount", "--"]

    def at_hub(self, script):
        return run_checked([*self.hub(), "sh", "-ec", script], timeout=SETUP_S)

    def at(self, host, *command, **options):
        return run_checked([*self.enter(host), *command], timeout=SETUP_S, **options)

    # --- its links ---

    def set_link(self, rate, delay_ms=0.0):
        """What every host can send, in bits per second, and how long that is under way."""
        if rate <= 0 or delay_ms < 0:
            raise LabError(f"no such link: {rate:g} bit/s, delay {delay_ms:g} ms")
        burst = max(BURST_BYTES_MIN, math.ceil(rate / 8 * BURST_S))
        for host in range(self.hosts):
            self.at(host, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", f"{rate:.0f}bit",
                    "burst", str(burst), "limit", str(QUEUE_BYTES))
        if delay_ms != self.delay_ms:
            self.set_delay(delay_ms)
        self.rate, self.delay_ms = rate, delay_ms

    def set_delay(self, delay_ms):
        """What a host sends comes in at its port, is redirected into the delay line and enters the bridge from there.
        The bridge never learns where a host is, it was given the address: what is for the host still leaves by its port."""
        for host, line in enumerate(self.lines):
            self.at_hub(f"tc qdisc del dev port{host} clsact; kill {line.number}")  # line.kill() would only end nsenter
            line.communicate()
        self.lines = []
        for host in range(self.hosts) if delay_ms else ():
            device, port = f"delay{host}", f"port{host}"
            line = subprocess.Popen([*self.hub(), "taskset", "-c", self.host_cores(host).split(",")[-1], sys.executable, "-S", "-E",
                                     DELAY_LINE, device, f"{delay_ms * 1e3:g}"], stdin=subprocess.DEVNULL,
                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
            self.lines.append(line)
            line.number = line.stdout.readline().strip()  # once it is ready
            if not line.number:
                raise LabError(f"delay line: {line.stderr.read().strip()}")
            self.at_hub(f"""
                ip link set {device} mtu {MTU} master bridge
                bridge link set dev {device} learning off flood off mcast_flood off bcast_flood off
                ip link set {device} up
                tc qdisc add dev {port} clsact
                tc filter add dev {port} ingress protocol all u32 match u32 0 0 action mirred egress redirect dev {device}""")

    # --- programs ---

    def mpirun(self, ranks, env=None):
        """The command that goes before PROGRAM ARGUMENTS. Open MPI would push a whole message into the connection
        at once, and what it says about the next one would wait for it to pass, so the two directions of a link would take
        turns: flags 9 make it send fragments. Nor should a message have to ask first whether it may come, and that
        question wait for what the other side sends: up to EAGER_BYTES it does not, which is more than a chunk of
        ours (commfuse/transport_mpi.c) and than most of what the native collectives send. The sizes of socket buffers
        are left to the kernel (see TCP)."""
        if ranks > self.hosts:
            raise LabError(f"{ranks} ranks on {self.hosts} hosts")
        settings = dict(plm_rsh_agent="/dev/shm/agent", pml="ob1", btl="tcp,self", btl_tcp_if_include="eth0",
                        oob_tcp_if_include="eth0", btl_tcp_links="1", btl_tcp_flags="9", btl_tcp_eager_limit=str(EAGER_BYTES),
                        btl_tcp_sndbuf="0", btl_tcp_rcvbuf="0", orte_tmpdir_base="/dev/shm")
        exports = {"OMP_NUM_THREADS": "1", **(env or {})}
        # Entering a mount namespace leads to /, and PROGRAM may be named from the directory of its user.
        command = [*self.enter(0), "env", f"--chdir={os.getcwd()}", "OMPI_ALLOW_RUN_AS_ROOT=1",
                   "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "TMPDIR=/dev/shm", "taskset", "-c", self.host_cores(0)]
        command += ["mpirun", "-np", str(ranks), "--hostfile", "/dev/shm/hostfile", "--bind-to", "none"]
        for name, value in settings.items():
            command += ["--mca", name, value]
        for name, value in exports.items():
            command += ["-x", f"{name}={value}"]
        return [*command, "/dev/shm/rank"]

    def run(self, ranks, program, env=None, **options):
        return subprocess.run([*self.mpirun(ranks, env), *program], text=True, **options)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", type=quantity({"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}), default=1e9,
                        help="of each host: 500mbit, 2gbit (default 1gbit)")
    parser.add_argument("--delay", type=quantity({"us": 1e-3, "ms": 1, "s": 1e3}), default=0,
                        help="how long a packet is under way: 0.05ms, 50us")
    parser.add_argument("--plan", action="store_true", help="say what would be created, create nothing")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ARGUMENTS")
    o = parser.parse_args()
    program = o.program[1:] if o.program[:1] == ["--"] else o.program
    if not program and not o.plan:
        parser.error("no program given; --plan shows what would be created")
    try:
        lab = Lab(o.hosts)
        if o.plan:
            print(lab.plan())
            return 0
        with lab:
            lab.set_link(o.rate, o.delay)
            if not lab.enough()[0]:
                print(f"lab: {lab.enough()[1]}: {SHARED}", file=sys.stderr)
            return lab.run(lab.hosts, program).returncode
    except LabError as error:
        sys.exit(f"lab: {error}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
