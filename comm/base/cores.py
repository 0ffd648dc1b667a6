"""Which cores a process may use: not all that there are, where a batch system or a launcher binds it."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a login node has no MPI library
    from mpi4py import MPI


def cores_of_process() -> frozenset[int]:
    """Return the numbers of the cores that this process may use; where a system doesn't say, all."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def num_of_node(node: "MPI.Comm") -> int:
    """Return how many cores the ranks of a node may use, together. Collective over `node`."""
    return len(frozenset().union(*node.allgather(cores_of_process())))
