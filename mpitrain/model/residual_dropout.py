"""Dropout of the residual stream, [B, T, D]: of embeddings, and of what sublayers add to it."""

import torch

from mpitrain.kernels.dropout import DropoutDraw, drop
from mpitrain.model.build_context import BuildContext, StreamPositions
from mpitrain.parallel.microbatch import Context
from mpitrain.parallel.walk import Later, Walk


class ResidualDropout:
    """Dropout of the positions of this rank; the backward makes the mask again, and nothing is kept.

    block, number: the block, and which of its dropouts it is (plan/declared/dropout_sites.py).
    """

    def __init__(self, rate: float, block: int, number: int, site: BuildContext):
        self.rate = rate
        self.place = block, number
        self.stream = StreamPositions(site)

    def forward(self, x: torch.Tensor, context: Context) -> Walk:
        """Drop."""
        yield None
        if context.dropout is None:
            return x, None
        saved = context.dropout, self.stream.begin(x, context), context.microbatch.order
        return self._dropped(x, *saved), saved if torch.is_grad_enabled() else None

    def backward(self, saved: tuple | None, grad_of_output: torch.Tensor, later: Later) -> Walk:
        yield None
        return grad_of_output if saved is None else self._dropped(grad_of_output, *saved)

    def _dropped(
        self, x: torch.Tensor, draw: DropoutDraw, begin: int, order: torch.Tensor | None
    ) -> torch.Tensor:
        here_T = self.stream.of(x, begin)
        return drop(x, self.rate, draw, *self.place, here_T if order is None else order[:, here_T])


def dropout_of(rate: float, block: int, number: int, site: BuildContext) -> list[ResidualDropout]:
    """Return the item of a dropout; none of a rate of 0."""
    return [ResidualDropout(rate, block, number, site)] if rate else []
