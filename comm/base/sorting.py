"""Memory in which data is sorted by nodes, a round at a time: two pieces, which rounds take in turn.

A round begins when the one before last is over, of whichever operation: the memory doesn't grow
with buffers or operations. Turns are taken when an operation is started, in the same order on all
ranks of an axis: no rank waits for ever.
"""

import numpy as np

from mpitrain.comm.base.buffers import Array, ScratchTurn, empty_like, on_device, typed_like, widened_like
from mpitrain.comm.base.wire import ALIGNED


class SortingMemory:
    """Two pieces of host memory, and whose turn it is to have them."""

    def __init__(self) -> None:
        self._pieces = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
        self._turns: list[ScratchTurn | None] = [None, None]
        self._next = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of both."""
        return sum(map(len, self._pieces))

    def take(self, x: Array, wanted: list[tuple[int, bool]]) -> tuple[list[Array], ScratchTurn]:
        """Return arrays like `x` of the wanted lengths, which may be written when it is their turn.

        wanted: (elements, whether they are fp32 instead). On a device each has its own memory.
        """
        if on_device(x):
            arrays = [widened_like(x, length) if wide else empty_like(x, length) for length, wide in wanted]
            return arrays, ScratchTurn(0, [], 0)
        slot, self._next = self._next, 1 - self._next
        sizes = [length * (4 if wide else x.dtype.itemsize) for length, wide in wanted]
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + -(-size // ALIGNED) * ALIGNED)
        if ends[-1] > len(self._pieces[slot]):
            self._pieces[slot] = np.empty(ends[-1], np.uint8)
        memory = self._pieces[slot]
        parts = [memory[begin : begin + size] for begin, size in zip(ends, sizes)]
        before = self._turns[slot]
        turn = ScratchTurn(0, [] if before is None else [before], -1)
        self._turns[slot] = turn
        return [_typed(x, part, wide) for part, (_, wide) in zip(parts, wanted)], turn


def _typed(x: Array, memory: np.ndarray, wide: bool) -> Array:
    return typed_like(widened_like(x, 0) if wide else x, memory)
