"""What a transport is, and what it sees of an axis.

The modules beside this file are transports: each has the functions of Transport, and `levels`
those of LevelTransport. An axis chooses one for every operation (comm/axis.py).
"""

from collections.abc import Sequence
from typing import Protocol

from mpitrain.comm.base.buffers import Array, Scratch
from mpitrain.comm.base.mpi import MPI
from mpitrain.comm.base.nodes import Nodes
from mpitrain.comm.base.sorting import SortingMemory
from mpitrain.comm.meters.account import Account
from mpitrain.comm.progress import Steps
from mpitrain.comm.transports.turnstile import Turnstile
from mpitrain.comm.transports.window import Window


class TransportAxis(Protocol):
    """An axis as a transport sees it; comm/axis.py says what each is."""

    rank: int
    size: int
    ranks: Sequence[int]
    comm: MPI.Intracomm
    second: MPI.Intracomm
    account: Account
    scratch: Scratch
    sorting: SortingMemory
    turnstile: Turnstile
    second_turnstile: Turnstile
    nodes: Nodes | None
    window: Window | None

    @property
    def near(self) -> "TransportAxis | None":
        """The axis of this rank on its node."""

    @property
    def far(self) -> "TransportAxis | None":
        """The axis of this rank over nodes."""

    def next_tag(self) -> int:
        """Return a tag for one operation."""

    def one_level(self, x: Array, *, pairs: bool = False, num_bytes: int | None = None) -> "Transport":
        """Choose the transport for a buffer as if there were no nodes."""

    def views(self, x: Array) -> list[Array] | None:
        """Return every rank's counterpart of `x` if all can read it."""


class ExchangeFunction(Protocol):
    """Sends x[sent[r]:sent[r+1]] to every rank r, and receives its counterpart into `out`."""

    def __call__(
        self, x: Array, sent: list[int], out: Array, received: list[int], axis: TransportAxis
    ) -> Steps:
        """Take what the operation is matched by, and return its steps."""


class LevelTransport(Protocol):
    """What can go in two levels. Operations take what they are matched by, and return steps."""

    def reduce_scatter(self, x: Array, out: Array, axis: TransportAxis) -> Steps:
        """Write the sum over the axis of the own shard of `x` to `out`."""

    def all_gather(self, out: Array, axis: TransportAxis) -> Steps:
        """Fill every shard of `out` with that of its rank."""

    def all_reduce(self, x: Array, axis: TransportAxis) -> Steps:
        """Sum `x` in place over the axis."""

    def broadcast(self, x: Array, root: int, axis: TransportAxis) -> Steps:
        """Send the `x` of `root` to all others."""

    def reduce(self, x: Array, out: Array | None, root: int, axis: TransportAxis) -> Steps:
        """Write the sum of `x` over the axis to `out` of `root`."""


class Transport(LevelTransport, Protocol):
    """A way of bytes over an axis, in one level."""

    def exchange(
        self, x: Array, sent: list[int], out: Array, received: list[int], axis: TransportAxis
    ) -> Steps:
        """Send x[sent[r]:sent[r+1]] to every rank r and receive its counterpart into `out`."""

    def shift(self, x: Array, out: Array, distance: int, axis: TransportAxis) -> Steps:
        """Send `x` to the rank `distance` further, and receive `out` from as far before."""

    def gather(self, part: Array, out: Array | None, length: int, root: int, axis: TransportAxis) -> Steps:
        """Collect every rank's part of `length` elements in `out` of `root`."""

    def scatter(self, x: Array | None, out: Array, length: int, root: int, axis: TransportAxis) -> Steps:
        """Send every rank its part of the `length` elements in `x` of `root`."""
