"""Oversubscription: more ranks on a node than cores. A rank that waits leaves its core to one that works."""

import os

HINTS = {
    "MPICH": (
        "MPIR_CVAR_POLLS_BEFORE_YIELD",
        "MPIR_CVAR_POLLS_BEFORE_YIELD=1 MPIR_CVAR_CH4_PROGRESS_THROTTLE=true",
    ),
    "Open MPI": ("OMPI_MCA_mpi_yield_when_idle", "OMPI_MCA_mpi_yield_when_idle=true"),
}


def crowded(vendor: str, ranks: int, cores: int) -> str:
    """Return what to set where a node has more ranks than cores that they may use.

    Nothing where it is set.
    """
    variable, setting = HINTS.get(vendor, ("", ""))
    if ranks <= cores or not variable or variable in os.environ:
        return ""
    return f"{ranks} ranks on {cores} cores: set {setting}, or waiting ranks keep the cores from working ones"
