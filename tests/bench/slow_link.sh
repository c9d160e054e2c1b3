#!/bin/sh
# Two ranks over a slow link: TCP over a loopback of its own that passes RATE in each direction. The link lives in a
# network namespace of this command alone, so nothing is left behind and no other traffic is touched. Needs Linux,
# tc, Open MPI, and root or user namespaces.
#
#     tests/bench/slow_link.sh 4gbit build/release/tests/bench/bench_causal
set -e
rate=${1:?"usage: slow_link.sh RATE PROGRAM [ARGUMENTS]"}
shift
here=$(cd "$(dirname "$0")" && pwd)
namespace="unshare --net"
[ "$(id -u)" = 0 ] || namespace="unshare --net --map-root-user"
export OMP_NUM_THREADS=1 RATE="$rate" MPIRUN="$here/../../scripts/mpirun.sh"
# Open MPI by default pushes a whole message into the connection at once, and what it says about the next one waits
# behind it: the two directions take turns. Flags 9 make it send fragments, and small socket buffers keep them short.
# Both directions of the one connection cross the loopback; the port of the end that listens tells them apart.
exec $namespace sh -e -c '
    ip link set lo mtu 9000 up
    tc qdisc add dev lo root handle 1: htb default 9
    for way in 1:dport 2:sport; do
        tc class add dev lo parent 1: classid 1:${way%:*} htb rate $RATE burst 256kb cburst 256kb quantum 60000
        tc filter add dev lo parent 1: protocol ip u32 match ip ${way#*:} 40960 0xf000 flowid 1:${way%:*}
    done
    exec "$MPIRUN" -np 2 --mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include lo \
        --mca btl_tcp_port_min_v4 40960 --mca btl_tcp_port_range_v4 4096 --mca btl_tcp_links 1 \
        --mca btl_tcp_flags 9 --mca btl_tcp_sndbuf 131072 --mca btl_tcp_rcvbuf 131072 "$@"
' slow_link "$@"
