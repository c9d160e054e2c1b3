"""The GPU program in bf16 goes on with what it has saved, on the emulator: see halves.py."""
# limit: 600
# quick: never_stopped
# make: emulated-tests
import os

os.environ["BUILD"] = "build/emulated-bf16"
import halves


class Resume(halves.Resume):
    pass
