"""The stages build (the programs of the other stages) and device (the machine)."""
import os

WIRES = "tests/bench/bench_wires"
REFERENCE = "build/ref/tests/layers/tool_twins"  # the CPU's twins, without any library


def build(check):
    names = "train_gpt", "tests/layers/tool_twins", "tests/bench/bench_gpu"
    wanted = [REFERENCE, *(f"{build}/{name}" for build in check.build.values() for name in names)]
    wires = f"{check.build['bf16']}/{WIRES}"  # builds other than nvcc's have no rule for it
    wanted += [wires] if check.runner.run(["make", "-n", wires]).status == 0 else []
    result = check.runner.run(["make", "-k", "-j", os.cpu_count(), "WERROR=", *wanted])  # a new compiler may have new warnings
    trouble = "\n".join(result.output.splitlines()[-20:])
    check.judge("make", result.status == 0, trouble if result.status else f"{result.seconds:.0f} s")


def device(check):
    properties = "name,driver_version,memory.total,power.limit,clocks.max.sm,compute_mode,persistence_mode"
    gpu = check.runner.printed("nvidia-smi", f"--query-gpu={properties}", "--format=csv,noheader").partition("\n")[0]
    check.show(check.runner.printed("make", "-s", "config").splitlines())
    check.judge("a GPU answers", bool(gpu), gpu or "nvidia-smi finds none")
    check.show_run("wires measured", check.runner.run([check.program("bf16", WIRES)], limit=40))
