"""What the documents promise is there: linked files and headings, named files, targets of make, tests, options."""
import pathlib
import re
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
OTHERS = {  # options of programs that are not ours
    "--hostfile", "--mca", "--mpi", "--no-python", "--nproc-per-node", "--signal",
    "--global-batch-size", "--micro-batch-size", "--tensor-model-parallel-size", "--train-iters"}
SOURCES = ("*.py", "*.sh", "scripts/mfu_sweep")
PLACEHOLDERS = {"X", "test_X", "tool_X", "gradient_X"}  # "write layers/X.h"
NAMED = re.compile(r"\b(?:commfuse|layers|data|scripts|tests)/[\w./-]*\w")


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
            raise unittest.SkipTest("git does not tell which files belong to the project") from None
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
        table = re.findall(r'"([a-z][a-z-]*)"', (ROOT / "data/options.c").read_text())
        programs = [name for name in tracked(*SOURCES) if re.match(r"scripts/|data/|tests/bench/.*\.py", name)]
        scripts = "".join((ROOT / name).read_text() for name in programs)
        known = {*(f"--{name}" for name in table), *re.findall(r"--[a-z][a-z-]*[a-z]", scripts)}
        for name, option in self.each(r"(?<![\w-])(--[a-z][a-z-]*[a-z])\b"):
            with self.subTest(document=name, option=option):
                self.assertTrue(option in known | OTHERS, "nobody takes it")


if __name__ == "__main__":
    unittest.main()
