"""Stochastic gradient descent with momentum and decoupled weight decay (arXiv:1711.05101, algorithm
1). torch's fused kernel computes.
"""

from collections.abc import Iterator

import torch
from torch.optim.sgd import sgd

from mpitrain.config import OptimizerTable
from mpitrain.optim.moments import Moments
from mpitrain.parallel.zero.shards import ParameterShard


class SGD:
    """momentum <- settings.momentum * momentum + gradient, and the weights go down along it.

    Matrices decay, vectors (norms) don't.
    """

    def __init__(self, settings: OptimizerTable, pieces: list[ParameterShard], seed: int):
        self._settings = settings
        self._num_updates = 0
        self._decaying = [piece.weight for piece in pieces if piece.spec.group != "vector"]
        kinds = ["sgd/momentum"] if settings.momentum else []
        self._momentum = Moments(pieces, kinds, narrow=settings.moments == "bf16", seed=seed)

    def step(self, lr: float) -> None:
        """Update the weights of the pieces from their gradients."""
        for weight in self._decaying:
            weight.mul_(1 - lr * self._settings.decay)
        for weights, grads, kinds in self._momentum.opened(self._num_updates):
            self._update(weights, grads, kinds[0] if kinds else [None] * len(weights), lr)
        self._num_updates += 1

    def _update(
        self,
        weights: list[torch.Tensor],
        grads: list[torch.Tensor],
        momenta: list[torch.Tensor | None],
        lr: float,
    ) -> None:
        # a rehearsal has shapes only
        settings = self._settings
        fused = not weights[0].is_meta
        sgd(
            weights, grads, momenta, fused=fused, lr=lr, momentum=settings.momentum,
            nesterov=settings.nesterov,
            weight_decay=0.0, dampening=0.0, maximize=False,
        )  # fmt: skip

    def moments(self, piece: ParameterShard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ("sgd/momentum", tensor) for one of its pieces, if there is momentum.

        Zeros before the first step.
        """
        yield from self._momentum.of(piece)

    def set_step(self, num_updates: int) -> None:
        """Set the number of updates made so far, on which the rounding of moments depends."""
        self._num_updates = num_updates
