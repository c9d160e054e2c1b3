"""The stages build and device: all programs that the other stages run, made for both element types; what this machine is."""
import os
import platform
import re

from runner import ROOT

from .check import FAIL, SKIP, TYPES
from .nvidia import smi

WIRES = "tests/bench/bench_wires"


def targets(check):
    names = "train_gpt", "tests/layers/tool_twins", "tests/bench/bench_gpu"
    found = [f"{build}/{name}" for build in check.build.values() for name in names]
    wires = f"{check.build['bf16']}/{WIRES}"  # builds other than nvcc's have no rule for it
    found += [wires] if check.runner.run(["make", "-n", wires]).status == 0 else []
    return [*found, f"{check.o.ref_build}/tests/layers/tool_twins"]


def build(check):
    make = ["make", "-k", "-j", os.cpu_count()]
    wanted = targets(check)
    result = check.runner.run([*make, *wanted])
    if result.status:  # perhaps for a warning that this compiler alone has
        check.verdict("make, warnings as errors", FAIL, "\n".join(result.output.splitlines()[-20:]))
        result = check.runner.run([*make, "WERROR=", *wanted])
    check.judge("make", result.status == 0, trouble(result) if result.status else f"{result.seconds:.0f} s")
    for kind in TYPES:
        if check.built(kind):
            starts(check, kind)


def trouble(result):
    lost = sorted(set(re.findall(r"(\w+/cJSON\.h|xxhash\.h|openssl/\w+\.h): No such file", result.output)))
    if not lost:
        return "\n".join(result.output.splitlines()[-20:])
    return (f"{' and '.join(lost)} missing; hint: scripts/install_deps.sh; without a network here, "
            "scripts/install_deps.sh --carry elsewhere, and bring its build/deps")


def starts(check, kind):
    """The linker finds libraries in places of which the loader knows nothing."""
    program = check.built(kind)
    result = check.runner.run([program, "--help"], limit=60)
    lost = re.findall(r"\S+ => not found", check.runner.printed("ldd", program)) if result.status else []
    why = f"{', '.join(lost)}; hint: set LD_LIBRARY_PATH to where it is (ldd {program})" if lost else result.last
    check.judge(f"{kind} program starts", result.status == 0, why if result.status else "")


def version_of_tree(check):
    """Of the repository; where this is none, of what the programs were built from."""
    if os.path.exists(os.path.join(ROOT, ".git")):
        return check.runner.printed("git", "describe", "--always", "--dirty")
    program = check.built("bf16") or check.built("fp32")
    banner = check.runner.printed(program, "--dry-run") if program else ""
    version = re.search(r"^commfuse (\S+):", banner, re.M)
    return f"{version.group(1)}, say the programs" if version else ""


def device(check):
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
    check.judge("a GPU answers", bool(gpu), facts["gpu"] or "nvidia-smi finds none")
    wires(check)
    torch = check.torch.version(0)
    check.say(f"        {'torch':<10} {torch or ('not yet found' if check.torch.thread.is_alive() else 'not found')}")


def wires(check):
    """What the transports rely on, and no emulator knows."""
    program = check.built("bf16", WIRES)
    if not program:
        check.verdict("wires", SKIP, f"{check.build['bf16']}/{WIRES} is not built")
        return
    result = check.runner.run([program], limit=40)
    check.data["wires"] = result.output.splitlines()
    check.show(check.data["wires"])
    check.judge("wires measured", result.status == 0, result.last if result.status else "")
