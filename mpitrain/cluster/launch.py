"""What the launcher says of this process, and how to start ranks for commands that need several. Training is started by the user's own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from mpitrain.errors import MeshError

RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")


def launched() -> bool:
    """Return whether a launcher started this process."""
    return any(name in os.environ for name in RANKS)


def rank_of_launcher() -> tuple[int, int]:
    """Return the rank and the number of ranks that the launcher gave this process, before MPI is asked; (0, 1) without one."""
    rank, size = (next((os.environ[name] for name in names if name in os.environ), "") for names in (RANKS, SIZES))
    return int(rank) if rank.isdecimal() else 0, int(size) if size.isdecimal() else 1


def start(num_ranks: int, arguments: list[str]) -> int:
    """Run `mpitrain ARGUMENTS` on `num_ranks` ranks of this machine with this environment's mpirun; return the exit code."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        command = f"mpirun -n {num_ranks} mpitrain {' '.join(arguments)}"
        raise MeshError(f"found no mpirun to start {num_ranks} ranks with; start it yourself: {command}")
    return subprocess.run([mpirun, "-n", str(num_ranks), sys.argv[0], *arguments], check=False).returncode
