"""Buffers that are lent and given back. They are allocated once: a step asks for the same lengths in the same order as the one before."""

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch

Kind = tuple[int, torch.dtype, torch.device]  # elements, and what they are


class Pool:
    """Buffers by length and dtype.

    allocate(length, dtype, device): where they come from. It may be collective, so `reserve` allocates them, on all ranks alike, and
    `take` never does.
    """

    def __init__(self, allocate: Callable[[int, torch.dtype, torch.device], torch.Tensor]):
        self._allocate = allocate
        self._free: dict[Kind, list[torch.Tensor]] = defaultdict(list)
        self.num_bytes = 0

    def reserve(self, counts: Mapping[Kind, int]) -> None:
        """Allocate so many buffers of each kind."""
        for kind, count in counts.items():
            for _ in range(count):
                buffer = self._allocate(*kind)
                self.num_bytes += buffer.nbytes
                self._free[kind].append(buffer)

    def has(self, kind: Kind) -> bool:
        """Whether `take` would find one."""
        return bool(self._free[kind])

    def take(self, kind: Kind) -> torch.Tensor:
        """Return a buffer, with whatever it last held."""
        return self._free[kind].pop(0)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer back that nobody reads any more."""
        self._free[len(buffer), buffer.dtype, buffer.device].append(buffer)
