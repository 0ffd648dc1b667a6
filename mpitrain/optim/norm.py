"""The global gradient norm, by which mpitrain/actor/update.py clips: the same bits in every
pipeline layout and however the gradients are sharded.

Squares are summed block by block of each parameter, on the rank that has the block, and the sums of
blocks are then added exactly: in whichever order and grouping they meet. An exact sum is a few
numbers that don't overlap (Shewchuk 1997, section 2), so that what travels doesn't grow with the
model.

On their device, in integers: of the 2,200 bits that a sum of fp64 numbers can have, each number
adds to three digits of 32.

    bits from 2^-1126  0 ....... 32 ....... 64 ....... 96 ..  a number: 53 bits, from bit `place` on
    digits, in int64   |   0    |    1    |    2    |  ..     how often 2^31 numbers can be added to
                                                              each
"""

import math
from collections.abc import Iterable

import torch

from mpitrain.plan.division.buckets import BLOCK

PARTS = 40  # numbers that any exact sum of fp64 numbers fits in: 2098 bits, 53 each
LOWEST = 1126  # 2^-1074, the least fp64 number, has its first bit 52 places above its last one
DIGIT = 32  # bits
NUM_DIGITS = (1024 + LOWEST) // DIGIT + 3
MASK = 2**DIGIT - 1
AT_ONCE = 2**16  # numbers; a dozen times as much memory, on a GPU a hundred times


def squares(grads: Iterable[torch.Tensor]) -> list[float]:
    """Return PARTS or fewer numbers with the exact sum of the squares of all blocks of flat
    gradients, each begun with a block; the last may be short. A block's norm is taken in the
    precision of the gradients, all the rest is fp64.
    """
    norms = []
    for grad in grads:
        whole = len(grad) // BLOCK * BLOCK
        norms += [
            torch.linalg.vector_norm(grad[:whole].view(-1, BLOCK), dim=1),
            torch.linalg.vector_norm(grad[whole:]).view(1),
        ]
    return summed(torch.cat(norms).double().square_()) if norms else []


def summed(numbers: torch.Tensor) -> list[float]:
    """Return PARTS or fewer numbers with the exact sum of `numbers`, [n] in fp64 and none negative;
    one nan if it isn't finite.

    n: at most 2^31. Computed where `numbers` are, in any order; from there come as many integers as
    a sum has digits.
    """
    sums = torch.zeros(NUM_DIGITS + 1, dtype=torch.int64, device=numbers.device)
    for part in numbers.split(AT_ONCE):
        finite = part.isfinite()
        _add(part.where(finite, 0.0), sums)
        sums[-1] += finite.logical_not_().sum()
    *digits, num_infinite = sums.tolist()
    if num_infinite:
        return [math.nan]
    return _floats(sum(value << DIGIT * number for number, value in enumerate(digits)) >> LOWEST - 1074)


def _add(numbers: torch.Tensor, sums: torch.Tensor) -> None:
    fraction, exponent = torch.frexp(numbers)
    bits = fraction.mul_(2.0**53).long()
    place = exponent.long() + (LOWEST - 53)
    digit = place // DIGIT
    shift = place % DIGIT
    parts = (bits << shift) & MASK, (bits >> (DIGIT - shift)) & MASK, bits >> DIGIT >> (DIGIT - shift)
    (_add_one_by_one if numbers.is_cpu else _add_by_product)(digit, parts, sums)


def _add_one_by_one(digit: torch.Tensor, parts: tuple[torch.Tensor, ...], sums: torch.Tensor) -> None:
    """Add the parts of each number to a digit of `sums`, and to those above."""
    for above, part in enumerate(parts):
        sums.index_add_(0, digit + above, part)


def _add_by_product(digit: torch.Tensor, parts: tuple[torch.Tensor, ...], sums: torch.Tensor) -> None:
    """Do the same by a product with zeros and ones: exact in fp64, for AT_ONCE parts have 48 bits.

    A GPU that has to be deterministic would sort what it adds one by one, and add thousands to one
    digit in a row.
    """
    count = NUM_DIGITS - len(parts) + 1
    ones = (digit[:, None] == torch.arange(count, device=digit.device)).double()
    products = (ones.t() @ torch.stack(parts, 1).double()).long()
    for above in range(len(parts)):
        sums[above : above + count] += products[:, above]


def _floats(total: int) -> list[float]:
    """Return `total` * 2^-1074 as numbers, each the nearest to what those before leave, or nan."""
    parts = []
    try:
        while total:
            parts.append(total / 2**1074)
            above, below = parts[-1].as_integer_ratio()
            total -= above * (2**1074 // below)
    except OverflowError:
        return [math.nan]
    return parts


def exact_sum(numbers: list[float]) -> list[float]:
    """Return PARTS numbers with the same exact sum, most of them 0; all nan if it isn't finite."""
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
