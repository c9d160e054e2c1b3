"""The documents are true: linked files and headings, named files, functions, targets of make, tests, options exist.
READMEs keep their size, and the repository keeps no results but those that a document shows.
"""
import fnmatch
import os
import pathlib
import re
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
OTHERS = {  # options of programs that are not ours
    "--cflags", "--hostfile", "--libs", "--local-dir", "--mca", "--mpi", "--no-python", "--nproc-per-node", "--signal", "--cpus-per-task", "--distribution", "--exact",
    "--gpus-per-node", "--ntasks", "--ntasks-per-node", "--tasks",
    "--global-batch-size", "--micro-batch-size", "--tensor-model-parallel-size", "--train-iters", "--iterations-to-skip",
    "--sequence-parallel", "--context-parallel-size", "--cp-comm-type",
    "--use-distributed-optimizer", "--tp-comm-overlap", "--overlap-grad-reduce", "--overlap-param-gather", "--recompute-activations",
    "--grad-reduce-in"}  # -bf16: digits end a name
SOURCES = ("*.py", "*.sh", "scripts/mfu_sweep", "tests/bench/*.c")
PLACEHOLDERS = {"X", "test_X", "tool_X", "gradient_X"}  # "write layers/X.h"
FOLDERS = "commfuse", "layers", "data", "scripts", "tests"
NAMED = re.compile(rf"\b(?:{'|'.join(FOLDERS)})/[\w./-]*\w")
NAMED_ALONE = r"`([\w*-]+\.(?:c|h|cu|cc|py|sh|slurm|mk))`"  # in a folder's README, without the folder
CODE = "*.c", "*.h", "*.cu", "*.cc", "*.py"
TOP_LINES = 220
FOLDER_LINES = 60, 220
RESULTS, RESULTS_BYTES = "scripts/experiments/results/", 1_500_000


def tracked(*patterns):
    """All files of the project that there will be in a clone, and those that are about to be added."""
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns], cwd=ROOT,
                            capture_output=True, text=True, check=True).stdout
    return [name for name in listed.splitlines() if (ROOT / name).is_file()]


def prose(text):
    """Without code between fences: its `#` are no headings, and what programs print holds no promises."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text):
    """As a forge makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


class Documents(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        try:
            names = [name for name in tracked("*.md") if "/results/" not in name]
        except (OSError, subprocess.CalledProcessError):  # no git, not a checkout, or another user's
            raise unittest.SkipTest("git does not know the project's files") from None
        cls.documents = {name: (ROOT / name).read_text() for name in names}
        assert "README.md" in cls.documents

    def each(self, pattern):
        for name, text in self.documents.items():
            for found in re.findall(pattern, text, re.MULTILINE):
                yield name, found

    def test_links(self):
        followed = 0
        for name, target in self.each(r"\]\(([^)\s]+)\)"):
            with self.subTest(document=name, link=target):
                if re.match(r"\w+:", target):
                    continue
                path, _, anchor = target.partition("#")
                file = (ROOT / name).parent / path if path else ROOT / name
                self.assertTrue(file.is_file(), "no such file")
                if anchor:
                    self.assertTrue(anchor in anchors(file.read_text()), "no such heading")
                followed += 1
        self.assertGreater(followed, 10)

    def test_named_files(self):
        files = tracked()
        known = {*files, *(str(parent) for name in files for parent in pathlib.PurePath(name).parents)}
        known |= {str(pathlib.PurePath(name).with_suffix("")) for name in files}  # a program by its source
        for name, text in self.documents.items():
            for found in NAMED.findall(re.sub(r"build/\S*", "", prose(text))):
                with self.subTest(document=name, file=found):
                    self.assertTrue(found in known or pathlib.PurePath(found).stem in PLACEHOLDERS, "no such file")

    def test_files_named_without_their_folder(self):
        names = {pathlib.PurePath(name).name for name in tracked()}
        for document, found in self.each(NAMED_ALONE):
            with self.subTest(document=document, file=found):
                self.assertTrue(pathlib.PurePath(found).stem in PLACEHOLDERS or fnmatch.filter(names, found), "no such file")

    def test_named_functions(self):
        code = "".join((ROOT / name).read_text() for name in tracked(*CODE))
        for document, found in self.each(r"`(\w+)\(\)`"):
            with self.subTest(document=document, function=found):
                self.assertRegex(code, rf"\b{found}\(", "no such function")

    def test_sizes(self):
        top = self.documents["README.md"]
        self.assertLessEqual(len(top.splitlines()), TOP_LINES)
        for folder in FOLDERS:
            with self.subTest(folder=folder):
                self.assertIn(f"({folder}/README.md", top, "README.md does not lead there")
                lines = len(self.documents[f"{folder}/README.md"].splitlines())
                self.assertGreaterEqual(lines, FOLDER_LINES[0])
                self.assertLessEqual(lines, FOLDER_LINES[1])

    def test_results_are_shown(self):
        kept = {name for name in tracked() if name.startswith(RESULTS)}
        self.assertLessEqual(sum((ROOT / name).stat().st_size for name in kept), RESULTS_BYTES)
        shown = set()
        for name in [*self.documents, *(name for name in kept if name.endswith(".md"))]:
            for target in re.findall(r"\]\(([^)\s#]+)", (ROOT / name).read_text()):
                shown.add(os.path.normpath(os.path.join(os.path.dirname(name), target)))
        self.assertEqual(kept - shown, set(), "no document shows them")

    def test_targets_of_make(self):
        listed = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        targets = re.findall(r"^\s*make ([\w-]+)", listed, re.MULTILINE)
        for name, target in self.each(r"(?:`|^ {4}(?:sudo )?)make ([a-z-]+)"):
            with self.subTest(document=name, target=target):
                self.assertTrue(target in targets, "not in `make help`")

    def test_names_of_tests(self):
        listed = subprocess.run(["scripts/test.sh", "--list"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        tests = [line.split()[0] for line in listed.splitlines() if line.strip()]
        for name, pattern in self.each(r"\bT=([\w/]+)"):
            with self.subTest(document=name, pattern=pattern):
                self.assertTrue(any(pattern in test for test in tests), "selects no test")

    def test_options(self):
        table = re.findall(r'"([a-z][a-z-]*)"', (ROOT / "data/run/option_list.h").read_text())
        programs = [name for name in tracked(*SOURCES) if re.match(r"scripts/|data/|tests/bench/|tests/(run|mutants)\.py", name)]
        scripts = "".join((ROOT / name).read_text() for name in programs)
        known = {*(f"--{name}" for name in table), *re.findall(r"--[a-z][a-z-]*[a-z]", scripts)}
        for name, option in self.each(r"(?<![\w-])(--[a-z][a-z-]*[a-z])\b"):
            with self.subTest(document=name, option=option):
                self.assertTrue(option in known | OTHERS, "no program takes it")
