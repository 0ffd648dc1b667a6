"""What the launcher says of this process, and how to start ranks for commands that need several. Training is started by the user's own."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from mpitrain.cluster.processes import parents_of, peer_of
from mpitrain.errors import MeshError

# Of several that are there the first: the later, the likelier left by a launcher in whose shell this one was started.
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
LAUNCHERS = ("prterun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun")  # not prte and prted, the daemons of other nodes


def launched() -> bool:
    """Return whether a launcher started this process."""
    return any(name in os.environ for name in RANKS)


def rank_of_launcher() -> tuple[int, int]:
    """Return the rank and the number of ranks that the launcher gave this process, before MPI is asked; (0, 1) without one."""
    rank, size = (next((os.environ[name] for name in names if name in os.environ), "") for names in (RANKS, SIZES))
    return int(rank) if rank.isdecimal() else 0, int(size) if size.isdecimal() else 1


def on_one_node() -> bool:
    """Return whether the launcher says that it started all ranks on this node."""
    here = next((os.environ[name] for name in LOCAL_SIZES if name in os.environ), "")
    return here == str(rank_of_launcher()[1]) or (not here and os.environ.get("SLURM_STEP_NUM_NODES") == "1")


def pmi_server() -> int:
    """Return the process that made the socket over which this rank speaks PMI, as MPICH's launcher and Slurm's do; 0 if there is none."""
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
    above = parents_of(pmi_server() or os.getpid()) if launched() else ()
    return next((pid for pid, name in above if name in LAUNCHERS), 0)


def job_of_scheduler() -> str:
    """Return what the scheduler calls this job; "" without one."""
    return next((os.environ[name] for name in JOBS if name in os.environ), "")


def elsewhere(name: str) -> dict[int, int]:
    """Return the ranks, with a process of each, that the launcher started on this node for this job and that aren't called `name`.

    What /proc says: of one job are processes with one PMIx namespace, or with one parent.
    """
    others, here = dict[int, int](), set[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = dict(pair.split(b"=", 1) for pair in (folder / "environ").read_bytes().split(b"\0") if b"=" in pair)
            rank = int(next(environment[name.encode()] for name in RANKS if name.encode() in environment))
            parent = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
            job, mine = environment.get(b"PMIX_NAMESPACE", b""), os.environ.get("PMIX_NAMESPACE", "").encode()
            if job == mine if mine else parent == os.getppid():
                others[rank] = int(folder.name)
                here |= {rank} if (folder / "comm").read_text().strip() == name else set()
        except (OSError, ValueError, IndexError, StopIteration):
            continue  # gone meanwhile, another user's, or no rank
    return {rank: pid for rank, pid in others.items() if rank not in here}


def start(num_ranks: int, arguments: list[str]) -> int:
    """Run `mpitrain ARGUMENTS` on `num_ranks` ranks of this machine with this environment's mpirun; return the exit code."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        command = f"mpirun -n {num_ranks} mpitrain {' '.join(arguments)}"
        raise MeshError(f"found no mpirun to start {num_ranks} ranks with; start it yourself: {command}")
    return subprocess.run([mpirun, "-n", str(num_ranks), sys.argv[0], *arguments], check=False).returncode
