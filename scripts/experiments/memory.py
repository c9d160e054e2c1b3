"""How much memory there is for the ranks on this machine, in MiB.

A batch system and a container give a job less than the machine has, in control groups, and end whoever takes more
without a word. So both figures are the smallest of the machine's own and those of every group that this process is in.

    total_mib()        what there may be in use at all
    available_mib()    what may be taken now
"""
import pathlib
import re

UNKNOWN = float("inf")  # no Linux, no group
MIB = 2**20
V1_FILES, V2_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")


def total_mib(root="/"):
    return min([machine_mib(root, "MemTotal"), *(limit for limit, _ in limits(root))])


def available_mib(root="/"):
    return min([machine_mib(root, "MemAvailable"), *(max(0, limit - used) for limit, used in limits(root))])


def text_of(path):
    try:
        return path.read_text()
    except OSError:
        return ""


def machine_mib(root, what):
    found = re.search(rf"^{what}: *(\d+) kB", text_of(pathlib.Path(root, "proc/meminfo")), re.MULTILINE)
    return int(found[1]) / 1024 if found else UNKNOWN


def limits(root):
    """(limit, in use) of each group with a limit, from this process's own up to the first."""
    found = []
    for line in text_of(pathlib.Path(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = pathlib.Path(root, "sys/fs/cgroup", *(["memory"] if controllers else []))
        group = base / path.lstrip("/")
        while group.is_relative_to(base):
            found += limit_of(group, V1_FILES if controllers else V2_FILES)
            if group == base:
                break
            group = group.parent
    return found


def limit_of(group, files):
    """What has been read from files, and can be had back at once, is not counted as in use."""
    limit, used = (text_of(group / file).strip() for file in files)
    if not limit.isdigit() or not used.isdigit():  # "max", or not mounted
        return []
    spare = {name: int(size) for name, size in re.findall(r"^(\w+) (\d+)$", text_of(group / "memory.stat"), re.MULTILINE)}
    spare_bytes = spare.get("total_inactive_file", spare.get("inactive_file", 0))  # version 1 counts groups below apart
    return [(int(limit) / MIB, max(0, int(used) - spare_bytes) / MIB)]
