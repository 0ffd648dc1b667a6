"""Optimisers that look at each number by itself: what is left to say of one is its update."""

from collections.abc import Callable, Iterator

import torch

from mpitrain.config import OptimizerTable
from mpitrain.optim.moments import Moments, UpdateBatch
from mpitrain.optim.protocol import OptimizerParts
from mpitrain.parallel.zero.shards import ParameterShard

# (settings, what to update, learning rate, weight decay, updates made so far): changes weights and
# moments in place, and leaves gradients as they are
Update = Callable[[OptimizerTable, UpdateBatch, float, float, int], None]


class Elementwise:
    """The optimiser of one rank. All but vectors decay: norms and biases don't, embedding and head do."""

    def __init__(self, parts: OptimizerParts, update: Update):
        self._settings = parts.settings
        self._update = update
        self._num_updates = 0
        groups: dict[tuple[bool, tuple[str, ...]], list[ParameterShard]] = {}
        for piece in parts.pieces:
            group = piece.spec.group
            groups.setdefault((group != "vector", parts.moments(group)), []).append(piece)
        narrow = parts.settings.moments == "bf16"
        self._groups = [
            (Moments(pieces, names, narrow=narrow, seed=parts.seed), decays)
            for (decays, names), pieces in groups.items()
        ]

    def step(self, lr: float) -> None:
        """Update the weights of the pieces from their gradients."""
        for moments, decays in self._groups:
            decay = self._settings.decay if decays else 0.0
            for batch in moments.opened(self._num_updates):
                self._update(self._settings, batch, lr, decay, self._num_updates)
        self._num_updates += 1

    def moments(self, piece: ParameterShard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of what is kept of one of the pieces; zeros before the first step."""
        yield from next(moments for moments, _ in self._groups if piece in moments).of(piece)

    def set_step(self, num_updates: int) -> None:
        """Set the number of updates made so far: for bias corrections, and the rounding of moments."""
        self._num_updates = num_updates
