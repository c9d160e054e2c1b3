"""How much memory there is for the ranks on this machine, in MiB.

A batch system and a container give a job less than the machine has, in control groups, and end whoever takes more
without a word. So both figures are the smallest of the machine's and those of every group that this process is in.

    total_mib()        what there may be in use at all
    available_mib()    what may be taken now
"""
import pathlib
import re

UNKNOWN = float("inf")  # no Linux, no group
MIB = 2**20
V1 = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
V2 = "sys/fs/cgroup", "memory.max", "memory.current"


def total_mib(root="/"):
    return min([machine_mib(root, "MemTotal"), *(limit for limit, _ in limits(root))])


def available_mib(root="/"):
    return min([machine_mib(root, "MemAvailable"), *(max(0, limit - used) for limit, used in limits(root))])


def text_of(*path):
    try:
        return pathlib.Path(*path).read_text()
    except OSError:
        return ""


def machine_mib(root, what):
    found = re.search(rf"^{what}: *(\d+) kB", text_of(root, "proc/meminfo"), re.MULTILINE)
    return int(found[1]) / 1024 if found else UNKNOWN


def limits(root):
    """(limit, in use) of each group with a limit, from this process's up to the first. What has been read from files, and can be
    had back at once, is not counted as in use."""
    found = []
    for line in text_of(root, "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, *files = V1 if controllers else V2
        for group in [(last := pathlib.PurePath(path.lstrip("/"))), *last.parents]:
            limit, used, stat = (text_of(root, base, group, file).strip() for file in (*files, "memory.stat"))
            if limit.isdigit() and used.isdigit():  # else "max", or not mounted
                spare = dict(re.findall(r"^(\w+) (\d+)$", stat, re.MULTILINE))
                spare = int(spare.get("total_inactive_file", spare.get("inactive_file", 0)))  # version 1 counts groups below apart
                found.append((int(limit) / MIB, max(0, int(used) - spare) / MIB))
    return found
