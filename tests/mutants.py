#!/usr/bin/env python3
"""Do the tests notice? One small fault at a time, drawn at random, is put into a copy of the tree, and its tests are run.

    tests/mutants.py                                     five faults in each file of TESTS
    tests/mutants.py --count 20 commfuse/schedule.c      twenty in one
    tests/mutants.py --seed 7 --show                     only says which ones another seed draws

Faults are those of universalmutator, from PyPI, which `scripts/install_deps.sh --mutants` installs into build/venv. What does not
compile, or gives the same machine code, is left out and another one drawn. A fault is noticed if a test of its file fails or takes
longer than --limit; those that survive are printed at the end, for a person to judge: some change nothing that matters. The
result of the last run is in tests/README.md. This is no part of the tests: a hundred faults take an hour and more.
"""
import argparse
import concurrent.futures
import difflib
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))
import command  # which says that this Python is too old

MUTATE, B = ROOT / "build/venv/bin/mutate", "build/release"
# What notices faults in a file, the fastest first: as tests/run.py --only has it.
TESTS = {
    "commfuse/schedule.c": ["test_schedule", "test_errors", "test_fuse"],
    "commfuse/fuse.c": ["test_fuse", "test_errors", "test_tune", "test_emulated.Emulated.test_once", "test_timeout"],
    "commfuse/choice.c": ["test_choice", "test_replay", "test_tune"],
    "commfuse/replay.c": ["test_replay", "test_choice", "test_playback"],
    "commfuse/tune.c": ["test_tune", "test_plan"],
    "commfuse/cpu/device_cpu.c": ["test_fuse", "test_trace", "test_elementwise", "test_program"],
    "commfuse/cpu/inflight_mpi.c": ["test_transport", "test_fuse", "test_messages"],
    "commfuse/cpu/transport_mpi.c": ["test_transport", "test_inquiry", "test_errors", "test_timeout", "test_kill", "test_plan"],
    "layers/optimizer/zero.c": ["test_gradients.Gradients.test_other_shape", "test_watching.DryRun", "test_plan.Plan.test_gradients*",
                                "test_meshes.Matrix.test_2x2", "test_state", "test_bf16.Bf16.test_gradients_travel_in_bf16", "test_nonfinite",
                                "test_meshes.Matrix.test_nowire_and_other_bounds_go_all_their_way", "test_traffic", "test_gradients"],
    "layers/parallel_linear.c": ["test_gradients.Gradients.test_other_shape", "test_meshes.Matrix.test_2x2", "test_gradients",
                                 "test_meshes.Uneven", "test_traffic"],
    "layers/up.c": ["test_gradients.Gradients.test_other_shape", "test_emulated.Emulated.test_once", "test_gradients"],
    "layers/model.c": ["test_gradients.Gradients.test_other_shape", "test_evaluate", "test_meshes.Matrix.test_2x2",
                       "test_gradients", "test_nonfinite"],
    "layers/params.c": ["test_params", "test_gradients.Gradients.test_other_shape", "test_state", "test_gradients",
                        "test_meshes.Uneven"],
    "data/checkpoint.c": ["test_checkpoint", "test_checkpoint_kill", "test_saving", "test_damage"],
    "data/atomic_file.c": ["test_atomic_file", "test_checkpoint_kill", "test_saving"],
    "data/run/log.c": ["test_log", "test_saving", "test_watching"],
}


running = set()  # so that an interrupted run leaves nothing behind
ended = threading.Event()


def end(*_):
    ended.set()
    for process in list(running):
        process.terminate()  # run.py then ends its tests
    sys.exit(143)

# What else than train_gpt a Python file needs, so that each fault is compiled few times.
BUILDS = {"test_gradients": f"{B}/tests/layers/tool_gradients", "test_bf16": f"{B}/train_gpt_bf16", "test_emulated": "emulated-tests",
          "test_checkpoint_kill": f"{B}/tests/data/tool_checkpoint", "test_messages": f"{B}/tests/commfuse/tool_messages",
          "test_timeout": f"{B}/tests/commfuse/tool_silent_peer", "test_meshes": f"{B}/tests/commfuse/tool_rows"}


