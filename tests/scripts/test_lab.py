"""The lab's hosts are apart from each other but for a link of the rate and delay asked for, have separate cores, and leave no
trace however the lab ends. Needs root, like the lab.
"""
# quick: names rate_at_once losses_of_one_rank Ends
# limit: 300
import glob
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import busy
import lab as laboratory
import run_log
from tokens import write_tokens

LAB = os.path.join(ROOT, "scripts", "lab.py")
SOON_S = 20

# A rank of each host: its name, its links, and whether it reaches the machine.
HOST = """
import json, os, socket, subprocess, sys, time
rank = os.environ["OMPI_COMM_WORLD_RANK"]
open(f"/dev/shm/file{rank}", "w").close()
time.sleep(1)
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=2)
    outside = "reached"
except OSError as error:
    outside = str(error)
links, routes = (subprocess.run(["ip", "-o", what], capture_output=True, text=True).stdout for what in ("link", "route"))
print(json.dumps([socket.gethostname(), links, routes, [name for name in os.listdir("/dev/shm") if name.startswith("file")], outside]))
"""
# Both send to each other at once; what comes in, in bits a second.
BOTH_WAYS = """
import os, socket, threading, time
server = socket.create_server(("0.0.0.0", 5000))
def send():
    to, data = ("10.0.0.2", "10.0.0.1")[int(os.environ["OMPI_COMM_WORLD_RANK"])], bytes(1 << 20)
    while True:
        try:
            peer = socket.create_connection((to, 5000))
            break
        except OSError:
            time.sleep(0.05)
    end = time.perf_counter() + 1.5
    while time.perf_counter() < end: peer.sendall(data)
    peer.close()
thread = threading.Thread(target=send)
thread.start()
peer, _ = server.accept()
buffer, begin, count = bytearray(1 << 20), None, 0
while got := peer.recv_into(buffer):
    now, count = time.perf_counter(), count + got
    if begin is None: begin = now + 0.3  # the start is left out
    if now < begin: count = 0
thread.join()
print("rate", 8 * count / (now - begin))
"""
PING = """
import os, socket, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    peer, _ = socket.create_server(("0.0.0.0", 5001)).accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := peer.recv(8): peer.sendall(data)
else:
    time.sleep(0.5)
    peer, times = socket.create_connection(("10.0.0.2", 5001)), []
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(50):
        begin = time.perf_counter()
        peer.sendall(bytes(8)); peer.recv(8)
        times.append(1e3 * (time.perf_counter() - begin))
    print(min(times))
"""
# A program, then what its host has sent.
SENT = ["sh", "-c", """"$@" && awk '/eth0/ { print "sent", $10 }' /proc/net/dev""", "sent"]


def setUpModule():
    if reason := laboratory.obstacle():
        raise unittest.SkipTest(reason)


def namespace(pid, kind):
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return None


def processes():
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def parent(pid):
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            return int(re.search(r"^PPid:\s*(\d+)", file.read(), re.MULTILINE)[1])
    except OSError:
        return None


def members(pid_namespace):
    return [pid for pid in processes() if namespace(pid, "pid") == pid_namespace]


def network_namespaces():
    return {namespace(pid, "net") for pid in processes()}


