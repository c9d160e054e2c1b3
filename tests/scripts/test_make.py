"""The Makefile: objects for another processor, MPI library or other flags are compiled again, not mixed with the rest; the
libraries in build/deps go before the system's."""
import os
import re
import pathlib
import shutil
import subprocess
import tempfile
import unittest
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPILER = """#!/bin/sh
echo "${C_INCLUDE_PATH:+$C_INCLUDE_PATH: }$*" >>commands
while [ $# -gt 1 ]; do [ "$1" != -o ] || touch "$2"; shift; done
"""
FILES = ("Makefile", "scripts/cuda.mk", "scripts/lib.mk", "scripts/tools.mk", "tests/tests.mk", "tests/emulator/emulator.mk",
         "tests/fuzz/fuzz.mk", "scripts/find_python.sh", "scripts/find_cuda.sh", "commfuse/base/die.c", "commfuse/context.h")
KINDS = "release", "ref", "cuda-bf16", "emulated-fp32"


class Copy(unittest.TestCase):
    """Of the Makefile, with a compiler that only writes down its arguments."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="commfuse-test-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        for name in FILES:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        (self.folder / "cc").write_text(COMPILER)
        (self.folder / "cc").chmod(0o755)

    def make(self, *words):
        """The compiler's arguments in this call, a line each time."""
        (self.folder / "commands").write_text("")
        variables = {name: value for name, value in os.environ.items() if name not in ("MARCH", "MAKEFLAGS", "C_INCLUDE_PATH")}
        subprocess.run(["make", "-s", "CC=./cc", *words], cwd=self.folder, env=variables, check=True, capture_output=True)
        return (self.folder / "commands").read_text().splitlines()


class Processor(Copy):
    def compiled(self, *words):
        """Processors that objects were compiled for by this call, in turn."""
        commands = self.make(*words, *(f"build/{kind}/commfuse/base/die.o" for kind in KINDS))
        return [word.removeprefix("-march=") for line in commands for word in line.split() if word.startswith("-march=")]

    def test_every_object_is_of_one_processor(self):
        n = len(KINDS)
        self.assertEqual(self.compiled(), ["native"] * n)
        self.assertEqual(self.compiled(), [])
        self.assertEqual(self.compiled("MARCH=x86-64-v3"), ["x86-64-v3"] * n)
        self.assertEqual(self.compiled("MARCH=x86-64-v3"), [])
        self.assertEqual(self.compiled(), ["native"] * n)


class Cuda(unittest.TestCase):
    def test_header_and_library_are_of_one_place(self):
        with tempfile.TemporaryDirectory(prefix="commfuse-test-") as folder:
            half, whole = (pathlib.Path(folder, name) for name in ("half", "whole"))
            files = [whole / "bin/nvcc", half / "include/cudnn.h"]
            for name in "cublasLt", "cudnn", "nccl":
                files += whole / f"include/{name}.h", whole / f"lib/lib{name}.so.9"
            for path in files:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(mode=0o755)
            for home, found in (whole, True), (half, False):
                variables = dict(os.environ, CUDA_HOME=str(whole), NCCL_HOME=str(whole), CUDNN_HOME=str(home))
                if not found:
                    (whole / "include/cudnn.h").unlink()  # the other half is elsewhere
                result = subprocess.run([ROOT / "scripts" / "find_cuda.sh", "make"], env=variables, capture_output=True, text=True)
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertNotIn(str(half), result.stdout)
                self.assertEqual(f"{whole}/lib -Xlinker -l:libcudnn.so.9" in result.stdout, found, result.stdout)


class Version(Copy):
    def test_define_belongs_to_it(self):
        for words, expected in (((), ""), (("DEFINE=-DRELU2 -DX=\"a\"",), " -DRELU2 -DX=a"), ((), "")):
            self.make(*words, "build/release/version")
            self.assertRegex((self.folder / "build/release/version").read_text(), rf"^\S+{re.escape(expected)}\n$")


class Users(Copy):
    GIVEN = dict(CFLAGS="-O2 -DMY=1", CPPFLAGS="-DPRE=2", LDFLAGS="-Lmine", LDLIBS="-lmine", CXXFLAGS="-DPLUS=3",
                 NVCCFLAGS="-DCUDA=4")

    def built(self, *words):
        """Commands by what they make, with and without the user's flags."""
        version = re.search(r'CF_VERSION "(\d+\.\d+)', (ROOT / "commfuse/context.h").read_text())[1]
        targets = [*(f"build/{kind}/commfuse/base/die.o" for kind in KINDS), "build/release/train_gpt",
                   f"build/lib/libcommfuse.so.{version}",
                   "build/emulated-fp32/commfuse/gpu/device_cuda.cuda.o", "build/cuda-bf16/commfuse/gpu/device_cuda.cuda.o"]
        commands = self.make("NVCC=./cc", "CXX=./cc", "program=", *words, *targets)
        return {re.search(r"-o (\S+)", line)[1]: line.split() for line in commands}

    def check(self, plain, given):
        self.assertEqual(set(given), set(plain))
        for made, words in given.items():
            with self.subTest(made):
                needed = [word for word in plain[made] if word in words]
                self.assertEqual(needed, plain[made])
                host, cuda = not made.endswith(".cuda.o"), made.startswith("build/cuda")
                object_file = made.endswith(".o")
                self.assertEqual("-DMY=1" in words, host)
                self.assertEqual("-DPRE=2" in words, not (cuda and not host))
                self.assertEqual(("-DPLUS=3" in words, "-DCUDA=4" in words), (not host and not cuda, not host and cuda))
                self.assertEqual("-Lmine" in words, not object_file)
                if host and "-O3" in words:
                    self.assertLess(words.index("-O3"), words.index("-O2"))

    def test_their_flags_come_after_what_is_needed(self):
        for name in "train_gpt.cu", "commfuse/gpu/device_cuda.cu":
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        plain = self.built()
        self.assertIn("-std=gnu11", plain["build/release/train_gpt"])
        self.check(plain, self.built(*(f"{name}={value}" for name, value in self.GIVEN.items())))
        self.assertEqual(self.built(*(f"{name}={value}" for name, value in self.GIVEN.items())), {})
        self.assertEqual(self.built(), plain)
        with unittest.mock.patch.dict(os.environ, self.GIVEN):
            self.check(plain, self.built())


