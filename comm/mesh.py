"""The axes of a rank; their communicators and windows are built, named and freed by the Mesh.

    Mesh
     |-- tp cp            carry the pieces of a layer's sums, of a sequence's attention
     |-- dp pp            coordinates only
     |-- data             ranks with the same parameters and other tokens: dp x cp
     |-- shard replicate  of these, those that divide the state among them, and those that have the
                          same
     |-- links            pipeline messages
     `-- tied ...         the ranks that hold a copy of the tied embedding: first and last stage;
                          and others, see plan/axes.py

Whoever needs an axis is given it. Nothing is looked up, and an axis of size 1 is one like any
other.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from mpitrain.comm.axis import Axis
from mpitrain.comm.base import cores
from mpitrain.comm.base.axis_operations import EVERYTHING, NOTHING, AxisOperations
from mpitrain.comm.base.grid import Grid
from mpitrain.comm.base.mpi import MPI
from mpitrain.comm.base.nodes import nodes_of
from mpitrain.comm.base.world import NULL_REPORTER, StatusReporter
from mpitrain.comm.device.gpu_support import STAGED, Way
from mpitrain.comm.meters.account import AxisUsage
from mpitrain.comm.meters.clocks import Clock
from mpitrain.comm.progress import Progress
from mpitrain.comm.tap import Tap
from mpitrain.comm.transports.window import Budget
from mpitrain.errors import MeshError

TRANSPORTS = ("auto", "messages", "collectives", "shared")


class Mesh:
    """All axes of this rank. Construction and free() are collective over `comm`, the caller's.

    grid: the layout of all ranks.
    axes: by name, the ranks of each axis of this rank, in their order; default: those of the grid.
    carried: what is started on each, alike on all ranks; anything, if not given.
    progress: who enters MPI while the rank computes: `poll` (the rank itself, between instructions)
    or a `thread`.
    on_thread: what a thread calls before it enters MPI for the first time.
    place: notes when memory is made together later, and waits that last.
    way: of device buffers, alike on all ranks.
    levels: whether axes over nodes move data inside of nodes and between them in turn (levels.py).
    node_ranks: neighbouring ranks that are taken for a node; 0: nodes are where ranks share memory.
    nodes: the node of each rank, which overrides both.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        grid: Grid,
        axes: Mapping[str, Sequence[int]] | None = None,
        carried: Mapping[str, AxisOperations] | None = None,
        *,
        transport: str = "auto",
        timeout_s: float | None = None,
        progress: str = "poll",
        on_thread: Callable[[], None] | None = None,
        place: StatusReporter = NULL_REPORTER,
        way: Way = STAGED,
        levels: bool = True,
        node_ranks: int = 0,
        nodes: Sequence[int] | None = None,
    ):
        grid.require(comm.size)
        self.grid = grid
        self.rank = comm.rank
        self.size = comm.size
        self.coordinates = grid.coordinates(comm.rank)
        (near, num_cores, self.budget), self.axes = _ranks_of_this_node(comm), dict[str, Axis]()
        self.progress = Progress(timeout_s, place, comm.rank, len(near), num_cores)
        self.transport = transport
        self.place = place
        self.way = way
        self.device_aware = way.direct
        if axes is None:
            axes = {name: grid.group(comm.rank, name) for name in grid.degrees}
        if nodes is None:
            nodes = (
                [rank // node_ranks for rank in range(comm.size)] if node_ranks else comm.allgather(min(near))
            )
        self._near = near
        self._nodes = nodes
        self._levels = levels
        for name, ranks in axes.items():
            self._add(name, comm, ranks, EVERYTHING if carried is None else carried.get(name, NOTHING))
        self.progress_thread = self._wants_thread(progress)
        if self.progress_thread:
            self.progress.start_thread(comm.Dup(), on_thread)

    def __getitem__(self, name: str) -> Axis:
        if name not in self.axes:
            raise MeshError(f"no axis {name!r}; this mesh has {', '.join(self.axes)}")
        return self.axes[name]

    def __str__(self) -> str:
        return (
            f"rank {self.rank} ("
            + ", ".join(f"{name} {at}" for name, at in reversed(self.coordinates.items()))
            + ")"
        )

    def keep_time(self, clock: Clock) -> None:
        """Book times by another clock from now on. Nothing is in flight.

        Axes of one rank keep the host's: nobody reads their times, and late marks would wait.
        """
        for axis in self.axes.values():
            if axis.size > 1:
                axis.account.clock = clock

    def listen(self, tap: Tap | None) -> None:
        """Let a tap hear from now on what is started on every axis that it is to hear; None: nobody."""
        for axis in self.axes.values():
            if axis.carried.heard:
                axis.listen(tap)

    def usage(self) -> dict[str, AxisUsage]:
        """Return what each axis of more than one rank has cost so far, by its name."""
        return {name: axis.account.read() for name, axis in self.axes.items() if axis.size > 1}

    def _wants_thread(self, progress: str) -> bool:
        if progress == "thread" and MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise MeshError(
                'comm.progress = "thread" needs MPI_THREAD_MULTIPLE, which this MPI was not started with; '
                'use "poll"'
            )
        return progress == "thread"

    def _add(self, name: str, comm: MPI.Intracomm, ranks: Sequence[int], carried: AxisOperations) -> None:
        """Add an axis. All ranks split `comm` alike for one that carries something.
        An axis has its first rank as colour.

        A rank alone on its axis gets no communicator: nothing is sent.
        """
        coordinate = ranks.index(comm.rank)
        alone = len(ranks) == 1
        own = comm.Split(MPI.UNDEFINED if alone else ranks[0], coordinate) if carried.operations else None
        here = [rank for rank in ranks if self._nodes[rank] == self._nodes[comm.rank]]
        shares_memory = self._near.issuperset(here)
        nodes = nodes_of([self._nodes[rank] for rank in ranks]) if self._levels else None
        mine = MPI.COMM_SELF if alone else cast("MPI.Intracomm | None", own)
        one_node = shares_memory and len(here) == len(ranks)
        self.axes[name] = Axis(name, mine, coordinate, ranks, carried, one_node, self, nodes, shares_memory)

    @property
    def cores_of_rank(self) -> int:
        """Return this rank's share of the cores that it may run on: a launcher may have bound it to some."""
        if sys.platform == "darwin":  # knows no affinity
            return 1
        return max(1, len(os.sched_getaffinity(0)) // len(self._near))

    def free(self) -> None:
        """Wait for what is in flight and free every communicator. Collective over all ranks."""
        self.progress.drain()
        self.progress.stop_thread()
        for axis in reversed(self.axes.values()):
            axis.free()
        self.axes = {}


def _ranks_of_this_node(comm: MPI.Intracomm) -> tuple[frozenset[int], int, Budget]:
    """Return the ranks of `comm` that share memory, their cores, and their budget. Collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    here = node.Get_group()
    all_ = comm.Get_group()
    ranks = frozenset(here.Translate_ranks(None, all_))
    budget = Budget(node)
    num_cores = cores.num_of_node(node)
    for each in (here, all_, node):
        each.Free()
    return ranks, num_cores, budget
