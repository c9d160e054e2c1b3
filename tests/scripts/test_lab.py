"""The laboratory's hosts are what they claim to be: apart from each other but for a link of the rate and delay asked
for, with cores of their own, and gone without a trace however the lab ends. Needs root, like the lab.
"""
# quick: names rate_at_once losses_of_one_rank Ends
# limit: 240
import array
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
sys.path[0:0] = [os.path.join(ROOT, "scripts"), os.path.join(ROOT, "tests")]
import busy
import lab as laboratory
from experiments import processors

LAB = os.path.join(ROOT, "scripts", "lab.py")
SOON_S = 20
HAS_CORES = laboratory.Lab().enough()[0] if sys.platform == "linux" else False

SINK = """
import socket, time
server = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
peer, _ = server.accept()
buffer, begin, count = bytearray(1 << 20), None, 0
while got := peer.recv_into(buffer):
    now, count = time.perf_counter(), count + got
    if begin is None: begin = now + 0.3  # the start is left out
    if now < begin: count = 0
print(8 * count / (now - begin))
"""
SOURCE = """
import socket, sys, time
peer, data, end = socket.create_connection((sys.argv[1], 5000)), bytes(1 << 20), time.perf_counter() + 1.5
while time.perf_counter() < end: peer.sendall(data)
"""
ECHO = """
import socket
server = socket.create_server(("0.0.0.0", 5001))
print("ready", flush=True)
peer, _ = server.accept()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while data := peer.recv(8): peer.sendall(data)
"""
PING = """
import socket, sys, time
peer, times = socket.create_connection((sys.argv[1], 5001)), []
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(50):
    begin = time.perf_counter()
    peer.sendall(bytes(8)); peer.recv(8)
    times.append(1e3 * (time.perf_counter() - begin))
print(min(times), sorted(times)[25])
"""
def setUpModule():
    if reason := laboratory.obstacle():
        raise unittest.SkipTest(reason)


def start(lab, host, code, *arguments):
    return subprocess.Popen([*lab.enter(host), "python3", "-c", code, *arguments], stdout=subprocess.PIPE, text=True)


def serve(lab, host, code):
    server = start(lab, host, code)
    server.stdout.readline()
    return server


