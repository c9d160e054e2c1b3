#!/usr/bin/env python3
"""Simulate several hosts on one machine, with links of known speed.

    scripts/lab.py --hosts 2 --rate 2gbit --delay 0.05ms -- build/release/train_gpt --tp 2 …

A host is a network, UTS and mount namespace with its name, eth0 and /dev/shm, so Open MPI moves every byte between two hosts
through a TCP socket. A bridge connects the hosts; a token bucket on each eth0 limits what the host sends, so both directions of a
link have the full rate at the same time. mpirun runs on host 0 and starts its daemons on the others through an agent that enters
their namespaces. A host has one rank, or as many as --ranks-per-host says, which share memory and the link.

Nothing remains: everything lives in one PID namespace, whose first process the kernel kills when this script ends, even by SIGKILL;
with it go all processes, namespaces, links, mounts and files. The machine's network, mounts and files are not changed.

Each rank has two cores: one for its main thread, which computes, one for the threads of its transport. The kernel does its network
work, the receiver's included, on the sender's core: in /proc/softirqs, 99 % of these interrupts are on the transport cores, so the
link itself does not slow down computation. With fewer cores, a rank's threads share them (SHARED), and every report says so.

Limits: like every token bucket, an idle link lets the first 68 KiB pass at once (a quarter of a millisecond above 2 Gbit/s); the
rate includes headers, about 1 %.
"""
import argparse
import math
import os
import re
import shutil
import subprocess
import sys

from command import Parser, Problem, at_least, status_of

CORES_PER_RANK = 2  # one computes, one makes progress
SHARED = ("cores are shared: threads that move bytes take time from those that compute, so steps with transfers take longer, "
          "and overlapping gains less, than on separate cores")
TOOLS = "ip", "tc", "mpirun", "unshare", "nsenter", "setpriv", "taskset", "mount", "hostname"

# The bucket holds the largest segment, and a fraction of a millisecond at the rate: timers are tens of microseconds late, and a
# full bucket loses rate.
BURST_BYTES_MIN, BURST_S = 68 << 10, 250e-6
# The first process. Its arguments are the program and the program's arguments; LAB_CORES has a word for each host. A host has a
# separate /dev/shm and reaches this one through /proc/1; the mount over /etc/hosts is common to all.
#
# TCP windows are wide enough for a long link, but little unsent data waits in a socket, because a message that the other side waits
# for would wait for this data. After an idle moment a link does not start slowly again.
#
# Open MPI would write a whole message to the connection at once, and the announcement of the next message would wait for it, so the
# two directions of a link would take turns: flags 9 make it send fragments. Up to the eager limit a message is sent without asking
# first, which would wait for the other side's data; the limit is larger than a chunk of ours (commfuse/cpu/transport_mpi.c) and than
# most messages of native collectives. The kernel chooses the sizes of socket buffers. Daemons are started by "agent HOST COMMAND…".
HUB = r"""
set -e
trap 'echo "lab: it could not be set up, see above" >&2' EXIT
mount -t proc proc /proc
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
echo 127.0.0.1 localhost >/dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
mkfifo /dev/shm/ready
ip link add bridge mtu 9000 type bridge
ip link set bridge up
host=0
for cores in $LAB_CORES; do
    export name=$LAB_NAME$host address=10.0.0.$((host + 1))
    echo $address $name >>/dev/shm/hosts
    unshare --net --uts --mount sh -c 'exec 3>/dev/shm/ready && hostname $name && mount -t tmpfs -o mode=1777 tmpfs /dev/shm &&
        exec 3>&- && exec sleep infinity' &
    timeout 20 cat /dev/shm/ready # until it is there
    ip link add port$host mtu 9000 type veth peer name eth0 mtu 9000 netns $!
    ip link set port$host master bridge up
    [ $LAB_DELAY = 0 ] || tc qdisc add dev port$host root netem delay $LAB_DELAY limit 100000 ||
        { echo "lab: --delay needs the kernel's netem: modprobe sch_netem" >&2; exit 1; }
    nsenter --target $! --net sh -ec '
        ip link set lo up; ip address add $address/24 dev eth0; ip link set eth0 up
        cd /proc/sys/net/ipv4
        for file in tcp_rmem tcp_wmem; do echo 4096 4194304 33554432 >$file; done
        echo 131072 >tcp_notsent_lowat; echo 0 >tcp_slow_start_after_idle; echo 1 >tcp_no_metrics_save
        tc qdisc add dev eth0 root tbf rate $LAB_RATE burst $LAB_BURST limit 67108864' # nothing is dropped
    first=${first:-$!}
    echo $name $! $cores >>/dev/shm/table
    echo $name slots=$LAB_EACH >>/dev/shm/slots
    host=$((host + 1))
done
cat >/dev/shm/agent <<'END'
#!/bin/sh
name=$1; shift
while read -r host pid cores <&3; do
    [ $host != $name ] || exec nsenter --target $pid --net --uts --mount -- env TMPDIR=/dev/shm taskset -c $cores \
        sh -c 'cd "$0"; eval "$1"' "$PWD" "$*" 3<&-
done 3</proc/1/root/dev/shm/table
echo "the lab has no host $name" >&2
exit 1
END
chmod +x /dev/shm/agent
trap - EXIT
set +e
at=/proc/1/root/dev/shm # as hosts see it
# Entering a mount namespace changes to /, but the program's path may be relative to the user's directory.
nsenter --target $first --net --uts --mount -- env --chdir="$PWD" TMPDIR=/dev/shm OMPI_ALLOW_RUN_AS_ROOT=1 \
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 taskset -c ${LAB_CORES%% *} \
    mpirun -np $((host * LAB_EACH)) --hostfile $at/slots --bind-to none \
    --mca plm_rsh_agent $at/agent --mca pml ob1 --mca btl tcp,self,vader \
    --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 --mca btl_tcp_links 1 --mca btl_tcp_flags 9 \
    --mca btl_tcp_eager_limit 4194304 --mca btl_tcp_sndbuf 0 --mca btl_tcp_rcvbuf 0 --mca orte_tmpdir_base /dev/shm \
    sh -c "$LAB_RANK" rank "$@"
exit $?
"""
# Puts the threads of a rank on its two cores, for some seconds, while the program may still start threads.
RANK = r"""
cores=$(echo $LAB_CORES | cut -d ' ' -f $((OMPI_COMM_WORLD_RANK / LAB_EACH + 1)))
at=$((2 * OMPI_COMM_WORLD_LOCAL_RANK + 1))
cores=$(echo $cores | cut -d , -f $at-$((at + 1)))
(for pause in 0.2 0.3 0.5 1 2 4; do
    sleep $pause
    for task in /proc/$$/task/*; do
        [ -d $task ] || exit
        [ ${task##*/} = $$ ] && core=${cores%,*} || core=${cores#*,}
        taskset -cp $core ${task##*/}
    done
done) </dev/null >/dev/null 2>&1 &
exec "$@"
"""


