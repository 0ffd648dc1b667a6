"""Listening to what a rank gives to the operations of its axes, and to what comes of them.

    given      the part that a rank itself contributes, when an operation is started
    came       what the operation has made of the parts of all, when it is complete

An operation is known by its axis, and by its number there since somebody began to listen: alike on
all ranks of the axis, and when the program is run again.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mpitrain.comm.base.buffers import Array
from mpitrain.comm.progress import Steps


class TappedOperation(NamedTuple):
    """An operation that was started. instruction: of the program, by which."""

    axis: str
    number: int
    operation: str
    instruction: str


class Tap(Protocol):
    """What listens. Buffers are flat, and lent for the call only."""

    def given(self, which: TappedOperation, parts: Sequence[Array]) -> None:
        """Take note of what this rank contributes."""

    def came(self, which: TappedOperation, parts: Sequence[Array]) -> None:
        """Take note of what came."""


def followed(
    tap: Tap, which: TappedOperation, steps: Steps, given: Sequence[Array], writes: Sequence[Array]
) -> Steps:
    """Tell a tap what is given to an operation now, continue with its steps, and tell what came."""
    tap.given(which, given)
    return _to_the_end(tap, which, steps, writes)


def _to_the_end(tap: Tap, which: TappedOperation, steps: Steps, writes: Sequence[Array]) -> Steps:
    yield from steps
    tap.came(which, writes)
