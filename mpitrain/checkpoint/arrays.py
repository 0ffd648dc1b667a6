"""A logical array: what the model knows by one name, whoever holds it; and its digests."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import xxhash

from mpitrain.checkpoint.boxes import Box, Chunks, overlapping
from mpitrain.checkpoint.dtypes import NAMES
from mpitrain.errors import CheckpointError

DIGEST_BYTES = 16


@dataclass(frozen=True)
class Piece:
    """A part of an array, and the shard that has it."""

    file: str
    box: Box

    def __str__(self) -> str:
        return f"{self.file} {self.box}"


@dataclass
class LogicalArray:
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)
    digests: dict[int, bytes] = field(default_factory=dict)  # of each chunk, by its number

    @property
    def chunks(self) -> Chunks:
        return Chunks(self.shape, self.dtype.itemsize)

    def holders(self, box: Box) -> list[str]:
        """Return the shards that hold a part of `box`."""
        return [piece.file for piece in self.pieces if piece.box.overlap(box).size]


def digest(array: np.ndarray) -> bytes:
    """Return the xxh3-128 of the elements in C order."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def root_digest(arrays: Iterable[LogicalArray]) -> str:
    """Digest names, dtypes, shapes and chunk digests, sorted by name: equal for equal arrays, however they were sharded."""
    root = xxhash.xxh3_128()
    for array in sorted(arrays, key=lambda array: array.name):
        root.update(f"{array.name}\0{NAMES[array.dtype]}\0{list(array.shape)}\0".encode())
        root.update(b"".join(array.digests[chunk] for chunk in range(array.chunks.count)))
    return root.hexdigest()


def check_tiles(array: LogicalArray) -> None:
    """Raise CheckpointError unless the pieces hold every element of the array exactly once."""
    for i, j in overlapping([piece.box for piece in array.pieces]):
        one, other = array.pieces[i], array.pieces[j]
        both = one.box.overlap(other.box)
        raise CheckpointError(f"{array.name}: {one.file} and {other.file} both hold {both}; let one writer write it")
    found, needed = sum(piece.box.size for piece in array.pieces), int(np.prod(array.shape, dtype=np.int64))
    if found != needed:
        pieces = ", ".join(map(str, array.pieces[:4])) + (", ..." if len(array.pieces) > 4 else "")
        raise CheckpointError(f"{array.name} {list(array.shape)}: the shards hold {found} of {needed} elements ({pieces}); write the rest")