def obstacle():
    """Why there can be no lab here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "the lab needs Linux and root, to create network namespaces and to limit their links: run this as root, or with sudo"
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        return f"the lab needs {', '.join(missing)}: apt-get install iproute2 util-linux openmpi-bin"
    done = subprocess.run(["unshare", "--net", "--pid", "--fork", "--mount", "mpirun", "--version"], capture_output=True, text=True)
    if done.returncode:
        return f"the lab needs namespaces, which this system refuses (a container without CAP_SYS_ADMIN?): {done.stderr.strip()}"
    return None if "Open MPI" in done.stdout else "the lab needs Open MPI; the mpirun found is another"


def quantity(units):
    """A type of options: a number with one of these units."""
    def parse(text):
        found = re.fullmatch(r"([\d.]+)\s*([a-z]+)", text)
        if not found or found[2] not in units:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number and {', '.join(units)}")
        return float(found[1]) * units[found[2]]
    return parse


def shortage(ranks, cores):
    """Why ranks share cores; "" if they do not."""
    need = CORES_PER_RANK * ranks
    why = f"{ranks} ranks need {need} cores (one to compute and one for progress each), this machine gives {cores}"
    return why if cores < need else ""


def main():
    parser = Parser(__doc__)
    parser.add_argument("--hosts", type=at_least(1), default=2)
    parser.add_argument("--ranks-per-host", type=at_least(1), default=1)
    parser.add_argument("--rate", type=quantity({"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}), default=1e9,
                        help="of each host: 500mbit, 2gbit (default 1gbit)")
    parser.add_argument("--delay", type=quantity({"us": 1e-3, "ms": 1, "s": 1e3}), default=0,
                        help="latency of each packet: 0.05ms, 50us")
    parser.add_argument("program", nargs="+", metavar="PROGRAM", help="after --, with its arguments")
    o = parser.parse_args()
    reason = obstacle()
    if reason:
        raise Problem(reason)
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    each, why = CORES_PER_RANK * o.ranks_per_host, shortage(o.hosts * o.ranks_per_host, len(cores))
    if why:  # one core for both, and perhaps for other hosts
        print(f"lab: {why}: {SHARED}", file=sys.stderr)
    else:
        cores = [",".join(cores[first:first + each]) for first in range(0, o.hosts * each, each)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "LAB_NAME": f"lab{os.getpid()}h", "LAB_EACH": str(o.ranks_per_host),
                   "LAB_CORES": " ".join(cores[host % len(cores)] for host in range(o.hosts)),
                   "LAB_RATE": f"{o.rate:.0f}bit", "LAB_BURST": str(max(BURST_BYTES_MIN, math.ceil(o.rate / 8 * BURST_S))),
                   "LAB_DELAY": f"{o.delay:g}ms" if o.delay else "0", "LAB_RANK": RANK}
    return subprocess.call(["setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--net", "--mount",
                            "--uts", "sh", "-c", HUB, "lab", *o.program], env=environment, start_new_session=True)


if __name__ == "__main__":
    sys.exit(status_of(main))