def things_of_the_machine(temporary):
    """Things that a careless lab would leave: links, named namespaces, mounts, files. Its directory for temporary files is not that
    of others, which may come and go meanwhile, and so may other tests' mounts in theirs."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    with open("/proc/self/mounts", encoding="utf-8") as file:
        mounts = [line for line in file if "/commfuse-test-" not in line or temporary in line]
    files = os.listdir(temporary) + [
        path for folder in ("/run/netns", "/etc/netns", "/dev/shm")
        for path in glob.glob(f"{folder}/*lab*") + glob.glob(f"{folder}/ompi*")]
    return re.findall(r"^\d+: (\S+)", links, re.MULTILINE), mounts, sorted(files), socket.gethostname()


def in_lab(*program, options=(), **more):
    return subprocess.run([sys.executable, LAB, *options, "--", *map(str, program)], capture_output=True, text=True, timeout=100, **more)


class Hosts(unittest.TestCase):
    def run_in(self, *program, options=()):
        done = in_lab(*program, options=options, cwd=ROOT)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_hosts_have_names_of_their_own_and_no_memory_or_way_out(self):
        with socket.create_server(("0.0.0.0", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=2).close()  # the machine reaches itself; a host does not
            hosts = sorted(map(json.loads, self.run_in("python3", "-c", HOST, port).splitlines()))
        names = [host[0] for host in hosts]
        self.assertEqual([name[-2:] for name in names], ["h0", "h1"])
        self.assertNotIn(socket.gethostname(), names)
        for rank, (_, links, routes, files, outside) in enumerate(hosts):
            self.assertEqual(re.findall(r"^\d+: (\w+)", links, re.MULTILINE), ["lo", "eth0"])
            self.assertEqual(len(routes.splitlines()), 1)
            self.assertEqual(files, [f"file{rank}"])
            self.assertIn("refused", outside)
        self.assertFalse(glob.glob("/dev/shm/file[01]"))

    @busy.needs_free_cores
    def test_both_directions_run_at_the_rate_at_once(self):
        """Never more. No less, but where others use the cores, the link's clock is served late."""
        for rate in (2e8, 1e9):
            text = self.run_in("python3", "-c", BOTH_WAYS, options=("--rate", f"{rate / 1e6:g}mbit"))
            measured = [float(rate) for rate in re.findall(r"^rate ([\d.]+)$", text, re.MULTILINE)]
            self.assertEqual(len(measured), 2)
            self.assertLess(max(measured), 1.01 * rate)
            self.assertGreater(min(measured), 0.8 * rate)

    @busy.needs_free_cores
    def test_delay_is_what_was_asked(self):
        netem = "ip link set lo up; tc qdisc add dev lo root netem delay 1ms"
        if subprocess.run(["unshare", "--net", "sh", "-ec", netem], capture_output=True).returncode:
            done = in_lab("true", options=("--delay", "1ms"))
            self.assertEqual(done.returncode, 1)
            self.assertIn("modprobe sch_netem", done.stderr)
            self.skipTest("this kernel has no netem")
        for delay_ms in (0, 1, 5):
            least = float(self.run_in("python3", "-c", PING, options=("--delay", f"{delay_ms}ms")))
            self.assertGreaterEqual(least, 2 * delay_ms)
            self.assertLess(least, 2 * delay_ms + 1)

    def test_labs_that_cannot_be(self):
        for options, says in ((("--rate", "fast"), "not a number and bit, kbit"),
                              (("--delay", "-1ms"), "--delay"), (("--hosts", "0"), "at least 1"),
                              (("--ranks-per-host", "0"), "at least 1")):
            done = in_lab("true", options=options)
            self.assertEqual(done.returncode, 2)
            self.assertIn(says, done.stderr)

    @unittest.skipUnless(len(os.sched_getaffinity(0)) > 1, "needs two cores")
    def test_a_rank_computes_on_one_core_and_makes_progress_on_another(self):
        script = ("import os, threading, time; t = threading.Thread(target=time.sleep, args=(80,), daemon=True); t.start(); end = time.time() + 70\n"
                  "def cores(): return os.sched_getaffinity(0), os.sched_getaffinity(t.native_id)\n"
                  "while (max(map(len, cores())) > 1 or cores()[0] == cores()[1]) and time.time() < end: time.sleep(0.1)\n"
                  "print(*cores())")
        first, second, *_ = sorted(os.sched_getaffinity(0))
        self.assertEqual(self.run_in("python3", "-c", script, options=("--hosts", "1")), f"{{{first}}} {{{second}}}\n")

    def test_a_program_named_from_where_its_user_stands(self):
        with tempfile.TemporaryDirectory(prefix="it's $HOME; ") as folder:
            with open(f"{folder}/here", "w", encoding="utf-8") as file:
                file.write("#!/bin/sh\npwd\n")
            os.chmod(file.name, 0o700)
            done = in_lab("./here", cwd=folder)
            self.assertEqual(done.stdout.splitlines(), 2 * [os.path.realpath(folder)], done.stderr)

    def test_status_of_the_program(self):
        self.assertEqual(in_lab("sh", "-c", "exit 3").returncode, 3)

    def sent(self, *program, options=()):
        """By each host."""
        return [int(count) for count in re.findall(r"^sent (\d+)$", self.run_in(*SENT, *program, options=options), re.MULTILINE)]

    def test_training_gives_the_losses_of_one_rank(self):
        with tempfile.TemporaryDirectory() as folder:
            text = f"{folder}/tokens.bin"
            write_tokens(text, 4096, 256)
            shape = ["--layers", "2", "--heads", "2", "--channels", "64", "--vocab", "256", "--seq", "32", "--batch", "4",
                     "--steps", "5", "--threads", "1", "--val-every", "0", "--train", text]
            logs = [f"{folder}/{name}.jsonl" for name in ("one", "tp", "dp")]
            program = os.environ.get("TRAIN_GPT", os.path.join(ROOT, "build/release/train_gpt"))
            subprocess.run([program, *shape, "--micro-batch", "4", "--log", logs[0]], check=True,
                           capture_output=True)
            crossed = self.sent(program, *shape, "--micro-batch", "4", "--tp", "2", "--log", logs[1])
            self.run_in(program, *shape, "--dp", "2", "--micro-batch", "2", "--log", logs[2])
            one, *others = [run_log.steps(run_log.lines(log)) for log in logs]
        self.assertEqual(len(one), 5)
        for other in others:
            self.assertEqual(len(one), len(other))
            for a, b in zip(one, other):
                self.assertAlmostEqual(b["loss"] / a["loss"], 1, delta=1e-5)
        activations = 5 * 10 * 2 * 32 * 4 * 64 * 4 // 2  # steps, exchanges of a layer, layers, (T, B, C) floats, half
        self.assertGreater(min(crossed), activations, "bytes of the ranks did not cross the link")

    def test_baselines_reduce_with_no_more_bytes_than_they_gather(self):
        """A library's reduce-scatter may send more: two of Open MPI's send twice as much."""
        bench = os.path.join(ROOT, os.environ.get("BUILD", "build/release"), "tests/bench/bench_fuse")
        for mode in "none", "slice":
            crossed = [max(self.sent(bench, "--op", operation, "--shape", "1024,4,512,64,8", "--only", mode, "--repetitions", "10",
                                     options=("--rate", "10gbit"))) for operation in ("gather_gemm", "gemm_scatter")]
            self.assertGreater(crossed[0], 10 * 4 * 512 * 512 * 4)  # T / 2, B, C floats each time
            self.assertLess(crossed[1], 1.2 * crossed[0], mode)

    def test_of_two_levels_a_slice_crosses_the_link_once_for_a_host(self):
        """Counted at the interfaces of two hosts of two ranks: the bytes of more runs. A host receives each shard of the other one
        once; sent straight to the ranks that need it, for each of its ranks."""
        bench = os.path.join(ROOT, os.environ.get("BUILD", "build/release"), "tests/bench/bench_fuse")
        shard = 1024 // 4 * 4 * 512 * 4  # T / ranks, B, C floats
        for operation in "gather_gemm", "gemm_scatter":
            for mode, shards in (("levels", 2), ("direct", 4)):
                counts = []
                for repetitions in 10, 20:
                    text = self.run_in(*SENT, bench, "--op", operation, "--shape", "1024,4,512,64,8", "--only", mode, "--repetitions",
                                       repetitions, options=("--ranks-per-host", "2", "--rate", "10gbit"))
                    sent = [int(count) for count in re.findall(r"^sent (\d+)$", text, re.MULTILINE)]
                    counts.append((min(sent), max(sent), len(re.findall(rf"^{mode}\S* .*bytes sent", text, re.MULTILINE))))
                (_, most, slices), (least, more, _) = counts
                self.assertEqual(slices, 4)  # 1, 2, 4 and 8 of a shard
                for crossed in least - most, more - most:
                    self.assertAlmostEqual(crossed / (10 * slices * shards * shard), 1, delta=0.02, msg=f"{operation} {mode}")


