"""The GPU program in bf16 goes on with what it has saved, on the emulator: see halves.py."""
# limit: 600
# quick: never_stopped
# make: emulated-tests
import os
import sys
import unittest

os.environ["BUILD"] = "build/emulated-bf16"
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import halves


class Resume(halves.Resume):
    pass


if __name__ == "__main__":
    unittest.main()
