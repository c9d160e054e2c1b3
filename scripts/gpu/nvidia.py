"""What nvidia-smi tells of the GPU: its properties, and how much of its memory is in use."""
import contextlib
import subprocess
import threading


def smi(check, *names):
    """What nvidia-smi says of the first GPU, a text for each name."""
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
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            while not self.over.is_set():
                told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
                used = [int(word) for word in told.split() if word.isdigit()]
                self.most = max([*used, *([] if self.most is None else [self.most])], default=None)
                self.over.wait(0.5)

    def __exit__(self, *_):
        self.over.set()
        self.thread.join(12)
