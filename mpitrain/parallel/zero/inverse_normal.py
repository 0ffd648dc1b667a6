"""The inverse of the normal distribution, at the speed of vector operations where fp32 is asked
for, with the bits of the slow one.

`torch.special.ndtri` in fp64 computes one number after another, 10 to 36 ns each. Of fp32 weights
only its first 24 bits are wanted. By q, the distance from u to the nearer end of (0, 1), an
interval is found in a table, and in it

    inverse(u) = (u - 0.5) * (a + q * (b + q * c))        to a relative ERROR, in fp64

If both ends of what that leaves open round to the same fp32 number, so does the exact value. Of the
rest, one in 200, and of numbers outside the table the exact function is computed: its bits, always.

    q           2^-14 ....... 2^-3        2^-2                2^-1
    interval  0 | 1 ...... STEPS | ...... | ...... STEPS ...... | last

Intervals are STEPS of each octave, as floating-point numbers lie; the first and the last have nan:
exact.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

ERROR = 2.0**-33  # five times the worst of 2^-35.5, that of the interval from q = 0.25
OCTAVES = 13
DIGITS = 9  # of the mantissa that number an interval
STEPS = 2**DIGITS
SHIFT = 52 - DIGITS
# number of the first interval
BEGIN = int(np.float64(2.0 ** (-1 - OCTAVES)).view(np.int64)) >> SHIFT
CHUNK = 2**16  # numbers at once: what is computed with them stays in a core's cache


class Coefficients(NamedTuple):
    """Coefficients of each interval, [OCTAVES * STEPS + 1] in fp64."""

    constant: np.ndarray
    linear: np.ndarray
    square: np.ndarray


def table() -> Coefficients:
    """Return the parabola of each interval that meets the exact function in its three Chebyshev points."""
    edges = (np.arange(BEGIN, BEGIN + OCTAVES * STEPS + 1) << SHIFT).view(np.float64)
    middle = (edges[1:] + edges[:-1]) / 2
    reach = (edges[1:] - edges[:-1]) / 2 * math.cos(math.pi / 6)
    left, at, right = (exact(q) / (q - 0.5) for q in (middle - reach, middle, middle + reach))
    slope = (right - left) / (2 * reach)
    bend = (left - 2 * at + right) / (2 * reach * reach)
    coefficients = Coefficients(at + middle * (bend * middle - slope), slope - 2 * bend * middle, bend)
    coefficients.constant[0] = math.nan  # smaller q, too, are looked up there
    return Coefficients(*(np.append(part, math.nan) for part in coefficients))  # and there u = 0.5


def exact(u: np.ndarray, std: float = 1.0) -> np.ndarray:
    """Return normally distributed numbers from uniform ones, all in fp64."""
    return torch.special.ndtri(torch.from_numpy(u)).mul_(std).numpy()


class Rounded:
    """Normally distributed numbers in fp32, from uniform ones in fp64: those of `exact`, rounded.

    table: of `table()`, which several of these may share. What is computed with is kept: new memory
    costs more than the numbers. chunk: numbers at once, at most.
    """

    def __init__(self, table: Coefficients, chunk: int = CHUNK):
        self._unscaled = table
        self._table = Coefficients(*map(np.empty_like, table))
        self._std = 0.0
        self._to_other_end = (1 + ERROR) / (1 - ERROR)
        self._numbers = np.empty((3, chunk))
        self._index = np.empty(chunk, np.int64)
        self._other = np.empty(chunk, np.float32)
        self._open = np.empty(chunk, bool)

    def __call__(self, u: np.ndarray, out: np.ndarray, std: float) -> None:
        """Fill `out`, of at most `chunk` elements."""
        if std != self._std:
            self._scale(std)
        other = self._other[: len(u)]
        open_ = self._open[: len(u)]
        ends = self._approximate(u)
        np.copyto(out, ends, casting="same_kind")
        ends *= self._to_other_end
        np.copyto(other, ends, casting="same_kind")
        left = np.flatnonzero(np.not_equal(out, other, out=open_))
        out[left] = exact(u[left], std)

    def _scale(self, std: float) -> None:
        for part, scaled in zip(self._unscaled, self._table):
            np.multiply(part, std * (1 - ERROR), out=scaled)
        self._std = std

    def _approximate(self, u: np.ndarray) -> np.ndarray:
        """Return, in memory of this object, the end nearer to 0 of where each number lies.

        Nan where the table has none.
        """
        y, q, term = self._numbers[:, : len(u)]
        index = self._index[: len(u)]
        np.abs(np.subtract(u, 0.5, out=q), out=q)
        np.subtract(0.5, q, out=q)
        np.right_shift(q.view(np.int64), SHIFT, out=index)
        index -= BEGIN
        np.take(self._table.square, index, out=y, mode="clip")
        y *= q
        y += np.take(self._table.linear, index, out=term, mode="clip")
        y *= q
        y += np.take(self._table.constant, index, out=term, mode="clip")
        y *= np.subtract(u, 0.5, out=term)
        return y
