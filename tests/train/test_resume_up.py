"""UP on every mesh: a run that goes on is the run that was never stopped (see resuming.py)."""
# quick: 2x1 1x2 again
# limit: 240
import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import resuming


class Resume(resuming.Resume):
    strategy = "up"


if __name__ == "__main__":
    unittest.main()
