"""The mpirun of this machine, Open MPI's or that of MPICH and its kin (Hydra), where tests have to know which."""
import re
import subprocess
import unittest

RANK = "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"  # in a shell that it has started


def open_mpi():
    """Its major version; 0: another one, or none."""
    try:
        said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    except FileNotFoundError:
        return 0
    found = re.search(r"Open MPI\D*(\d+)", said)
    return int(found.group(1)) if found else 0


def sparing_survivors():
    """Options with which it does not end the others when a rank has died."""
    if not open_mpi():
        raise unittest.SkipTest("this mpirun ends all ranks when one has died, whatever it is told")
    return ["--enable-recovery"]


def killing_after(seconds):
    """Environment in which it waits so long between SIGCONT, SIGTERM and SIGKILL, for Open MPI 4 and 5."""
    return {f"{prefix}_MCA_odls_base_sigkill_timeout": str(seconds) for prefix in ("OMPI", "PRTE")}


def tells_status_after_signals():
    """Sent a signal that it passes on, does it return the ranks' status in the end? Hydra 4.0 sometimes returns 0."""
    return open_mpi() > 0


def falls_silent():
    """Told to end, does it pass on nothing any more of what ranks say?"""
    return open_mpi() >= 5


def rank_of(environment):
    """Of the process that this is the environment of."""
    return int(environment.get("OMPI_COMM_WORLD_RANK") or environment.get("PMI_RANK") or 0)
