"""A Slurm of its own, of one node, or of several that are daemons of this machine.

munged, slurmctld and slurmd of this machine's packages, started in a folder and ended with it.

with slurm(tmp_path, "linuxproc") as cluster:
    cluster.run("sbatch", "job.sh")
    training = Training(cluster, tmp_path, "srun --mpi=pmi2")
"""

import faulthandler
import json
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from launch import MPITRAIN, TINY, lines_in, options, write_text

# how Slurm knows the processes of a job: all that Debian's packages have
TRACKERS = ("linuxproc", "pgid", "cgroup")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/{tracker}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
LaunchParameters=use_interactive_step
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=1
SchedulerParameters=sched_min_interval=100000,bf_interval=5,batch_sched_delay=1
KillWait={kill_wait}
SlurmdTimeout=15
MinJobAge=600
FirstJobId={first}
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# the shortest that Slurm has; a run leaves after a third of it
LIMIT_S = 60
MARGIN_S = 40
SETTINGS = {
    **{key: value for key, value in TINY.items() if key != "run.steps"},
    "batch.global": 64,  # slow enough that there aren't thousands of steps to compare
    "run.eval_every": 50,
    "run.save_every": 10,
    "run.time_margin_s": MARGIN_S,
    "schedule.name": "constant",
}


def missing() -> str:
    """Return what keeps this machine from starting one; "" if nothing does."""
    found = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    return (
        f"needs {', '.join(found)}: apt-get install slurm-wlm munge"
        if found
        else "needs root"
        if os.getuid()
        else ""
    )


@dataclass
class Slurm:
    """A cluster that runs. Its commands find it by SLURM_CONF. daemons: of its nodes."""

    folder: Path
    names: Sequence[str]
    daemons: dict[str, subprocess.Popen] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(
        self,
        *command: str,
        cwd: Path | None = None,
        timeout: float = 60,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Run a command of Slurm's, or of a user, and return what it prints."""
        given = {"env": {**self.environment, **(env or {})}, "cwd": cwd, "timeout": timeout}
        done = subprocess.run(command, capture_output=True, text=True, check=False, **given)
        assert done.returncode == 0, (
            f"{command}: {done.returncode}\n{done.stdout}{done.stderr}\n{self.logs()}"
        )
        return done.stdout.strip()

    def state(self, job: str) -> str:
        return self.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")

    def cancel(self, job: str) -> None:
        """Cancel a job, if it isn't over."""
        subprocess.run(["scancel", job], env=self.environment, check=False)

    def restarts(self, job: str) -> int:
        """Return how many times a job has been requeued."""
        return int(
            self.run("scontrol", "--oneliner", "show", "job", job).partition(" Restarts=")[2].split()[0]
        )

    def node_is(self, state: str, timeout: float = 60) -> None:
        """Wait for a state of the node. A job that completes hides an idle one."""
        self.wait_for(f"nodes that are {state}", lambda: _nodes(self) in (state, f"{state}*"), timeout)

    def start_nodes(self) -> None:
        """Start the daemons of the nodes."""
        for name in self.names:
            self.daemons[name] = _started(["slurmd", "-D", "-N", name], self)

    def lose_node(self, name: str) -> None:
        """End the daemon of a node and everything that runs there, as a power cut does."""
        self.daemons.pop(name).kill()
        here = f"SLURMD_NODENAME={name}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if here in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)

    def resume_node(self, jobs: list[str], timeout: float = 60) -> None:
        """Take a node that was set down into use again, with a new daemon.

        Slurm drains one that tells of the jobs it had.
        """
        self.wait_for("the end of all steps", lambda: not any(map(self._steps, jobs)), timeout)
        _end_all(self)
        self.start_nodes()
        self.run("scontrol", "update", f"nodename={_host()}", "state=resume")

    def _steps(self, job: str) -> list[Path]:
        """Return the processes by which Slurm holds the steps of a job."""
        found = []
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                found += [command] * command.read_bytes().startswith(f"slurmstepd: [{job}.".encode())
        return found

    def processes(self, job: str) -> dict[int, str]:
        """Return the processes that have an environment of this job, with their names.

        ranks, watchdogs, launchers and shells.
        """
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"SLURM_JOB_ID={job}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    born = (folder / "stat").read_bytes().rpartition(b")")[2].split()[19].decode()
                    found[int(folder.name)] = f"{(folder / 'comm').read_text().strip()}, born {born}"
            except (OSError, IndexError):
                continue
        return {pid: name for pid, name in found.items() if not name.startswith(("slurmstepd", "slurmd"))}

    def wait_for(
        self, what: str, ready: Callable[[], object], timeout: float, describe: Callable[[], str] = lambda: ""
    ) -> None:
        faulthandler.cancel_dump_traceback_later()  # pytest's: a wait has a limit of its own
        end = time.monotonic() + timeout
        while not ready():
            assert time.monotonic() < end, f"waited {timeout} s for {what}\n{describe()}\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        return "\n".join(
            "\n".join(path.read_text().splitlines()[-40:])
            for path in sorted(self.folder.glob("slurm*.[cl]o*"))
        )


