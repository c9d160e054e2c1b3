"""Saving a checkpoint, stopped anywhere: killed before every call that changes the disk and in the middle of every
write; with every such call failing; on a full disk. What is there afterwards is the old checkpoint or the new one,
complete and right, and the next run can save.

A kill leaves what the system has been told, a power cut only what was synced; test_order checks for that which call
comes before which.

limit: 300
"""
import errno
import os
import shutil
import signal
import subprocess
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TOOL = os.path.join(ROOT, os.environ.get("BUILD", "build/release"), "tests/data/tool_checkpoint")
RANKS = 3


class Stopped(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.directory = os.path.realpath(directory.name)
        cls.shim = os.path.join(cls.directory, "preload_kill.so")
        subprocess.run([os.environ.get("CC", "cc"), "-std=gnu11", "-O1", "-shared", "-fPIC", "-o", cls.shim,
                        os.path.join(ROOT, "tests/data/preload_kill.c"), "-ldl"], check=True)
        cls.before = os.path.join(cls.directory, "before")
        assert cls.save(cls.before, 10, 1).returncode == 0

    def setUp(self):
        self.out = os.path.join(self.directory, "out")
        shutil.rmtree(self.out, ignore_errors=True)

    @classmethod
    def tool(cls, *arguments, shim=None):
        # Libraries make directories of their own (UCX: in /run), which are none of a save's calls.
        env = {**os.environ, **({"LD_PRELOAD": cls.shim, "CALLS_ABOUT": cls.directory, **shim} if shim else {})}
        return subprocess.run([TOOL, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=60)

    @classmethod
    def save(cls, out, step, seed, keep=1, shim=None):
        return cls.tool("save", out, step, seed, RANKS, keep, shim=shim)

    def restart(self, old):
        """The directory as it was before: with a checkpoint of step 10 and seed 1, or not there."""
        shutil.rmtree(self.out, ignore_errors=True)
        if old:
            shutil.copytree(self.before, self.out)

    def newest(self, how):
        """(step, seed), or None; what is there may be absent, never wrong."""
        done = self.tool(how, self.out)
        self.assertIn(done.returncode, (0, 1), done.stderr)
        return tuple(map(int, done.stdout.split())) if done.returncode == 0 else None

    def leftovers(self):
        found = [os.path.join(at, name) for at, directories, files in os.walk(self.out) for name in directories + files]
        return [path for path in found if ".tmp" in os.path.basename(path)]

    def calls(self, step, old):
        """The calls of a save that nothing stops."""
        self.restart(old)
        log = os.path.join(self.directory, "log")
        if os.path.exists(log):
            os.remove(log)
        self.assertEqual(self.save(self.out, step, 2, shim={"CALLS_LOG": log}).returncode, 0)
        self.assertEqual(self.newest("look"), (step, 2))
        with open(log, encoding="utf-8") as file:
            return [line.split() for line in file]

    def goes_on(self):
        """The next run saves, and only its checkpoint is left."""
        done = self.save(self.out, 30, 3)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.newest("look"), (30, 3))
        self.assertEqual(sorted(os.listdir(self.out)), ["lock", "step_00000030"])
        self.assertEqual(self.leftovers(), [])

    def kill_everywhere(self, step, old):
        calls = self.calls(step, old)
        allowed = {(step, 2), (10, 1) if old else None}
        seen = []
        for n in range(1, len(calls) + 1):
            with self.subTest(n=n, call=calls[n - 1]):
                self.restart(old)
                self.assertEqual(self.save(self.out, step, 2, shim={"KILL_AT": str(n)}).returncode, -signal.SIGKILL)
                self.assertIn(self.newest("look"), allowed)  # a reader beside the run
                seen.append(self.newest("latest"))
                self.assertIn(seen[-1], allowed)
                self.assertEqual(self.newest("look"), seen[-1])
                self.assertEqual(self.leftovers(), [])
                self.goes_on()
        self.assertEqual(set(seen), allowed)
        self.assertEqual(seen, sorted(seen, key=lambda s: s == (step, 2)), "once there, it stays")
        print(f"killed at each of {len(calls)} calls: {', '.join(sorted({call[0] for call in calls}))}")

    def test_kill_first_save(self):
        self.kill_everywhere(20, old=False)

    def test_kill_next_save(self):
        self.kill_everywhere(20, old=True)

    def fail_everywhere(self, step, how, number):
        calls = self.calls(step, old=True)
        told = 0
        for n in range(1, len(calls) + 1):
            with self.subTest(n=n, call=calls[n - 1]):
                self.restart(old=True)
                done = self.save(self.out, step, 2, shim={how: str(n), "FAIL_WITH": str(number)})
                self.assertIn(done.returncode, (0, 1), done.stderr)
                removing = calls[n - 1][0] in ("unlink", "rmdir")
                if done.returncode == 1:
                    told += 1
                    self.assertIn(os.strerror(number), done.stderr)
                    self.assertRegex(done.stderr, r"error: cannot [a-z ]+ /")
                    if calls[n - 1][0] == "write" and "step_" in calls[n - 1][1]:
                        self.assertRegex(done.stderr, r"cannot write \S+/(rank_0000\d.safetensors|manifest.json), "
                                                      r"which needs \d+ bytes")
                else:
                    self.assertTrue(removing, "only what removes may fail without a word")
                self.assertIn(self.newest("look"), {(step, 2), (10, 1)})
                if not removing:
                    self.assertEqual(self.leftovers(), [])
                self.goes_on()
        self.assertGreater(told, 15)
        print(f"{told} of {len(calls)} failing calls told")

    def test_each_call_fails(self):
        self.fail_everywhere(20, "FAIL_AT", errno.EIO)

    def test_disk_full_from_each_call_on(self):
        self.fail_everywhere(20, "FAIL_FROM", errno.ENOSPC)

    def test_order(self):
        unsynced, placed = set(), None
        for call, path, *to in self.calls(20, old=True):
            inside = os.path.dirname(path)
            if call in ("create", "write", "truncate"):
                unsynced |= {path} | ({inside} if call == "create" else set())
            elif call in ("mkdir", "rmdir"):
                unsynced.add(inside)
            elif call == "fsync":
                unsynced.discard(path)
                placed = False if path == self.out and placed else placed
            elif call == "rename" and path.endswith("00000020.tmp"):
                missing = [p for p in unsynced if p == path or p.startswith(path + "/")]
                self.assertEqual(missing, [], "not on the disk when the checkpoint takes its name")
                self.assertIsNone(placed)
                placed = True
            elif call == "rename":
                self.assertFalse(placed, "something else is moved before the new name is on the disk")
                if path.startswith(f"{self.out}/step_00000020.tmp/"):
                    self.assertNotIn(path, unsynced)
                    unsynced.add(inside)
            elif call == "unlink":
                self.assertIs(placed, False, "removed before the new checkpoint's name is on the disk")
        self.assertIs(placed, False)

    def test_no_locks(self):
        done = self.save(self.out, 20, 2, shim={"NO_FLOCK": "1"})
        self.assertEqual(done.returncode, 0)
        self.assertIn("cannot be locked", done.stderr)
        self.assertEqual(self.newest("look"), (20, 2))

    def test_a_directory_that_cannot_be_read_is_not_an_empty_one(self):
        self.restart(old=True)
        for how in ("look", "latest"):
            done = self.tool(how, self.out, shim={"NO_SCANDIR": "1"})
            self.assertEqual(done.returncode, 1)
            self.assertIn(f"cannot list {self.out}: Input/output error", done.stderr)
        self.assertEqual(self.newest("latest"), (10, 1))

    def mounted(self, size, script):
        """Runs a shell script over a small file system of its own at OUT, with the tool as $1, OUT as $2."""
        os.mkdir(self.out)
        mount = f'mount -t tmpfs -o size={size} tmpfs "$2" || exit 77\n'
        done = subprocess.run(["unshare", "-rm", "sh", "-c", mount + script, "sh", TOOL, self.out],
                              capture_output=True, text=True, timeout=60)
        if "unshare:" in done.stderr or done.returncode == 77:
            self.skipTest("no file system can be mounted here: " + done.stderr.strip())
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stderr

    @unittest.skipUnless(shutil.which("unshare"), "no unshare")
    def test_full_disk(self):
        said = self.mounted("5m", '"$1" save "$2/x" 10 1 3 1 || exit 1\n'
                                  'find "$2/x" | sort > "$2/list"\n'
                                  '"$1" save "$2/x" 20 2 3 1 && exit 2\n'
                                  'find "$2/x" | sort | cmp - "$2/list" || exit 3\n'
                                  'test "$("$1" latest "$2/x")" = "10 1" || exit 4\n')
        self.assertRegex(said, r"cannot write \S+/rank_00001.safetensors, which needs 12\d{5} bytes where \d+ "
                               "are free: No space left on device")
        self.assertIn("hint:  free space, or save elsewhere", said)

    @unittest.skipUnless(shutil.which("unshare"), "no unshare")
    def test_read_only(self):
        said = self.mounted("9m", '"$1" save "$2/x" 10 1 3 1 || exit 1\n'
                                  'mount -o remount,ro "$2" || exit 77\n'
                                  '"$1" save "$2/x" 20 2 3 1 && exit 2\n'
                                  '"$1" save "$2/y" 20 2 3 1 && exit 3\n'
                                  'test "$("$1" look "$2/x")" = "10 1" || exit 4\n')
        self.assertRegex(said, r"cannot open lock \S+/x/lock: Read-only file system")
        self.assertRegex(said, r"cannot make directory \S+/y: Read-only file system")
