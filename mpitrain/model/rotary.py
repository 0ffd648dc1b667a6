"""Rotary position embedding."""

import math

import torch

from mpitrain.kernels.functions import EAGER, Functions
from mpitrain.kernels.precision import wide
from mpitrain.model.layers.rope import Dynamic, Llama3, Rope


class Rotary:
    """Rotary position embedding of heads, halves rotated, tables for the positions [T] of this rank.

    length: of the whole sequence, on all ranks.
    ordered: rows may be in an order of their own (Microbatch.order): tables are of all positions.

    Features after the first `rope.width` stay as they are. Only distances show in the scores:
    positions needn't start anew with each document.
    """

    def __init__(
        self,
        rope: Rope,
        positions: torch.Tensor,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        functions: Functions = EAGER,
        ordered: bool = False,
    ):
        self.width = rope.width
        self.functions = functions
        self._here = positions.to(device) if ordered else None
        tabled = torch.arange(length) if ordered else positions
        angles = torch.outer(tabled.to(torch.float64), rates(rope, length))
        self.cos, self.sin = (
            (table * rope.magnitude).to(device, wide(dtype)) for table in (angles.cos(), angles.sin())
        )

    def __call__(
        self, x_BHTC: torch.Tensor, start: int = 0, order: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Turn x, of positions from `start` on of those that are here. order: as a microbatch has it."""
        if not torch.is_grad_enabled():
            return self.turned(x_BHTC, start, 1, order)
        return _Turned.apply(x_BHTC, self, start, order)

    def turned(
        self, x_BHTC: torch.Tensor, start: int, sense: int, order: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x turned by its positions, by -1 turned back; outside of autograd."""
        here = slice(start, start + x_BHTC.shape[-2])
        at = here if self._here is None else self._here[here]  # in the tables, [T]
        if self._here is not None and order is not None:
            at = order[:, None, at]  # [B, 1, T]
        return self.functions.turned(x_BHTC, self.cos[at], self.sin[at], sense)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rotary: Rotary, start: int, order: torch.Tensor | None):
        ctx.rotary = rotary
        ctx.at = start, -1, order
        return rotary.turned(x, start, 1, order)

    @staticmethod
    def backward(ctx, grad_of_output):
        return ctx.rotary.turned(grad_of_output, *ctx.at), None, None, None


def rates(rope: Rope, length: int) -> torch.Tensor:
    """Return by how much each pair of features turns a position, fp64 [C/2]. length: of a sequence."""
    theta = rope.theta if rope.dynamic is None else _grown(rope.theta, rope.width, rope.dynamic, length)
    rates_C = theta ** (-torch.arange(0, rope.width, 2, dtype=torch.float64) / rope.width)
    if rope.llama3 is not None:
        return _scaled_as_llama3(rates_C, rope.llama3)
    if rope.linear != 1:
        return rates_C / rope.linear
    if rope.factor == 1:
        return rates_C
    # turns within the trained length: a pair with more keeps its rate, one with fewer is slowed (YaRN,
    # section 3.2)
    first, last = (
        rope.width * math.log(rope.length / (2 * math.pi * turns)) / (2 * math.log(rope.theta))
        for turns in (rope.fast, rope.slow)
    )
    if rope.rounded:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, rope.width - 1)
    # as transformers has it also where the last comes before the first: theta is small, or the length large
    pairs = torch.arange(len(rates_C), dtype=torch.float64)
    slowed = ((pairs - first) / ((last - first) or 1e-3)).clamp(0, 1)
    return rates_C * (1 - slowed) + rates_C / rope.factor * slowed


def _grown(theta: float, width: int, scaling: Dynamic, length: int) -> float:
    if width == 2:
        return theta  # one pair, which turns by 1 with any
    beyond = max(length, scaling.length) / scaling.length - 1
    return theta * (1 + scaling.factor * beyond) ** (width / (width - 2))


def _scaled_as_llama3(rates_C: torch.Tensor, scaling: Llama3) -> torch.Tensor:
    turns = rates_C * scaling.length / (2 * math.pi)
    kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return rates_C * kept + rates_C / scaling.factor * (1 - kept)