@contextmanager
def slurm(
    folder: Path, tracker: str = "linuxproc", cpus: int = 2, kill_wait: int = 15, names: Sequence[str] = ()
) -> Iterator[Slurm]:
    """Start it; at the end of the block nothing of it is left, jobs included.

    cpus: that Slurm takes a node to have, however many it has.
    kill_wait: seconds from SIGTERM to SIGKILL.
    names: of its nodes; this machine's, if none is given.
    """
    names = names or (_host(),)
    for name in ("state", *(f"spool-{name}" for name in names)):
        (folder / name).mkdir(parents=True)
    where = f"NodeHostname={_host()} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN"
    nodes = "\n".join(f"NodeName={name} Port={_port()} {where}" for name in names)
    # MPICH names shared memory after jobs: not as another Slurm of this machine did
    first = random.randrange(10**3, 10**7)
    places = dict(folder=folder, first=first, controller=_port(), nodes=nodes, host=_host())
    places |= dict(tracker=tracker, kill_wait=kill_wait)
    (folder / "slurm.conf").write_text(CONF.format(**places))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    cluster = Slurm(folder, names)
    with ExitStack() as stack:
        paths = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")] + [
            f"--socket={folder}/munge.socket"
        ]
        for command in (["munged", "-F", "--force", *paths], ["slurmctld", "-D"]):
            stack.callback(_end, _started(command, cluster))
            if command[0] == "munged":
                cluster.wait_for("munged", (folder / "munge.socket").exists, 20)
        stack.callback(_end_all, cluster)
        cluster.start_nodes()
        cluster.node_is("idle")
        stack.callback(_cancel, cluster)
        yield cluster


def _nodes(cluster: Slurm) -> str:
    """Return what state all nodes are in; "" while the controller doesn't answer yet."""
    command = ["sinfo", "--noheader", "--format=%T"]  # a line for each state
    return subprocess.run(
        command, env=cluster.environment, capture_output=True, text=True, check=False
    ).stdout.strip()


def _cancel(cluster: Slurm) -> None:
    subprocess.run(
        ["scancel", "--user", pwd.getpwuid(os.getuid()).pw_name], env=cluster.environment, check=False
    )
    cluster.wait_for(
        "the end of all jobs", lambda: not cluster.run("squeue", "--noheader", "--format=%i"), 60
    )


def _started(command: list[str], cluster: Slurm) -> subprocess.Popen:
    """Start a daemon; what it prints goes to a file of the folder."""
    program = shutil.which(command[0], path=f"{os.environ['PATH']}:/usr/sbin")
    with (cluster.folder / f"{command[0]}.console").open("ab") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        return subprocess.Popen(
            [program, *command[1:]], env=cluster.environment, start_new_session=True, **streams
        )


