"""TPSP on every mesh: a run that goes on is the run that was never stopped (see resuming.py)."""
# quick: worth 1x1 2x2 other_modes trace done
# limit: 240

import resuming


class Resume(resuming.Resume):
    strategy = "tpsp"
