"""Holding a step against its digests: is every byte that a reader could get the one that was written?"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from mpitrain.checkpoint.arrays import LogicalArray, by_shard, root_digest
from mpitrain.checkpoint.boxes import Box, run_boxes
from mpitrain.checkpoint.files import reason
from mpitrain.checkpoint.index import INDEX
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.errors import CheckpointError
from mpitrain.inputs import kind_of


@dataclass(frozen=True)
class VerifiedShare:
    """What of a step is read: of a share of its chunks, taken by chance, what falls to one of `size` ranks.

    seed: by which they are taken; the same on all ranks, or else some are read by nobody.
    """

    share: float = 1.0
    rank: int = 0
    size: int = 1
    seed: str = ""


ALL = VerifiedShare()
READ_BYTES = 1 << 24  # at once; a chunk has more if a row has


Chunk = tuple[LogicalArray, int]
T = TypeVar("T")


def verify(path: Path) -> None:
    """Read all of one step.

    Raises CheckpointError that names the first file, and array and chunk, that is not as it was
    committed.
    """
    with Checkpoint(path) as checkpoint:
        verify_data(checkpoint)


def verify_data(
    checkpoint: Checkpoint, each: Callable[[str], object] = lambda chunk: None, part: VerifiedShare = ALL
) -> None:
    """Do the same with a part of a step that is open.

    each: called with the name of each chunk that is read.
    """
    for array, chunk in chunks_of(checkpoint, part):
        each(f"verifying chunk {chunk} of {array.name} in {checkpoint.path.name}")
        check_chunk(checkpoint, array, chunk)


def chunks_of(checkpoint: Checkpoint, part: VerifiedShare = ALL) -> list[Chunk]:
    """Return the chunks of a part, in an order that opens each shard about once.

    Raises CheckpointError as check_sizes and check_index.
    """
    check_sizes(checkpoint)
    dice = random.Random(part.seed)
    chunks = by_shard(
        chunk for chunk in check_index(checkpoint) if part.share == 1 or dice.random() < part.share
    )
    return shares(chunks, map(bytes_of, chunks), part.size)[part.rank]


def shares(items: Sequence[T], sizes: Iterable[int], num_parts: int) -> list[list[T]]:
    """Divide items into runs of about equal size."""
    sizes = list(sizes)
    total = sum(sizes) or 1
    done = 0
    parts = [list[T]() for _ in range(num_parts)]
    for item, size in zip(items, sizes, strict=True):
        parts[min(num_parts - 1, done * num_parts // total)].append(item)
        done += size
    return parts


def bytes_of(chunk: Chunk) -> int:
    array, number = chunk
    return array.chunks.box(number).size * array.dtype.itemsize


def check_index(checkpoint: Checkpoint) -> list[tuple[LogicalArray, int]]:
    """Return all chunks, each as its array and number.

    Raises CheckpointError unless the root digest is theirs. Reads no data.
    """
    arrays = list(map(checkpoint.array, checkpoint.names()))
    if root_digest(arrays) != checkpoint.digest:
        raise CheckpointError(f"{checkpoint.path.name}: {INDEX} has another digest than its arrays")
    return [(array, chunk) for array in arrays for chunk in range(array.chunks.count)]


def check_sizes(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError unless every shard is there in full. Reads no data."""
    for file, needed in checkpoint.shards.items():
        path = checkpoint.path / file
        try:
            if (kind := kind_of(path)) != "a file":
                raise CheckpointError(f"{checkpoint.path.name}: {file} is {kind or 'missing'}")
            num_bytes = path.stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"{checkpoint.path.name}: {file} cannot be read: {reason(error)}"
            ) from error
        if num_bytes != needed:
            raise CheckpointError(f"{checkpoint.path.name}: {file} has {num_bytes} bytes, {needed} needed")


def check_chunk(checkpoint: Checkpoint, array: LogicalArray, chunk: int) -> None:
    """Read a chunk.

    Raises CheckpointError, with the shards that hold it, unless it is as it was committed.
    """
    box = array.chunks.box(chunk)
    if _digest(checkpoint, array, box) != array.digests[chunk]:
        files = " or ".join(array.holders(box)[:4])
        raise CheckpointError(f"{checkpoint.path.name}: {files}: chunk {chunk} of {array.name} is damaged")


def _digest(checkpoint: Checkpoint, array: LogicalArray, chunk: Box) -> bytes:
    """Return the digest of a chunk, which is read in its order and in parts: a row can be larger
    than memory.
    """
    digest = xxhash.xxh3_128()
    step = READ_BYTES // array.dtype.itemsize
    for begin in range(0, chunk.size, step):
        for part, _ in run_boxes(chunk.shape, begin, min(begin + step, chunk.size)):
            rows = tuple(
                slice(origin + a, origin + b) for origin, a, b in zip(chunk.start, part.start, part.stop)
            )
            digest.update(checkpoint.read(array.name, rows).reshape(-1).view("u1"))
    return digest.digest()
