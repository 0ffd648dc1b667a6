"""What an actor asks of an optimiser, and what an optimiser is made of."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mpitrain.config import OptimizerTable
from mpitrain.optim.matrices import MatrixRound
from mpitrain.parallel.zero.shards import ParameterShard
from mpitrain.plan.declared.optimizers import OptimizerKind


class Optimizer(Protocol):
    """The optimiser of one rank, over the pieces that it owns.

    What is kept of a piece has the piece's elements, one for one: whoever has a box of the
    parameter can resume with that of its state.
    """

    def step(self, lr: float) -> None:
        """Update the weights of the pieces from their gradients, which stay as they are."""

    def moments(self, piece: ParameterShard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name in a checkpoint, tensor) of what is kept of a piece; zeros at first."""

    def set_step(self, num_updates: int) -> None:
        """Set the number of updates made so far."""


@dataclass(frozen=True)
class OptimizerParts:
    """kind: what the optimiser declares.  settings: resolved.  pieces: what this rank updates.

    seed: of the random bits that round moments.
    rounds, device: for a kind that needs whole matrices: who has which and who computes it, and
    where gradients are: pieces can be in host memory, whose processor is too slow for products.
    """

    kind: OptimizerKind
    settings: OptimizerTable
    pieces: Sequence[ParameterShard]
    seed: int
    rounds: Sequence[MatrixRound] = ()
    device: torch.device | None = None

    def moments(self, group: str) -> tuple[str, ...]:
        """Return the names of what is kept of a parameter of a group."""
        return self.kind.moments(self.settings, group)
