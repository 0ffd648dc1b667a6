"""Frozen weights (optimizer.frozen): an optimiser that doesn't know some of a rank's pieces."""

from collections.abc import Iterator

import torch

from mpitrain.optim.protocol import Optimizer
from mpitrain.parallel.zero.shards import ParameterShard


class WithFrozen:
    """An optimiser of the other pieces; of frozen ones nothing is kept."""

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer

    def step(self, lr: float) -> None:
        """Update all weights that aren't frozen."""
        self._optimizer.step(lr)

    def moments(self, piece: ParameterShard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is kept of one of the pieces: of a frozen one, nothing."""
        if piece.spec.updated:
            yield from self._optimizer.moments(piece)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of gradients that the optimiser inside keeps in host memory."""
        return self._optimizer.num_bytes

    def set_step(self, num_updates: int) -> None:
        """Set the number of updates made so far."""
        self._optimizer.set_step(num_updates)
