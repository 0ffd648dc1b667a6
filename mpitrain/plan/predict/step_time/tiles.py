"""What share of its rate a product of some sides reaches: it does only if it is large.

With sides m, n, k that is m / (m + rows) n / (n + rows) k / (k + depth): what tiles at the edges, waves
and the beginning of a product lose (the shape of fig. 5 of arXiv:2401.14489). A core of a CPU has small
tiles; how small, `mpitrain bench machine` finds by products of which two sides are 128: 12 on a Zen 5, 40
to 50 on a Zen 3 (2026-11-28).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

Sides = tuple[int, int, int]  # rows, inputs, outputs


class Tiles(NamedTuple):
    """Sides of which a product loses half of its rate."""

    rows: float
    depth: float


OF_GPU = Tiles(128.0, 64.0)
OF_CPU = Tiles(12.0, 12.0)  # where none are measured
# of a CPU's products that `bench machine` measures
LARGE: tuple[Sides, ...] = ((512, 256, 1024), (512, 1024, 256), (512, 512, 2048))
SMALL: tuple[Sides, ...] = ((128, 1024, 128), (128, 128, 1024))
SMALL_SUFFIX = "_small"  # ends the name of a rate of SMALL
MOST = 512.0  # of a side: what loses more isn't explained by tiles


def share_of(m: float, n: float, k: float, tiles: Tiles) -> float:
    """Return the share of the sustained rate that a product of these sides reaches."""
    return m / (m + tiles.rows) * n / (n + tiles.rows) * k / (k + tiles.depth)


def share_of_all(products: Sequence[Sides], tiles: Tiles) -> float:
    """Return the share of the sustained rate that some products reach together."""
    flops = [math.prod(sides) for sides in products]
    took = sum(each / share_of(m, n, k, tiles) for each, (m, k, n) in zip(flops, products))
    return sum(flops) / took


def fitted(large: float, small: float) -> tuple[float, Tiles]:
    """Return the sustained rate and the tiles of a CPU by which products take what was measured.

    large, small: rates of LARGE and SMALL, as they were if its tiles were OF_CPU.
    """
    reached = small * share_of_all(SMALL, OF_CPU) / (large * share_of_all(LARGE, OF_CPU))
    side = _root(
        lambda side: share_of_all(SMALL, Tiles(side, side)) / share_of_all(LARGE, Tiles(side, side)) - reached
    )
    tiles = Tiles(side, side)
    return large * share_of_all(LARGE, OF_CPU) / share_of_all(LARGE, tiles), tiles


def stated(rate: float, tiles: Tiles) -> float:
    """Return what fitted() was given as the rate of LARGE."""
    return rate * share_of_all(LARGE, tiles) / share_of_all(LARGE, OF_CPU)


def _root(falling: Callable[[float], float]) -> float:
    """Return where a function that falls is zero, between 0 and MOST."""
    low, high = 0.0, MOST
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2