def heed_interrupts():
    """Also where these tests run in the background of a shell, which makes its children deaf to them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Ends(unittest.TestCase):
    """Whatever ends the lab: its processes and namespaces go, and nothing of it was ever outside them."""

    def ends(self, how):
        temporary = tempfile.TemporaryDirectory(prefix="commfuse-test-")
        self.addCleanup(temporary.cleanup)
        before = things_of_the_machine(temporary.name)
        lab = subprocess.Popen([sys.executable, LAB, "--", "sh", "-c",
                                "echo started; exec sleep 100"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               text=True, start_new_session=True, preexec_fn=heed_interrupts,
                               env=dict(os.environ, TMPDIR=temporary.name))
        with lab:
            self.assertEqual([lab.stdout.readline(), lab.stdout.readline()], ["started\n"] * 2)
            inside = {namespace(pid, "pid") for pid in processes() if parent(parent(pid) or 0) == lab.pid}
            inside -= {namespace(lab.pid, "pid"), None}
            self.assertEqual(len(inside), 1)
            pid_namespace = inside.pop()
            held = members(pid_namespace)
            networks = {namespace(pid, "net") for pid in held} - {None}  # of one that has ended meanwhile
            self.assertGreaterEqual(len(held), 7)  # the first, hosts, mpirun, a daemon, ranks
            self.assertEqual(len(networks), 3)     # two hosts and the bridge
            self.assertEqual(things_of_the_machine(temporary.name), before, "while it ran")
            how(lab)
            deadline = time.monotonic() + SOON_S
            while members(pid_namespace) and time.monotonic() < deadline:
                time.sleep(0.05)
            self.assertEqual(members(pid_namespace), [])
            self.assertFalse(networks & network_namespaces())
            self.assertEqual(things_of_the_machine(temporary.name), before, "after it")
            return lab.wait(timeout=SOON_S)

    def test_interrupted(self):
        self.assertEqual(self.ends(lambda lab: lab.send_signal(signal.SIGINT)), 130)

    def test_interrupted_at_the_terminal(self):
        self.assertEqual(self.ends(lambda lab: os.killpg(lab.pid, signal.SIGINT)), 130)

    def test_terminated(self):
        self.assertEqual(self.ends(lambda lab: lab.terminate()), 143)

    def test_killed(self):
        self.assertEqual(self.ends(lambda lab: lab.kill()), -signal.SIGKILL)

    def test_two_labs_at_once(self):
        with subprocess.Popen([sys.executable, LAB, "--", "sh", "-c", "echo started; sleep 3; hostname"], stdout=subprocess.PIPE,
                              text=True) as other:
            self.assertEqual(other.stdout.readline(), "started\n")
            names = set(in_lab("hostname").stdout.split())
            names |= set(other.communicate(timeout=SOON_S)[0].split()) - {"started"}
        self.assertEqual(len(names), 4, names)

    def test_cores_can_be_shared_and_it_says_so(self):
        core = str(min(os.sched_getaffinity(0)))
        done = subprocess.run(["taskset", "-c", core, sys.executable, LAB, "--", "echo", "ran"], capture_output=True, text=True)
        self.assertEqual(done.stdout.split(), ["ran", "ran"], done.stderr)
        self.assertIn("2 ranks need 4 cores", done.stderr)
        self.assertIn(laboratory.SHARED, done.stderr)


class Refusals(unittest.TestCase):
    def refuses(self, *words, before=(), arguments=("--", "true")):
        done = subprocess.run([*before, sys.executable, LAB, *arguments], capture_output=True, text=True)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    def test_without_root(self):
        nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        if subprocess.run([*nobody, "sh", "-c", 'exec "$0" -c "open(\'$1\')" 2>/dev/null', sys.executable, LAB]).returncode:
            self.skipTest("nobody cannot start Python, or read the lab's script, here")
        self.refuses("needs Linux and root", before=nobody)
