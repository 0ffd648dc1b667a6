"""Stochastic gradient descent with momentum and decoupled weight decay (arXiv:1711.05101, algorithm 1). torch's fused kernel computes."""

from collections.abc import Iterator

import torch

from mpitrain.config import Optimizer
from mpitrain.parallel.zero import Piece


class SGD:
    """momentum <- settings.momentum * momentum + gradient, and the weights go down along it; matrices decay, vectors (norms) don't."""

    def __init__(self, settings: Optimizer, pieces: list[Piece]):
        self._decay, self._decaying = settings.decay, [piece.weight for piece in pieces if len(piece.spec.shape) > 1]
        for piece in pieces:
            piece.weight.grad = piece.grad
        weights = [piece.weight for piece in pieces] or [torch.zeros(0)]  # a shard can be all padding
        fused = not weights[0].is_meta  # a rehearsal has shapes only
        self._sgd = torch.optim.SGD(weights, settings.lr, settings.momentum, nesterov=settings.nesterov, fused=fused)
        if settings.momentum:
            for weight in weights:
                self._sgd.state[weight]["momentum_buffer"] = torch.zeros_like(weight)

    def step(self, lr: float) -> None:
        """Update the weights of the pieces from their gradients."""
        for group in self._sgd.param_groups:
            group["lr"] = lr
        for weight in self._decaying:
            weight.mul_(1 - lr * self._decay)
        self._sgd.step()

    def moments(self, piece: Piece) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ("sgd/momentum", tensor) for one of its pieces, if there is momentum; zeros before the first step."""
        if piece.weight in self._sgd.state:
            yield "sgd/momentum", self._sgd.state[piece.weight]["momentum_buffer"]

    def set_step(self, num_updates: int) -> None:
        """Nothing depends on the number of updates."""
