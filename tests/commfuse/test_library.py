"""commfuse/ as a library: installed, then used by programs outside of the tree that know the prefix alone."""
# make: lib
# quick: symbols mlp ones_own
# limit: 300
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PREFIX = "/opt/commfuse"
LATE = r"""
#include <commfuse/fuse.h>
#include <stdio.h>
#include <unistd.h>
int main(void) {
    cf_errors_return(true);
    cf_context *context = cf_open("auto", 1, 1);
    cf_group *all = cf_group_create(context, "all", NULL, 0);
    cf_fuse *gather = cf_fuse_create(context, (cf_fuse_config){.name = "late", .group = all, .operation = CF_ALLGATHER,
                                                             .algorithm = cf_algorithm_find("ring"), .slices = 1, .capacity = 4});
    float full[8] = {0};
    if (all->rank == 1) sleep(60);
    if (cf_fuse_run(gather, full, 4, 1, NULL, NULL, -1)) return 0;
    printf("first: %s\n", cf_error());
    printf("failed %d\n", context->failed);
    if (!cf_fuse_begin(gather, full, 4, 1, NULL, NULL, -1)) printf("then: %s\n", cf_error());
    if (!cf_close(context)) printf("last: %s\n", cf_error());
    fflush(stdout);
    return 3;
}
"""


