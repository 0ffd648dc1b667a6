"""What the launcher says of this process, and how commands that need several ranks start them."""

import os
import socket
import sys
from collections.abc import Collection
from pathlib import Path

from mpitrain.cluster.launcher_process import LauncherProcess
from mpitrain.cluster.processes import parents_of, peer_of, stat_of
from mpitrain.comm.base.interpreter import python
from mpitrain.comm.base.launchers import STARTERS, launch, without_rank
from mpitrain.errors import MeshError

JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
# not prte and prted, the daemons of other nodes
LAUNCHERS = ("prterun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun")


def launched() -> bool:
    """Return whether a launcher started this process as a rank."""
    return launch() is not None


def rank_of_launcher() -> tuple[int, int]:
    """Return the launcher's rank and number of ranks, before MPI is asked; (0, 1) without one."""
    launched_by = launch()
    return (launched_by.rank, launched_by.size) if launched_by else (0, 1)


def is_single() -> bool:
    """Return whether this process is the only rank, as far as is known before MPI starts."""
    launched_by = launch()
    return launched_by is None or (launched_by.size == 1 and launched_by.variable != "")


def on_one_node() -> bool:
    """Return whether the launcher says that it started all ranks on this node."""
    launched_by = launch()
    if launched_by is not None and launched_by.local_size is not None:
        return launched_by.local_size == launched_by.size
    return os.environ.get("SLURM_STEP_NUM_NODES") == "1"


def num_ranks_here() -> int:
    """Return how many ranks the launcher started on this node, or in all if it doesn't say."""
    launched_by = launch()
    return launched_by.local_size or launched_by.size if launched_by else 1


def pmi_server() -> int:
    """Return the process of MPICH's launcher or Slurm's that this rank speaks PMI with; 0: none."""
    number = os.environ.get("PMI_FD", "")
    if not number.isdecimal():
        return 0
    try:
        with socket.socket(fileno=os.dup(int(number))) as server:
            return peer_of(server).pid if server.family == socket.AF_UNIX else 0
    except (OSError, OverflowError):
        return 0


def launcher() -> int:
    """Return the launcher's process where it runs above this one, on this node; 0 elsewhere."""
    return _above(pmi_server() or os.getpid(), LAUNCHERS)


def _above(pid: int, names: Collection[str]) -> int:
    above = parents_of(pid) if launched() else ()
    return next((number for number, name in above if name in names), 0)


def launcher_above() -> LauncherProcess:
    """Return this rank's launcher, or what it has on this node: MPICH's proxy, prted, slurmstepd.

    It is one that is never gone where neither is above this process, or the system has no pidfd.
    """
    top = launcher()
    server = pmi_server()
    own = [server] if top and server else []
    above = [*own, *(pid for pid, _ in parents_of(server if own else os.getpid()))]
    top = top or _above(os.getpid(), STARTERS)  # started by a launcher elsewhere
    if not top:
        return LauncherProcess([], [])
    pids = list(reversed(above[: above.index(top) + 1]))
    descriptors = []
    try:
        for pid in pids:
            descriptors.append(os.pidfd_open(pid))
    except (OSError, AttributeError):
        LauncherProcess(pids, descriptors).close()
        return LauncherProcess([], [])
    return LauncherProcess(pids, descriptors)


def job_of_scheduler() -> str:
    """Return what the scheduler calls this job; "" without one."""
    return next((os.environ[name] for name in JOBS if name in os.environ), "")


def elsewhere(name: str) -> dict[int, int]:
    """Return the ranks of this job on this node, with a process of each, that aren't called `name`.

    What /proc says: of one job are processes with one PMIx namespace, or with one parent.
    """
    others = dict[int, int]()
    here = set[int]()
    launched_by = launch()
    if launched_by is None:
        return {}
    variable = launched_by.launcher.rank.encode()
    mine = os.environ.get("PMIX_NAMESPACE", "").encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            pairs = (folder / "environ").read_bytes().split(b"\0")
            environment = dict(pair.split(b"=", 1) for pair in pairs if b"=" in pair)
            rank = int(environment[variable])
            parent = int(stat_of(folder.name).fields[1])
            job = environment.get(b"PMIX_NAMESPACE", b"")
            if job == mine if mine else parent == os.getppid():
                others[rank] = int(folder.name)
                here |= {rank} if (folder / "comm").read_text().strip() == name else set()
        except (OSError, ValueError, IndexError, KeyError):
            continue  # gone meanwhile, another user's, or no rank
    return {rank: pid for rank, pid in others.items() if rank not in here}


def start(num_ranks: int, arguments: list[str]) -> int:
    """Run `mpitrain ARGUMENTS` on ranks of this host, by mpirun; return the exit code."""
    import shutil
    import subprocess

    sibling = Path(sys.executable).with_name("mpirun")
    mpirun = str(sibling) if sibling.exists() else shutil.which("mpirun")
    if mpirun is None:
        command = f"mpirun -n {num_ranks} mpitrain {' '.join(arguments)}"
        raise MeshError(f"found no mpirun to start {num_ranks} ranks with; start it yourself: {command}")
    environment = without_rank(os.environ)  # this process may have those of a rank that started it
    program = python("-m", "mpitrain") if sys.argv[0].endswith("__main__.py") else [sys.argv[0]]
    command = [mpirun, "-n", str(num_ranks), *program, *arguments]
    return subprocess.run(command, env=environment, check=False).returncode
