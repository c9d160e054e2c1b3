#!/usr/bin/env python3
"""Compare the predictions of --predict with measurements; `make predict-check` writes build/predict/.

gpu         this program's steps on one H100 and one H200 (the reports of gpu_check.py that are committed), by the machine files
            whose kernels come from these reports (measure_machine.py); nothing is fitted to a step
published   llm.c's published steps, nothing fitted
emulated    the emulator's clock (tests/emulator/clock.cc), with a machine file of the same assumptions
report      the committed report of a lab of four cores; for each mesh the speed of a rank is fitted
here        this machine, described by measure_machine.py: two ranks over shared memory and, as root, on two hosts made of it
scaling     no measurement: d48 (with 16 heads, a multiple of 8 ranks) on 8 to 4096 H100, in build/predict/scaling.png
"""
import csv
import functools
import json
import os
import pathlib
import re
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import lab
import plots
import run_log
import tables
from command import Parser, some_of, status_of, write_whole
from runner import Runner, words_of

run = Runner().output
MODES = "ideal", "none", "slice", "ring", "levels", "auto"
COLUMNS = "step", "tokens", "mfu", "products", "attention", "memory", "exposed", "slowed", "host", "gib"
HOSTS_GBIT = 2
REPORTED = "none", "slice", "ring"
PUBLISHED = (("124M, 8 A100, 64 a GPU", "a100x8", "d12", 64, 512, 300), ("350M, 8 A100, 64 a GPU", "a100x8", "d24", 64, 512, 820),
             ("774M, 8 A100, 32 a GPU", "a100x8", "d36", 32, 512, 1700),
             ("1558M, 8 H100, 16 a GPU", "h100x8", "d48", 16, 1024, 2800))


@functools.lru_cache(maxsize=None)
def predict(machine, **options):
    text = run(["./train_gpt", "--predict", machine, *words_of(**options)])
    rows = re.findall(rf"^({'|'.join(MODES)}) +([-\d. |%]+?) +[a-z]", text, re.M)
    return {mode: dict(zip(COLUMNS, map(float, re.findall(r"[-\d.]+", rest)))) for mode, rest in rows}


def compared(what, rows):
    """A table of rows (names, measured, predicted)."""
    return tables.markdown([{**names, f"{what}, ms": f"{measured:.4g}", "predicted, ms": f"{predicted:.4g}",
                             "error": f"{100 * (predicted / measured - 1):+.1f} %"} for names, measured, predicted in rows])


def gpu(_):
    rows = []
    for name in "h100", "h200":
        text = pathlib.Path(ROOT, f"scripts/experiments/results/gpu/{name}.txt").read_text(encoding="utf-8")
        steps = re.findall(r"^ *(d\d+) +(commfuse|recompute) +(\d+) +(\d+) +([\d.]+) ", text, re.M)
        rows += [({"on one": f"{name}, {model}, {micro} × {count}{', recompute' * (kind == 'recompute')}"}, float(ms), predict(
            f"{name}x8", model=model, micro_batch=micro, batch=int(micro) * int(count), recompute=int(kind == "recompute"))
            ["ring"]["step"]) for model, kind, micro, count, ms in dict.fromkeys(steps)]
    return compared("measured", rows)


def published(_):
    return compared("measured", [({"llm.c": name}, measured, predict(
        machine, tp=1, dp=8, model=model, micro_batch=micro, batch=batch, recompute=1)["slice"]["step"])
                                 for name, machine, model, micro, batch, measured in PUBLISHED])


def scaling(o):
    """Tokens per second and GPU of each mode, on its best mesh that fits. Takes some minutes."""
    figure, axes = plots.plt.subplots(1, 2, figsize=(9, 3.6))
    text = ""
    for axis, micro in zip(axes, (16, 1)):
        printed = run(["./train_gpt", "--predict", "scripts/machines/h100x8.json", "--predict-ranks", "8:4096", "--model", "d48",
                       "--heads", "16", "--micro-batch", micro])
        found = {}
        for ranks, tp, steps in re.findall(r"^ *(\d+) +(\d+) +\d+ +([\d.]+(?: +[\d.]+){5})  \S+ +[\d.]+% +[\d.]+  "
                                           r"(?!does not fit)", printed, re.M):
            for mode, ms in zip(MODES, map(float, steps.split())):
                found[int(ranks), mode] = max(found.get((int(ranks), mode), (0, 0)), (micro * 1024 / ms, int(tp)))
        sizes = sorted({ranks for ranks, _ in found})
        for mode in MODES:
            axis.semilogx(sizes, [found[n, mode][0] for n in sizes], "o-", ms=3, base=2, label=mode)
        axis.set(xlabel="GPUs", ylabel="thousand tokens/s and GPU", ylim=(0, None),
                 title=f"{micro} sequence{'s' * (micro > 1)} a GPU")
        lines = [{"GPUs": n, **{mode: "{:.1f} (tp {})".format(*found[n, mode]) for mode in MODES}} for n in sizes]
        text += f"{micro} a GPU, thousand tokens/s and GPU on the best mesh:\n\n{tables.markdown(lines)}\n"
    axes[0].legend()
    plots.save(figure, o.out / "scaling.png")
    return text


