"""What this machine's processors give when all of them work at once.

A virtual machine's processors may be hyperthreads of cores that others use too, and lscpu does not say so: beside a busy one
a processor does little more than half of what it can, so steps differ from one minute to the next.

    measure()    {"work": 0.91, "slowed": 0.24}

One process per processor counts how often it gets through a short computation in slices of 20 ms, first alone, then all
at the same time. The fastest slice is what a processor can do. work: what all do together, of what they can. slowed: share
of the time in which one of them at least does less than three quarters of it.
"""
import multiprocessing
import os
import statistics
import time

ALONE_S, TOGETHER_S, SLICE_S = 0.2, 2.0, 0.02
TURNS = 2000  # about 0.1 ms
SLOW = 0.75
SLOWED_MAX = 0.05  # of the time: what is measured beside it is a machine's, with more a host's


def count_turns(processor, seconds, all_ready, answer):
    """Turns a second, slice by slice."""
    os.sched_setaffinity(0, {processor})
    all_ready.wait()
    found, end = [], time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        turns, x = 0, 1
        while (now := time.perf_counter()) < begin + SLICE_S:
            for _ in range(TURNS):
                x = x * 1103515245 + 12345 & 0x7fffffff
            turns += 1
        found.append(turns / (now - begin))
    answer.send(found)


def counted(processors, seconds):
    """Of processes that begin at the same time, one on each of these processors."""
    fork = multiprocessing.get_context("fork")
    all_ready, found = fork.Barrier(len(processors)), []
    for processor in processors:
        answer, end = fork.Pipe(False)
        fork.Process(target=count_turns, args=(processor, seconds, all_ready, end), daemon=True).start()
        found.append(answer)
    return [answer.recv() for answer in found]


def measure(processors=None, seconds=TOGETHER_S):
    processors = sorted(os.sched_getaffinity(0)) if processors is None else processors
    alone = {processor: max(counted([processor], ALONE_S)[0]) for processor in set(processors)}
    together = counted(processors, seconds)
    best = [max(alone[processor], *slices) for processor, slices in zip(processors, together)]
    speeds = [[turns / most for turns in slices] for slices, most in zip(together, best)]
    return {"work": statistics.fmean(statistics.fmean(slices) for slices in speeds),
            "slowed": statistics.fmean(min(slices) < SLOW for slices in zip(*speeds))}


def suffice(measured):
    """None: nobody has looked."""
    return not measured or measured["slowed"] <= SLOWED_MAX


def text(measured):
    return (f"when all work they do {100 * measured['work']:.0f} % of what they can, and {100 * measured['slowed']:.0f} % of "
            f"the time one of them does less than {100 * SLOW:.0f} %")
