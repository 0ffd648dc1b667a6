"""Oversubscription: more ranks on a node than cores. A rank that waits leaves its core to one that works."""

import os

from mpitrain.errors import counted

HINTS = {
    "MPICH": "MPIR_CVAR_POLLS_BEFORE_YIELD=1 MPIR_CVAR_CH4_PROGRESS_THROTTLE=true",
    "Open MPI": "OMPI_MCA_mpi_yield_when_idle=true",
}
MANY = 32  # ranks on a node, from which on the memory of each counts
# of a rank: 5 MB of MPICH's UCX, 1 MB of cells for messages on its node, 2 MB of docstrings
SMALLER = {
    "MPICH": "MPIR_CVAR_CH4_NETMOD=ofi MPIR_CVAR_CH4_ROOTS_ONLY_PMI=1 "
    "MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS=8 PYTHONOPTIMIZE=2"
}


def crowded(vendor: str, ranks: int, cores: int) -> str:
    """Return what to set where a node has more ranks than usable cores; "" where it is set."""
    settings = _unset(HINTS, vendor)
    if ranks <= cores or not settings:
        return ""
    crowd = f"{counted(ranks, 'ranks')} on {counted(cores, 'cores')}"
    return f"{crowd}: set {settings}, or waiting ranks take the cores from working ones"


def many(vendor: str, ranks: int, cores: int) -> str:
    """Return how to start many ranks on few cores with less memory, where that isn't done."""
    smaller = _unset(SMALLER, vendor)
    if ranks < MANY or ranks <= cores or not smaller:
        return ""
    settings = " ".join(filter(None, [smaller, _unset(HINTS, vendor)]))
    crowd = f"{counted(ranks, 'ranks')} on {counted(cores, 'cores')}"
    return f"{crowd}: env {settings} mpirun ... saves 8 MB a rank, and time"


def _unset(hints: dict[str, str], vendor: str) -> str:
    """Return the settings of a vendor, if its first variable isn't set."""
    settings = hints.get(vendor, "")
    return "" if settings.partition("=")[0] in os.environ else settings