def compared_steps(what, machine, program, shape, meshes, modes, rounds, launcher="scripts/mpirun.sh -np {}", **environment):
    """A table of the shortest steps of bench_train, which other work disturbs least."""
    rows = []
    for mesh in meshes:
        ranks = str(mesh["tp"] * mesh["dp"])
        command = [*launcher.format(ranks).split(), program, "--modes", ",".join(modes), "--json",
                   *words_of(rounds=rounds, peak_tflops=1, timeout=600, **shape, **mesh)]
        steps = run_log.turns(run(command, EMULATOR_DEVICES=ranks, **environment))[1]
        rows += [({"mesh": " ".join(f"{k} {v}" for k, v in mesh.items()), "overlap": mode},
                  min(step["step_ms"] for step in steps if step["mode"] == mode),
                  predict(str(machine), **shape, **mesh)[mode]["step"]) for mode in modes]
    return compared(what, rows)


def here(o):
    bench, machine, hosts = "build/release/tests/bench/bench_train", o.out / "here.json", o.out / "hosts.json"
    shape = dict(layers=4, channels=512, heads=8, seq=256, vocab=8192, micro_batch=4, threads=1)
    meshes = dict(tp=2, dp=1), dict(tp=1, dp=2), dict(tp=2, dp=1, strategy="up")
    options = dict(program=bench, shape=shape, meshes=meshes, modes=MODES[:4], rounds=7, OMP_WAIT_POLICY="passive")
    run(["make", "-s", bench])
    run([sys.executable, "scripts/measure_machine.py", "--out", machine])
    described = json.loads(machine.read_text(encoding="utf-8"))
    write_whole(hosts, json.dumps({**described, "links": [dict(described["links"][1], gb_per_s=HOSTS_GBIT / 8)]}))
    text = (f"{os.cpu_count()} cores, two for each rank; if there are fewer, transfers take time from products.\n\n"
            f"{compared_steps('measured', machine, **options)}\n")
    obstacle = lab.obstacle()
    if obstacle:
        return f"{text}No hosts: {obstacle}\n"
    remote = compared_steps("measured", hosts, **options, launcher=f"scripts/lab.py --rate {HOSTS_GBIT}gbit --hosts {{}} --")
    return f"{text}Two hosts, {HOSTS_GBIT} Gbit/s between them:\n\n{remote}"


def report(o):
    """Its machine is not here, so the speed of a rank is fitted: the step without transfers is as measured."""
    laptop = json.loads(pathlib.Path(ROOT, "scripts/machines/laptop.json").read_text(encoding="utf-8"))
    with open(f"{ROOT}/scripts/experiments/results/training/training.csv", encoding="utf-8") as file:
        steps = [row for row in csv.DictReader(file) if row["threads"] == "1" and row["round"] != "0"]
    rows = []
    for name in dict.fromkeys(row["mesh"] for row in steps):
        def middle(column, mode="nowire"):
            return statistics.median(float(row[column]) for row in steps if (row["mesh"], row["mode"]) == (name, mode))

        strategy, tp, dp = re.fullmatch(r"(\w+) (\d+)x(\d+)", name).groups()
        shape = dict(model="d12", vocab=8192, seq=1024, micro_batch=1, recompute=1, strategy=strategy, tp=tp, dp=dp)
        link = dict(laptop["links"][-1], gb_per_s=middle("link_bits_per_s") / 8e9, block_gb_per_s=0, taken=0,
                    native_share=[[1, min(1, middle("line_ms") / middle("native_ms"))]])  # the library's, timed alone
        speed, off = 1, 1
        while abs(off) > 0.001:
            path = o.out / f"report_{strategy}_{dp}_{speed:.4f}.json"
            faster = {f"{kind}_tflops": [[x, y * speed] for x, y in laptop[f"{kind}_tflops"]]
                      for kind in ("product", "attention", "attention_backward")}
            faster.update({field: laptop[field] * speed for field in ("peak_tflops", "memory_gb_per_s")})
            write_whole(path, json.dumps({**laptop, **faster, "links": [link]}))
            off = predict(str(path), **shape)["ideal"]["step"] / middle("step_ms") - 1
            speed *= 1 + off
        rows += [({"mesh": name, "overlap": mode}, middle("step_ms", mode), predict(str(path), **shape)[mode]["step"])
                 for mode in REPORTED]
    return compared("measured", rows)


def emulated(o):
    program = "build/emulated-bf16/tests/bench/bench_train"
    if not os.path.exists(f"{ROOT}/{program}"):
        return f"Skipped: {program} is not built (make {program})\n"
    shape = dict(layers=4, channels=1280, heads=20, seq=1024, vocab=8192, micro_batch=32, recompute=0)
    meshes = dict(tp=2, dp=1), dict(tp=4, dp=1), dict(tp=1, dp=4), dict(tp=2, dp=2), dict(tp=4, dp=1, strategy="up")
    return compared_steps("emulated", "tests/emulator/imagined.json", program, shape, meshes, MODES[1:4], 1,
                          EMULATOR_CLOCK="1", OMP_NUM_THREADS="1")


PARTS = {part.__name__: part for part in (gpu, published, emulated, report, here, scaling)}


def main():
    parser = Parser(__doc__)
    parser.add_argument("--only", type=some_of(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=pathlib.Path, default=f"{ROOT}/build/predict")
    o = parser.parse_args()
    o.out = o.out.absolute()  # programs start in the root of the repository
    o.out.mkdir(parents=True, exist_ok=True)
    text = "# Predictions beside measurements\n"
    for name in o.only:
        table = PARTS[name](o)
        text += f"\n## {name}\n\n{table}"
        print(f"{name}\n{table}", flush=True)
    write_whole(o.out / "predict.md", text)
    print(f"{o.out}/predict.md")


if __name__ == "__main__":
    sys.exit(status_of(main))
