"""Rotary position embedding."""

import math

import torch

from mpitrain.model.layers.rope import Rope
from mpitrain.parallel.precision import wide

FAST, SLOW = 32, 1  # turns within the trained length: a pair with more keeps its rate, one with fewer is slowed (YaRN, section 3.2)


class Rotary:
    """Rotary position embedding of heads, halves rotated, tables for the positions [T] of this rank.

    Only distances show in the scores: positions needn't start anew with each document.
    """

    def __init__(self, rope: Rope, positions: torch.Tensor, dtype: torch.dtype, device: torch.device):
        self.width = rope.width
        angles = torch.outer(positions.to(torch.float64), rates(rope))
        self.cos, self.sin = ((table * rope.magnitude).to(device, wide(dtype)) for table in (angles.cos(), angles.sin()))

    def __call__(self, x_BHTC: torch.Tensor, start: int = 0) -> torch.Tensor:
        here = slice(start, start + x_BHTC.shape[-2])
        return _Turned.apply(x_BHTC, self.cos[here], self.sin[here])


class _Turned(torch.autograd.Function):
    """x turned, in memory as x; the gradient is turned back."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.tables = cos, sin
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad_of_output):
        return _turned(grad_of_output, *ctx.tables, -1), None, None


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sense: int) -> torch.Tensor:
    exact = x.to(cos.dtype)
    y = torch.empty_like(exact)
    (a, b), (c, d) = exact.chunk(2, -1), y.chunk(2, -1)
    torch.mul(a, cos, out=c).addcmul_(b, sin, value=-sense)
    torch.mul(b, cos, out=d).addcmul_(a, sin, value=sense)
    return y.to(x.dtype)


def rates(rope: Rope) -> torch.Tensor:
    """Return by how much each pair of features turns from one position to the next, fp64 [C/2]."""
    found = rope.theta ** (-torch.arange(0, rope.width, 2, dtype=torch.float64) / rope.width)
    if rope.factor == 1:
        return found
    first, last = (rope.width * math.log(rope.length / (2 * math.pi * turns)) / (2 * math.log(rope.theta)) for turns in (FAST, SLOW))
    if rope.rounded:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.width - 1)
    slowed = ((torch.arange(len(found), dtype=torch.float64) - first) / max(last - first, 1e-3)).clamp(0, 1)
    return found * (1 - slowed) + found / rope.factor * slowed