class Library(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="commfuse-test-")
        cls.addClassCleanup(folder.cleanup)
        cls.folder, cls.prefix = pathlib.Path(folder.name), pathlib.Path(folder.name + PREFIX)
        subprocess.run(["make", "-s", "-C", ROOT, "install", f"PREFIX={PREFIX}", f"DESTDIR={folder.name}"], check=True,
                       stdout=subprocess.DEVNULL, env={k: v for k, v in cls.environment().items() if not k.startswith("MAKE")})

    @staticmethod
    def environment(**more):
        return {**os.environ, **more}

    def run_there(self, *command, status=0):
        done = subprocess.run([str(word) for word in command], cwd=self.folder, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env=self.environment(PKG_CONFIG_PATH=f"{self.prefix}/lib/pkgconfig", OMP_NUM_THREADS="1",
                                                   LD_LIBRARY_PATH=f"{self.prefix}/lib", PKG_CONFIG_SYSROOT_DIR=""))
        self.assertEqual(done.returncode, status, f"{command}:\n{done.stdout}")
        return done.stdout

    def flags(self, *what):
        return self.run_there("pkg-config", *what, "commfuse").split()

    def build(self, source, *libraries):
        """Of a file in the folder: the program."""
        program = self.folder / pathlib.Path(source).stem
        self.run_there("cc", "-std=c11", "-O3", "-Wall", "-Wextra", "-Werror", self.folder / source, *self.flags("--cflags"),
                       *(libraries or self.flags("--libs")), "-lm", "-o", program)
        return program

    def example(self, name):
        shutil.copy(self.prefix / "share/commfuse/examples" / name, self.folder / name)
        return name

    def ranks(self, number, *command, **more):
        return self.run_there(ROOT / "scripts/mpirun.sh", "-np", number, *command, **more)

    def exported(self, *nm):
        return [line.split()[-1] for line in self.run_there("nm", "--defined-only", *nm).splitlines() if len(line.split()) == 3]

    def test_symbols_are_cf(self):
        for names in self.exported("-D", self.prefix / "lib/libcommfuse.so"), self.exported("-g", self.prefix / "lib/libcommfuse.a"):
            self.assertGreater(len(names), 100)
            self.assertEqual([name for name in names if not name.startswith("cf_")], [])
        needed = self.run_there("objdump", "-p", self.prefix / "lib/libcommfuse.so")
        self.assertNotRegex(needed, r"NEEDED.*(dnnl|cjson|xxhash)")

    def test_headers_declare_what_is_there(self):
        exported, headers = self.exported("-D", self.prefix / "lib/libcommfuse.so"), sorted(self.prefix.glob("include/**/*.h"))
        self.assertGreater(len(headers), 10)
        for header in headers:
            code = re.sub(r"//[^\n]*", "", header.read_text())
            functions = re.findall(r"^(?!typedef|#|static|    )[\w \t*]*?\b(cf_\w+)\([^;{}]*\)(?: CF_\w+\([^;]*\))?;", code, re.MULTILINE)
            with self.subTest(header=header.name):
                self.assertEqual([name for name in functions if name not in exported], [])
                for name in re.findall(r'#include "([^"]+)"', code):
                    self.assertTrue((header.parent / name).exists(), f"{name} is not installed")

    def test_each_header_is_whole_in_c_and_cpp(self):
        for header in sorted(self.prefix.glob("include/**/*.h")):
            name = header.relative_to(self.prefix / "include")
            for compiler, standard in ("cc", "c11"), ("c++", "c++17"):
                source = self.folder / f"one.{compiler.replace('cc', 'c').replace('c++', 'cc')}"
                source.write_text(f"#include <{name}>\n#include <{name}>\nint main(void) {{ return 0; }}\n")
                with self.subTest(header=header.name, compiler=compiler):
                    self.run_there(compiler, f"-std={standard}", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
                                   *self.flags("--cflags"), source)

    def test_one_version(self):
        version = self.run_there("pkg-config", "--modversion", "commfuse").strip()
        (self.folder / "version.c").write_text("#include <commfuse/context.h>\n#include <stdio.h>\n"
                                               'int main(void) { return printf("%s %s", CF_VERSION, cf_version()) < 0; }\n')
        self.assertEqual(self.run_there(self.build("version.c")), f"{version} {version}")
        soname = re.search(r"SONAME +(\S+)", self.run_there("objdump", "-p", self.prefix / "lib/libcommfuse.so"))[1]
        self.assertEqual(soname, f"libcommfuse.so.{version.rpartition('.')[0]}")

    def test_mlp(self):
        """On any number of ranks: three divide neither the rows nor the columns."""
        mlp = self.build(self.example("mlp.c"))
        for ranks in range(1, 5):
            said = self.ranks(ranks, mlp)
            for rank, schedule in itertools.product(range(ranks), ("none", "slice:4", "ring")):
                with self.subTest(ranks=ranks, rank=rank, schedule=schedule):
                    self.assertRegex(said, rf"rank {rank} of {ranks}, {schedule}: exposed \d+\.\d+ ms, error \d\.\de-0[5-9]")

    def test_mlp_is_numpys(self):
        script = self.example("mlp.py")
        for ranks in range(1, 5):
            said = self.ranks(ranks, sys.executable, script)
            for rank, schedule in itertools.product(range(ranks), ("none", "slice", "ring")):
                with self.subTest(ranks=ranks, rank=rank, schedule=schedule):
                    self.assertIn(f"rank {rank} of {ranks}, {schedule}: equal to numpy", said)

    def test_schedule_of_ones_own(self):
        domino = self.build(self.example("domino.c"), self.prefix / "lib/libcommfuse.a", *self.flags("--libs", "--static"))
        for ranks in range(1, 5):
            said = self.ranks(ranks, domino)
            took = dict(re.findall(r"(\w+) is correct and takes (\d+\.\d+) ms", said))
            self.assertLess(float(took["direct"]), float(took["domino"]))
            self.assertLess(float(took["domino"]), float(took["none"]))
            self.assertIn("domino without a wait violates race: rank 1 step", said)
            self.assertEqual(said.count("its sums are exact"), ranks)

    def test_a_late_peer_is_a_value(self):
        (self.folder / "late.c").write_text(LATE)
        said = self.ranks(2, self.build("late.c"), status=3)
        self.assertRegex(said, r"first: rank 0 waits for rank 1: all-gather late; nothing came for \d[\d.]* s[^\n]*\nhint: ")
        self.assertRegex(said, r"failed 1\nthen: all-gather late: an operation of this context has failed half way\nhint: ")
        self.assertIn("last: an operation of this context has failed half way", said)


if __name__ == "__main__":
    unittest.main()
