"""The order of an epoch: a permutation of its windows, a pure function of (seed, epoch).

feistel  The window of a place is computed where it is asked for, in constant memory. A keyed Feistel
         network permutes a square of cells that is a little larger than the number of windows; a
         cell that is no window goes through the network again until it is one (cycle walking).
         Black and Rogaway, Ciphers with Arbitrary Finite Domains (CT-RSA 2002), methods 2 and 3.
sorted   Random keys are sorted: 16 bytes for each window of the epoch, on every rank. Checkpoints from
         before there was another order resume in this one.

    place 7 of 11 windows, 4 x 4 cells: (1, 3) -> ... 8 rounds ... -> (3, 1) = 13, no window
                                        (3, 1) -> ... 8 rounds ... -> (0, 2) = 2: window 2
"""

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np

ROUNDS = 8  # what format-preserving ciphers have (NIST SP 800-38G, FF3)
# of splitmix64: odd numbers that change half of all bits
FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
HALF_BITS = np.uint64(32)
MOST_WINDOWS = 2**62


class Order(Protocol):
    """The order of the windows in every epoch."""

    def windows(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Return the windows at some places of an epoch, both counted from 0: int64, of their shape."""
        ...


class TextOrder:
    """The windows as they lie in the text, in every epoch."""

    def windows(self, epoch: int, places: np.ndarray) -> np.ndarray:
        return places


class FeistelOrder:
    """A permutation that is computed place by place."""

    def __init__(self, num_windows: int, seed: int):
        if num_windows > MOST_WINDOWS:
            raise ValueError(f"{num_windows} windows, at most {MOST_WINDOWS} can be permuted")
        self._num_windows = num_windows
        self._seed = seed
        self._side = even_side(num_windows)

    def windows(self, epoch: int, places: np.ndarray) -> np.ndarray:
        keys = raw_bits(self._seed, epoch, ROUNDS)
        cells = permuted_cells(places.astype(np.uint64), self._side, keys)
        outside = np.flatnonzero(cells >= self._num_windows)
        while outside.size:
            cells[outside] = permuted_cells(cells[outside], self._side, keys)
            outside = outside[cells[outside] >= self._num_windows]
        return cells.astype(np.int64)


class SortedOrder:
    """The windows sorted by random keys. Keeps the permutation of the last epoch asked for."""

    def __init__(self, num_windows: int, seed: int):
        self._num_windows = num_windows
        self._seed = seed
        self._cached = (-1, np.empty(0, np.int64))

    def windows(self, epoch: int, places: np.ndarray) -> np.ndarray:
        if self._cached[0] != epoch:
            keys = raw_bits(self._seed, epoch, self._num_windows)
            self._cached = (epoch, np.argsort(keys, kind="stable"))
        return self._cached[1][places]


FEISTEL = "feistel"
SORTED = "sorted"
# by their names in data.order and in checkpoints
ORDERS: dict[str, Callable[[int, int], Order]] = {FEISTEL: FeistelOrder, SORTED: SortedOrder}


def even_side(num_windows: int) -> int:
    """Return the least even side of a square that has a cell for each window.

    With an odd side all rounds are even permutations, which come more often of a few windows then.
    """
    least = math.isqrt(num_windows - 1) + 1
    return least + least % 2


def permuted_cells(cells: np.ndarray, side: int, keys: np.ndarray) -> np.ndarray:
    """Send cells of a square through a Feistel network: a permutation of range(side * side).

    cells: uint64, [n].  side: at most 2**31.  keys: uint64, one a round.

    A round swaps row and column, and shifts one by a hash of the other, modulo the side.
    """
    length = np.uint64(side)
    row, column = np.divmod(cells, length)
    for key in keys:
        shifted = row
        shifted += hashed_below(column, key, length)
        shifted -= length * (shifted >= length)
        row, column = column, shifted
    row *= length
    row += column
    return row


def hashed_below(numbers: np.ndarray, key: np.uint64, limit: np.uint64) -> np.ndarray:
    """Hash numbers with a key to numbers below a limit of at most 2**32. uint64, of their shape."""
    mixed = numbers ^ key
    mixed *= FIRST_FACTOR
    mixed ^= mixed >> HALF_BITS
    mixed *= SECOND_FACTOR
    mixed >>= HALF_BITS
    mixed *= limit
    mixed >>= HALF_BITS
    return mixed


def raw_bits(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return random numbers of an epoch, uint64, [count]: raw bits, the same in every NumPy version."""
    return np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(count)
