"""Memory that is lent and given back: each buffer lies where plan/predict/arena.py has placed it.

It is allocated once.
"""

from collections.abc import Callable

import torch

from mpitrain.plan.predict.arena import Arena


class Pool:
    """The arena of one kind of buffers, of one dtype.

    allocate(length, dtype, device): where its memory comes from. It may be collective, so `reserve`
    allocates, on all ranks alike, and `borrow` never does.
    """

    def __init__(self, allocate: Callable[[int, torch.dtype, torch.device], torch.Tensor]):
        self._allocate = allocate
        self._offsets: dict[str, list[int]] = {}
        self._memory: torch.Tensor | None = None
        self._program = ""
        self._taken = 0
        self._lent: dict[int, int] = {}  # where each buffer that is lent begins, and where it ends

    @property
    def num_bytes(self) -> int:
        """Bytes of the arena."""
        return 0 if self._memory is None else self._memory.nbytes

    def reserve(self, arena: Arena, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the memory of all buffers."""
        self._offsets, self._memory = arena.offsets, self._allocate(arena.length, dtype, device)

    def begin(self, program: str) -> None:
        """Lend the buffers of a program, from its first one on.

        Those of a program before have been given back.
        """
        assert not self._lent, f"{len(self._lent)} buffers are lent when a program begins"
        self._program = program
        self._taken = 0

    def borrow(self, length: int) -> torch.Tensor:
        """Return the next buffer of the program, with whatever its memory last held."""
        begin = self._offsets[self._program][self._taken]
        self._taken += 1
        taken = [end for at, end in self._lent.items() if at < begin + length and begin < end]
        assert not taken, (
            f"buffer {self._taken - 1} of the {self._program} is lent before its memory is given back"
        )
        if length:
            self._lent[begin] = begin + length
        return self._memory[begin : begin + length]

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take back a buffer that nobody reads any more."""
        if len(buffer):
            del self._lent[buffer.storage_offset() - self._memory.storage_offset()]
