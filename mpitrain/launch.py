"""Start ranks from a plain command, for commands that need several. Training is started by the user's own launcher."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from mpitrain.errors import MeshError

LAUNCHED = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def launched() -> bool:
    """Return whether a launcher started this process."""
    return any(name in os.environ for name in LAUNCHED)


def start(num_ranks: int, arguments: list[str]) -> int:
    """Run `mpitrain ARGUMENTS` on `num_ranks` ranks of this machine with this environment's mpirun; return the exit code."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        command = f"mpirun -n {num_ranks} mpitrain {' '.join(arguments)}"
        raise MeshError(f"found no mpirun to start {num_ranks} ranks with; start it yourself: {command}")
    return subprocess.run([mpirun, "-n", str(num_ranks), sys.argv[0], *arguments], check=False).returncode
