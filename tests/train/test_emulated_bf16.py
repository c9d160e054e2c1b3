"""The GPU program in bf16, on the emulator: see halves.py."""
# quick: one_rank goes_on other_type
# limit: 600
# make: emulated-tests
import os

os.environ["BUILD"] = "build/emulated-bf16"
import halves
import harness
import meshes


class Bf16(halves.Training):
    shape, T, samples = meshes.SMALL
    steps = 4
    others = dict(transport="nccl", overlap="none"),

    def wires(self):
        return dict(transport="nccl", overlap="ring:2"), dict(transport="ipc", overlap="direct:2")

    def train(self, ranks=1, timeout=400, **more):
        return super().train(ranks, timeout, **more)

    def test_the_other_type_is_another_program(self):
        result = harness.run(self.arguments(dtype="fp32"))
        self.assertFails(result, "make cuda", "--dtype fp32")