def _end_all(cluster: Slurm) -> None:
    for daemon in cluster.daemons.values():
        _end(daemon)


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _host() -> str:
    return socket.gethostname().partition(".")[0]


def _port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Training:
    """A job that `mpitrain job` has written and submitted.

    steps: of the run, which change while it is queued.

    env: of the shell that submits it, which the job gets.

    asked: options of mpitrain job.
    """

    def __init__(
        self,
        cluster: Slurm,
        folder: Path,
        launch: str,
        minutes: int = 1,
        env: Mapping[str, str] | None = None,
        asked: Sequence[str] = ("--nodes=1", "--ranks-per-node=2"),
        **changes: object,
    ):
        self.cluster = cluster
        self.folder = folder
        self.run_dir = folder / "runs/my"
        folder.mkdir(parents=True, exist_ok=True)
        self.text = write_text(folder / "text.txt")
        self.train_for(10**6)
        dotted = {key.replace("_", ".", 1): value for key, value in changes.items()}
        sets = options({**SETTINGS, "data.path": self.text, "parallel.pp": 2, **dotted})
        job = [MPITRAIN, "job", "slurm", "my.toml", *asked, "--cores=1", f"--time=0:{minutes:02}:00"]
        said = cluster.run(*job, f"--launch={launch}", *sets, "--submit", cwd=folder, env=env)
        self.job = said.split()[-1]
        assert f"Submitted batch job {self.job}" in said

    def train_for(self, steps: int) -> None:
        (self.folder / "my.toml").write_text(f"[run]\nsteps = {steps}\n")

    def ends(self) -> list[dict]:
        path = self.run_dir / "ends.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def console(self) -> str:
        path = self.folder / f"my-{self.job}.out"
        return path.read_text(errors="replace") if path.exists() else "no console yet"

    def num_starts(self) -> int:
        """Return how many times the run has begun to train."""
        return self.console().count("val loss before training") + self.console().count("resuming after")

    def wait_for_end(self, number: int, code: int | None) -> None:
        """Wait until the run has ended for the `number`th time.

        code: None for any that tells of a failure.
        """
        self.wait_for(f"end {number}", lambda: len(self.ends()) == number)
        found = self.ends()[-1]["code"]
        assert found == code or (code is None and found not in (0, 2, 75)), self.console()

    def wait_for_start(self, number: int, timeout: float = LIMIT_S + 60) -> None:
        """Wait until the run has taken some steps after its `number`th start."""
        steps = (self.ends()[-1]["step"] if self.ends() else 0) + 3
        self.wait_for(
            f"start {number}",
            lambda: self.num_starts() == number and lines_in(self.run_dir) + 1 > steps,
            timeout,
        )

    def wait_for_restart(self, number: int, timeout: float) -> None:
        """Wait until the job has been requeued so many times."""
        self.wait_for(f"restart {number}", lambda: self.cluster.restarts(self.job) == number, timeout)

    def wait_for(self, what: str, ready: Callable[[], object], timeout: float = LIMIT_S + 60) -> None:
        """Wait for something while the job lives."""

        def over():
            return ready() or (self.cluster.state(self.job) in ENDED and not ready())

        self.cluster.wait_for(what, over, timeout, self.console)
        assert ready(), f"{what}: the job is {self.cluster.state(self.job)}\n{self.console()}"

    def a_rank(self) -> int:
        """Return the process of rank 1."""
        for pid in self.cluster.processes(self.job):
            try:
                environment, command = (
                    Path(f"/proc/{pid}/{name}").read_bytes() for name in ("environ", "cmdline")
                )
            except OSError:
                continue
            names = (b"PMI_RANK=1", b"OMPI_COMM_WORLD_RANK=1")
            if any(name in environment.split(b"\0") for name in names) and b"mpitrain\0run" in command:
                return pid
        raise AssertionError(f"no rank 1 of job {self.job}\n{self.console()}")