def result(process):
    return [float(word) for word in process.communicate(timeout=SOON_S)[0].split()]


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
    """What a careless lab would leave: links, named namespaces, mounts, files. Its directory for temporary files is not that
    of others, which may come and go meanwhile, and so may other tests' mounts in theirs."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    with open("/proc/self/mounts", encoding="utf-8") as file:
        mounts = [line for line in file if "/commfuse-test-" not in line or temporary in line]
    files = os.listdir(temporary) + [
        path for folder in ("/run/netns", "/etc/netns", "/dev/shm")
        for path in glob.glob(f"{folder}/*lab*") + glob.glob(f"{folder}/*delay*") + glob.glob(f"{folder}/ompi*")]
    return re.findall(r"^\d+: (\S+)", links, re.MULTILINE), mounts, sorted(files), socket.gethostname()


class Hosts(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.lab = laboratory.Lab(hosts=2)
        cls.lab.__enter__()
        cls.addClassCleanup(cls.lab.close)

    def run_mpi(self, *program):
        done = self.lab.run(2, program, capture_output=True, timeout=100, cwd=ROOT)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def throughput(self):
        sinks = [serve(self.lab, host, SINK) for host in (0, 1)]
        sources = [start(self.lab, host, SOURCE, self.lab.address(1 - host)) for host in (0, 1)]
        for source in sources:
            source.communicate(timeout=SOON_S)
        return [result(sink)[0] for sink in sinks]

    def round_trip_ms(self):
        echo = serve(self.lab, 1, ECHO)
        times = result(start(self.lab, 0, PING, self.lab.address(1)))
        echo.communicate(timeout=SOON_S)
        return times

    def test_ranks_are_on_hosts_of_different_names(self):
        names = self.run_mpi("hostname").split()
        self.assertEqual(sorted(names), [self.lab.host_name(0), self.lab.host_name(1)])
        self.assertNotIn(socket.gethostname(), names)

    def test_a_host_has_no_other_way_out(self):
        for host in (0, 1):
            links = self.lab.at(host, "ip", "-o", "link")
            self.assertEqual(re.findall(r"^\d+: (\w+)", links, re.MULTILINE), ["lo", "eth0"])
            self.assertEqual(len(self.lab.at(host, "ip", "route").splitlines()), 1)
        with socket.create_server(("0.0.0.0", 0)) as server:
            knock = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=2)"
            subprocess.run([sys.executable, "-c", knock], check=True)  # the machine reaches itself; the host does not
            with self.assertRaisesRegex(laboratory.LabError, "refused"):
                self.lab.at(0, "python3", "-c", knock)

    def test_hosts_share_no_memory(self):
        self.lab.write(0, "/dev/shm/mine", "0")
        with self.assertRaisesRegex(laboratory.LabError, "No such file"):
            self.lab.at(1, "cat", "/dev/shm/mine")
        self.assertFalse(os.path.exists("/dev/shm/mine"))

    @busy.needs_free_cores
    def test_both_directions_run_at_the_rate_at_once(self):
        for rate in (2e8, 1e9):
            self.lab.set_link(rate)
            self.check_rate(rate)

    def check_rate(self, rate):
        """Never more. No less, but where processors share their cores all the time, the link's clock is served late."""
        measured = self.throughput()
        self.assertLess(max(measured), 1.01 * rate)
        if min(measured) <= 0.8 * rate:
            found = processors.measure()
            self.assertTrue(not processors.suffice(found) and min(measured) > 0.5 * rate,
                            f"{measured} of {rate}; {processors.text(found)}")

    @busy.needs_free_cores
    def test_delay_is_what_was_asked_and_ends(self):
        for delay_ms in (1, 5):
            self.lab.set_link(1e9, delay_ms)
            least, middle = self.round_trip_ms()
            self.assertGreaterEqual(least, 2 * delay_ms)
            self.assertLess(least, 2 * delay_ms + 1)
        self.check_rate(1e9)  # 5 ms and still the whole rate: windows are wide enough
        self.lab.set_link(1e9)
        self.assertLess(self.round_trip_ms()[0], 1)

    def test_links_that_cannot_be(self):
        for link in ((0,), (1e9, -1)):
            with self.assertRaisesRegex(laboratory.LabError, "no such link"):
                self.lab.set_link(*link)

    @unittest.skipUnless(HAS_CORES, "needs two cores per rank")
    def test_a_rank_computes_on_one_core_and_makes_progress_on_another(self):
        script = ("import os, threading, time; t = threading.Thread(target=time.sleep, args=(1.5,)); t.start(); "
                  "time.sleep(1.2); print(os.environ['OMPI_COMM_WORLD_RANK'], os.sched_getaffinity(0), "
                  "os.sched_getaffinity(t.native_id))")
        lines = sorted(self.run_mpi("python3", "-c", script).splitlines())
        cores = self.lab.cores
        self.assertEqual(lines, [f"{rank} {{{cores[2 * rank]}}} {{{cores[2 * rank + 1]}}}" for rank in (0, 1)])

    def test_a_program_named_from_where_its_user_stands(self):
        with tempfile.TemporaryDirectory(prefix="it's $HOME; ") as folder:
            with open(f"{folder}/here", "w", encoding="utf-8") as file:
                file.write("#!/bin/sh\npwd\n")
            os.chmod(file.name, 0o700)
            done = subprocess.run([sys.executable, LAB, "--", "./here"], cwd=folder, text=True,
                                  capture_output=True, timeout=60)
            self.assertEqual(done.stdout.splitlines(), 2 * [os.path.realpath(folder)], done.stderr)

    def test_status_of_the_program(self):
        self.assertEqual(self.lab.run(2, ["sh", "-c", "exit 3"], capture_output=True).returncode, 3)

    def sent(self, host):
        return json.loads(self.lab.at(host, "ip", "-json", "-s", "link", "show", "eth0"))[0]["stats64"]["tx"]["bytes"]

    def test_training_gives_the_losses_of_one_rank(self):
        self.lab.set_link(1e9)
        with tempfile.TemporaryDirectory() as folder:
            text = f"{folder}/tokens.bin"
            self.write_tokens(text)
            shape = ["--layers", "2", "--heads", "2", "--channels", "64", "--vocab", "256", "--seq", "32", "--batch", "4",
                     "--steps", "5", "--threads", "1", "--val-every", "0", "--train", text]
            logs = [f"{folder}/{name}.jsonl" for name in ("one", "tp", "dp")]
            program = os.environ.get("TRAIN_GPT", os.path.join(ROOT, "build/release/train_gpt"))
            subprocess.run([program, *shape, "--micro-batch", "4", "--log", logs[0]], check=True,
                           capture_output=True)
            before = self.sent(0)
            self.run_mpi(program, *shape, "--micro-batch", "4", "--tp", "2", "--log", logs[1])
            crossed = self.sent(0) - before
            self.run_mpi(program, *shape, "--dp", "2", "--micro-batch", "2", "--log", logs[2])
            one, *others = [[line for line in map(json.loads, open(log)) if line["event"] == "step"] for log in logs]
        self.assertEqual(len(one), 5)
        for other in others:
            for a, b in zip(one, other, strict=True):
                self.assertAlmostEqual(b["loss"] / a["loss"], 1, delta=1e-5)
        activations = 5 * 10 * 2 * 32 * 4 * 64 * 4 // 2  # steps, exchanges of a layer, layers, (T, B, C) floats, half
        self.assertGreater(crossed, activations, "bytes of the ranks did not cross the link")

    def test_baselines_reduce_with_no_more_bytes_than_they_gather(self):
        """What a library's reduce-scatter sends depends on the call: two of Open MPI's send twice as much."""
        self.lab.set_link(1e10)
        bench = os.path.join(ROOT, os.environ.get("BUILD", "build/release"), "tests/bench/bench_fuse")
        for mode in "none", "slice":
            crossed = []
            for operation in "gather_gemm", "gemm_scatter":
                before = [self.sent(host) for host in (0, 1)]
                self.run_mpi(bench, "--op", operation, "--shape", "1024,4,512,64,8", "--only", mode, "--repetitions", "10")
                crossed.append(max(self.sent(host) - before[host] for host in (0, 1)))
            self.assertGreater(crossed[0], 10 * 4 * 512 * 512 * 4)  # T / 2, B, C floats each time
            self.assertLess(crossed[1], 1.2 * crossed[0], mode)

    @staticmethod
    def write_tokens(path):
        with open(path, "wb") as file:
            array.array("i", [20240520, 1, 4096] + [0] * 253).tofile(file)
            array.array("H", (i * i % 251 for i in range(4096))).tofile(file)


