"""One axis of a rank: what it starts operations on. comm/mesh.py builds, names and frees them all."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np

from mpitrain.comm.base.axis_operations import AUTO_SHARED, LINKS, READING, WINDOW, AxisOperations
from mpitrain.comm.base.buffers import NOTHING, Array, Scratch, on_device, require_memory
from mpitrain.comm.base.mpi import MPI
from mpitrain.comm.base.nodes import Nodes
from mpitrain.comm.base.sorting import SortingMemory
from mpitrain.comm.base.world import ExpectedAction, StatusReporter
from mpitrain.comm.device.staging import reachable
from mpitrain.comm.meters.account import Account
from mpitrain.comm.progress import Pending, Progress, Steps
from mpitrain.comm.tap import Tap, TappedOperation, followed
from mpitrain.comm.transports import levels, messages, mpi_collectives, shared, window
from mpitrain.comm.transports.levels import carried_near_and_far
from mpitrain.comm.transports.protocol import LevelTransport, Transport
from mpitrain.comm.transports.turnstile import Turnstile
from mpitrain.comm.transports.window import Allocation, Budget, Window


class Surroundings(Protocol):
    """What all axes of a rank share; a mesh."""

    progress: Progress
    device_aware: bool
    place: StatusReporter
    transport: str
    budget: Budget


class Axis:
    """One axis as this rank sees it: its ranks, communicators of its own, an account of their use.

    comm: of these ranks, from now on the axis's own; None if it carries nothing.
    ranks: of the world, in the order of the axis.  one_node: they share memory.
    nodes: how they lie on several nodes, if evenly.
    near, far: then the axes of this rank on its node, and over nodes (comm/transports/levels.py),
    with accounts of their own.

    Construction and free() are collective over the axis.
    """

    def __init__(
        self, name: str, comm: MPI.Intracomm | None, rank: int, ranks: Sequence[int], carried: AxisOperations,
        one_node: bool, mesh: Surroundings,
        nodes: Nodes | None = None, near_shares_memory: bool = False,
    ):  # fmt: skip
        self.name = name
        self.rank = rank
        self.ranks = ranks
        self.size = len(ranks)
        self.carried = carried
        self.one_node = one_node
        self.progress = mesh.progress
        self.place = mesh.place
        self._transport = mesh.transport
        self.device_aware = mesh.device_aware
        self._budget = mesh.budget
        self.account = Account()
        self.tap: Tap | None = None
        self._num_heard = 0
        self.turnstile = Turnstile()
        self.second_turnstile = Turnstile()
        self.scratch = Scratch()
        self.sorting = SortingMemory()
        # Open MPI knows it for COMM_WORLD only; each MPI has it
        self.num_tags: int = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # type: ignore[assignment]
        self._tag = -1
        self._allocations: list[Allocation] = []
        self._owns = comm is not None and self.size > 1
        # None where it carries nothing, and the second where no transport needs it: nothing is started then
        self.comm: MPI.Intracomm = comm  # type: ignore[assignment]  # see above
        self.second: MPI.Intracomm = None  # type: ignore[assignment]  # see above
        self.window: Window | None = None
        if self._owns:
            self.comm.Set_name(f"mpitrain.{name}")
            self._furnish()
        self.near: Axis | None = None
        self.far: Axis | None = None
        self.nodes = nodes if self._owns and carried.operations & READING else None
        if self.nodes is not None:
            self._level(mesh, near_shares_memory)

    def _level(self, mesh: Surroundings, near_shares_memory: bool) -> None:
        """Make the axes on this node and over nodes. Collective over the axis."""
        assert self.nodes is not None
        near = self.nodes.num_near
        node, place = divmod(self.rank, near)
        parts = carried_near_and_far(self.carried)
        neighbours = self.ranks[node * near : (node + 1) * near]
        counterparts = self.ranks[place::near]
        self.near = Axis(
            f"{self.name}.near",
            cast("MPI.Intracomm", self.comm.Split(node, place)),
            place,
            neighbours,
            parts,
            near_shares_memory,
            mesh,
        )
        over_nodes = cast("MPI.Intracomm", self.comm.Split(place, node))
        self.far = Axis(f"{self.name}.far", over_nodes, node, counterparts, parts, False, mesh)
        self.account.parts = [self.near.account, self.far.account]

    def _furnish(self) -> None:
        """Make what is carried needs beside the communicator. Collective over the axis."""
        if self.carried.needs_second(self._transport):
            self.second = self.comm.Dup()
            self.second.Set_name(f"mpitrain.{self.name}.second")
        if (
            self.one_node
            and self.carried.needs_window(self._transport)
            and self._budget.take(self.name, WINDOW, self.comm)
        ):
            self.window = window.Window(self.comm, self.ranks)

    def __str__(self) -> str:
        return f"{self.name} {self.rank}/{self.size}"

    def start(
        self,
        operation: Callable[..., Steps],
        name: str,
        num_bytes: int,
        *,
        reads: Sequence[Array] = (),
        writes: Sequence[Array] = (),
        given: slice = NOTHING,
        result: Array | None = None,
        what: object = "",
        expected: ExpectedAction | None = None,
    ) -> Pending:
        """Call operation(*reads, *writes) and run its first steps, as far as its data is there.

        Return its Pending. By way of the host, if the buffers are on a device that MPI can't read.
        given: the part of each written buffer that is read before; only that is carried to the
        host.
        num_bytes: what an account calls the size of the operation `name`, see wire.py.
        result: of the Pending.  what: names it in a hang report.
        expected: the instruction by which other ranks do their part; default: the one that runs
        here.
        """
        assert self.carried.allows(name, self.size), (
            f"axis {self.name} is made for {sorted(self.carried.operations)}, not {name}"
        )
        to_mpi = self.size > 1 or name in LINKS  # of one rank, only links hand anything over
        if to_mpi:
            for x in (*reads, *writes):
                require_memory(x)
        self.account.note(name, num_bytes)
        steps = reachable(operation, reads, writes, given, self.device_aware or not to_mpi)
        if self.tap is not None:
            which = TappedOperation(self.name, self._num_heard, name, self.place.what)
            self._num_heard = self._num_heard + 1
            steps = followed(self.tap, which, steps, [*reads, *(x[given] for x in writes)], writes)
        what = what or f"{name} of {num_bytes} bytes on {self.name}"
        return self.progress.start(steps, what, self.account, result, expected=expected)

    def listen(self, tap: Tap | None) -> None:
        """Let a tap hear what is started from now on, counted from 0; None: nobody."""
        self.tap = tap
        self._num_heard = 0

    def next_tag(self) -> int:
        """Return a tag for one operation. All ranks start operations in the same order and so agree on it."""
        self._tag = (self._tag + 1) % self.num_tags
        return self._tag

    def transport(self, x: Array) -> LevelTransport:
        """Choose the transport module for a buffer: two levels on several nodes, else one."""
        return self.one_level(x) if self.nodes is None else levels

    def one_level(self, x: Array, *, pairs: bool = False, num_bytes: int | None = None) -> Transport:
        """Choose as if there were no nodes, by the buffer's place and size, and the user's wish.

        pairs: each pair of ranks has a count of its own: no rank knows the total, so messages.
        num_bytes: of all ranks, where each has a part of another size.
        """
        return (
            messages
            if on_device(x)
            else self.by_size(x.nbytes if num_bytes is None else num_bytes, pairs=pairs)
        )

    def by_size(self, num_bytes: int, *, pairs: bool = False) -> Transport:
        """Choose it for a buffer in host memory."""
        if self.size == 1 or pairs:
            return messages
        if self._transport == "collectives":
            return mpi_collectives if mpi_collectives.addresses(num_bytes, self.size) else messages
        return (
            shared if self.window and (self._transport == "shared" or num_bytes >= AUTO_SHARED) else messages
        )

    def all_gather_objects(self, mine: Any) -> list[Any]:
        """Return what each rank gives, in axis order. Collective, and blocks: not within a step."""
        with self.place.waiting(f"for all ranks of axis {self.name}"):
            return self.comm.allgather(mine) if self.size > 1 else [mine]

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Return `num_bytes` of zeroed host memory for a buffer to reduce, shared where it can be.

        Collective; all ranks pass the same size. The memory is the axis's and lives until free().
        """
        with self.place.waiting(f"making {num_bytes} bytes of memory for axis {self.name}"):
            if self.near is not None:
                return self.near.allocate(num_bytes)
            if self.window is None or not self._budget.take(self.name, num_bytes, self.comm):
                return np.zeros(num_bytes, np.uint8)
            made = Allocation(self.comm, num_bytes)
            if not self.comm.allreduce(made.clear(), MPI.LAND):
                made.free()
                return np.zeros(num_bytes, np.uint8)
        self._allocations.append(made)
        return made.memory

    def views(self, x: Array) -> list[Array] | None:
        """Return every rank's counterpart of `x` if it lies in an allocation of this axis, else None."""
        held = next((allocation for allocation in self._allocations if allocation.holds(x)), None)
        return held.views(x) if held else None

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's window and scratch memory at most, those of both levels included.

        What was allocated for others is not counted.
        """
        levels = sum(level.num_bytes for level in (self.near, self.far) if level is not None)
        return levels + self.scratch.most_bytes + self.sorting.num_bytes + (WINDOW if self.window else 0)

    def free(self) -> None:
        """Free the communicators and the windows, with allocate()'s buffers. Collective."""
        for level in (self.near, self.far):
            if level is not None:
                level.free()
        for allocation in self._allocations:
            allocation.free()
        self._allocations = []
        if self.window:
            self.window.free()
        if self.second:
            self.second.Free()
        if self._owns:
            self.comm.Free()
