"""Rotary position embedding."""

import torch

from mpitrain.parallel.precision import wide


class Rotary:
    """Rotary position embedding (arXiv:2104.09864) of heads of `width`, halves rotated, tables for the positions [T] of this rank.

    Only distances show in the scores: positions needn't start anew with each document.
    """

    def __init__(self, width: int, positions: torch.Tensor, dtype: torch.dtype, device: torch.device, base: float = 10_000.0):
        self.width = width
        rates = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.outer(positions.to(torch.float64), rates)
        self.cos, self.sin = (table.to(device, wide(dtype)) for table in (angles.cos(), angles.sin()))

    def __call__(self, x_BHTC: torch.Tensor, start: int = 0) -> torch.Tensor:
        a, b = x_BHTC.chunk(2, -1)
        here = slice(start, start + a.shape[-2])
        cos, sin = self.cos[here], self.sin[here]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x_BHTC.dtype)