def heed_interrupts():
    """Also where these tests run in the background of a shell, which makes its children deaf to them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Ends(unittest.TestCase):
    """Whatever ends the lab: its processes and namespaces go, and nothing of it was ever outside them."""

    def ends(self, how):
        temporary = tempfile.TemporaryDirectory(prefix="commfuse-test-")
        self.addCleanup(temporary.cleanup)
        before = things_of_the_machine(temporary.name)
        lab = subprocess.Popen([sys.executable, LAB, "--delay", "1ms", "--", "sh", "-c",
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
            networks = {namespace(pid, "net") for pid in held}
            self.assertGreaterEqual(len(held), 8)  # hosts, mpirun, a daemon, ranks, delay lines
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
        with laboratory.Lab(2) as one, laboratory.Lab(2) as other:
            for lab in (one, other):
                lab.set_link(1e9)
                self.assertEqual(len(lab.run(2, ["hostname"], capture_output=True).stdout.split()), 2)

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
        self.refuses("needs root", before=nobody)

    def test_the_plan_creates_nothing(self):
        before = network_namespaces()
        done = subprocess.run([sys.executable, LAB, "--plan", "--hosts", "3"], capture_output=True, text=True, check=True)
        self.assertIn("6 cores", done.stdout)
        self.assertEqual(done.stdout.count("eth0"), 3)


if __name__ == "__main__":
    unittest.main()
