"""What nvidia-smi says of the GPU: its properties, and how much of its memory is in use."""
import threading

from runner import Runner


def smi(check, *names):
    """Of the first GPU, a text for each name; empty: there is none."""
    text = check.runner.printed("nvidia-smi", "--query-gpu=" + ",".join(names), "--format=csv,noheader")
    return [word.strip() for word in text.splitlines()[0].split(",")] if text else []


class MemoryWatch:
    """Most memory in use on the GPU while this is open, in MiB, by looking twice a second; None: nobody knows."""

    def __enter__(self):
        self.most, self.over = None, threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()
        return self

    def work(self):
        runner = Runner()
        while not self.over.is_set():
            used = runner.printed("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", limit=10).split()
            if not used:
                return
            self.most = max([int(word) for word in used if word.isdigit()] + [self.most or 0]) or None
            self.over.wait(0.5)

    def __exit__(self, *_):
        self.over.set()
        self.thread.join(12)
