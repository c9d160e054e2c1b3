"""What this machine's processors give when all of them work at once.

A virtual machine's processors may be hyperthreads of cores that others use too, and lscpu does not say so: beside a busy one
a processor does little more than half of what it can, so steps differ from one minute to the next.

    measure()    {"work": 0.91, "slowed": 0.24}

One thread per processor counts its hashes in slices of 20 ms, first alone, then all at the same time. The fastest slice is what a
processor can do. work: what all do together, of what they can. slowed: share of the slices in which one of them at least does
less than three quarters of it.
"""
import concurrent.futures
import hashlib
import os
import statistics
import threading
import time

ALONE, TOGETHER, SLICE_S = 10, 100, 0.02  # slices
BLOCK = bytes(1 << 17)  # hashed in about 0.1 ms, without Python's lock
SLOW = 0.75
SLOWED_MAX = 0.05  # of the time: what is measured beside it is a machine's, with more a host's


def counted(processors, slices):
    """Hashes of threads that begin at the same time, one on each of these processors."""
    all_ready = threading.Barrier(len(processors))

    def count(processor):
        os.sched_setaffinity(0, {processor})  # this thread
        all_ready.wait()
        found, begin = [0] * slices, time.perf_counter()
        while (now := int((time.perf_counter() - begin) / SLICE_S)) < slices:
            hashlib.sha256(BLOCK).digest()
            found[now] += 1
        return found
    with concurrent.futures.ThreadPoolExecutor(len(processors)) as pool:
        return list(pool.map(count, processors))


def measure(processors, slices=TOGETHER):
    alone = {processor: max(counted([processor], ALONE)[0]) for processor in set(processors)}
    speeds = [[count / max(alone[processor], *counts) for count in counts]
              for processor, counts in zip(processors, counted(processors, slices))]
    return {"work": statistics.fmean(statistics.fmean(one) for one in speeds),
            "slowed": statistics.fmean(min(now) < SLOW for now in zip(*speeds))}


def text(measured):
    return (f"when all work they do {100 * measured['work']:.0f} % of what they can, and {100 * measured['slowed']:.0f} % of "
            f"the time one of them does less than {100 * SLOW:.0f} %")
