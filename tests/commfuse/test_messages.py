"""Messages of many lengths between all ranks at once, in the device's memory, byte by byte: over MPI, and by NCCL and by IPC on
the emulator. Some transports send messages of several MiB in pieces.
"""
# quick: test_mpi delays hosts
# limit: 400
# make: emulated-tests
import os
import subprocess
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import launcher

BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build/release"))
EMULATED = os.path.join(ROOT, "build", "emulated-fp32")
LENGTHS = 1, 255, 4096, 70001, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (5 << 20) + 12345
# Hosts are told apart by this file: rank 1 sees another one.
APART = f"""[ "{launcher.RANK}" != 1 ] || exec unshare -m sh -c 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"' \\
    "$ANOTHER_HOST" "$@"
exec "$@"
"""


class Messages(unittest.TestCase):
    def start(self, ranks, build, transport, *wrapper, **environment):
        program = os.path.join(build, "tests", "commfuse", "tool_messages")
        if not os.path.exists(program):
            self.skipTest(f"{program} is not built")
        command = [os.path.join(ROOT, "scripts", "mpirun.sh"), "-np", str(ranks), *wrapper, program, transport,
                   *map(str, LENGTHS)]
        return subprocess.run(command, capture_output=True, text=True, timeout=200,
                              env=dict(os.environ, OMP_NUM_THREADS="1", **environment))

    def run_ranks(self, *words, **environment):
        done = self.start(*words, **environment)
        self.assertEqual((done.returncode, done.stdout), (0, "all as sent\n"), done.stderr)

    def test_mpi(self):
        for ranks in (2, 3):
            with self.subTest(ranks=ranks):
                self.run_ranks(ranks, BUILD, "mpi")

    def test_emulated(self):
        for transport in ("nccl", "ipc"):
            for ranks in (2, 3):
                with self.subTest(transport=transport, ranks=ranks):
                    self.run_ranks(ranks, EMULATED, transport)

    def test_emulated_with_delays_and_few_queues(self):
        self.run_ranks(3, EMULATED, "ipc", EMULATOR_JITTER="300", CUDA_DEVICE_MAX_CONNECTIONS="6")

    def test_ranks_on_several_hosts_have_no_memory_in_common(self):
        if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
            self.skipTest("making a namespace needs root")
        with tempfile.NamedTemporaryFile("w") as host:
            host.write("another\n")
            host.flush()
            apart = "sh", "-c", APART, "sh"
            self.run_ranks(2, EMULATED, "auto", *apart, ANOTHER_HOST=host.name)
            done = self.start(2, EMULATED, "ipc", *apart, ANOTHER_HOST=host.name)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("transport ipc cannot serve the world group", done.stderr)
        self.assertIn("on several hosts", done.stderr)
