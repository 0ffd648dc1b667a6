"""`mpitrain doctor`: what a user wants to know before blaming the trainer."""

import time
from collections.abc import Callable, Iterable

from mpitrain.cluster.guard import Guard
from mpitrain.cluster.launch import rank_of_launcher
from mpitrain.comm.base import library
from mpitrain.errors import DONE, MeshError
from mpitrain.measuring.environment import Line, environment, without_mpi

PATIENCE_S = 30.0  # for rank 0 to tell what it knows without MPI


def main(guard: Guard, say: Callable[[str], None]) -> int:
    """Report on the world this process was started in. Collective over all ranks.

    Raises MeshError where there is no MPI library, LibraryError where there is no torch, when all
    else is printed.
    """
    try:
        library.vendor()
    except MeshError:
        if rank_of_launcher()[0] == 0:
            _print(say, without_mpi())
        else:
            time.sleep(PATIENCE_S)  # the first report ends the job
        raise
    world = guard.connect(may_be_alone=True)
    sections = environment(world, guard.place)
    if world.rank == 0:
        _print(say, sections.lines)
    if sections.fault is not None:
        raise sections.fault
    return DONE


def _print(say: Callable[[str], None], lines: Iterable[Line]) -> None:
    for name, value in lines:
        say(f"{name:13}  {value}")
