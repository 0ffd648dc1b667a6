"""The axes of a rank, and what they are made of: communicators and windows, built, named and freed by the Mesh.

    Mesh
     |-- tp cp            carry the pieces of a layer's sums, of a sequence's attention
     |-- dp pp            coordinates only
     |-- data             ranks with the same parameters and other tokens: dp x cp
     |-- shard replicate  of these, those that divide the state among them, and those that have the same
     |-- links            pipeline messages
     `-- tied ...         the ranks that hold a copy of the tied embedding: first and last stage; and others, see layout/axes.py

Whoever needs an axis is given it. Nothing is looked up, and an axis of size 1 is an axis like any other.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from mpi4py import MPI

from mpitrain.comm import messages, native, shared
from mpitrain.comm.account import Account, Usage
from mpitrain.comm.buffers import Array, Scratch, on_device
from mpitrain.comm.carried import AUTO_SHARED, EVERYTHING, NOTHING, Carried
from mpitrain.comm.device import cuda_awareness
from mpitrain.comm.grid import Grid
from mpitrain.comm.native import Turnstile
from mpitrain.comm.progress import Pending, Progress, Steps
from mpitrain.comm.world import NOWHERE, Place
from mpitrain.errors import MeshError

TRANSPORTS = ("auto", "messages", "collectives", "shared")


class Axis:
    """One axis as this rank sees it: its coordinate, the size, communicators that belong to nobody else, and an account of their use.

    comm: of these ranks, from now on the axis's own; None if it carries nothing.  Construction and free() are collective over the axis.
    """

    def __init__(self, name: str, comm: MPI.Comm | None, rank: int, size: int, carried: Carried, one_node: bool, mesh: "Mesh"):
        self.name, self.rank, self.size, self.carried, self.one_node = name, rank, size, carried, one_node
        self.progress, self.device_aware, self.place, self._transport = mesh.progress, mesh.device_aware, mesh.place, mesh.transport
        self.account = Account()
        self.turnstile, self.second_turnstile, self.scratch = Turnstile(), Turnstile(), Scratch()
        self.num_tags, self._tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB), -1  # Open MPI knows it for COMM_WORLD only
        self._allocations: list[shared.Allocation] = []
        self._owns = comm is not None and size > 1
        self.comm, self.second, self.window = comm, None, None
        if self._owns:
            comm.Set_name(f"mpitrain.{name}")
            self._furnish()

    def _furnish(self) -> None:
        """Make what is carried needs beside the communicator. Collective over the axis."""
        if self.carried.needs_second(self._transport):
            self.second = self.comm.Dup()
            self.second.Set_name(f"mpitrain.{self.name}.second")
        if self.one_node and self.carried.needs_window(self._transport):
            self.window = shared.Window(self.comm)

    def __str__(self) -> str:
        return f"{self.name} {self.rank}/{self.size}"

    def start(self, begin: Callable[[], Steps], operation: str, num_bytes: int, result: Array | None = None, what: str = "") -> Pending:
        """Call `begin`, an operation on a buffer of `num_bytes`, and run its first steps, as far as its data is there.

        The Pending's result is `result`, and `what` names it in a hang report.
        """
        assert self.carried.allows(operation, self.size), f"axis {self.name} is made for {sorted(self.carried.operations)}, not {operation}"
        self.account.note(operation, num_bytes)
        return self.progress.start(begin(), what or f"{operation} of {num_bytes} bytes on {self.name}", self.account, result)

    def next_tag(self) -> int:
        """Return a tag for one operation. All ranks start operations in the same order and so agree on it."""
        self._tag = (self._tag + 1) % self.num_tags
        return self._tag

    def transport(self, x: Array, *, pairs: bool = False):
        """Choose the transport module for a buffer: by where it lies, by its size, and by what the user asked for.

        pairs: each pair of ranks has a count of its own, so no rank knows the total; the choice must not depend on it.
        """
        if on_device(x) or self.size == 1 or (x.nbytes > native.LIMIT and self._transport == "collectives"):
            return messages
        if self._transport == "collectives":
            return native
        large = pairs or x.nbytes >= AUTO_SHARED
        return shared if self.window and (self._transport == "shared" or large) else messages

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Return `num_bytes` of zeroed host memory for a buffer this axis will reduce; shared by its ranks where they can.

        Collective; all ranks pass the same size. The memory is the axis's and lives until free().
        """
        with self.place.waiting(f"making {num_bytes} bytes of memory for axis {self.name}"):
            if self.window is None or not shared.fits(self.comm, num_bytes):
                return np.zeros(num_bytes, np.uint8)
            self._allocations.append(shared.Allocation(self.comm, num_bytes))
        self._allocations[-1].memory[:] = 0
        return self._allocations[-1].memory

    def views(self, x: Array) -> list[Array] | None:
        """Return every rank's counterpart of `x` if it lies in an allocation of this axis, else None."""
        held = next((allocation for allocation in self._allocations if allocation.holds(x)), None)
        return held.views(x) if held else None

    def free(self) -> None:
        """Free the communicators and the windows. Collective; no buffer from allocate() may be used afterwards."""
        for allocation in self._allocations:
            allocation.free()
        self._allocations = []
        if self.window:
            self.window.free()
        if self.second:
            self.second.Free()
        if self._owns:
            self.comm.Free()


