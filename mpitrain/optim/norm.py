"""The global gradient norm, the same bits in every pipeline layout and however the gradients are sharded.

Squares are summed block by block of each parameter, on the rank that has the block, and the sums of blocks are then added exactly: in
whichever order and grouping they meet. An exact sum is a few numbers that don't overlap (Shewchuk 1997, section 2), so that what
travels doesn't grow with the model.
"""

import math
from collections.abc import Iterable

import torch

from mpitrain.layout.buckets import BLOCK

PARTS = 40  # numbers that any exact sum of fp64 numbers fits in: 2098 bits, 53 each


def squares(grads: Iterable[torch.Tensor]) -> list[float]:
    """Return the sums of squares of the blocks of flat gradients, each begun with a block; the last of one may be short.

    A block's norm is taken in the precision of the gradients, all the rest is fp64.
    """
    norms = []
    for grad in grads:
        whole = len(grad) // BLOCK * BLOCK
        norms += [torch.linalg.vector_norm(grad[:whole].view(-1, BLOCK), dim=1), torch.linalg.vector_norm(grad[whole:]).view(1)]
    return torch.cat(norms).double().square_().tolist() if norms else []


def exact_sum(numbers: list[float]) -> list[float]:
    """Return PARTS numbers with the same exact sum, most of them 0; all nan if one of them, or the sum, isn't finite."""
    if not all(map(math.isfinite, numbers)):
        return [math.nan] * PARTS
    parts: list[float] = []
    try:
        while left := math.fsum([*numbers, *(-part for part in parts)]):
            parts.append(left)
    except OverflowError:  # of fp64 gradients around 1e154
        return [math.nan] * PARTS
    return parts + [0.0] * (PARTS - len(parts))


def norm(parts: list[float]) -> float:
    """Return the square root of an exact sum."""
    return math.sqrt(math.fsum(parts)) if all(map(math.isfinite, parts)) else math.nan
