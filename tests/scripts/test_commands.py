"""Every command that a README shows can be typed as it is written: its program is there and may be run, takes the options, and
what is quick runs here.

quick: none
limit: 400
"""
import functools
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
STARTERS = "mpirun", "torchrun", "sbatch", "sudo", "python3"  # the program follows their own options
BUILT = {"./train_gpt": "data/run/option_list.h", "./train_gpt_cuda": "data/run/option_list.h",
         "build/release/train_gpt": "data/run/option_list.h", "build/release/tests/bench/bench_train": "tests/bench/bench_train.c",
         "build/cuda-bf16/tests/bench/bench_train": "tests/bench/bench_train.c",
         "build/release/tests/bench/bench_collectives": "tests/bench/bench_collectives.c"}  # where their options are


def documents():
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split() if "/results/" not in name]


def shown(text):
    """Lines of code, and code in a sentence that begins with a program."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).replace("\\\n", " ")
    yield from re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE)
    yield from (" ".join(code.split()) for code in re.findall(r"`((?:scripts|tests|data|\./train_gpt)[\w/.]* -[^`]*)`", text))


def simple(line):
    """The words of each command of a line, without those that start it."""
    for words in split(shlex.split(line, comments=True, posix=True)):
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        starter = words[0] if words else ""
        if starter in STARTERS:
            words = words[next((i for i, word in enumerate(words) if "/" in word and not word.startswith("-")), len(words)):]
        if words:
            yield words


def split(words):
    command = []
    for word in words:
        if word in ("&&", "|", ";", "--"):
            yield command
            command = []
        else:
            command.append(word)
    yield command


@functools.cache
def options_of(program):
    """What the program's own help, or for what is built its source, names."""
    if program in BUILT:
        text = (ROOT / BUILT[program]).read_text()
        return set(re.findall(r'"-?-?([a-z][a-z-]*)"', text))
    python = (ROOT / program).read_text().startswith("#!/usr/bin/env python3")  # this one has numpy and matplotlib
    done = subprocess.run([*[sys.executable] * python, ROOT / program, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=100)
    return set(re.findall(r"--([a-z][a-z-]*)", done.stdout)) if done.returncode == 0 else set()


class Commands(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        try:
            cls.lines = [(name, line) for name in documents() for line in shown((ROOT / name).read_text())]
            modes = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            raise unittest.SkipTest("git does not know the project's files") from None
        cls.tracked = {line.split("\t")[1]: line.split()[0] for line in modes.splitlines()}

    def each(self):
        for document, line in self.lines:
            for words in simple(line):
                yield document, line, words

    def test_programs_are_there_and_take_the_options(self):
        seen = 0
        for document, line, words in self.each():
            program = words[0]
            if program not in BUILT and not re.match(r"(scripts|tests|data)/", program):
                continue
            with self.subTest(document=document, line=line):
                if program not in BUILT:
                    self.assertIn(program, self.tracked, "no such file")
                    started = program.endswith(".slurm") or "python" in line
                    self.assertTrue(self.tracked[program] == "100755" or started, "it has no run bit")
                if program.endswith(".slurm"):
                    program = "./train_gpt"  # to which it passes its arguments
                for option in re.findall(r"(?<!\S)--([a-z][a-z-]*)", " ".join(words[1:])):
                    self.assertIn(option, options_of(program), f"{program} does not take it")
                seen += 1
        self.assertGreater(seen, 40)

    def test_what_is_quick_runs_as_it_is_written(self):
        """Text to tokens; and the trainer as a dry run, or as a prediction, of what a line would do."""
        folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        for name in os.listdir(ROOT):
            if name.startswith("train_gpt") or name in ("data", "scripts"):
                (folder / name).symlink_to(ROOT / name)
        (folder / "corpus.txt").write_text("A text of some words. " * 4000)
        (folder / "copy.json").symlink_to(ROOT / "scripts/machines/h100x8.json")  # of which a reader makes a copy of his own
        ran = 0
        for document, line, words in self.each():
            written = " ".join(words)
            if words[0] == "data/prepare.py" and "gpt2" not in written and not (folder / "tokens").exists():
                command = words
            elif words[0] == "./train_gpt" and re.search(r"--dry-run|--predict", written):
                command = words
            elif words[0] == "./train_gpt" and re.search(r"--train tokens", written) and "--init-from" not in written:
                command = [*words, "--dry-run"]
            else:
                continue
            with self.subTest(document=document, line=line):
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
                self.assertEqual(done.returncode, 0, f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
                ran += 1
        self.assertGreater(ran, 8)

    def test_a_model_of_bytes_is_asked(self):
        """What READMEs do with model.bin, as it is written, on one that has learned a text of one word by bytes."""
        with tempfile.TemporaryDirectory() as folder:
            def run(*words):
                done = subprocess.run(words, cwd=folder, capture_output=True, timeout=300)
                self.assertEqual(done.returncode, 0, (words, done.stderr.decode(errors="replace")))
                return done.stdout.decode(errors="replace")
            pathlib.Path(folder, "corpus.txt").write_text("commfuse " * 2000)
            for name in "train_gpt", "data", "scripts":
                os.symlink(ROOT / name, f"{folder}/{name}")
            run("data/prepare.py", "--input", "corpus.txt", "--out", "tokens")
            run("./train_gpt", "--train", "tokens", "--out", "run", *"--layers 1 --channels 64 --heads 2 --seq 64 --micro-batch 4 --lr 0.01 "
                "--steps 60 --warmup 5 --threads 1 --peak-tflops 1".split())
            os.rename(f"{folder}/run/model.bin", f"{folder}/model.bin")
            said = [(words, run(*words)) for _, _, words in self.each() if words[:3] == ["./train_gpt", "--init-from", "model.bin"]]
        self.assertGreater(len(said), 1)
        self.assertTrue(any("--prompt" in words for words, _ in said))
        for words, text in said:
            text = text[text.rindex(words[words.index("--prompt") + 1]):] if "--prompt" in words else text
            self.assertGreater(text.count("commfuse"), 2, text)

    def test_a_case_is_run_by_the_name_that_its_failure_prints(self):
        for name, program in (("test_meshes.Matrix.test_4x1", "train/test_meshes"),  # in no text: made by a loop
                              ("test_tree.Arrows.test_they_point_down", "scripts/test_tree")):
            done = subprocess.run([sys.executable, "tests/run.py", "--list", "--only", name], cwd=ROOT, capture_output=True, text=True)
            self.assertRegex(done.stdout, rf"^{program} +ranks 1  cases {re.escape(name)}\n$")
        done = subprocess.run([sys.executable, "tests/run.py", "--only", name], cwd=ROOT, capture_output=True, text=True)
        self.assertEqual(done.stdout.splitlines()[-1], "1 passed, 0 failed")
        done = subprocess.run([sys.executable, "tests/run.py", "--only", "test_tree.Arrows.test_of_no_name"], cwd=ROOT,
                              capture_output=True, text=True)
        self.assertNotEqual(done.returncode, 0)

    def test_what_fails_beside_others_has_a_second_run_alone(self):
        """In a tree of its own, of tests that fail in their first run only, and always."""
        case = "import os, unittest\nclass Case(unittest.TestCase):\n    def test_it(self):\n        self.assertTrue({})\n"
        once, always, never = case.format("os.path.exists(__file__ + '.ran') or open(__file__ + '.ran', 'w').close()"), case.format(0), case.format(1)
        for files, again, last in (([once, never], 1, "2 passed, 0 failed"), ([once, always], 1, "1 passed, 1 failed"),
                                   ([once] * 4, 0, "0 passed, 4 failed")):
            with self.subTest(last=last), tempfile.TemporaryDirectory() as tree:
                for name in "tests/run.py", "tests/launcher.py", "scripts/command.py", "scripts/find_python.sh", "tests/room":
                    os.makedirs(os.path.dirname(f"{tree}/{name}"), exist_ok=True)
                    shutil.copy(ROOT / name, f"{tree}/{name}") if os.path.exists(ROOT / name) else os.mkdir(f"{tree}/{name}")
                pathlib.Path(tree, "Makefile").write_text("all:\n")
                for number, text in enumerate(files):
                    pathlib.Path(tree, f"tests/room/test_{number}.py").write_text(text)
                done = subprocess.run([sys.executable, "tests/run.py"], cwd=tree, capture_output=True, text=True)
                self.assertEqual(done.stdout.splitlines()[-1], last, done.stdout + done.stderr)
                self.assertEqual(done.stdout.count("\nfailed beside others and passed alone, which is a fault to be found: "
                                                   "room/test_0: test_0.Case.test_it\n"), again, done.stdout)
                self.assertEqual(done.returncode, int(not last.endswith(" 0 failed")))


class BatchFile(unittest.TestCase):
    """scripts/train.slurm with what a site's Slurm has set, and without Slurm: its launchers print what they are given."""

    def launched(self, status=0, **variables):
        with tempfile.TemporaryDirectory() as folder:
            for name in "mpirun", "srun", "scontrol":
                pathlib.Path(folder, name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
                os.chmod(f"{folder}/{name}", 0o755)
            environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": folder, "SLURM_JOB_ID": "1"}
            done = subprocess.run(["bash", ROOT / "scripts/train.slurm", "--steps", "9"], env=environment | variables,
                                  capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, status, done.stderr)
        return done.stdout.split() if status == 0 else done.stderr

    def test_the_number_of_ranks(self):
        nodes = {"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "4", "SLURM_CPUS_ON_NODE": "16"}
        program = ["./train_gpt", "--steps", "9"]
        for variables, ranks, cores in ((nodes, "8", "4"), (nodes | {"SLURM_NTASKS": "6", "SLURM_CPUS_PER_TASK": "3"}, "6", "3"),
                                        ({"SLURM_NNODES": "3", **dict(list(nodes.items())[1:])}, "12", "4"),
                                        (nodes | {"SLURM_NTASKS": "64"}, "64", "1"),
                                        ({"SLURM_TASKS_PER_NODE": "4(x2),1", "SLURM_CPUS_PER_TASK": "2"}, "9", "2")):
            with self.subTest(variables=variables):
                self.assertEqual(self.launched(MPI="mpirun", **variables), ["mpirun", "-np", ranks, *program])
                self.assertEqual(self.launched(**variables), ["srun", "--mpi=pmix", f"--ntasks={ranks}", f"--cpus-per-task={cores}",
                                                              "--distribution=block", *program])

    def test_what_is_missing_is_named(self):
        for mpi in "mpirun", "pmix":
            self.assertRegex(self.launched(status=1, MPI=mpi, SLURM_NNODES="2"), r"\Aerror: Slurm has set none of SLURM_NTASKS, "
                             r"SLURM_NTASKS_PER_NODE, SLURM_TASKS_PER_NODE; give sbatch --ntasks-per-node\n\Z")
        self.assertIn("SLURM_CPUS_PER_TASK", self.launched(status=1, SLURM_NTASKS="2"))
        self.assertEqual(self.launched(MPI="mpirun", SLURM_NTASKS="2")[:3], ["mpirun", "-np", "2"])
