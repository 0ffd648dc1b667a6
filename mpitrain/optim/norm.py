"""The global gradient norm, the same bits in every pipeline layout."""

import math

import torch

from mpitrain.model.parameters import Parameter


def squares(parameters: list[Parameter]) -> list[float]:
    """Return the sum of squares of each gradient, in fp64.

    One number per parameter, whatever the layout; math.fsum then adds them exactly, in whichever order they arrive.
    """
    return [torch.linalg.vector_norm(p.grad, dtype=torch.float64).item() ** 2 for p in parameters]


def norm(every_square: list[float]) -> float:
    """Return the square root of the exact sum."""
    return math.sqrt(math.fsum(every_square)) if all(map(math.isfinite, every_square)) else math.nan
