"""How ranks meet without MPI, by environment variables and sockets; and the messages when they do not.

sanitizers: too
limit: 300
"""
import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../.."))
BUILD = os.environ.get("BUILD", "build/release")
TOOL = os.path.join(ROOT, BUILD, "tests/commfuse/launch/tool_bootstrap")
LAUNCHERS = re.compile(r"OMPI_|PMI_|PMIX_|MPI_|SLURM_|(LOCAL_)?RANK$|(LOCAL_)?WORLD_SIZE$|MASTER_|TORCHELASTIC_|COMMFUSE_")
BARE = {name: value for name, value in os.environ.items() if not LAUNCHERS.match(name)}
PROMPT_S = 30  # below the time-outs of the cases that end at once
MAGIC = 0xCF0B0078
PLACE_BYTES = 64 + 40 + 128 + 8  # what each rank gives first: host, boot, cores, network


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


class Line:
    """A connection to a rank: the protocol of commfuse/launch/bootstrap_sockets.c, written from its description alone."""
    HEAD = struct.Struct("<Iiq")

    def __init__(self, connection, rank=1):
        self.connection, self.rank = connection, rank

    def send(self, payload=b"", **changes):
        head = dict(magic=MAGIC, rank=self.rank, size=len(payload))
        self.connection.sendall(self.HEAD.pack(*dict(head, **changes).values()) + payload)

    def bytes(self, count):
        data = b""
        while len(data) < count:
            more = self.connection.recv(count - len(data))
            if not more:
                raise EOFError(f"closed after {len(data)} of {count} bytes")
            data += more
        return data

    def receive(self):
        magic, _, size = self.HEAD.unpack(self.bytes(self.HEAD.size))
        assert magic == MAGIC
        return self.bytes(size)

    def hello(self, size, host=b"elsewhere"):
        return struct.pack("<ii64s", self.rank, size, host)

    def join(self, size):
        """Returns the reason to refuse it; empty: accepted."""
        self.send(self.hello(size))
        return self.receive().split(b"\0")[0].decode()


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

    def test_slurm(self):
        processes = [self.start(0, 2, "gather", RANK=None, WORLD_SIZE=None, SLURM_PROCID=rank, SLURM_NTASKS=2,
                                SLURM_STEP_ID=0) for rank in range(2)]
        for rank, process in enumerate(processes):
            self.assertIn(f"sockets: rank {rank} of 2, {rank} of 2", self.end(process, 0))

    def test_slurm_batch_script_is_one_process(self):
        process = self.start(0, 2, "gather", RANK=None, WORLD_SIZE=None, SLURM_PROCID=0, SLURM_NTASKS=2)
        self.assertIn("alone", self.end(process, 0))

    def test_slurm_batch_file_says_where_rank_0_is(self):
        programs = {"scontrol": '[ "$*" = "show hostnames node[7-8]" ] && printf "node7\\nnode8\\n"',
                    "srun": 'echo "rank 0 is on $MASTER_ADDR"'}
        with tempfile.TemporaryDirectory(prefix="commfuse-test-") as folder:
            for name, text in programs.items():
                with open(f"{folder}/{name}", "w", encoding="utf-8") as file:
                    file.write(f"#!/bin/sh\n{text}\n")
                os.chmod(file.name, 0o755)
            done = subprocess.run(["bash", f"{ROOT}/scripts/train.slurm"], capture_output=True, text=True, env=dict(
                BARE, PATH=f"{folder}:{os.environ['PATH']}", SLURM_SUBMIT_DIR=folder, SLURM_JOB_ID="1",
                SLURM_CPUS_PER_TASK="2", SLURM_TASKS_PER_NODE="1(x2)", SLURM_JOB_NODELIST="node[7-8]"))
        self.assertEqual((done.returncode, done.stdout), (0, "rank 0 is on node7\n"), done.stderr)

    # --- strangers ---

    def test_strangers_neither_join_nor_stop_anything(self):
        root = self.start(0, 2, "gather")
        with self.connect() as browser, self.connect() as silent, self.connect() as half, self.connect() as liar:
            browser.sendall(b"GET / HTTP/1.1\r\n" + bytes(200))
            half.sendall(MAGIC.to_bytes(4, "little") + b"\1")
            Line(liar).send(size=1 << 40)
            for rude in (browser, silent, half, liar):
                with self.assertRaises((EOFError, ConnectionResetError)):
                    Line(rude).bytes(1000)
            self.end(self.start(1, 2, "gather"), 0)
            self.end(root, 0)

    def test_three_hundred_strangers_hold_nobody(self):
        """Some are silent, some have sent half a hello; one sends a byte now and then."""
        root = self.start(0, 2, "gather")
        begin, stop = time.monotonic(), threading.Event()
        hello = Line.HEAD.pack(MAGIC, 1, 72) + Line(None).hello(2)
        with contextlib.ExitStack() as open_ones:
            strangers = [open_ones.enter_context(self.connect()) for _ in range(300)]
            for stranger in strangers[::2]:
                with contextlib.suppress(OSError):  # it may have had its second
                    stranger.sendall(hello[:40])
            dripping = threading.Thread(target=self.drip, args=(self.connect(), hello[:-1], stop))
            dripping.start()
            try:
                self.end(self.start(1, 2, "gather"), 0)
                self.end(root, 0)
            finally:
                stop.set()
                dripping.join()
        self.assertLess(time.monotonic() - begin, PROMPT_S)

    def test_strangers_hold_nobody_beyond_the_time_out(self):
        hello, stop = Line.HEAD.pack(MAGIC, 1, 72) + Line(None).hello(2), threading.Event()
        root = self.start(0, 2, "gather", timeout_s=1)
        dripping = threading.Thread(target=self.drip, args=(self.connect(), hello[:-1], stop))
        begin = time.monotonic()
        dripping.start()
        self.assertRegex(self.end(root, 1), r"1 of 2 ranks have not connected .* within 1 s")
        self.assertLess(time.monotonic() - begin, 5)
        stop.set()
        dripping.join()

    @staticmethod
    def drip(connection, data, stop):
        """A byte now and then, as long as somebody takes it."""
        with connection, contextlib.suppress(OSError):
            for byte in data:
                connection.sendall(bytes([byte]))
                if stop.wait(0.2):
                    return

    def test_a_thousand_ranks_meet(self):
        """All but rank 0 are of this process. None waits for another one: they come at once."""
        size = 1000
        root = self.start(0, size, "meet", timeout_s=60)
        self.connect().close()
        with contextlib.ExitStack() as all_of_them:
            lines = [Line(all_of_them.enter_context(self.connect()), rank=rank) for rank in range(1, size)]
            for i, line in enumerate(lines):
                try:
                    reply = line.join(size)
                except (EOFError, ConnectionError):  # on a busy machine its turn came late: as a rank does, it connects again
                    lines[i] = Line(all_of_them.enter_context(self.connect()), rank=line.rank)
                    reply = lines[i].join(size)
                self.assertEqual(reply, "")
            for mine in bytes(PLACE_BYTES), b"":  # at start, at the end
                for line in lines:
                    line.send(mine)
                for line in lines:
                    self.assertEqual(len(line.receive()), size * len(mine))
        self.assertIn(f"rank 0 of {size}", self.end(root, 0))

    def test_rank_0_listens_at_master_addr_alone(self):
        root = self.start(0, 2, "wait", MASTER_ADDR="127.0.0.5")
        for _ in range(100):
            with open("/proc/net/tcp", encoding="utf-8") as table:
                text = table.read()
            if f"0500007F:{self.port:04X} 00000000:0000 0A" in text:
                break
            time.sleep(0.05)
        else:
            self.fail("rank 0 does not listen at 127.0.0.5")
        with self.assertRaises(OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=1)

    # --- somebody goes missing ---

    def test_a_rank_on_another_host_that_does_not_answer(self):
        """The hosts are networks of this machine: with IPv4, with IPv6 alone, and with addresses of their link alone."""
        if subprocess.run(["unshare", "--net", "ip", "link"], capture_output=True).returncode != 0:
            self.skipTest("no networks of its own: needs root, unshare and ip")
        script = r"""unshare --net sh -c 'echo >"$FOLDER/ready"; exec sleep 60' & other=$!
read line <"$FOLDER/ready"; there="nsenter --net --target $other"
ip link add eth0 type veth peer name eth1 netns $other; ip addr add $A dev eth0 $NODAD; $there ip addr add $B dev eth1 $NODAD
for link in lo eth0; do ip link set $link up; done; for link in lo eth1; do $there ip link set $link up; done
RANK=1 $there sh -c 'echo $$ >$FOLDER/pid; MASTER_ADDR=${MASTER_ADDR%%eth0}${LINK:+eth1} exec "$TOOL" 20 $WHAT' &
RANK=0 "$TOOL" 20 $WHAT; status=$?; kill -9 $(cat $FOLDER/pid) $other; exit $status"""
        frozen, dead, unknown = "does not answer: frozen", "is dead: its process has ended", "cannot be asked: this host knows"
        for a, b, what, said in (("10.1.2.1/24", "10.1.2.2/24", "stop:1", frozen), ("10.1.2.1/24", "10.1.2.2/24", "hangup:1", dead),
                                 ("fd00::1/64", "fd00::2/64", "stop:1", frozen), ("fd00::1/64", "fd00::2/64", "hangup:1", dead),
                                 ("fe80::1/64", "fe80::2/64", "stop:1", unknown)):
            with self.subTest(a=a, what=what), tempfile.TemporaryDirectory() as folder:
                os.mkfifo(f"{folder}/ready")
                link = "%eth0" if a.startswith("fe80") else ""
                env = dict(BARE, WORLD_SIZE="2", MASTER_ADDR=a.split("/")[0] + link, MASTER_PORT="29500", FOLDER=folder, TOOL=TOOL,
                           WHAT=what, A=a, B=b, LINK=link, NODAD="nodad" if ":" in a else "")
                done = subprocess.run(["unshare", "--net", "sh", "-c", script], env=env, capture_output=True, text=True, timeout=60)
                self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
                self.assertIn(f"; rank 1 {said}", done.stderr)

    def test_a_false_rank_0_holds_nobody_beyond_the_time_out(self):
        answer = Line.HEAD.pack(MAGIC, 0, 256) + bytes(255)
        for timeout_s, payload, drips in ((0.5, b"", b""), (1, b"v", b""), (1, MAGIC.to_bytes(4, "little") + b"\1", b""),
                                          (1, b"", answer), (1, answer[:20], answer[20:])):
            with self.subTest(timeout_s=timeout_s, payload=len(payload), drips=len(drips)), socket.socket() as server:
                self.port = free_port()
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("127.0.0.1", self.port))
                server.listen()
                process = self.start(1, 2, "gather", timeout_s=timeout_s)
                connection, _ = server.accept()
                with connection:
                    begin = time.monotonic()
                    connection.sendall(payload)
                    threading.Thread(target=self.drip, args=(connection.dup(), drips, threading.Event())).start()
                    self.assertRegex(self.end(process, 1), rf"cannot reach rank 0 .* within {timeout_s} s: it answers nothing")
                    self.assertLess(time.monotonic() - begin, timeout_s + 4)

    def test_sub_second_time_outs(self):
        for rank, words in (0, r"1 of 2 ranks have not connected .* within 0\.5 s"), (1, r"within 0\.5 s: .*refused"):
            begin = time.monotonic()
            self.assertRegex(self.end(self.start(rank, 2, "gather", timeout_s=0.5), 1), words)
            self.assertLess(time.monotonic() - begin, 4)

    def test_out_of_files(self):
        """Too few for the ranks, and just enough for them alone."""
        for size, limit in (40, 24), (20, 20):
            with self.subTest(size=size):
                self.port = free_port()
                env = dict(BARE, RANK="0", WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port))
                root = subprocess.Popen(["sh", "-c", f"ulimit -n {limit}; exec '{TOOL}' 60 wait"], env=env,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                self.started.append(root)
                begin = time.monotonic()
                with contextlib.ExitStack() as ranks:
                    rank = 1
                    while root.poll() is None:
                        with contextlib.suppress(OSError, EOFError):
                            connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
                            Line(ranks.enter_context(connection), rank=rank).join(size)
                            rank += 1
                self.assertIn(f"rank 0 of {size} needs more open files than ulimit -n allows ({limit})", self.end(root, 1))
                self.assertLess(time.monotonic() - begin, PROMPT_S)

    def meets_with_few_files(self, rank, opened, soft, hard):
        """That rank of two has so many files open and these limits; the other one is as usual."""
        code = (f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({hard}, {hard}))\n"
                f"for _ in range({opened}): os.set_inheritable(os.open('/dev/null', 0), True)\n"
                f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard})); os.execv(sys.argv[1], sys.argv[1:])")
        env = dict(BARE, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port))
        few = subprocess.Popen([sys.executable, "-c", code, TOOL, "60", "gather"], env=env, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.started.append(few)
        return few, self.start(1 - rank, 2, "gather")

    def test_files_that_are_open_already_count(self):
        """They leave room if the limit can be raised, or is just high enough."""
        for rank in (0, 1):
            for opened, soft, hard in (200, 256, 256), (200, 205, 400):
                with self.subTest(rank=rank, opened=opened, soft=soft):
                    self.port = free_port()
                    for process in self.meets_with_few_files(rank, opened, soft, hard):
                        self.end(process, 0)
        self.port = free_port()
        begin = time.monotonic()
        few, _ = self.meets_with_few_files(0, 252, 256, 256)
        self.assertIn("rank 0 of 2 needs more open files than ulimit -n allows (256)", self.end(few, 1))
        self.assertLess(time.monotonic() - begin, PROMPT_S)

    def ends_all(self, what, lost, others, first=1):
        processes = self.start_all(len(others) + 1, what)
        begin = time.monotonic()
        for rank, process in enumerate(processes):
            if rank in others:
                gone = lost if rank == 0 else 0  # the others see that rank 0 ends
                self.assertRegex(self.end(process, 1), rf"error: rank {rank} of \d .*: rank {gone} .*is gone")
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
                        gone = killed if rank == 0 else 0  # the others see that rank 0 ends
                        self.assertRegex(self.end(process, 1), rf"error: rank {rank} of 3 .*: rank {gone} .*is gone")
                self.assertLess(time.monotonic() - begin, PROMPT_S)

    def test_a_rank_freezes(self):
        processes = self.start_all(3, "freeze:2", timeout_s=2)
        self.assertRegex(self.end(processes[0], 1), r"rank 0 waits for rank 2 .*nothing came for 2 s")
        self.assertRegex(self.end(processes[1], 1), r"rank 0 .*is gone")

    def test_a_rank_never_appears(self):
        processes = [self.start(rank, 4, "gather", timeout_s=2) for rank in (0, 2)]
        self.assertRegex(self.end(processes[0], 1), r"2 of 4 ranks have not connected .*: the last is rank 3\n")
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
            process = self.start(1, 2, "gather", timeout_s=1)
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(88))
                connection.recv(1000)
            server.close()
            self.assertRegex(self.end(process, 1), "within 1 s: (another program answers|.*refused)")

    def refused(self, rank, size):
        """What rank 0 of three replies to one that is wrong; it goes on, and the right ones meet."""
        root = self.start(0, 3, "gather")
        with self.connect() as first, self.connect() as second:
            self.assertEqual(Line(first, rank=2).join(3), "")
            reply = Line(second, rank=rank).join(size)
            self.assertEqual(second.recv(1), b"")
        text = self.end(root, 1)  # the other one has gone, too
        self.assertIn("rank 2 (elsewhere) is gone", text)
        return reply

    def test_rank_out_of_range(self):
        for rank in (-1, 0, 3, 1 << 30):
            with self.subTest(rank=rank):
                self.port = free_port()
                self.assertIn(f"a process on elsewhere is rank {rank} of 3", self.refused(rank, 3))

    def test_another_size(self):
        self.assertIn("is rank 1 of 7; this run has 3 ranks", self.refused(1, 7))

    def test_same_rank_twice(self):
        self.assertEqual(self.refused(2, 3), "two processes are rank 2: one on elsewhere, one on elsewhere")

    def test_a_rank_that_is_refused_says_why_and_the_others_meet(self):
        root = self.start(0, 2, "gather")
        self.assertRegex(self.end(self.start(1, 3, "gather"), 1), r"rank 0 at 127.0.0.1 port \d+ refuses rank 1: a process "
                         r"on .* is rank 1 of 3; this run has 2 ranks")
        self.end(self.start(1, 2, "gather"), 0)
        self.end(root, 0)

    def test_nonsense(self):
        for changes, words in ((dict(size=1 << 40), f"gives 1099511627776 bytes where rank 0 expects {PLACE_BYTES}"),
                               (dict(magic=1), "is no message of this run"), (dict(rank=0), "is no message of this run")):
            with self.subTest(**changes):
                self.port = free_port()
                root = self.start(0, 2, "gather")
                with self.connect() as liar:
                    line = Line(liar)
                    self.assertEqual(line.join(2), "")
                    line.send(bytes(PLACE_BYTES), **changes)
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
