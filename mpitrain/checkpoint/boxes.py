"""Boxes of an array's index space: what a writer holds, what a reader wants, what a digest covers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

CHUNK_BYTES = 1 << 20


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

    def overlap(self, other: "Box") -> "Box":
        """Return what both hold: a box of size 0 if they don't meet."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start))
        return Box(start, tuple(max(a, min(b, c)) for a, b, c in zip(start, self.stop, other.stop)))

    def seen_from(self, other: "Box") -> tuple[slice, ...]:
        """Return the index of this box in an array that holds `other`."""
        return (*(slice(a - origin, b - origin) for a, b, origin in zip(self.start, self.stop, other.start)), ...)

    def __str__(self) -> str:
        return f"[{', '.join(f'{a}:{b}' for a, b in zip(self.start, self.stop))}]"


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(map(int, shape)))


def select(shape: tuple[int, ...], where: slice | tuple[slice, ...] | None) -> Box:
    """Return the box of a slice of the first dim, or of one slice for each of the leading dims."""
    slices = () if where is None else where if isinstance(where, tuple) else (where,)
    if len(slices) > len(shape) or any(piece.step not in (None, 1) for piece in slices):
        raise ValueError(f"{where} selects no box of an array of shape {list(shape)}")
    ranges = [range(*piece.indices(n)) for piece, n in zip(slices, shape)] + [range(n) for n in shape[len(slices) :]]
    return Box(tuple(r.start for r in ranges), tuple(max(r.start, r.stop) for r in ranges))


def overlapping(boxes: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Yield the positions of every two boxes that share an element."""
    real = [i for i, box in enumerate(boxes) if box.size]
    starts, stops = ([getattr(boxes[i], end) for i in real] for end in ("start", "stop"))
    apart = np.zeros((len(real), len(real)), bool)
    for start, stop in zip(np.array(starts).T, np.array(stops).T):
        apart |= (start[:, None] >= stop) | (stop[:, None] <= start)
    yield from ((real[i], real[j]) for i, j in np.argwhere(np.triu(~apart, k=1)))


@dataclass(frozen=True)
class Chunks:
    """How an array is cut for digests: into as many whole rows (indices of the first dim) as fit in CHUNK_BYTES, at least one.

    The cut depends on the shape and the item size of the logical array alone, never on who holds which part of it:
    that makes digests comparable between layouts. A part of leading rows contains whole chunks but at its two ends.
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
        return Box((first, *[0] * len(self.shape[1:])), (min(first + self.rows, self.shape[0]), *self.shape[1:]))

    def inside(self, box: Box) -> range:
        """Return the chunks of which `box` holds every element."""
        if not box.size or box.shape[1:] != self.shape[1:]:
            return range(0)
        if not self.shape:
            return range(1)
        last = self.count if box.stop[0] == self.shape[0] else box.stop[0] // self.rows
        return range(-(-box.start[0] // self.rows), last)
