"""A Slurm cluster of two nodes on this host, for one test program: daemons of its own, on ports and in a directory of their
own, gone with it however it ends.

They are children of a keeper, this file started as a program, which ends them all when nobody holds the other end of its
standard input any more. What they start becomes the keeper's when they end (a child subreaper), so nothing escapes it.
"""
import contextlib
import ctypes
import os
import pathlib
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import launcher

DAEMONS = "munged", "slurmctld", "slurmd"
NODES, CPUS = ("n1", "n2"), 4
MPI = "pmix" if launcher.open_mpi() else "pmi2"
CORES = 2  # that all of it runs on, so that four ranks are more
START_S = 60
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
# Where both nodes use one directory for what is temporary, the second finds that of the first. It belongs to root.
CONFIGURATION = """
ClusterName=commfuse
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
TmpFS={folder}/tmp-%n
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus}
PartitionName=all Nodes=n1,n2 Default=YES
"""


def missing():
    """What is not installed."""
    return [name for name in (*DAEMONS, "srun", "sbatch") if not shutil.which(name, path=PATH)]


class Cluster:
    def __init__(self):
        if missing():
            raise unittest.SkipTest(f"no {', '.join(missing())}: scripts/install_deps.sh --slurm")
        self.folder = tempfile.mkdtemp(prefix="commfuse-slurm-")
        self.env = dict(os.environ, PATH=PATH, SLURM_CONF=f"{self.folder}/slurm.conf")
        self.keeper = subprocess.Popen([sys.executable, os.path.abspath(__file__), self.folder], env=self.env,
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        said = self.keeper.stdout.readline()
        if said != "ready\n":
            said += self.keeper.stdout.read()
            self.close()
            raise AssertionError(f"the Slurm cluster did not start:\n{said}")

    def close(self):
        self.keeper.stdin.close()
        self.keeper.wait(60)
        self.keeper.stdout.close()

    def run(self, *command, timeout=60, **more):
        """A client of it, to its end."""
        return subprocess.run([str(word) for word in command], env=self.env | more, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout, preexec_fn=end_with_parent)

    def asked(self, *command):
        done = self.run(*command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def job(self, number):
        """What scontrol knows of a job: {"JobState": …}"""
        words = self.asked("scontrol", "-o", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def idle(self):
        return states(self.env) == ["idle"] * len(NODES)

    def logs(self):
        return logs(self.folder)


def logs(folder):
    return "\n".join(path.read_text(errors="replace") for path in sorted(pathlib.Path(folder).glob("*.log")))


# --- the keeper ---


def free_ports(count):
    """Below those that the system gives to whoever asks for any, so that nobody takes them meanwhile."""
    found = set()
    while len(found) < count:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", random.randint(15000, 32000)))
            found.add(probe.getsockname()[1])
    return list(found)


def prctl(option, value):
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_with_parent():
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def daemon(folder, *command):
    with open(f"{folder}/{command[0]}.out.log", "a", encoding="utf-8") as output:
        subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                         preexec_fn=end_with_parent)


def wait_until(condition, seconds=START_S):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited for {seconds} s")
        time.sleep(0.05)


def states(env=None):
    return subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], env=env, capture_output=True, text=True).stdout.split()


def start(folder):
    os.chmod(folder, 0o755)  # munge wants its socket to be reached by all
    os.mkdir(f"{folder}/state", 0o700)
    for node in NODES:
        os.mkdir(f"{folder}/{node}", 0o755)
        os.mkdir(f"{folder}/tmp-{node}")
        os.chmod(f"{folder}/tmp-{node}", 0o1777)
    with open(os.open(f"{folder}/key", os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
        file.write(os.urandom(128))
    pathlib.Path(folder, "slurm.conf").write_text(CONFIGURATION.format(
        host=socket.gethostname().split(".")[0], ports=free_ports(3), user=pwd.getpwuid(os.getuid()).pw_name, folder=folder, cpus=CPUS))
    daemon(folder, "munged", "--foreground", f"--socket={folder}/munge.socket", f"--key-file={folder}/key",
           f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/seed", f"--log-file={folder}/munge.log")
    wait_until(lambda: os.path.exists(f"{folder}/munge.socket"))
    daemon(folder, "slurmctld", "-D")
    for node in NODES:
        daemon(folder, "slurmd", "-D", "-N", node)
    wait_until(lambda: states() == ["idle"] * len(NODES))


def descendants(ancestor):
    """All there are."""
    parents = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            pass  # gone meanwhile
    found = {ancestor}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {ancestor}


def end(folder):
    while found := descendants(os.getpid()):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


def keep(folder):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    try:
        start(folder)
        print("ready", flush=True)
        sys.stdin.read()
    except (OSError, TimeoutError) as error:
        print(error, logs(folder), sep="\n")
    finally:
        end(folder)


if __name__ == "__main__":
    keep(sys.argv[1])
