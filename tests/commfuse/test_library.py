"""commfuse/ as a library: installed, then used by programs outside of the tree that know the prefix alone."""
# make: lib
# quick: symbols mlp ones_own half_of
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

# Beside a program that has its own MPI: own_mpi LEVEL WHOLE|HALF THREADS. Twice opens a context on a communicator of the program's,
# runs an operation there, and closes it. With MPI_THREAD_MULTIPLE a thread of the program's sends messages all the while.
OWN_MPI = r"""
#define _GNU_SOURCE
#include <commfuse/fuse.h>
#include <mpi.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int world, size;
static int stop; // atomic

static void *talk(void *comm) { // to the next rank, from the one before; all ranks end after the same message
    for (int out[2] = {0, 0}, in[2] = {0, 0}; !in[1]; out[0]++) {
        out[1] = in[1] | (world == 0 && __atomic_load_n(&stop, __ATOMIC_ACQUIRE));
        MPI_Bcast(out, 2, MPI_INT, 0, *(MPI_Comm *)comm);
        MPI_Sendrecv(out, 2, MPI_INT, (world + 1) % size, 0, in, 2, MPI_INT, (world + size - 1) % size, 0, *(MPI_Comm *)comm,
                     MPI_STATUS_IGNORE);
        if (in[0] != out[0]) MPI_Abort(*(MPI_Comm *)comm, 9);
    }
    return NULL;
}

static void *must(void *made) {
    if (made) return made;
    printf("error: %s\n", cf_error());
    MPI_Finalize();
    exit(4);
}

static int cores(void) {
    cpu_set_t set;
    sched_getaffinity(0, sizeof set, &set);
    return CPU_COUNT(&set);
}

int main(int argc, char **argv) {
    static const char *const names[] = {"none", "single", "funneled", "serialized", "multiple"};
    static const int levels[] = {MPI_THREAD_SINGLE, MPI_THREAD_FUNNELED, MPI_THREAD_SERIALIZED, MPI_THREAD_MULTIPLE};
    const int threads = atoi(argv[3]);
    int level = 0, provided, ended, failed = 0;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET((size_t)sched_getcpu(), &one);
    sched_setaffinity(0, sizeof one, &one);
    omp_set_num_threads(3);
    while (strcmp(argv[1], names[level]) != 0) level++;
    if (level == 0)
        MPI_Init(&argc, &argv);
    else
        MPI_Init_thread(&argc, &argv, levels[level - 1], &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &world);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm part, mine;
    MPI_Comm_split(MPI_COMM_WORLD, *argv[2] == 'H' ? world % 2 : 0, -world, &part); // in reverse
    MPI_Comm_dup(MPI_COMM_WORLD, &mine);
    cf_errors_return(true);
    pthread_t talker;
    if (levels[level > 0 ? level - 1 : 0] == MPI_THREAD_MULTIPLE) pthread_create(&talker, NULL, talk, &mine);
    for (int time = 0; time < 2; time++) {
        cf_context *c = must(cf_open_on(&part, "auto", threads, 60));
        cf_group *all = must(cf_group_create(c, "all", NULL, 0));
        cf_fuse *gather = must(cf_fuse_create(c, (cf_fuse_config){.name = "own", .group = all, .operation = CF_ALLGATHER,
                                                                  .algorithm = cf_algorithm_find("ring"), .slices = 1,
                                                                  .dtype = CF_INT64, .capacity = 1000}));
        if (cf_open("auto", 1, 60)) return 5;
        if (time == 0) printf("second: %s\n", cf_error());
        int64_t *full = calloc((size_t)all->size * 1000, sizeof *full);
        for (int run = 0; run < 50; run++) {
            int sum = 0, one_each = 1;
            for (int i = 0; i < 1000; i++) full[all->rank * 1000 + i] = world * 1000 + i + run;
            must(cf_fuse_run(gather, full, 1000, 1, NULL, NULL, -1));
            for (int r = 0; r < all->size; r++)
                for (int i = 0; i < 1000; i++) { // ranks of `part` are the program's, in reverse
                    const int from = *argv[2] == 'H' ? (all->size - 1 - r) * 2 + world % 2 : all->size - 1 - r;
                    failed |= full[r * 1000 + i] != from * 1000 + i + run;
                }
            MPI_Allreduce(&one_each, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD); // between two runs this thread may call MPI
            failed |= sum != size;
        }
        printf("rank %d of %d, world %d, time %d: %s, cores %d, threads %d\n", all->rank, all->size, world, time,
               failed ? "wrong" : "exact", cores(), omp_get_max_threads());
        free(full);
        cf_fuse_free(gather), cf_group_free(all);
        must(cf_close(c) ? c : NULL);
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELEASE);
    if (levels[level > 0 ? level - 1 : 0] == MPI_THREAD_MULTIPLE) pthread_join(talker, NULL);
    MPI_Errhandler handler;
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &handler);
    MPI_Finalized(&ended);
    printf("MPI goes on: %d, its errors end the program: %d\n", !ended, handler == MPI_ERRORS_ARE_FATAL);
    MPI_Finalize();
    if (!cf_open("auto", 1, 60)) printf("afterwards: %s\n", cf_error());
    return failed;
}
"""
# Ranks that differ: DIFFER HOW. Rank 1 has another operation before this one, another size of it, or comes late to a barrier.
DIFFER = r"""
#include <commfuse/fuse.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
// Uses the stack where the failed barrier had its variables, while the late rank comes.
static __attribute__((noinline)) int changed(void) {
    volatile unsigned char stack[8192];
    for (size_t i = 0; i < sizeof stack; i++) stack[i] = 255;
    sleep(3);
    int count = 0;
    for (size_t i = 0; i < sizeof stack; i++) count += stack[i] != 255;
    return count;
}
int main(int argc, char **argv) {
    cf_errors_return(true);
    cf_context *context = cf_open("auto", 1, 1);
    cf_group *all = cf_group_create(context, "all", NULL, 0);
    cf_fuse_config config = {.name = "extra", .group = all, .operation = CF_ALLGATHER, .algorithm = cf_algorithm_find("ring"),
                             .slices = 1, .capacity = 4};
    static float full[16];
    const int more = argc > 1 && all->rank == 1;
    if (argc > 1 && strcmp(argv[1], "late") == 0) {
        if (more) sleep(3);
        printf("rank %d: %s\n", all->rank, cf_barrier(context, all) ? "met" : cf_error());
        fflush(stdout);
        if (!more || sleep(3) != 0) printf("changed: %d\n", changed()); // rank 0 ends first
        return 4;
    }
    if (more && strcmp(argv[1], "order") == 0) cf_fuse_create(context, config);
    config.name = "same";
    if (more && strcmp(argv[1], "size") == 0) config.capacity = 8;
    cf_fuse *gather = cf_fuse_create(context, config);
    if (!cf_fuse_run(gather, full, config.capacity, 1, NULL, NULL, -1)) return printf("run: %s\n", cf_error()), fflush(stdout), sleep(1), 4; // its peer says it too
    printf("no error\n");
    return cf_close(context) ? 0 : 5;
}
"""
# Two schedules of one's own, checked for many ranks and run.
NEW = r"""
#include <commfuse/fuse.h>
#include <commfuse/schedule_check.h>
#include <stdio.h>
#include <stdlib.h>

// An all-gather by two rings: even slices go to the right, odd ones to the left.
static bool both_ways(cf_schedule *s, const void *argument) {
    const int N = s->ranks, r = s->rank, m = s->slices;
    (void)argument;
    if (m < 2) return false;
    for (int hop = 1; hop < N; hop++)
        for (int k = 0; k < m; k++) {
            const int by = k % 2 ? N - 1 : 1, out = (r + (N - by) * (hop - 1)) % N * m + k, in = (r + (N - by) * hop) % N * m + k;
            cf_append(s, (cf_step){.kind = CF_EXCHANGE, .send = {(r + by) % N, out}, .from = {CF_FULL, out},
                                   .recv = {(r + N - by) % N, in}, .at = {CF_FULL, in}, .wait = {hop > 1 ? s->count - m + 1 : 0}});
        }
    s->split = s->count;
    for (int hop = 0; hop < N; hop++)
        for (int k = 0; k < m; k++) {
            const int by = k % 2 ? N - 1 : 1, in = (r + (N - by) * hop) % N * m + k;
            cf_append(s, (cf_step){.kind = CF_COMPUTE, .side = CF_COMPUTE_AFTER, .at = {CF_FULL, in}, .first = in, .count = 1,
                                   .wait = {hop > 0 ? (hop - 1) * m + k + 1 : 0}});
        }
    return true;
}

// An all-gather in two levels, of hosts with as many ranks as the argument says: each rank's counterpart on other hosts gets its
// shard, then passes it on to those beside it.
static bool two_levels(cf_schedule *s, const void *argument) {
    const int G = *(const int *)argument, N = s->ranks, H = N / G, host = s->rank / G, local = s->rank % G;
    if (s->slices > 1 || N % G != 0) return false;
    int arrived[64] = {0};
    for (int j = 1; j < H; j++) {
        const int to = (host + j) % H * G + local, from = (host + H - j) % H * G + local;
        arrived[from] = cf_append(s, (cf_step){.kind = CF_EXCHANGE, .send = {to, s->rank}, .from = {CF_FULL, s->rank},
                                               .recv = {from, from}, .at = {CF_FULL, from}});
    }
    for (int i = 1; i < G; i++)
        for (int j = 0; j < H; j++) {
            const int there = (host + H - j) % H * G, out = there + local, in = there + (local + G - i) % G;
            arrived[in] = cf_append(s, (cf_step){.kind = CF_EXCHANGE, .send = {host * G + (local + i) % G, out}, .from = {CF_FULL, out},
                                                 .recv = {host * G + (local + G - i) % G, in}, .at = {CF_FULL, in},
                                                 .wait = {arrived[out]}});
        }
    s->split = s->count;
    for (int i = 0; i < N; i++) {
        const int in = (s->rank + i) % N;
        cf_append(s, (cf_step){.kind = CF_COMPUTE, .side = CF_COMPUTE_AFTER, .at = {CF_FULL, in}, .first = in, .count = 1,
                               .wait = {arrived[in]}});
    }
    return true;
}

enum { ROWS = 6 };

static void sum(void *argument, const cf_span *span, cf_stream *stream) {
    (void)stream;
    for (int block = 0; block < span->blocks; block++)
        for (int64_t i = 0; i < span->rows; i++)
            *(int64_t *)argument += (span->row + block * span->row_stride + i + 1) * ((int64_t *)(span->data + block * span->data_stride))[i];
}

int main(void) {
    static const int two = 2;
    const cf_algorithm ring = *cf_algorithm_find("ring"); // with as many slices, and what else it does
    cf_algorithm rows[] = {ring, ring};
    rows[0].name = "both_ways", rows[0].generate = both_ways, rows[0].slices = 2;
    rows[1].name = "two_levels", rows[1].generate = two_levels, rows[1].argument = &two, rows[1].slices = 1;
    cf_errors_return(true);
    cf_context *context = cf_open("auto", 1, 60);
    cf_group *all = context ? cf_group_create(context, "all", NULL, 0) : NULL;
    for (int which = 0; all && which < 2; which++) {
        for (int N = 2; N <= 16 && all->rank == 0; N += 2) {
            cf_schedule *list[16];
            char where[CF_WHERE_TEXT];
            for (int r = 0; r < N; r++)
                list[r] = cf_schedule_create(CF_ALLGATHER, CF_COMPUTE_AFTER, &rows[which], N, 1, r, rows[which].slices);
            const char *property = cf_schedule_check(list, where);
            if (property) printf("%s on %d ranks violates %s: %s\n", rows[which].name, N, property, where);
            for (int r = 0; r < N; r++) cf_schedule_free(list[r]);
        }
        cf_fuse *gather = cf_fuse_create(context, (cf_fuse_config){.name = "new", .group = all, .operation = CF_ALLGATHER,
                                                                   .side = CF_COMPUTE_AFTER, .algorithm = &rows[which],
                                                                   .slices = rows[which].slices, .dtype = CF_INT64, .capacity = ROWS});
        int64_t full[16 * ROWS] = {0}, total = 0, expected = 0;
        for (int i = 0; i < ROWS; i++) full[all->rank * ROWS + i] = all->rank * ROWS + i + 1;
        for (int64_t i = 1; i <= all->size * ROWS; i++) expected += i * i;
        if (!gather || !cf_fuse_run(gather, full, ROWS, 1, sum, &total, -1)) return fprintf(stderr, "%s\n", cf_error()), 1;
        printf("%s on rank %d: %s\n", rows[which].name, all->rank, total == expected ? "exact" : "wrong");
        cf_fuse_free(gather);
    }
    cf_group_free(all);
    return context && cf_close(context) ? 0 : 1;
}
"""
# Without an MPI of its own; and more groups than there may be.
TWICE = r"""
#include <commfuse/fuse.h>
#include <stdio.h>
int main(void) {
    cf_errors_return(true);
    if (!cf_open("carrier-pigeon", 1, 60)) printf("unknown: %s\n", cf_error());
    cf_context *context = cf_open("auto", 1, 60);
    if (!context || cf_open("auto", 1, 60)) return fprintf(stderr, "%s\n", cf_error()), 1;
    printf("second: %s\n", cf_error());
    cf_group *group[20];
    int groups = 0;
    while (groups < 20 && (group[groups] = cf_group_create(context, "one more", NULL, 0))) groups++;
    printf("groups %d: %s\n", groups, cf_error());
    while (groups > 0) cf_group_free(group[--groups]);
    if (!cf_close(context) || cf_open("auto", 1, 60)) return 2;
    printf("again: %s\n", cf_error());
    return 0;
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

    def build(self, source, *libraries, compiler="cc"):
        """Of a file in the folder: the program."""
        program = self.folder / pathlib.Path(source).stem
        self.run_there(compiler, "-std=c11", "-O3", "-Wall", "-Wextra", "-Werror", self.folder / source, *self.flags("--cflags"),
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

    def test_no_limit_of_the_library_is_a_programs_array(self):
        for header in self.prefix.glob("include/**/*.h"):
            self.assertNotIn("[CF_CHOICES]", header.read_text(), header.name)

    def test_a_config_grows_at_its_end(self):
        """Programs compiled before its last field was there, and after the next one, with the library of today."""
        self.example("mlp.c")
        headers = self.folder / "include"
        last = re.search(r"( *double flops;.*\n)(} cf_fuse_config;)", (self.prefix / "include/commfuse/fuse.h").read_text())
        for name, text in ("older", last[2]), ("newer", last[1] + "    char next[64];\n" + last[2]):
            with self.subTest(header=name):
                shutil.copytree(self.prefix / "include", headers, dirs_exist_ok=True)
                fuse = headers / "commfuse/fuse.h"
                fuse.write_text(fuse.read_text().replace(last[0], text))
                self.run_there("cc", "-std=c11", "-O1", f"-I{headers}", "mlp.c", *self.flags("--libs"), "-lm", "-o", name)
                said = self.ranks(2, f"./{name}", status=0 if name == "older" else 1)
                self.assertEqual(len(re.findall(r"ms, exact$", said, re.M)), 6 if name == "older" else 0, said)
                self.assertEqual("the program is newer than this library" in said, name == "newer", said)

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
                    self.assertRegex(said, rf"rank {rank} of {ranks}, {schedule}: exposed \d+\.\d+ ms, exact\n")

    def test_mlp_is_numpys(self):
        script = self.example("mlp.py")
        for ranks in range(1, 5):
            said = self.ranks(ranks, sys.executable, script)
            for rank, schedule in itertools.product(range(ranks), ("none", "slice", "ring")):
                with self.subTest(ranks=ranks, rank=rank, schedule=schedule):
                    self.assertIn(f"rank {rank} of {ranks}, {schedule}: equal to numpy", said)

    def test_mlp_without_numpy(self):
        said = self.run_there(sys.executable, "-S", self.example("mlp.py"), status=1)
        self.assertEqual(said, f"{sys.executable} has no numpy: /usr/bin/python3 has it after apt-get install python3-numpy\n")

    def test_what_the_readme_says_from_an_empty_prefix(self):
        lines = re.search(r"## As a library\n\n((?:    .*\n)+)", (ROOT / "commfuse/README.md").read_text())[1]
        home, path = self.folder / "home", self.folder / "path"
        home.mkdir(), path.mkdir()
        (path / "python3").symlink_to(sys.executable)
        names = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name not in ("PKG_CONFIG_PATH",)}
        done = subprocess.run(["sh", "-e"], input=lines, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env={**names, "HOME": str(home), "PATH": f"{path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
                                   "OMPI_MCA_rmaps_base_oversubscribe": "1"})
        self.assertEqual(done.returncode, 0, done.stdout)
        for text, times in (("ring: exposed ", 2), ("its sums are exact", 2), ("ring: equal to numpy", 2)):
            self.assertEqual(done.stdout.count(text), times, done.stdout)
        self.assertEqual(sorted(each.name for each in (home / "cf").iterdir()), ["include", "lib", "share"])

    def test_schedule_of_ones_own(self):
        domino = self.build(self.example("domino.c"), self.prefix / "lib/libcommfuse.a", *self.flags("--libs", "--static"))
        for ranks in range(1, 5):
            said = self.ranks(ranks, domino)
            took = dict(re.findall(r"(\w+) is correct and takes (\d+\.\d+) ms", said))
            self.assertLess(float(took["direct"]), float(took["domino"]))
            self.assertLess(float(took["domino"]), float(took["none"]))
            self.assertIn("domino without a wait violates race: rank 1 step", said)
            self.assertEqual(said.count("its sums are exact"), ranks)

    def own_mpi(self, ranks, *arguments, status=0):
        (self.folder / "own_mpi.c").write_text(OWN_MPI)
        program = self.folder / "own_mpi"
        if not program.exists():
            self.build("own_mpi.c", *self.flags("--libs"), "-fopenmp", compiler="mpicc")
        return self.ranks(ranks, program, *arguments, status=status)

    def test_own_mpi_with_threads(self):
        """The program starts MPI, opens twice, goes on with MPI and ends it; in another thread it calls MPI at any time."""
        for level in "serialized", "multiple":
            with self.subTest(level=level):
                said = self.own_mpi(3, level, "WHOLE", 0)
                for rank, time in itertools.product(range(3), range(2)):
                    self.assertIn(f"rank {rank} of 3, world {2 - rank}, time {time}: exact, cores 1, threads 3\n", said)
                self.assertEqual(said.count("MPI goes on: 1, its errors end the program: 1\n"), 3)
                self.assertEqual(said.count("second: a context is open, and a process has one at a time"), 3)
                self.assertEqual(said.count("afterwards: MPI has ended, and starts only once in a process"), 3)

    def test_own_mpi_without_threads(self):
        """A level that does not do is an error value, with what to do; MPI goes on."""
        for level in "none", "single", "funneled":
            with self.subTest(level=level):
                said = self.own_mpi(2, level, "WHOLE", 0, status=4)
                self.assertRegex(said, r"error: MPI has thread level [01], and the library's thread needs 2\n"
                                       r"hint: start MPI by MPI_Init_thread\(…, MPI_THREAD_SERIALIZED or MULTIPLE, …\)")

    def test_half_of_the_ranks(self):
        said = self.own_mpi(4, "multiple", "HALF", 0)
        for world, time in itertools.product(range(4), range(2)):
            self.assertIn(f"rank {1 - world // 2} of 2, world {world}, time {time}: exact, cores 1, threads 3\n", said)

    def test_cores_are_taken_when_asked(self):
        """The binding of a launcher to one core is widened for a program that names its threads, and for no other."""
        if "Open MPI" not in self.run_there("mpirun", "--version") or len(os.sched_getaffinity(0)) < 2:
            self.skipTest("only Open MPI's launcher binds without being asked, to one core of several")
        self.assertRegex(self.own_mpi(2, "serialized", "WHOLE", 1), r"exact, cores (?!1,)\d+, threads 3\n")
        self.assertRegex(self.own_mpi(2, "serialized", "WHOLE", 0), r"exact, cores 1, threads 3\n")

    def test_open_twice(self):
        (self.folder / "twice.c").write_text(TWICE)
        program = self.build("twice.c")
        for ranks in 1, 2:
            said = self.ranks(ranks, program)
            for text in ("unknown: transport carrier-pigeon needs a GPU", "second: a context is open", "groups 16: more than 16 groups of ranks",
                         "again: MPI has ended, and starts only once in a process"):
                with self.subTest(ranks=ranks, text=text):
                    self.assertEqual(said.count(text), ranks, said)

    def test_configs_that_differ(self):
        """By the time-out's message, or by the library that finds a message too long."""
        (self.folder / "differ.c").write_text(DIFFER)
        program = self.build("differ.c")
        self.assertEqual(self.ranks(3, program).count("no error\n"), 3)
        self.assertRegex(self.ranks(2, program, "order", status=4),
                         r"run: rank 0 waits for rank 1: all-gather same; nothing came for \d[\d.]* s; (rank 1 has given up; )?"
                         r"rank 1 answers: it waits for rank 0: all-gather same: it has another config of that operation\n(?:.*\n)?"
                         r"hint: all ranks of a group create the same operations, with the same config")
        self.assertRegex(self.ranks(2, program, "size", status=1),
                         r"MPI_ERR_TRUNCATE.*\(all-gather same\)\n(?:.*\n)?hint:  [^\n]* another config of that operation")

    def test_late_at_a_barrier(self):
        """Rank 0's barrier has failed when rank 1 comes: it ends all the same, and writes nothing where the program's variables are."""
        (self.folder / "differ.c").write_text(DIFFER)
        said = self.ranks(2, self.build("differ.c"), "late", status=4)
        self.assertRegex(said, r"rank 0: rank 0 waits for the other ranks: barrier; nothing came for 1\S* s; ")
        self.assertIn("rank 1: met\n", said)
        self.assertIn("changed: 0\n", said)

    def test_beside_mpi4py(self):
        """mlp.py on each half of the ranks of a program that has started MPI by mpi4py."""
        if subprocess.run([sys.executable, "-c", "import mpi4py"], capture_output=True).returncode:
            self.skipTest(f"{sys.executable} has no mpi4py")
        text = (self.prefix / "share/commfuse/examples/mlp.py").read_text()
        text = text.replace("import ctypes\n", "import ctypes\nfrom mpi4py import MPI\n", 1)
        text = text.replace('lib.cf_open(b"auto", 1, 60)', 'lib.cf_open_on(MPI._addressof(half), b"auto", 0, 60)', 1)
        text = text.replace("\ncontext =", "\nhalf = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)\ncontext =", 1)
        text = text.replace("sys.exit(not lib.cf_close(context))",
                            "closed = lib.cf_close(context)\nprint(f'all: {MPI.COMM_WORLD.allreduce(closed)}')")
        (self.folder / "beside.py").write_text(text)
        said = self.ranks(4, sys.executable, "beside.py")
        for rank, schedule in itertools.product(range(2), ("none", "slice", "ring")):
            self.assertEqual(said.count(f"rank {rank} of 2, {schedule}: equal to numpy"), 2, said)
        self.assertEqual(said.count("all: 4"), 4)

    def test_new_schedules_of_few_lines(self):
        """A ring in both directions, and a gather in two levels: right the first time."""
        for name in "both_ways", "two_levels":
            body = re.search(rf"bool {name}\(.*?^}}", NEW, re.DOTALL | re.MULTILINE)[0]
            self.assertLess(body.count("\n"), 25, name)
        (self.folder / "new.c").write_text(NEW)
        program = self.build("new.c")
        for ranks in 2, 4:
            said = self.ranks(ranks, program)
            self.assertNotIn("violates", said)
            for name, rank in itertools.product(("both_ways", "two_levels"), range(ranks)):
                self.assertIn(f"{name} on rank {rank}: exact", said)

    def test_a_late_peer_is_a_value(self):
        (self.folder / "late.c").write_text(LATE)
        said = self.ranks(2, self.build("late.c"), status=3)
        self.assertRegex(said, r"first: rank 0 waits for rank 1: all-gather late; nothing came for \d[\d.]* s[^\n]*\nhint: ")
        self.assertRegex(said, r"failed 1\nthen: all-gather late: an operation of this context has failed half way\nhint: ")
        self.assertIn("last: an operation of this context has failed half way", said)
