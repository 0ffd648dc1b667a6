"""Saving a step, in three calls with a barrier after each of the first two. The caller lets no two saves overlap.

    tmp = begin(folder, step)             one rank: makes step-00000030.tmp
    write_shard(tmp, writer, arrays)      every writer: its own file, no communication
    commit(tmp, meta)                     one rank: checks that the shards make whole arrays, writes the index, renames

A process killed anywhere in between leaves all committed steps as they were.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpitrain.checkpoint.arrays import LogicalArray, check_tiles, digest
from mpitrain.checkpoint.boxes import Box, whole
from mpitrain.checkpoint.dtypes import check_dtype
from mpitrain.checkpoint.files import creating, remove, saving, sync_folder
from mpitrain.checkpoint.folders import TMP, leftovers, name_of, publish, step_of
from mpitrain.checkpoint.index import write_index
from mpitrain.checkpoint.shards import OWN, Shards, add_array, file_name, gather
from mpitrain.errors import CheckpointError


@dataclass(frozen=True)
class Extent:
    """Where a writer's array lies in the logical array: as a box of its own shape, from `offset` on."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]


def begin(folder: Path, step: int) -> Path:
    """Make the temporary folder of a step and return it. For one rank. Removes what a killed save has left."""
    with saving(folder):
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
        for path in leftovers(folder):
            remove(path)
        tmp = folder / (name_of(step) + TMP)
        tmp.mkdir()
    return tmp


def write_shard(tmp: Path, writer: int, arrays: Mapping[str, np.ndarray], extents: Mapping[str, Extent] | None = None) -> None:
    """Write and sync one writer's arrays. For every writer; `writer` is a number that no other one uses.

    arrays: by logical name, `parameters/blocks.0.attention.q.weight`; fp64, fp32, fp16, integers, and bits of bf16 as
    `bits.view(BF16)`. Not changed, and not needed after the return. extents: for those that are only a part of their
    logical array; the parts of all writers must tile it, in any shape of boxes. Raises CheckpointError.
    """
    boxes = {name: _place(name, array, (extents or {}).get(name)) for name, array in arrays.items()}
    with saving(tmp.parent), creating(tmp / file_name(writer)) as file:
        for name in sorted(arrays):
            add_array(file, name, arrays[name], *boxes[name])


def commit(tmp: Path, meta: Mapping, num_shards: int | None = None) -> Path:
    """Make a step of the shards in `tmp`, by one rename, and return its folder. For one rank, after all shards are written.

    meta: what JSON can hold. num_shards: how many writers there were; without it, a lost shard is noticed only if it
    held part of an array that others hold too. A step that was committed before is replaced.
    Raises CheckpointError when the shards leave a gap in an array or overlap: the step is then not committed.
    """
    with saving(tmp.parent):
        sizes = {path.name: path.stat().st_size for path in sorted(tmp.glob("shard-*.h5"))}
        if not sizes or (num_shards or len(sizes)) != len(sizes):
            raise CheckpointError(f"{tmp}: found {len(sizes)} shards, {num_shards or 'at least 1'} needed; save the step again")
        arrays = gather(tmp, list(sizes))
        for array in arrays:
            check_tiles(array)
        _digest_shared_chunks(tmp, arrays)
        write_index(tmp, step_of(tmp), meta, arrays, sizes)
        sync_folder(tmp)
        return publish(tmp)


def _place(name: str, array: np.ndarray, extent: Extent | None) -> tuple[Box, tuple[int, ...]]:
    """Return the box that an array is of its logical array, and the shape of that."""
    check_dtype(name, array.dtype)
    if name.split("/")[0] == OWN:
        raise CheckpointError(f'{name}: names that begin with "{OWN}/" are the checkpoint\'s own; use another one')
    extent = extent or Extent(array.shape, (0,) * array.ndim)
    box = Box(tuple(extent.offset), tuple(a + n for a, n in zip(extent.offset, array.shape)))
    fits = len(extent.offset) == len(extent.global_shape) == array.ndim
    if not fits or box.overlap(whole(extent.global_shape)) != box:
        found = f"{list(array.shape)} at {list(extent.offset)}"
        raise CheckpointError(f"{name}: {found} is no box of {list(extent.global_shape)}; fix its extent")
    return box, tuple(extent.global_shape)


def _digest_shared_chunks(tmp: Path, arrays: list[LogicalArray]) -> None:
    """Digest the chunks that no writer holds whole: for parts of leading rows, at most one at each border of two parts."""
    shards = Shards(tmp)
    try:
        for array in arrays:
            for chunk in range(array.chunks.count):
                if chunk not in array.digests:
                    array.digests[chunk] = digest(shards.read(array, array.chunks.box(chunk)))
    finally:
        shards.close()