class Library(Copy):
    def compiled(self, name):
        """What was compiled by this call with the MPI library whose mpicc comes first."""
        mpicc = self.folder / "bin" / "mpicc"
        mpicc.parent.mkdir(exist_ok=True)
        mpicc.write_text(f"#!/bin/sh\necho -I/opt/{name}/include\n")
        mpicc.chmod(0o755)
        with unittest.mock.patch.dict(os.environ, PATH=f"{mpicc.parent}:{os.environ['PATH']}"):
            commands = self.make(*(f"build/{kind}/commfuse/{noun}.o" for kind, noun in (
                ("release", "base/die"), ("release", "cpu/transport_mpi"), ("cuda-fp32", "launch/bootstrap_mpi"),
                ("emulated-bf16", "launch/bootstrap_mpi"))))
        for line in commands:
            self.assertEqual(f"-I/opt/{name}/include" in line, "_mpi" in line, line)
        return [os.path.basename(line.split()[-1]) for line in commands]

    def test_what_includes_it_is_compiled_anew_for_another(self):
        for noun in ("cpu/transport_mpi", "launch/bootstrap_mpi"):
            (self.folder / f"commfuse/{noun}.c").parent.mkdir(parents=True, exist_ok=True)
            (self.folder / f"commfuse/{noun}.c").touch()
        mine = ["transport_mpi.c", "bootstrap_mpi.c", "bootstrap_mpi.c"]
        self.assertEqual(self.compiled("one"), ["die.c", *mine])
        self.assertEqual(self.compiled("one"), [])
        self.assertEqual(self.compiled("another"), ["die.c", *mine])  # the compiler's flags are another's, too
        self.assertEqual(self.compiled("another"), [])


class Carried(Copy):
    def test_what_was_carried_along_is_compiled_and_linked_with(self):
        shutil.copy(ROOT / "train_gpt.cu", self.folder)
        target = "build/release/train_gpt"
        deps = self.folder.resolve() / "build/deps"
        self.assertEqual([line.split()[0].startswith("-") for line in self.make("program=", target)], [True] * 2)
        (deps / "include").mkdir(parents=True)
        shutil.rmtree(self.folder / "build/release")
        asked = self.make("program=", target)
        self.assertTrue(all(line.startswith(f"{deps}/include: ") for line in asked), asked)
        self.assertIn(f"-Lbuild/deps/lib -Xlinker -rpath={deps}/lib -lcjson", asked[-1])

    def test_where_a_path_has_blanks(self):
        """Its first word is another directory."""
        neighbour = self.folder / "it's"
        neighbour.mkdir()
        inside = self.folder / "it's a place"
        inside.mkdir()
        for entry in list(self.folder.iterdir()):
            if entry not in (neighbour, inside):
                entry.rename(inside / entry.name)
        self.folder = inside
        self.test_what_was_carried_along_is_compiled_and_linked_with()

    def test_it_is_all_that_is_needed(self):
        script = shutil.copy(ROOT / "scripts/install_deps.sh", self.folder / "scripts")
        subprocess.run([script, "--carry"], check=True, capture_output=True)
        deps = self.folder.resolve() / "build/deps"
        source, program = self.folder / "use.c", self.folder / "use"
        source.write_text("#define XXH_INLINE_ALL\n#include <xxhash.h>\n#include <cjson/cJSON.h>\n"
                          "int main(void) { return !cJSON_Version(); }\n")
        included = subprocess.run(["cc", "-H", f"-I{deps}/include", source, "-o", program, f"-L{deps}/lib", f"-Wl,-rpath={deps}/lib",
                               "-lcjson"], check=True, capture_output=True, text=True).stderr
        for header in "xxhash.h", "cjson/cJSON.h":
            self.assertIn(f"{deps}/include/{header}\n", included)
        linked = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
        self.assertIn(f"{deps}/lib/libcjson.so.1 ", linked)
        subprocess.run([program], check=True)
        version = subprocess.run([deps / "bin/make", "--version"], check=True, capture_output=True, text=True, env={}).stdout
        self.assertIn("GNU Make", version)