class Tree:
    """A copy of the tree, built."""

    def __init__(self, where):
        self.root = pathlib.Path(where)
        for path in subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
            if path.startswith("tests/bench/bench_"):
                continue  # nor are they built
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, self.root / path)
        (self.root / "build").mkdir()
        for build in ROOT.glob("build/*"):
            if build.is_file():
                shutil.copy2(build, self.root / "build")
            elif build.name != "venv" and not build.name.startswith("san-"):
                shutil.copytree(build, self.root / "build" / build.name, symlinks=True)
        self.originals = {}  # machine code by file
        self.run("make", "-j2")

    def run(self, *command, limit=None):
        """(exit status; None: it took too long, output)"""
        if ended.is_set():
            sys.exit()
        process = subprocess.Popen(command, cwd=self.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   errors="replace")
        running.add(process)
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            return None, process.communicate()[0]
        finally:
            running.discard(process)
        if ended.is_set():  # this says nothing of the fault
            sys.exit()
        return process.returncode, output

    def code(self, file):
        """The machine code of a file; None: it does not compile."""
        made = self.root / f"{B}/{file[:-2]}.o"
        if self.run("make", f"{B}/{file[:-2]}.o")[0] != 0:
            return None
        with tempfile.NamedTemporaryFile() as bare:
            subprocess.run(["strip", "--strip-debug", "-o", bare.name, made], check=True)
            return pathlib.Path(bare.name).read_bytes()

    def verdict(self, file, mutant, limit):
        """"" (it survives), what noticed it, or None: it is not one."""
        source = self.root / file
        original = source.read_bytes()
        if file not in self.originals:
            self.originals[file] = self.code(file)
        try:
            source.write_bytes(mutant.read_bytes())
            if self.code(file) in (None, self.originals[file]):
                return None
            for test in TESTS[file]:
                name = test.partition(".")[0]
                python = any(self.root.glob(f"tests/**/{name}.py"))
                build = ["--build", f"{B}/train_gpt {BUILDS.get(name, '')}"] if python else []
                status, output = self.run(sys.executable, "tests/run.py", "--jobs", "1", "--first", "--only", test, *build,
                                          limit=limit)
                if status is None:
                    return f"{test}, after {limit:.0f} s"
                if "\n0 passed, 0 failed" in output:
                    sys.exit(f"{test} is skipped, which notices nothing:\n{output}")
                if status != 0:
                    return None if "the build failed" in output else test
            return ""
        finally:
            source.write_bytes(original)


def mutants(file, seed, folder):
    """Those of a file, in an order that the seed gives."""
    folder.mkdir(parents=True)
    subprocess.run([MUTATE, ROOT / file, "--noCheck", "--mutantDir", folder], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    found = sorted(folder.glob("*.mutant.*"), key=lambda path: int(path.suffixes[-2][1:]))
    random.Random(f"{seed} {file}").shuffle(found)
    return found


def change(file, original, mutant):
    """'FILE:LINE: the line as it was → as it is now'"""
    old, new = (text.splitlines() for text in (original, mutant.read_text(encoding="utf-8")))
    for tag, i, end, j, last in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
        if tag != "equal":
            was, now = (" ".join(line.strip() for line in lines) or "nothing" for lines in (old[i:end], new[j:last]))
            return f"{file}:{i + 1}: {was}  →  {now}"
    return f"{file}: unchanged"


class Draw:
    """The faults of some files, in the order of the seed, and what has become of them."""

    def __init__(self, files, o, folder):
        self.o, self.lock = o, threading.Lock()
        self.original = {file: (ROOT / file).read_text(encoding="utf-8") for file in files}  # which may be edited meanwhile
        self.left = {file: mutants(file, o.seed, folder / file.replace("/", "-"))[o.skip:] for file in files}
        self.drawn = dict.fromkeys(files, o.skip)
        self.busy = dict.fromkeys(files, 0)
        self.judged = {file: [] for file in files}  # (change, verdict)

    def next(self):
        """(file, mutant, its place in the order) of a file that needs more of them, or None."""
        with self.lock:
            for file, left in self.left.items():
                if left and len(self.judged[file]) + self.busy[file] < self.o.count:
                    self.busy[file] += 1
                    self.drawn[file] += 1
                    return file, left.pop(0), self.drawn[file]
        return None

    def examine(self, tree):
        for file, mutant, place in iter(self.next, None):
            what, verdict = change(file, self.original[file], mutant), None
            try:
                verdict = tree.verdict(file, mutant, self.o.limit) if tree else ""
            finally:
                with self.lock:
                    self.busy[file] -= 1
            if verdict is not None:
                self.judged[file].append((what, verdict))
                said = f"noticed by {verdict} " if verdict else "SURVIVES "
                print(f"{place:>5} {said.ljust(35) if tree else ''}{what}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="of those in TESTS; default: all")
    parser.add_argument("--count", type=int, default=5, help="faults in each file (default 5)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skip", type=int, default=0, help="leaves out so many of the seed's order: judged earlier")
    parser.add_argument("--jobs", type=int, default=2, help="at a time, each in a tree of its own (default 2)")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one test program (default 600)")
    parser.add_argument("--show", action="store_true", help="print the faults, run nothing")
    o = parser.parse_args()
    files = o.files or list(TESTS)
    wrong = [file for file in files if file not in TESTS]
    if wrong:
        parser.error(f"no tests are known of {', '.join(wrong)}")
    if not MUTATE.exists() and subprocess.run([ROOT / "scripts/install_deps.sh", "--mutants"], check=False).returncode:
        sys.exit(1)
    with tempfile.TemporaryDirectory(prefix="commfuse-mutants-") as folder, concurrent.futures.ThreadPoolExecutor(o.jobs) as pool:
        draw = Draw(files, o, pathlib.Path(folder))
        list(pool.map(draw.examine, [None] if o.show else [Tree(f"{folder}/tree{i}/tree") for i in range(o.jobs)]))
    if o.show:
        return
    judged = sum(draw.judged.values(), [])
    for what, verdict in judged:
        if not verdict:
            print(f"survives: {what}")
    for file, of in draw.judged.items():
        print(f"{file:<32} {sum(bool(verdict) for _, verdict in of):>4} of {len(of)} noticed; {draw.drawn[file]} drawn")
    print(f"{sum(bool(verdict) for _, verdict in judged)} of {len(judged)} noticed")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    main()
