"""Dropout of the residual stream, [B, T, D]: of embeddings, and of what sublayers add to it."""

import torch

from mpitrain.kernels.dropout import DropoutDraw, drop
from mpitrain.model.build_context import BuildContext
from mpitrain.parallel.microbatch import Context
from mpitrain.parallel.walk import Later, Walk


class ResidualDropout:
    """Dropout of the positions of this rank of cp, and of tp if that divides them.

    It is written by hand: the backward makes the mask again, and nothing is kept.

    block, number: the block, and which of its dropouts it is (plan/declared/dropout_sites.py).
    """

    def __init__(self, rate: float, block: int, number: int, site: BuildContext):
        self.rate = rate
        self.block = block
        self.number = number
        here = site.plan.positions(site.cp.rank if site.cp else 0)
        self.positions = torch.from_numpy(here).to(site.device)
        self.part = site.tp.rank if site.tp and site.plan.config.parallel.sequence else 0

    def forward(self, x: torch.Tensor, context: Context) -> Walk:
        """Drop."""
        yield None
        draw = context.dropout
        if draw is None:
            return x, None
        begin = context.start + self.part * x.shape[1]
        at = draw, begin, context.microbatch.order
        return self._dropped(x, *at), at if torch.is_grad_enabled() else None

    def backward(
        self,
        saved: tuple[DropoutDraw, int, torch.Tensor | None] | None,
        grad_of_output: torch.Tensor,
        later: Later,
    ) -> Walk:
        yield None
        return grad_of_output if saved is None else self._dropped(grad_of_output, *saved)

    def _dropped(
        self, x: torch.Tensor, draw: DropoutDraw, begin: int, order: torch.Tensor | None
    ) -> torch.Tensor:
        here_T = self.positions[begin : begin + x.shape[1]]
        positions = here_T if order is None else order[:, here_T]
        return drop(x, self.rate, draw, self.block, self.number, positions)


def dropout_of(rate: float, block: int, number: int, site: BuildContext) -> list[ResidualDropout]:
    """Return the item of a dropout; none of a rate of 0."""
    return [ResidualDropout(rate, block, number, site)] if rate else []
