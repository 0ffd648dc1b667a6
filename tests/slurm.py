"""A Slurm of its own, of one node: munged, slurmctld and slurmd of this machine's packages, started in a folder and ended with it.

    with slurm(tmp_path) as cluster:
        cluster.run("sbatch", "job.sh")
"""

import faulthandler
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_min_interval=100000,bf_interval=5,batch_sched_delay=1
KillWait=15
MinJobAge=600
FirstJobId={first}
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Return what keeps this machine from starting one; "" if nothing does."""
    found = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    return f"needs {', '.join(found)}: apt-get install slurm-wlm munge" if found else "needs root" if os.getuid() else ""


@dataclass
class Slurm:
    """A cluster that runs. Its commands find it by SLURM_CONF."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, cwd: Path | None = None, timeout: float = 60) -> str:
        """Run a command of Slurm's, or of a user, and return what it prints."""
        done = subprocess.run(command, cwd=cwd, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        return self.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")

    def wait_for(self, what: str, ready: Callable[[], object], timeout: float, told: Callable[[], str] = lambda: "") -> None:
        faulthandler.cancel_dump_traceback_later()  # pytest's: a wait has a limit of its own
        end = time.monotonic() + timeout
        while not ready():
            assert time.monotonic() < end, f"waited {timeout} s for {what}\n{told()}\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        return "\n".join("\n".join(path.read_text().splitlines()[-40:]) for path in sorted(self.folder.glob("slurm*.[cl]o*")))


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start it; at the end of the block nothing of it is left, jobs included."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    first = random.randrange(10**3, 10**7)  # MPICH names shared memory after jobs: not as another Slurm of this machine did
    places = dict(folder=folder, first=first, controller=_port(), node=_port())
    places |= dict(host=socket.gethostname().partition(".")[0], cpus=os.cpu_count())
    (folder / "slurm.conf").write_text(CONF.format(**places))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    cluster = Slurm(folder)
    with ExitStack() as stack:
        paths = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")] + [f"--socket={folder}/munge.socket"]
        for command in (["munged", "-F", "--force", *paths], ["slurmctld", "-D"], ["slurmd", "-D", "-N", places["host"]]):
            stack.enter_context(_daemon(command, cluster))
            if command[0] == "munged":
                cluster.wait_for("munged", (folder / "munge.socket").exists, 20)
        cluster.wait_for("a node that is idle", lambda: _nodes(cluster) == "idle", 60)
        stack.callback(_cancel, cluster)
        yield cluster


def _nodes(cluster: Slurm) -> str:
    """Return what state the node is in; "" while the controller doesn't answer yet."""
    command = ["sinfo", "--noheader", "--format=%T"]
    return subprocess.run(command, env=cluster.environment, capture_output=True, text=True, check=False).stdout.strip()


def _cancel(cluster: Slurm) -> None:
    subprocess.run(["scancel", "--user", pwd.getpwuid(os.getuid()).pw_name], env=cluster.environment, check=False)
    cluster.wait_for("the end of all jobs", lambda: not cluster.run("squeue", "--noheader", "--format=%i"), 60)


@contextmanager
def _daemon(command: list[str], cluster: Slurm) -> Iterator[None]:
    program = shutil.which(command[0], path=f"{os.environ['PATH']}:/usr/sbin")
    with (cluster.folder / f"{command[0]}.console").open("wb") as output:
        process = subprocess.Popen(
            [program, *command[1:]], env=cluster.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
