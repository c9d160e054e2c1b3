"""The stage build: all programs that the other stages run, made for both element types; do they start?"""
import os
import re

from .check import FAIL, OK, TYPES

WIRES = "tests/bench/bench_wires"


def targets(check):
    names = "train_gpt", "tests/layers/tool_twins", "tests/bench/bench_gpu"
    found = [f"{build}/{name}" for build in check.build.values() for name in names]
    wires = f"{check.build['bf16']}/{WIRES}"  # builds other than nvcc's have no rule for it
    found += [wires] if check.runner.run(["make", "-n", wires]).status == 0 else []
    return [*found, f"{check.o.ref_build}/tests/layers/tool_twins"]


def run(check):
    make = ["make", "-k", "-j", os.cpu_count()]
    wanted = targets(check)
    result = check.runner.run([*make, *wanted])
    if result.status:  # perhaps for a warning that this compiler alone has
        check.verdict("make, warnings as errors", FAIL, "\n".join(result.output.splitlines()[-20:]))
        result = check.runner.run([*make, "WERROR=", *wanted])
    check.verdict("make", FAIL if result.status else OK, trouble(result) if result.status else f"{result.seconds:.0f} s")
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
    told = f"{', '.join(lost)}; hint: set LD_LIBRARY_PATH to where it is (ldd {program})" if lost else result.last
    check.verdict(f"{kind} program starts", FAIL if result.status else OK, told if result.status else "")
