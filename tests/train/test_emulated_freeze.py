"""Ranks of the GPU program, frozen at any moment of training, on the emulator: as on CPUs (test_freeze.py), every other
one ends in time and names the frozen one.
"""
# quick: none
# limit: 300
# make: emulated-tests
import os

os.environ["BUILD"] = "build/emulated-fp32"
import test_freeze


class Emulated(test_freeze.Freeze):
    pass
