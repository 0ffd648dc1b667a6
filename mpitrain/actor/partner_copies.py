"""COPY: what was copied of this rank's state after the last step goes to a partner on another node.

It is there before NORM, which all ranks reach before one makes its next copy: each node has the
newest copy of its partners, or the one before it.
"""

from collections.abc import Callable
from typing import NamedTuple

from mpitrain.comm.axis import Axis
from mpitrain.comm.base.buffers import Array
from mpitrain.comm.collectives import shift
from mpitrain.comm.progress import Pending


class CopyExchange(NamedTuple):
    """A copy to send, where another's goes, of the same size, and what to call once it is there."""

    own: Array
    partners: Array
    arrived: Callable[[], None]


class PartnerCopies:
    """Copies on their way over an axis of ranks of different nodes."""

    def __init__(self, axis: Axis):
        self._axis = axis
        self._given: CopyExchange | None = None
        self._pending: Pending | None = None
        self._arrived: Callable[[], None] | None = None

    def give(self, exchange: CopyExchange | None) -> None:
        """Have a copy sent at the next COPY; None: nothing. Alike on all ranks of the axis."""
        self._given = exchange

    def start(self) -> None:
        """Start sending what was given, if anything was."""
        given, self._given = self._given, None
        if given is not None:
            self._pending = shift(given.own, self._axis, out=given.partners)
            self._arrived = given.arrived

    def wait(self) -> None:
        """Wait for what was started."""
        if self._pending is None or self._arrived is None:
            return
        self._pending.wait()
        self._pending = None
        self._arrived()
