"""Nothing is left behind: a process that outlives the check and ends what it has started.

Processes lead sessions of their own, so that a whole group can be ended at once; but then they live on when the script
is killed. The reaper reads a pipe from the script, which closes however that ends.
"""
import contextlib
import subprocess
import sys

# Whole groups, as make and sanitizers have children of their own, which nothing but this would end with them.
REAPER = """
import os, shutil, signal, sys
alive = set()
for line in sys.stdin:
    (alive.add if line[0] == "+" else alive.discard)(int(line[1:]))
for group in alive:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
if sys.argv[1:]:
    shutil.rmtree(sys.argv[1], True)
"""


class Reaper:
    """Outlives the script, however that ends, and clears away what it has left: processes and, if told, a directory."""

    def __init__(self, *directory):
        command = [sys.executable, "-S", "-E", "-c", REAPER, *directory]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL, start_new_session=True)

    def tell(self, sign, process):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{sign}{process.pid}\n".encode())  # at once, or not at all: it is short

    def close(self):
        self.process.stdin.close()
        self.process.wait()
