"""Who may run beside whom, where several things run at a time on one GPU."""
import contextlib
import threading


class Turns:
    """A few at a time, or one alone."""

    def __init__(self, count):
        self.count, self.gate, self.free = count, threading.Lock(), threading.Semaphore(count)

    @contextlib.contextmanager
    def one(self):
        with self.gate:
            self.free.acquire()
        try:
            yield
        finally:
            self.free.release()

    @contextlib.contextmanager
    def alone(self):
        with self.gate:  # nobody begins meanwhile
            for _ in range(self.count):
                self.free.acquire()
            try:
                yield
            finally:
                self.free.release(self.count)
