"""Messages of many lengths between all ranks at once, in the device's memory, byte by byte: over MPI, and by NCCL and by IPC on
the emulator. Of those by IPC some are larger than a slot, some larger than all slots (transport_ipc.cu).
"""
# limit: 300
import os
import subprocess
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build/release"))
EMULATED = os.path.join(ROOT, "build", "emulated-fp32")
SLOT = 16 << 20
LENGTHS = 1, 255, 4096, 70001, SLOT - 1, SLOT, SLOT + 1, 3 * SLOT + 12345


class Messages(unittest.TestCase):
    def run_ranks(self, ranks, build, transport, **environment):
        program = os.path.join(build, "tests", "commfuse", "tool_messages")
        if not os.path.exists(program):
            self.skipTest(f"{program} is not built")
        command = [os.path.join(ROOT, "scripts", "mpirun.sh"), "-np", str(ranks), program, transport, *map(str, LENGTHS)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120,
                              env=dict(os.environ, OMP_NUM_THREADS="1", **environment))
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


if __name__ == "__main__":
    unittest.main()
