"""UP on every mesh: a run that goes on is the run that was never stopped (see resuming.py)."""
# quick: 2x1 1x2 again
# limit: 240

import resuming


class Resume(resuming.Resume):
    strategy = "up"
