"""For cases about rates and shares of time that an operating system owes a free machine only, such as those of a link that it
serves itself: three tries, and on a machine that others use no verdict instead of a failure.
"""
import functools
import os


def others_use_the_cores():
    return os.getloadavg()[0] > 1.25 * len(os.sched_getaffinity(0))


def needs_free_cores(case):
    @functools.wraps(case)
    def tried(self):
        for tries_left in (2, 1, 0):
            try:
                return case(self)
            except AssertionError as error:
                if tries_left == 0 and others_use_the_cores():
                    self.skipTest(f"others use the cores: {error}")
                if tries_left == 0:
                    raise
    return tried
