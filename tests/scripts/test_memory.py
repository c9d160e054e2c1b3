"""Memory and cores that a machine, a batch system or a container leaves, as the program finds it in made-up files of /proc and
/sys/fs/cgroup. They are mounted where only the program sees them, which needs root.

limit: 60
"""
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
SEES = """
mount --bind "$0/proc/meminfo" /proc/meminfo && mount --bind "$0/proc/self/cgroup" /proc/$$/cgroup &&
mount --bind "$0/sys/fs/cgroup" /sys/fs/cgroup || exit 77
exec build/release/train_gpt --dry-run --layers 1 --channels 64 --heads 1 --seq 16
"""
GIB = 2**30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1000 kB\nMemAvailable:    8388608 kB\n"


class MemoryTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.write("proc/meminfo", MEMINFO)
        self.write("proc/self/cgroup", "")
        (self.root / "sys/fs/cgroup").mkdir(parents=True)

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def banner(self):
        done = subprocess.run(["unshare", "--mount", "sh", "-c", SEES, self.root], cwd=ROOT, capture_output=True, text=True)
        if "unshare: " in done.stderr or done.returncode == 77:
            self.skipTest(f"only root can mount files: {done.stderr}")
        return done.stdout

    def found_gib(self):
        return float(re.search(r"MiB per rank, of ([\d.]+) MiB", self.banner())[1]) / 1024

    def assertCores(self, cores):
        """That many, by a quota; None: by none."""
        here, all_cores = len(os.sched_getaffinity(0)), os.cpu_count()
        with mock.patch.dict(os.environ):
            os.environ.pop("OMP_NUM_THREADS", None)
            found, limit = re.search(r"(\d+) threads? of the host a rank(.*)", self.banner()).groups()
        self.assertEqual(int(found), min(here, cores or here))
        if cores and cores < here:
            self.assertEqual(limit, f" (a control group's quota allows {cores} of {all_cores} cores)")
        else:
            self.assertNotIn("quota", limit)

    def test_a_quota_of_processors(self):
        self.write("proc/self/cgroup", "0::/slurm/job_7/step_0")
        for quota, cores in (("max 100000", None), ("100000 100000", 1), ("50000 100000", 1), ("199999 100000", 1),
                             ("200000 100000", 2), ("25000 20000", 1), ("6400000 100000", None)):
            with self.subTest(quota=quota):
                self.write("sys/fs/cgroup/slurm/job_7/cpu.max", quota)
                self.write("sys/fs/cgroup/slurm/job_7/step_0/cpu.max", "max 100000")
                self.assertCores(cores)

    def test_a_quota_of_processors_of_version_1(self):
        """Its directory has the name of all its controllers, or of one; cpuset is another controller."""
        for kinds, folder, cores in (("cpu,cpuacct", "cpu,cpuacct", 1), ("cpuacct,cpu", "cpu", 1), ("cpu", "cpu", 1),
                                     ("cpuset", "cpuset", None)):
            with self.subTest(kinds=kinds, folder=folder):
                self.write("proc/self/cgroup", f"5:memory:/\n3:{kinds}:/docker/abc\n0::/")
                shutil.rmtree(self.root / "sys/fs/cgroup")
                self.write(f"sys/fs/cgroup/{folder}/cpu.cfs_quota_us", "100000")
                self.write(f"sys/fs/cgroup/{folder}/cpu.cfs_period_us", "100000")
                self.assertCores(cores)
                self.write(f"sys/fs/cgroup/{folder}/cpu.cfs_quota_us", "-1")
                self.assertCores(None)

    def test_a_machine_without_groups(self):
        self.assertEqual(self.found_gib(), 8)

    def test_a_machine_that_does_not_say(self):
        self.write("proc/meminfo", "MemTotal: 1 kB")
        self.assertGreater(self.found_gib(), 2**30)

    def test_the_narrowest_group_decides(self):
        """As Slurm has it: the job has a limit, its step none. Cached files do not count."""
        self.write("proc/self/cgroup", "0::/slurm/job_7/step_0")
        group = "sys/fs/cgroup/slurm"
        for at, limit, used in (("", "max", 15 * GIB), ("/job_7", 4 * GIB, 3 * GIB), ("/job_7/step_0", "max", GIB)):
            self.write(f"{group}{at}/memory.max", limit)
            self.write(f"{group}{at}/memory.current", used)
        self.write(f"{group}/job_7/memory.stat", f"anon 5\ninactive_file {2 * GIB}\nactive_file 7")
        self.assertEqual(self.found_gib(), 3)

    def test_a_full_group_leaves_nothing(self):
        self.write("proc/self/cgroup", "0::/")
        self.write("sys/fs/cgroup/memory.max", GIB)
        self.write("sys/fs/cgroup/memory.current", GIB + 4096)
        self.assertEqual(self.found_gib(), 0)

    def test_groups_of_version_1(self):
        """A container sees its own group as the first one, though its processes still name it by its whole path."""
        self.write("proc/self/cgroup", "9:name=systemd:/\n5:memory:/docker/abc\n3:cpu,cpuacct:/\n0::/")
        self.write("sys/fs/cgroup/memory/memory.limit_in_bytes", 6 * GIB)
        self.write("sys/fs/cgroup/memory/memory.usage_in_bytes", 5 * GIB)
        self.write("sys/fs/cgroup/memory/memory.stat", f"inactive_file 0\ntotal_inactive_file {GIB}")
        self.assertEqual(self.found_gib(), 2)

    def test_a_limit_that_is_none(self):
        self.write("proc/self/cgroup", "5:memory:/")
        self.write("sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
        self.write("sys/fs/cgroup/memory/memory.usage_in_bytes", 15 * GIB)
        self.assertEqual(self.found_gib(), 8)
