"""A logical array: what the model knows by one name, whoever holds it; and its digests."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import xxhash

from mpitrain.checkpoint.boxes import Bounds, Box, Chunks, whole
from mpitrain.checkpoint.dtypes import NAMES
from mpitrain.errors import CheckpointError

DIGEST_BYTES = 16
# of pieces: seconds. 10,000 writers of columns need less, writers of rows hardly any
MOST_COMPARISONS = 10**9


@dataclass(frozen=True)
class StoredPart:
    """A part of an array, and the dataset of a shard that has it."""

    file: str
    dataset: str
    box: Box

    def __str__(self) -> str:
        return f"{self.file} {self.box}"


@dataclass
class LogicalArray:
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    # all of them, before the first question where something is
    pieces: list[StoredPart] = field(default_factory=list)
    digests: dict[int, bytes] = field(default_factory=dict)  # of each chunk, by its number

    @property
    def chunks(self) -> Chunks:
        return Chunks(self.shape, self.dtype.itemsize)

    @cached_property
    def _bounds(self) -> Bounds:
        return Bounds([piece.box for piece in self.pieces], len(self.shape))

    def pieces_of(self, box: Box) -> list[StoredPart]:
        """Return the pieces that hold a part of `box`."""
        if box.size and len(self.pieces) == 1 and self.pieces[0].box == whole(self.shape):
            return self.pieces
        return [self.pieces[i] for i in self._bounds.meeting(box)]

    def overlaps(self) -> Iterator[tuple[StoredPart, StoredPart]]:
        """Yield every two pieces that hold an element both."""
        yield from ((self.pieces[i], self.pieces[j]) for i, j in self._bounds.overlapping())

    @property
    def most_comparisons(self) -> int:
        """Return how many pairs of pieces overlaps() compares."""
        return self._bounds.most_comparisons

    def holders(self, box: Box) -> list[str]:
        """Return the shards that hold a part of `box`, sorted."""
        return sorted({piece.file for piece in self.pieces_of(box)})


def digest(array: np.ndarray) -> bytes:
    """Return the xxh3-128 of the elements in C order."""
    hasher = xxhash.xxh3_128()
    # xxh3_128_digest() keeps the interpreter's lock meanwhile, from threads that compute or read
    hasher.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return hasher.digest()


def root_digest(arrays: Iterable[LogicalArray]) -> str:
    """Digest names, dtypes, shapes and chunk digests, sorted by name.

    Equal for equal arrays, however they were sharded.
    """
    root = xxhash.xxh3_128()
    for array in sorted(arrays, key=lambda array: array.name):
        root.update(f"{array.name}\0{NAMES[array.dtype]}\0{list(array.shape)}\0".encode())
        root.update(b"".join(array.digests[chunk] for chunk in range(array.chunks.count)))
    return root.hexdigest()


def by_shard(chunks: Iterable[tuple[LogicalArray, int]]) -> list[tuple[LogicalArray, int]]:
    """Sort chunks by the shards that hold them.

    Who reads them in this order opens each shard about once, however many there are.
    """
    return sorted(chunks, key=lambda at: (at[0].holders(at[0].chunks.box(at[1])), at[0].name, at[1]))


def check_tiles(array: LogicalArray) -> None:
    """Raise CheckpointError unless the pieces hold every element of the array exactly once."""
    if [piece.box for piece in array.pieces] == [whole(array.shape)]:
        return  # most are in one piece
    if array.most_comparisons > MOST_COMPARISONS:
        raise CheckpointError(
            f"{array.name}: {len(array.pieces):,} pieces lie side by side; let a writer hold whole rows"
        )
    for one, other in array.overlaps():
        both = one.box.overlap(other.box)
        raise CheckpointError(
            f"{array.name}: {one.file} and {other.file} both hold {both}; let one writer write it"
        )
    num_elements = sum(piece.box.size for piece in array.pieces)
    needed = math.prod(array.shape)
    if num_elements != needed:
        pieces = ", ".join(map(str, array.pieces[:4])) + (", ..." if len(array.pieces) > 4 else "")
        raise CheckpointError(
            f"{array.name} {list(array.shape)}: the shards hold {num_elements} of {needed} elements "
            f"({pieces}); write the rest"
        )
