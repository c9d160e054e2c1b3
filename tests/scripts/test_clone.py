"""What is around the program: a clone with converted line ends works; workflow, container and citation name what is there."""
import json
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def output(*command, cwd=ROOT):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True, timeout=100).stdout


class Clone(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="commfuse-test-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name, "clone")
        try:
            output("git", "rev-parse", "HEAD")
        except (OSError, subprocess.CalledProcessError):
            self.skipTest("git does not know the project's files")

    def test_converted_line_ends(self):
        """As git on Windows, or who has its settings, checks files out."""
        output("git", "clone", "-q", "--shared", "-c", "core.autocrlf=true", str(ROOT), str(self.folder))
        ends = [line.split(maxsplit=3) for line in output("git", "ls-files", "--eol", cwd=self.folder).splitlines()]
        self.assertGreater(len(ends), 200)
        self.assertEqual([words[-1] for words in ends if words[1] in ("w/crlf", "w/mixed") and ".csv" not in words[-1]], [])
        self.assertEqual(output("git", "status", "--short", cwd=self.folder), "")
        self.assertIn("scripts/install_deps.sh", output("scripts/install_deps.sh", "--help", cwd=self.folder))

    def test_a_container_builds_from_what_git_knows(self):
        """As far as that can be tried without a builder: the commands in a folder of those files, and make's without running them."""
        self.folder.mkdir()
        subprocess.run(f"git archive HEAD | tar -x -C '{self.folder}'", shell=True, cwd=ROOT, check=True)
        text = (self.folder / "scripts/Dockerfile").read_text()
        run, = re.findall(r"^RUN (.*)$", text, re.MULTILINE)
        self.assertIn("--file scripts/Dockerfile", text)
        self.assertTrue(run.startswith("scripts/install_deps.sh && make "), run)
        given = re.findall(r"^ARG (\w+=\w+)$", text, re.MULTILINE)
        said = output("env", "-u", "MARCH", *given, "sh", "-ec", run.replace("&& make", "&& make -n"), cwd=self.folder)
        self.assertTrue(re.search(r"-march=native .*train_gpt\.cu\n", said) and re.search(r"(?m)^cp -f \S+ train_gpt$", said))
        for word in json.loads(re.search(r"^CMD (.*)$", text, re.MULTILINE)[1]):
            self.assertTrue(os.access(self.folder / word, os.X_OK), word)

    def test_the_workflow_runs_what_is_there(self):
        for name in (ROOT / ".github/workflows").iterdir():
            text = name.read_text()
            commands = re.findall(r"- run: (.*)$", text, re.MULTILINE)
            self.assertIn(".ci/run", commands)
            self.assertTrue(os.access(ROOT / ".ci/run", os.X_OK))
            for command in commands:
                output("bash", "-nc", command)
            images = json.loads(re.search(r"image: (\[.*?\])", text)[1])
            self.assertEqual({image.split(":")[0] for image in images}, {"debian", "ubuntu"})
            try:
                import yaml
            except ImportError:
                continue
            self.assertEqual([step["run"] for step in yaml.safe_load(text)["jobs"]["all"]["steps"] if "run" in step], commands)

    def test_the_citation_names_the_paper_and_the_licence(self):
        text = (ROOT / ".github/CITATION.cff").read_text()
        paper = re.search(r"arXiv (\d+\.\d+)", (ROOT / "README.md").read_text())[1]
        self.assertIn(f"https://arxiv.org/abs/{paper}", text)
        self.assertIn(f"license: {(ROOT / 'LICENSE').read_text().split()[0]}\n", text)
