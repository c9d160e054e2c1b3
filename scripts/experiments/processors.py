"""What this machine's processors give when all of them work at once.

A virtual machine's processors may be hyperthreads of cores that others use too, and lscpu does not say so: beside a busy one
a processor does little more than half of what it can, so steps differ from one minute to the next.

    measure()    {"work": 0.91, "slowed": 0.24}

One thread per processor counts how often it gets through a hash in slices of 20 ms, first alone, then all at the same time. The
fastest slice is what a processor can do. work: what all do together, of what they can. slowed: share of the time in which one
of them at least does less than three quarters of it.
"""
import concurrent.futures
import hashlib
import os
import statistics
import threading
import time

ALONE_S, TOGETHER_S, SLICE_S = 0.2, 2.0, 0.02
BLOCK = bytes(1 << 17)  # hashed in about 0.1 ms, without Python's lock
SLOW = 0.75
SLOWED_MAX = 0.05  # of the time: what is measured beside it is a machine's, with more a host's


def count_hashes(processor, seconds, all_ready):
    """Hashes a second, slice by slice."""
    os.sched_setaffinity(0, {processor})  # this thread
    all_ready.wait()
    found, end = [], time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        hashes = 0
        while (now := time.perf_counter()) < begin + SLICE_S:
            hashlib.sha256(BLOCK).digest()
            hashes += 1
        found.append(hashes / (now - begin))
    return found


def counted(processors, seconds):
    """Of threads that begin at the same time, one on each of these processors."""
    all_ready = threading.Barrier(len(processors))
    with concurrent.futures.ThreadPoolExecutor(len(processors)) as pool:
        return list(pool.map(lambda processor: count_hashes(processor, seconds, all_ready), processors))


def measure(processors=None, seconds=TOGETHER_S):
    processors = sorted(os.sched_getaffinity(0)) if processors is None else processors
    alone = {processor: max(counted([processor], ALONE_S)[0]) for processor in set(processors)}
    together = counted(processors, seconds)
    best = [max(alone[processor], *slices) for processor, slices in zip(processors, together)]
    speeds = [[speed / most for speed in slices] for slices, most in zip(together, best)]
    return {"work": statistics.fmean(statistics.fmean(slices) for slices in speeds),
            "slowed": statistics.fmean(min(slices) < SLOW for slices in zip(*speeds))}


def suffice(measured):
    """None: nobody has looked."""
    return not measured or measured["slowed"] <= SLOWED_MAX


def text(measured):
    return (f"when all work they do {100 * measured['work']:.0f} % of what they can, and {100 * measured['slowed']:.0f} % of "
            f"the time one of them does less than {100 * SLOW:.0f} %")