class Mesh:
    """All axes of this rank. Construction and free() are collective over `comm`, which stays the caller's.

    grid: the layout of all ranks.  axes: by its name, the ranks of each axis that this rank is on, in their order; those of the grid
    if not given.  carried: what is started on each, alike on all ranks; anything, if not given.  progress: who enters MPI while the
    rank computes: `poll` (the rank itself, between instructions) or a `thread`.  place: is told when memory is made together later.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        grid: Grid,
        axes: Mapping[str, Sequence[int]] | None = None,
        carried: Mapping[str, Carried] | None = None,
        *,
        transport: str = "auto",
        timeout_s: float | None = None,
        progress: str = "poll",
        place: Place = NOWHERE,
    ):
        grid.require(comm.size)
        self.grid, self.rank, self.size = grid, comm.rank, comm.size
        self.coordinates = grid.coordinates(comm.rank)
        self.progress, self.transport, self.place = Progress(timeout_s), transport, place
        self.device_aware, self.device_reason = cuda_awareness()
        if axes is None:
            axes = {name: grid.group(comm.rank, name) for name in grid.degrees}
        near, self.axes = _ranks_of_this_node(comm), dict[str, Axis]()
        for name, ranks in axes.items():
            self._add(name, comm, ranks, EVERYTHING if carried is None else carried.get(name, NOTHING), near)
        self.progress_thread = self._wants_thread(progress)
        if self.progress_thread:
            self.progress.start_thread(comm.Dup())

    def __getitem__(self, name: str) -> Axis:
        if name not in self.axes:
            raise MeshError(f"no axis {name!r}; this mesh has {', '.join(self.axes)}")
        return self.axes[name]

    def __str__(self) -> str:
        return f"rank {self.rank} (" + ", ".join(f"{name} {at}" for name, at in reversed(self.coordinates.items())) + ")"

    def usage(self) -> dict[str, Usage]:
        """Return what each axis of more than one rank has cost so far, by its name."""
        return {name: axis.account.read() for name, axis in self.axes.items() if axis.size > 1}

    def _wants_thread(self, progress: str) -> bool:
        if progress == "thread" and MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise MeshError('comm.progress = "thread" needs MPI_THREAD_MULTIPLE, which this MPI was not started with; use "poll"')
        return progress == "thread"

    def _add(self, name: str, comm: MPI.Comm, ranks: Sequence[int], carried: Carried, near: frozenset[int]) -> None:
        """Add an axis. Of one that carries something, all ranks split `comm` alike: those of an axis have its first rank as colour.

        A rank alone on its axis gets no communicator there: nothing is sent, and MPI has one for the purpose.
        """
        coordinate, alone = ranks.index(comm.rank), len(ranks) == 1
        own = comm.Split(MPI.UNDEFINED if alone else ranks[0], coordinate) if carried.operations else None
        self.axes[name] = Axis(name, MPI.COMM_SELF if alone else own, coordinate, len(ranks), carried, near.issuperset(ranks), self)

    def free(self) -> None:
        """Wait for what is in flight and free every communicator. Collective over all ranks."""
        self.progress.drain()
        self.progress.stop_thread()
        for axis in reversed(self.axes.values()):
            axis.free()
        self.axes = {}


def _ranks_of_this_node(comm: MPI.Comm) -> frozenset[int]:
    """Return the ranks of `comm` that share this rank's memory. Collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    here, all_ = node.Get_group(), comm.Get_group()
    ranks = frozenset(here.Translate_ranks(None, all_))
    for each in (here, all_, node):
        each.Free()
    return ranks
