"""The communicators of a rank: one per axis of the layout, built, named and freed by the Mesh.

    Mesh
     |-- tp cp dp pp          axes of the dense layers, rank order fastest first
     |-- etp ep edp           axes of the expert layers, folded over the same ranks
     |-- data                 ranks with the same parameters and other tokens: dp x cp
     |-- tied                 the ranks that hold a copy of the tied embedding: first and last stage
     |-- links                pipeline messages, apart from the collectives of pp
     `-- world, node          everyone; those who share this machine's memory

Whoever needs an axis is given it. Nothing is looked up, and an axis of size 1 is an axis like any other.
"""

from collections.abc import Callable, Mapping

import numpy as np
from mpi4py import MPI

from mpitrain.comm import messages, native, shared
from mpitrain.comm.account import Account, Usage
from mpitrain.comm.buffers import Array, Scratch, on_device
from mpitrain.comm.device import cuda_awareness
from mpitrain.comm.grid import Grid, members
from mpitrain.comm.native import Turnstile
from mpitrain.comm.progress import Pending, Progress, Steps
from mpitrain.comm.world import NOWHERE, Place
from mpitrain.errors import MeshError

TRANSPORTS = ("auto", "messages", "collectives", "shared")
AUTO_SHARED = 1 << 15  # bytes from which the window beats messages between ranks of one node: see benchmarks/collectives.py


class Axis:
    """One axis as this rank sees it: its coordinate, the size, communicators that belong to nobody else, and an account of their use.

    Construction and free() are collective over the ranks of the axis.
    """

    def __init__(self, name: str, comm: MPI.Comm, progress: Progress, transport: str, node: int, device_aware: bool, place: Place):
        self.place = place
        self.name, self.progress, self.device_aware = name, progress, device_aware
        self.comm, self.second = comm, comm.Dup()
        comm.Set_name(f"mpitrain.{name}")
        self.second.Set_name(f"mpitrain.{name}.second")
        self.rank, self.size = comm.rank, comm.size
        self.account = Account()
        self.turnstile, self.second_turnstile, self.scratch = Turnstile(), Turnstile(), Scratch()
        self.one_node = len(set(comm.allgather(node))) == 1
        self.window = shared.Window(comm) if self.one_node and self.size > 1 and transport in ("auto", "shared") else None
        self._allocations: list[shared.Allocation] = []
        self._transport = transport
        self.num_tags, self._tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB), -1  # Open MPI knows it for COMM_WORLD only

    def __str__(self) -> str:
        return f"{self.name} {self.rank}/{self.size}"

    def start(self, begin: Callable[[], Steps], operation: str, num_bytes: int, result: Array | None = None, what: str = "") -> Pending:
        """Call `begin`, an operation on a buffer of `num_bytes`, and run its first steps, as far as its data is there.

        The Pending's result is `result`, and `what` names it in a hang report.
        """
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
        self.second.Free()
        self.comm.Free()


class Mesh:
    """All axes of this rank. Construction and free() are collective over `comm`, which stays the caller's.

    dense: the layout of all ranks.  expert: the same ranks folded for expert layers, if given.  spans: further axes that join
    several, {"data": ("cp", "dp")}.  groups: further axes given as one list of ranks each; ranks outside have an axis of size 1.
    progress: who enters MPI while the rank computes: `poll` (the rank itself, between instructions) or a `thread`.  place: is told when
    memory is made together later.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        dense: Grid,
        *,
        expert: Grid | None = None,
        spans: Mapping[str, tuple[str, ...]] | None = None,
        groups: Mapping[str, list[tuple[int, ...]]] | None = None,
        transport: str = "auto",
        timeout_s: float | None = None,
        progress: str = "poll",
        place: Place = NOWHERE,
    ):
        dense.require(comm.size)
        if expert is not None:
            expert.require(comm.size)
        self.grid, self.rank, self.size = dense, comm.rank, comm.size
        self.coordinates = dense.coordinates(comm.rank)
        self.progress = Progress(timeout_s)
        self.device_aware, self.device_reason = cuda_awareness()
        self.axes: dict[str, Axis] = {}
        self._place = place
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        self._node = node.bcast(comm.rank, 0)  # a node is called after its first rank
        self._transport = transport
        for name, ranks in members(comm.rank, dense, expert, spans, groups).items():
            self._add(name, comm, ranks)
        self._add("world", comm, range(comm.size))
        self.axes["node"] = Axis("node", node, self.progress, transport, self._node, self.device_aware, place)
        self.num_nodes = len(set(comm.allgather(self._node)))
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

    def _add(self, name: str, comm: MPI.Comm, ranks) -> None:
        """Split one axis off. The first rank of each group is its colour; keys keep the order given."""
        ranks = list(ranks)
        axis = comm.Split(ranks[0], ranks.index(comm.rank))
        self.axes[name] = Axis(name, axis, self.progress, self._transport, self._node, self.device_aware, self._place)

    def free(self) -> None:
        """Wait for what is in flight and free every communicator. Collective over all ranks."""
        self.progress.drain()
        self.progress.stop_thread()
        for axis in reversed(self.axes.values()):
            axis.free()
        self.axes = {}
