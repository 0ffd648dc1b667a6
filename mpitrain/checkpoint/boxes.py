"""Boxes of an array's index space: what a writer holds, what a reader wants, what a digest covers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

CHUNK_BYTES = 1 << 20
SWEEP = 64  # boxes that are compared with all others at once


@dataclass(frozen=True)
class Box:
    """The indices from `start` up to `stop`, one pair per dim. A 0-d array is the box without dims."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Its index in the whole array."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop))

    def overlap(self, other: "Box") -> "Box":
        """Return what both hold: a box of size 0 if they don't meet."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start))
        return Box(start, tuple(max(a, min(b, c)) for a, b, c in zip(start, self.stop, other.stop)))

    def seen_from(self, other: "Box") -> tuple[slice, ...]:
        """Return the index of this box in an array that holds `other`."""
        return (
            *(slice(a - origin, b - origin) for a, b, origin in zip(self.start, self.stop, other.start)),
            ...,
        )

    def __str__(self) -> str:
        return f"[{', '.join(f'{a}:{b}' for a, b in zip(self.start, self.stop))}]"


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(map(int, shape)))


def select(shape: tuple[int, ...], where: slice | tuple[slice, ...] | None) -> Box:
    """Return the box of a slice of the first dim, or of one slice for each of the leading dims."""
    slices = () if where is None else where if isinstance(where, tuple) else (where,)
    if len(slices) > len(shape) or any(piece.step not in (None, 1) for piece in slices):
        raise ValueError(f"{where} selects no box of an array of shape {list(shape)}")
    ranges = [range(*piece.indices(n)) for piece, n in zip(slices, shape)] + [
        range(n) for n in shape[len(slices) :]
    ]
    return Box(tuple(r.start for r in ranges), tuple(max(r.start, r.stop) for r in ranges))


def run_boxes(shape: Sequence[int], begin: int, end: int) -> list[tuple[Box, slice]]:
    """Return the boxes that elements [begin, end) of an array are, in row-major order, each with
    the part of the run that it takes.

    There are at most three of a matrix, at most 2n - 1 of n dims. Elements [2, 15) of a 4 x 4
    matrix:

        . . a a     the end of a row            [0:1, 2:4]   run[0:2]
        b b b b     whole rows                  [1:3, 0:4]   run[2:10]
        b b b b
        c c c .     the beginning of a row      [3:4, 0:3]   run[10:13]
    """
    if not 0 <= begin <= end <= math.prod(shape):
        raise ValueError(f"an array of shape {list(shape)} has no elements {begin} to {end}")
    if not shape:
        return [(whole(()), slice(0, 1))] * (end - begin)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    boxes = []
    at = begin
    while at < end:
        start = tuple(at // stride % length for stride, length in zip(strides, shape))
        dim = next(dim for dim, stride in enumerate(strides) if at % stride == 0 and end - at >= stride)
        count = min((end - at) // strides[dim], shape[dim] - start[dim])
        stop = (*(a + 1 for a in start[:dim]), start[dim] + count, *shape[dim + 1 :])
        boxes.append((Box(start, stop), slice(at - begin, at - begin + count * strides[dim])))
        at += count * strides[dim]
    return boxes


class Bounds:
    """The boxes of one array as two tables, for questions to thousands of them at once."""

    def __init__(self, boxes: Sequence[Box], num_dims: int):
        # One more dim, [0, 1), lets boxes of a 0-d array have a first one.
        self.starts = np.array([(*box.start, 0) for box in boxes], np.int64).reshape(-1, num_dims + 1)
        self.stops = np.array([(*box.stop, 1) for box in boxes], np.int64).reshape(-1, num_dims + 1)

    def meeting(self, box: Box) -> list[int]:
        """Return the positions of the boxes that share an element with `box`."""
        return np.flatnonzero(_meet(self.starts, self.stops, (*box.start, 0), (*box.stop, 1))).tolist()

    @cached_property
    def _sweep(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the order of the boxes along the first dim, and for each in it, from where on all
        begin below it.
        """
        order = np.argsort(self.starts[:, 0], kind="stable")
        return order, np.searchsorted(self.starts[order, 0], self.stops[order, 0])

    @property
    def most_comparisons(self) -> int:
        """Return how many pairs overlapping() compares."""
        order, ends = self._sweep
        return int(sum(SWEEP * (ends[i : i + SWEEP].max() - i) for i in range(0, len(order), SWEEP)))

    def overlapping(self) -> Iterator[tuple[int, int]]:
        """Yield the positions of every two boxes that share an element.

        It is a sweep along the first dim: near linear for parts of rows.
        """
        order, ends = self._sweep
        starts = self.starts[order]
        stops = self.stops[order]
        for i in range(0, len(order), SWEEP):
            few = slice(i, i + SWEEP)
            others = slice(i, ends[i : i + SWEEP].max())
            meet = _meet(starts[few, None], stops[few, None], starts[None, others], stops[None, others])
            for one, other in np.argwhere(np.triu(meet, k=1)) + i:
                yield tuple(sorted((int(order[one]), int(order[other]))))


def _meet(start: np.ndarray, stop: np.ndarray, other_start: ArrayLike, other_stop: ArrayLike) -> np.ndarray:
    return (np.maximum(start, other_start) < np.minimum(stop, other_stop)).all(-1)


@dataclass(frozen=True)
class Chunks:
    """How an array is cut for digests.

    Into as many whole rows (indices of the first dim) as fit in CHUNK_BYTES, at least one.

    The cut depends on the shape and the item size of the logical array alone, never on who holds
    which part of it: that makes digests comparable between layouts. A part of leading rows contains
    whole chunks but at its two ends.
    """

    shape: tuple[int, ...]
    itemsize: int

    @property
    def rows(self) -> int:
        return max(1, CHUNK_BYTES // max(1, self.itemsize * math.prod(self.shape[1:])))

    @property
    def count(self) -> int:
        if not math.prod(self.shape):
            return 0
        return -(-self.shape[0] // self.rows) if self.shape else 1

    def box(self, chunk: int) -> Box:
        if not self.shape:
            return whole(())
        first = chunk * self.rows
        return Box(
            (first, *[0] * len(self.shape[1:])), (min(first + self.rows, self.shape[0]), *self.shape[1:])
        )

    def inside(self, box: Box) -> range:
        """Return the chunks of which `box` holds every element."""
        if not box.size or box.shape[1:] != self.shape[1:]:
            return range(0)
        if not self.shape:
            return range(1)
        last = self.count if box.stop[0] == self.shape[0] else box.stop[0] // self.rows
        return range(-(-box.start[0] // self.rows), last)
