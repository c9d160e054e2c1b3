"""A delay line for packets: what comes out of a TAP device goes back into it DELAY_US microseconds later.

    delay_line.py DEVICE DELAY_US

scripts/lab.py starts one for each host whose link has a delay, redirects what the host sends into the device, and makes the
device a port of the bridge, where the packet goes on. Linux has netem for this, but as a module that some kernels lack. Packets
keep their header of offloads, so that a segment of 64 KiB stays one packet.

It runs ahead of every ordinary process, for a moment per packet, on the core of the host that sends: the same core where the
kernel does the rest of that packet's work.
"""
import collections
import errno
import fcntl
import gc
import os
import select
import struct
import sys
import time

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # <linux/if_tun.h>
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 1, 2, 4
PACKETS_MAX, PACKET_BYTES_MAX = 1 << 14, 68 << 10

name, delay_ns = sys.argv[1], int(float(sys.argv[2]) * 1e3)
device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
gc.disable()  # nothing here refers to itself
under_way = collections.deque()  # (when it leaves, packet)
print(os.getpid(), flush=True)   # ready
while True:
    try:
        while len(under_way) < PACKETS_MAX:
            packet = os.read(device, PACKET_BYTES_MAX)
            under_way.append((time.monotonic_ns() + delay_ns, packet))
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EIO):  # nothing has come; the device is not up yet
            raise
    try:
        while under_way and under_way[0][0] <= time.monotonic_ns():
            os.write(device, under_way[0][1])
            under_way.popleft()
    except OSError as error:
        if error.errno != errno.EAGAIN:
            under_way.popleft()  # lost, as on a wire
    rest_s = max(0, under_way[0][0] - time.monotonic_ns()) * 1e-9 if under_way else None
    select.select([device] if len(under_way) < PACKETS_MAX else [], [], [], rest_s)
