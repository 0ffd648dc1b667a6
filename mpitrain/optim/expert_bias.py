"""Load balancing without a loss: the bias of each expert, from the loads that are counted.
Gradients of both are how many tokens of a step have chosen each expert.

    load  the share of all choices that went to each expert in the last step
    bias  of the scores that choose: up for an expert with less than the mean load, down for one
          with more (arXiv:2408.15664)

They are neither divided by tokens nor clipped: rounded, an expert with the mean load would seem to
have more, or less. A vector of at most BLOCK elements is never cut by ZeRO, so that its mean is
here. Where precision.reduce rounds gradients on their way, or precision.compute weights, they have
buckets of their own, which aren't rounded (plan/division/domains.py).
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from mpitrain.parallel.zero.shards import ParameterShard

if TYPE_CHECKING:
    from mpitrain.optim.protocol import Optimizer


def inequality(loads: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the coefficient of variation of loads, and their entropy as a share of the most."""
    shares = loads.double() / loads.sum()
    entropy = -torch.xlogy(shares, shares).sum() / math.log(max(2, len(shares)))
    return {"load_cv": (shares * len(shares) - 1).square().mean().sqrt(), "load_entropy": entropy}


class Balanced:
    """An optimiser of what is trained, and beside it the rules of what isn't: frozen weights
    (optimizer.frozen) stay, and of them nothing is kept. rate: how far a bias moves in a step.
    """

    def __init__(self, trained: "Optimizer", counted: list[ParameterShard], rate: float):
        self._trained = trained
        self._counted = counted
        self._rate = rate

    def step(self, lr: float) -> None:
        self._trained.step(lr)
        for piece in self._counted:
            if piece.spec.group == "load":
                piece.weight.copy_(piece.grad / piece.grad.sum())
            else:
                step = (piece.grad.mean() - piece.grad).sign_()
                piece.weight.add_(step.to(piece.weight.device), alpha=self._rate)

    def moments(self, piece: ParameterShard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is kept of one of the pieces: of those that are counted or frozen, nothing."""
        if piece.spec.updated:
            yield from self._trained.moments(piece)

    @property
    def num_bytes(self) -> int:
        """Of the gradients that the optimiser inside keeps in host memory."""
        return self._trained.num_bytes

    def set_step(self, num_updates: int) -> None:
        self._trained.set_step(num_updates)
