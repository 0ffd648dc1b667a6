"""The first ranks of a job do something among themselves, and the others sleep until that is over.

A rank that waits in MPI polls, and takes a core from those that work: these look every NAP_S. Each
sign of life of rank 0 begins their wait anew: a limit is one of a part of the work, not of all.
"""

import time
from collections.abc import Callable
from typing import Any, cast

from mpitrain.comm.base.mpi import MPI
from mpitrain.comm.base.world import AT_WORK, NAP_S, OVER, World
from mpitrain.errors import InputError

TAG = 17  # nothing else sends point to point between the ranks of a world

Action = Callable[[World, Callable[[], None]], Any]


def on_first_ranks(world: World, size: int, what: str, action: Action) -> Any:
    """Have the first `size` ranks run action(their world, sign_of_life).

    Return rank 0's result on all ranks. An InputError, alike on all that run it, is raised on all.
    Collective over all ranks.
    """
    with world.place.waiting(f"for all ranks: {what}"):
        color = 0 if world.rank < size else MPI.UNDEFINED
        comm = cast("MPI.Intracomm", world.comm.Split(color, world.rank))
    result = error = None
    if world.rank < size:
        part = World(comm, world.place)
        signs = _SignsOfLife(world, size)
        try:
            result = action(part, signs.give)
        except InputError as found:
            error = found
        signs.end()
        part.node.Free()
        comm.Free()
    else:
        _sleep_until_over(world, what)
    return world.on_first_rank(what, lambda: _result_or_raise(result, error))


def _result_or_raise(result: Any, error: InputError | None) -> Any:
    if error is not None:
        raise error
    return result


class _SignsOfLife:
    """What rank 0 sends the ranks that sleep; other ranks send nothing."""

    def __init__(self, world: World, size: int):
        self._comm = world.comm
        self._sleeping = range(size, world.size) if world.rank == 0 else ()
        self._sent: list[Any] = []

    def give(self) -> None:
        self._send(AT_WORK)

    def end(self) -> None:
        self._send(OVER)
        MPI.Request.Waitall(self._sent)

    def _send(self, sign: str) -> None:
        self._sent += [self._comm.isend(sign, rank, TAG) for rank in self._sleeping]


def _sleep_until_over(world: World, what: str) -> None:
    sign = AT_WORK
    while sign != OVER:
        with world.place.waiting(f"for rank 0: {what}"):
            while not world.comm.iprobe(0, TAG):
                time.sleep(NAP_S)
            sign = world.comm.recv(source=0, tag=TAG)
