"""The memory that ranks may use on this machine.

Batch systems and containers limit memory by control groups, and kill a process above the limit without a message. So the result is
the minimum of the machine's memory and the limits of all groups of this process.
"""
import pathlib
import re

UNKNOWN = float("inf")  # no Linux
V1 = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
V2 = "sys/fs/cgroup", "memory.max", "memory.current"


def text_of(*path):
    try:
        return pathlib.Path(*path).read_text()
    except OSError:
        return ""


def available_mib(root="/"):
    machine = re.search(r"^MemAvailable: *(\d+) kB", text_of(root, "proc/meminfo"), re.MULTILINE)
    found = [int(machine[1]) / 1024 if machine else UNKNOWN]
    for line in text_of(root, "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, *files = V1 if controllers else V2
        for group in [(last := pathlib.PurePath(path.lstrip("/"))), *last.parents]:
            limit, used, stat = (text_of(root, base, group, file).strip() for file in (*files, "memory.stat"))
            if limit.isdigit() and used.isdigit():  # else "max", or not mounted
                # Cached files can be dropped at once. In version 1 only total_* includes child groups.
                cached = dict(re.findall(r"^(\w+) (\d+)$", stat, re.MULTILINE))
                cached = int(cached.get("total_inactive_file", cached.get("inactive_file", 0)))
                found.append(max(0, int(limit) - max(0, int(used) - cached)) / 2**20)
    return min(found)
