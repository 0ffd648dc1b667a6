"""Ranks that hand what they have to the first of them: those of a node, or all."""

from typing import Any

import numpy as np

from mpitrain.comm.base.mpi import MPI
from mpitrain.comm.base.world import StatusReporter, World

MESSAGE_BYTES = 1 << 30  # at most: a count of more than 2^31 - 1 is one that not every MPI takes


class Group:
    """Ranks of which the first is given arrays of the others, one after the other.

    comm: the caller's; nobody else has messages under way on it.  first: the name of the first
    rank.
    """

    def __init__(self, comm: MPI.Comm, place: StatusReporter, first: str):
        self._comm = comm
        self._place = place
        self._first = first
        self.rank = comm.rank
        self.size = comm.size

    def gather(self, what: str, mine: object) -> list[Any] | None:
        """Return what each rank gives on the first, and None on the others. Collective over the group."""
        with self._place.waiting(f"for {self._first}: {what}"):
            return self._comm.gather(mine)

    def give(self, what: str, array: np.ndarray) -> None:
        """Send an array, contiguous, to the first rank; on return it may be changed."""
        with self._place.waiting(f"for {self._first}: {what}"):
            for part in _messages(array):
                self._comm.Send(part, 0)

    def take(self, what: str, rank: int, array: np.ndarray) -> None:
        """On the first rank, receive what a rank gives into a contiguous array of its size."""
        with self._place.waiting(f"for rank {rank} of the {self.size} of {self._first}: {what}"):
            for part in _messages(array):
                self._comm.Recv(part, rank)


def group_of(world: World, which: str) -> Group:
    """Return the group of this rank: of its `node`, or of `one` file, which is all."""
    if which == "node":
        return Group(world.node, world.place, "the first rank of this node")
    return Group(world.comm, world.place, "rank 0")


def _messages(array: np.ndarray) -> list[np.ndarray]:
    flat = array.reshape(-1).view(np.uint8)
    assert np.shares_memory(flat, array) or not array.size, (
        "not contiguous: a copy would be sent, or received into"
    )
    return [flat[at : at + MESSAGE_BYTES] for at in range(0, len(flat), MESSAGE_BYTES)]
