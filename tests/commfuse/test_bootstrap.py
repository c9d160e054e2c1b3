"""How ranks find each other without MPI: by environment variables and sockets; and what they say when they do not.

sanitizers: too
limit: 180
"""
import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("BUILD", "build/release")
TOOL = os.path.join(ROOT, BUILD, "tests/commfuse/tool_bootstrap")
LAUNCHERS = re.compile(r"OMPI_|PMI_|PMIX_|MPI_|SLURM_|(LOCAL_)?RANK$|(LOCAL_)?WORLD_SIZE$|MASTER_|TORCHELASTIC_")
BARE = {name: value for name, value in os.environ.items() if not LAUNCHERS.match(name)}
PROMPT_S = 8  # far below the time-outs of the cases that end at once
MAGIC = 0xCF0B0075


def free_port():
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::", 0))
        return probe.getsockname()[1]


def free_pair():
    """The first of two ports in a row."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError), socket.create_server(("", port + 1)):
            return port


def hello(rank, size, magic=MAGIC, kind=1):
    numbers = (magic, kind, rank & 0xFFFFFFFF, size)
    return b"".join(n.to_bytes(4, "little") for n in numbers) + b"elsewhere".ljust(64, b"\0")


@unittest.skipUnless(os.path.exists(TOOL), f"{TOOL} is not built: make build-tests")
class Bootstrap(unittest.TestCase):
    def setUp(self):
        self.port = free_port()
        self.started = []

    def tearDown(self):
        for process in self.started:
            process.kill()
            process.communicate()

    def start(self, rank, size, what, timeout_s=60, **changes):
        env = dict(BARE, RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port))
        env.update(changes)
        env = {name: str(value) for name, value in env.items() if value is not None}
        process = subprocess.Popen([TOOL, str(timeout_s), what], env=env, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.started.append(process)
        return process

    def start_all(self, size, what, **changes):
        return [self.start(rank, size, what, **changes) for rank in range(size)]

    def end(self, process, status, within_s=30):
        out, err = process.communicate(timeout=within_s)
        self.assertEqual(process.returncode, status, out + err)
        return out + err

    def ready(self, processes):
        for process in processes:
            self.assertIn(" of ", process.stdout.readline())

    def connect(self):
        for _ in range(200):
            try:
                return socket.create_connection(("127.0.0.1", self.port), timeout=10)
            except OSError:
                time.sleep(0.05)
        self.fail("rank 0 does not listen")

    # --- all is well ---

    def test_alone(self):
        process = self.start(0, 1, "gather", RANK=None, WORLD_SIZE=None, MASTER_ADDR=None, MASTER_PORT=None)
        self.assertIn("alone: rank 0 of 1, 0 of 1 on this host", self.end(process, 0))

    def test_ranks_meet_beside_the_store_of_torchruns_agent(self):
        """It listens at MASTER_PORT as long as its workers run."""
        for port in (free_pair(), 65535):
            with self.subTest(port=port), socket.create_server(("127.0.0.1", port)):
                changes = dict(MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True")
                for process in self.start_all(2, "gather", **changes):
                    self.assertIn(" of 2", self.end(process, 0))

    def test_ranks_meet_and_gather(self):
        for size in (2, 5):
            with self.subTest(size=size):
                self.port = free_port()
                for rank, process in enumerate(self.start_all(size, "gather")):
                    text = self.end(process, 0)
                    self.assertIn(f"sockets: rank {rank} of {size}, {rank} of {size} on this host", text)
                    self.assertIn("gathered", text)

    def test_rank_0_comes_last(self):
        late = [self.start(rank, 3, "gather") for rank in (2, 1)]
        time.sleep(0.5)
        for process in [self.start(0, 3, "gather"), *late]:
            self.end(process, 0)

    def test_a_rank_that_waits_does_not_meet_itself(self):
        """Where nobody listens on a port from which connections start, a socket may be given it, and connect to itself.
        Here it has no other choice, until rank 0 is there."""
        if subprocess.run(["unshare", "--net", "ip", "link"], capture_output=True).returncode != 0:
            self.skipTest("no network of its own: needs root, unshare and ip")
        script = (f"ip link set lo up; echo '40000 40001' >/proc/sys/net/ipv4/ip_local_port_range; "
                  f"RANK=1 '{TOOL}' 20 gather & sleep 1; RANK=0 '{TOOL}' 20 gather && wait $!")
        done = subprocess.run(["unshare", "--net", "sh", "-c", script], capture_output=True, text=True, timeout=60,
                              env=dict(BARE, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="40000"))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("rank 1 of 2", done.stdout)

    def test_launcher_tells_local_ranks(self):
        processes = [self.start(rank, 2, "gather", LOCAL_RANK=0, LOCAL_WORLD_SIZE=1) for rank in range(2)]
        for rank, process in enumerate(processes):
            self.assertIn(f"rank {rank} of 2, 0 of 1 on this host", self.end(process, 0))

    def test_slurm(self):
        processes = [self.start(0, 2, "gather", RANK=None, WORLD_SIZE=None, SLURM_PROCID=rank, SLURM_NTASKS=2,
                                SLURM_LOCALID=rank, SLURM_STEP_ID=0) for rank in range(2)]
        for rank, process in enumerate(processes):
            self.assertIn(f"sockets: rank {rank} of 2, {rank} of 2", self.end(process, 0))

    def test_slurm_batch_script_is_one_process(self):
        process = self.start(0, 2, "gather", RANK=None, WORLD_SIZE=None, SLURM_PROCID=0, SLURM_NTASKS=2)
        self.assertIn("alone", self.end(process, 0))

    def test_slurm_batch_file_says_where_rank_0_is(self):
        programs = {"scontrol": '[ "$*" = "show hostnames node[7-8]" ] && printf "node7\\nnode8\\n"',
                    "scripts/mfu_sweep": 'echo "rank 0 is on $MASTER_ADDR"', "scripts/find_python.sh": "echo true"}
        with tempfile.TemporaryDirectory(prefix="commfuse-test-") as folder:
            os.mkdir(f"{folder}/scripts")
            for name, text in programs.items():
                with open(f"{folder}/{name}", "w", encoding="utf-8") as file:
                    file.write(f"#!/bin/sh\n{text}\n")
                os.chmod(file.name, 0o755)
            done = subprocess.run(["bash", f"{ROOT}/scripts/sweep.slurm"], capture_output=True, text=True, env=dict(
                BARE, PATH=f"{folder}:{os.environ['PATH']}", SLURM_SUBMIT_DIR=folder, SLURM_NTASKS_PER_NODE="8",
                SLURM_CPUS_PER_TASK="2", SLURM_JOB_NODELIST="node[7-8]"))
        self.assertEqual((done.returncode, done.stdout), (0, "rank 0 is on node7\n"), done.stderr)

    def test_strangers_are_sent_away(self):
        root = self.start(0, 2, "gather")
        with self.connect() as browser, self.connect() as silent, self.connect() as half:
            browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
            self.assertEqual(browser.recv(16), b"")
            half.sendall(hello(1, 2)[:40])
            other = self.start(1, 2, "gather")
            self.end(other, 0)
            self.end(root, 0)
            self.assertEqual(silent.recv(16), b"")

    # --- somebody goes missing ---

    def ends_all(self, what, lost, others, first=1):
        processes = self.start_all(len(others) + 1, what)
        begin = time.monotonic()
        for rank, process in enumerate(processes):
            if rank in others:
                self.assertRegex(self.end(process, 1), rf"error: rank {rank} of \d .*: rank {lost} .*is gone")
        self.assertLess(time.monotonic() - begin, PROMPT_S)
        return self.end(processes[lost], first)

    def test_a_rank_gives_up(self):
        self.assertIn("error: rank 2 of 4", self.ends_all("die:2", 2, (0, 1, 3)))

    def test_rank_0_gives_up(self):
        self.assertIn("has had enough", self.ends_all("die:0", 0, (1, 2)))

    def test_a_rank_leaves_without_a_goodbye(self):
        self.ends_all("leave:1", 1, (0, 2), first=0)

    def test_a_rank_is_killed(self):
        for killed in (1, 0):
            with self.subTest(killed=killed):
                self.port = free_port()
                processes = self.start_all(3, "wait")
                self.ready(processes)
                begin = time.monotonic()
                processes[killed].send_signal(signal.SIGKILL)
                for rank, process in enumerate(processes):
                    if rank != killed:
                        self.assertRegex(self.end(process, 1), rf"error: rank {rank} of 3 .*: rank {killed} .*is gone")
                self.assertLess(time.monotonic() - begin, PROMPT_S)

    def test_a_rank_freezes(self):
        processes = self.start_all(3, "freeze:2", timeout_s=2)
        self.assertRegex(self.end(processes[0], 1), r"rank 0 waits for rank 2 .*nothing came for 2 s")
        self.assertRegex(self.end(processes[1], 1), r"rank 0 .*is gone")

    def test_a_rank_never_appears(self):
        processes = [self.start(rank, 4, "gather", timeout_s=2) for rank in (0, 2)]
        self.assertRegex(self.end(processes[0], 1), r"2 of 4 ranks have not connected .*: rank 1, 3\n")
        self.end(processes[1], 1)

    def test_rank_0_never_appears(self):
        process = self.start(1, 2, "gather", timeout_s=2)
        self.assertRegex(self.end(process, 1),
                         r"rank 1 cannot reach rank 0 at 127.0.0.1 port \d+ within 2 s: .*refused")

    def test_all_find_the_same_error(self):
        processes = self.start_all(4, "together")
        texts = [self.end(process, 1) for process in processes]
        self.assertEqual([text.count("all of us are wrong") for text in texts], [1, 0, 0, 0], "".join(texts))

    # --- wrong from the start ---

    def test_port_is_taken(self):
        with socket.socket(socket.AF_INET6) as taken:
            taken.bind(("::", self.port))
            taken.listen()
            text = self.end(self.start(0, 2, "gather"), 1)
        self.assertRegex(text, rf"cannot listen on port {self.port}: .*in use")
        self.assertIn("MASTER_PORT", text)

    def test_another_program_answers(self):
        with socket.create_server(("127.0.0.1", self.port)) as server:
            process = self.start(1, 2, "gather")
            connection, _ = server.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            self.assertIn("is not rank 0 of this program", self.end(process, 1))
            connection.close()

    def refused_hello(self, message):
        root = self.start(0, 3, "gather")
        with self.connect() as liar:
            liar.sendall(message)
            return self.end(root, 1)

    def test_rank_out_of_range(self):
        for rank in (-1, 0, 3, 1 << 30):
            with self.subTest(rank=rank):
                self.port = free_port()
                self.assertRegex(self.refused_hello(hello(rank, 3)), rf"elsewhere connects as rank {rank} of 3")

    def test_another_size(self):
        self.assertIn("rank 1 of 7; this run has 3 ranks", self.refused_hello(hello(1, 7)))

    def test_same_rank_twice(self):
        root = self.start(0, 3, "gather")
        with self.connect() as first, self.connect() as second:
            first.sendall(hello(1, 3))
            second.sendall(hello(1, 3))
            self.assertIn("two processes are rank 1: one on elsewhere, one on elsewhere", self.end(root, 1))

    def test_frame_of_nonsense(self):
        for payload, words in ((b"\xff" * 16, "what is no frame"),
                               (MAGIC.to_bytes(4, "little") + b"\x03\0\0\0" + b"\xff" * 7 + b"\x7f", "are believed"),
                               (MAGIC.to_bytes(4, "little") + b"\x63\0\0\0" + bytes(8), "unknown kind 99")):
            with self.subTest(words=words):
                self.port = free_port()
                root = self.start(0, 2, "wait")
                with self.connect() as liar:
                    liar.sendall(hello(1, 2) + payload)
                    self.assertIn(words, self.end(root, 1))

    def test_unequal_sizes(self):
        processes = self.start_all(2, "unequal")
        self.assertRegex(self.end(processes[0], 1), r"rank 1 gives 9 bytes where rank 0 expects 8")
        self.end(processes[1], 1)

    def test_environment_is_checked(self):
        for changes, words in (({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
                               ({"RANK": "2"}, 'RANK is "2", not a number from 0 to 1'),
                               ({"RANK": "-1"}, 'RANK is "-1"'),
                               ({"RANK": "0x1"}, 'RANK is "0x1"'),
                               ({"RANK": None}, "WORLD_SIZE is set, but RANK is not"),
                               ({"WORLD_SIZE": None}, "RANK is set, but WORLD_SIZE is not"),
                               ({"WORLD_SIZE": "0"}, 'WORLD_SIZE is "0"'),
                               ({"MASTER_PORT": "70000"}, 'MASTER_PORT is "70000"'),
                               ({"RANK": None, "WORLD_SIZE": None, "MASTER_ADDR": None, "SLURM_PROCID": 0,
                                 "SLURM_NTASKS": 2, "SLURM_STEP_ID": 0}, "scontrol show hostnames")):
            with self.subTest(words=words):
                self.assertIn(words, self.end(self.start(0, 2, "gather", **changes), 1))


if __name__ == "__main__":
    unittest.main()
