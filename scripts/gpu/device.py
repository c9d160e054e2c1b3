"""The stage device: what this machine is, and what the transports rely on, measured."""
import os
import platform
import re

from .build import WIRES
from .check import FAIL, OK, SKIP
from .nvidia import smi
from .runner import ROOT


def version_of_tree(check):
    """Of the repository; where this is none, of what the programs were built from."""
    if os.path.exists(os.path.join(ROOT, ".git")):
        return check.runner.printed("git", "describe", "--always", "--dirty")
    program = check.built("bf16") or check.built("fp32")
    banner = check.runner.printed(program, "--dry-run") if program else ""
    version = re.search(r"^commfuse (\S+):", banner, re.M)
    return f"{version.group(1)}, say the programs" if version else ""


def run(check):
    names = "name", "driver_version", "memory.total", "power.limit", "clocks.max.sm", "compute_mode", "persistence_mode"
    gpu = smi(check, *names)
    nvcc = re.search(r"release ([\d.]+)", check.runner.printed("nvcc", "--version") or
                     check.runner.printed("/usr/local/cuda/bin/nvcc", "--version"))
    facts = {"gpu": ", ".join(gpu), "nvcc": nvcc.group(1) if nvcc else "",
             "libraries": check.runner.printed("scripts/find_cuda.sh", "report"), "cores": os.cpu_count(),
             "host": platform.platform(), "python": platform.python_version(), "commit": version_of_tree(check)}
    check.data["device"] = facts
    for name, value in facts.items():
        check.say(f"        {name:<10} " + str(value or "unknown").replace("\n", "\n" + " " * 19))
    check.verdict("a GPU answers", OK if gpu else FAIL, facts["gpu"] or "nvidia-smi finds none")
    wires(check)
    torch = check.torch.version(0)
    check.say(f"        {'torch':<10} {torch or ('not yet found' if check.torch.thread.is_alive() else 'not found')}")


def wires(check):
    """What the transports rely on and no emulator can tell."""
    program = check.built("bf16", WIRES)
    if not program:
        check.verdict("wires", SKIP, f"{check.build['bf16']}/{WIRES} is not built")
        return
    result = check.runner.run([program], limit=40)
    check.data["wires"] = result.output.splitlines()
    check.show(check.data["wires"])
    check.verdict("wires measured", FAIL if result.status else OK, result.last if result.status else "")
