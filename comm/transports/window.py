"""Shared memory of a node's ranks: windows, buffers that all can read, and a budget for both.

How they are used: comm/transports/shared.py.
"""

import math
import os
from collections.abc import Sequence

import numpy as np

from mpitrain.comm.base.axis_operations import HEADER, SLOT, WINDOW
from mpitrain.comm.base.buffers import Array, address, typed_like
from mpitrain.comm.base.mpi import MPI
from mpitrain.comm.progress import Ready, Steps

UNKNOWN = 64 << 20  # bytes that a rank takes where nobody says how much there is
FOLDER = "/dev/shm"  # where MPI libraries keep shared memory on Linux


class Budget:
    """What a rank may take of its node's shared memory: its part of half of what is free now.

    Construction is collective over `node`. A page is taken at the first write, and where none is
    left, that is SIGBUS: so all is counted before. The other half is for MPI, and for other jobs.
    """

    def __init__(self, node: MPI.Comm):
        self.free = node.allreduce(free(), MPI.MIN)
        self.left = UNKNOWN if self.free == math.inf else self.free // (2 * node.size)
        self.refused = dict[str, int]()  # bytes of a rank, by the name of the axis

    def take(self, name: str, num_bytes: int, comm: MPI.Comm) -> bool:
        """Take so much, if each rank of axis `name` has it; return whether. Collective over it."""
        granted: bool = comm.allreduce(num_bytes <= self.left, MPI.LAND)
        if granted:
            self.left -= num_bytes
        else:
            self.refused[name] = self.refused.get(name, 0) + num_bytes
        return granted

    def describe(self) -> str:
        """Say what there was too little for; "" if for nothing."""
        if not self.refused:
            return ""
        axes = ", ".join(
            f"{name} ({num_bytes / 1e6:,.1f} MB a rank)" for name, num_bytes in self.refused.items()
        )
        return (
            f"{self.free / 1e6:,.0f} MB of shared memory are free in {FOLDER} of {os.uname().nodename}, of "
            f"which half is MPI's: too little for axes {axes}, which send copies instead: slower, with the "
            "same bits; make it larger (docker run --shm-size=8g)"
        )


def free() -> float:
    """Return how many bytes of shared memory this node has; infinitely many where nobody says."""
    try:
        room = os.statvfs(FOLDER)
    except OSError:
        return math.inf
    return room.f_bavail * room.f_frsize


def _bytes_of(window: MPI.Win, rank: int) -> np.ndarray:
    memory = window.Shared_query(rank)[0]
    # mpi4py's buffer has the buffer protocol, as Python before 3.12 can't say in types
    return np.frombuffer(memory, np.uint8)  # type: ignore[call-overload, no-any-return]  # see above


class Window:
    """The shared memory of one axis. ranks: of the world.

    Construction and free() are collective over `comm`, whose ranks share a node.
    """

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int]):
        self.size = comm.size
        self.rank = comm.rank
        self._ranks = ranks
        self._window = MPI.Win.Allocate_shared(WINDOW, 1, comm=comm)
        segments = [_bytes_of(self._window, rank) for rank in range(comm.size)]
        self.slots = [[s[HEADER + half * SLOT :][:SLOT] for half in (0, 1)] for s in segments]
        self._written: list[np.ndarray] = [s[:8].view(np.int64) for s in segments]
        self._read: list[np.ndarray] = [s[64:72].view(np.int64) for s in segments]
        self._written[self.rank][0] = self._read[self.rank][0] = 0
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self.piece = 0  # number of the next piece; every rank counts alike
        self._window.Sync()
        comm.Barrier()

    def free(self) -> None:
        """Give the memory back. Collective."""
        self.slots = []
        self._written = self._read = []
        self._window.Unlock_all()
        self._window.Free()

    def publish(self, piece: int) -> None:
        """Announce that the own part of `piece` is in its slot."""
        self._raise(self._written[self.rank], piece + 1)

    def release(self, piece: int) -> None:
        """Announce that this rank has read everybody's part of `piece`."""
        self._raise(self._read[self.rank], piece + 1)

    def written(self, piece: int) -> Ready:
        """Return whether everybody's part of `piece` is there to be read."""
        return self._reached(self._written, piece + 1)

    def writable(self, piece: int) -> Ready:
        """Return whether the slot of `piece` is free: everybody has read the piece before it in that slot."""
        return self._reached(self._read, piece - 1)

    def handshake(self) -> Steps:
        """Wait until every rank has come here; what was written before is then visible to all."""
        piece = self.piece
        self.piece = self.piece + 1
        self.publish(piece)
        yield self.written(piece)
        self.release(piece)

    def _raise(self, counter: np.ndarray, value: int) -> None:
        self._window.Sync()
        counter[0] = value
        self._window.Sync()

    def _reached(self, counters: list[np.ndarray], value: int) -> Ready:
        return _Reached(self._window, counters, value, self._ranks)


class _Reached:
    """Whether the counters of all ranks have reached a value."""

    def __init__(self, window: MPI.Win, counters: list[np.ndarray], value: int, ranks: Sequence[int]):
        self._window = window
        self._counters = counters
        self._value = value
        self._ranks = ranks

    def __call__(self) -> bool:
        if any(counter[0] < self._value for counter in self._counters):
            return False
        self._window.Sync()
        return True

    def waiting_on(self) -> set[int]:
        """Return the ranks whose counters haven't."""
        return {rank for rank, counter in zip(self._ranks, self._counters) if counter[0] < self._value}


class Allocation:
    """A buffer of `num_bytes` per rank that all ranks of `comm` can read. Made, freed collectively."""

    def __init__(self, comm: MPI.Intracomm, num_bytes: int):
        room = -(-num_bytes // HEADER) * HEADER  # whole pages: every rank's buffer begins on one
        self._window = MPI.Win.Allocate_shared(room, 1, comm=comm)
        self.segments = [_bytes_of(self._window, rank)[:num_bytes] for rank in range(comm.size)]
        self.memory = self.segments[comm.rank]

    def clear(self) -> bool:
        """Write zeros; return whether each page was there: a store would be SIGBUS."""
        begin = 0
        with open("/dev/zero", "rb", buffering=0) as zeros:
            while begin < len(self.memory):
                try:
                    begin += zeros.readinto(self.memory[begin:].data)
                except OSError:
                    return False
        return True

    def holds(self, x: Array) -> bool:
        """Tell whether `x` lies in this rank's buffer."""
        offset = address(x) - self.memory.ctypes.data
        last: int = len(self.memory) - x.nbytes
        return 0 <= offset <= last

    def views(self, x: Array) -> list[Array]:
        """Return what every rank has at the place of `x`."""
        begin = address(x) - self.memory.ctypes.data
        return [typed_like(x, segment[begin : begin + x.nbytes]) for segment in self.segments]

    def free(self) -> None:
        """Give the memory back; nobody may use a view of it any more."""
        self.segments = []
        del self.memory
        self._window.Free()
