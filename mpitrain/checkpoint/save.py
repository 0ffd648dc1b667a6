"""Saving a step, in three calls with a barrier after each of the first two.

The caller lets no two saves overlap.

    tmp = begin(folder, step)         one rank: makes step-00000030.tmp
    write_shard(tmp, writer, arrays)  every writer: its own file, no communication
    commit(tmp, meta)                 one rank: checks that the shards make whole arrays, writes the
                                      index, renames

A process killed anywhere in between leaves all committed steps as they were.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpitrain.checkpoint.arrays import LogicalArray, by_shard, check_tiles, digest, root_digest
from mpitrain.checkpoint.boxes import Box, whole
from mpitrain.checkpoint.dtypes import NAMES, check_dtype
from mpitrain.checkpoint.files import STAGING, creating, drain, require_space, saving
from mpitrain.checkpoint.folders import TMP, name_of, publish, remove_leftovers, require_own, step_of
from mpitrain.checkpoint.hdf5_bytes import STEP, ForeignError
from mpitrain.checkpoint.index import write_index
from mpitrain.checkpoint.meta import NOBODY, StepInfo
from mpitrain.checkpoint.shards import OWN, ArrayPart, Shards, file_name, gather, write_parts
from mpitrain.errors import CheckpointError, counted
from mpitrain.inputs import make_folder, shown, sync_folder

Each = Callable[[str], object]


@dataclass(frozen=True)
class Extent:
    """Where an array of a writer's lies in the logical array: as a box of its own shape, from `offset` on."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]


class LaterPart:
    """A part of an array that is made when it is written: few are in memory at a time."""

    def __init__(self, box: Box, dtype: np.dtype, make: Callable[[Box, np.dtype], np.ndarray]):
        self._box = box
        self._make = make
        self.dtype = dtype
        self.shape = box.shape
        self.ndim = len(box.shape)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self._make(self._box, self.dtype)


def begin(folder: Path, step: int, num_bytes: int = 0) -> Path:
    """Make the temporary folder of a step and return it. For one rank. Removes what a killed save has left.

    num_bytes: of all arrays; less space is an error now, and not after most of it has been written.
    """
    with saving(folder):
        require_own(folder)
        if not folder.exists():
            with suppress(FileExistsError):
                folder.parent.mkdir(parents=True)
            make_folder(folder)
            sync_folder(folder.parent)
        remove_leftovers(folder)
        require_space(folder, num_bytes)
        tmp = folder / (name_of(step) + TMP)
        for path in (tmp, folder / name_of(step)):
            if os.path.lexists(path) and not path.is_dir():
                raise CheckpointError(
                    f"{shown(path)} is no folder; needed there is the checkpoint of step {step}: move it away"
                )
        make_folder(tmp, STEP)
    return tmp


def write_shard(
    tmp: Path,
    writer: int,
    arrays: Mapping[str, np.ndarray | Sequence[tuple[np.ndarray, Extent]]],
    each: Each = lambda what: None,
    staging: Path | None = None,
) -> None:
    """Write and sync one writer's arrays. For every writer; `writer` is a number that no other one uses.

    arrays: by logical name, `parameters/blocks.0.attention.q.weight`: the whole array, or the parts
    of it that this writer holds, each with its place. The parts of all writers must tile the
    logical array, in any shape of boxes (`run_boxes` gives those of a flat run). fp64, fp32, fp16,
    integers, and bits of bf16 as `bits.view(BF16)`. Not changed, and not needed after the return.
    each: called with what is done next. staging: a file to write first, not synced, and then to
    copy: large writes in their order for a file system that wants these.
    Raises CheckpointError.
    """
    parts = [_place(name, *part) for name in sorted(arrays) for part in _parts(arrays[name])]
    _check_alike(writer, parts)
    final = tmp / file_name(writer)
    path = staging or final
    try:
        with saving(staging.parent, STAGING) if staging else saving(tmp.parent):
            if staging:
                staging.unlink(missing_ok=True)  # left by a killed save
            with creating(path, each, synced=staging is None) as (file, filler):
                write_parts(file, filler, parts, lambda part: each(f"writing {part} to {path}"))
        if staging:
            each(f"copying {staging} to {final}")
            with saving(tmp.parent):
                drain(staging, final)
    finally:
        if staging:
            with suppress(OSError):  # it may be in memory, and nobody comes for it
                staging.unlink(missing_ok=True)


def commit(
    tmp: Path,
    meta: Mapping,
    num_shards: int | None = None,
    each: Each = lambda what: None,
    about: StepInfo = NOBODY,
    expected: str = "",
) -> Path:
    """Make a step of the shards in `tmp`, atomically, by one rename, and return its folder.

    One rank calls it, after all shards are written.

    meta: what JSON can hold, with the keys of meta.Known. num_shards: how many writers there were;
    without it, a lost shard is noticed only if it held part of an array that others hold too. A
    step that was committed before is replaced. each: as above.
    about: who writes it. expected: the root digest that it has to have, if that is known.
    Raises CheckpointError when the shards leave a gap in an array or overlap, meta lacks a key, or
    the digest is another: the step is then not committed.
    """
    with saving(tmp.parent):
        sizes = {path.name: path.stat().st_size for path in sorted(tmp.glob("shard-*.h5"))}
        if not sizes or (num_shards or len(sizes)) != len(sizes):
            raise CheckpointError(
                f"{tmp}: found {counted(len(sizes), 'shards')}, {num_shards or 'at least 1'} needed; "
                "save the step again"
            )
        each(f"reading what the {len(sizes)} shards of {tmp} hold")
        arrays = gather(tmp, list(sizes))
        for array in arrays:
            check_tiles(array)
        _digest_shared_chunks(tmp, arrays, sizes)
        if expected not in ("", digest := root_digest(arrays)):
            raise CheckpointError(
                f"{tmp}: the root digest is {digest}, needed {expected}: what was read differs "
                "from what was written"
            )
        each(f"writing the index of {tmp}")
        try:
            write_index(tmp, step_of(tmp), meta, arrays, sizes, about)
        except ForeignError as error:
            raise CheckpointError(f"{tmp}: {error}; the step was not committed") from error
        each(f"renaming {tmp}")
        sync_folder(tmp)
        return publish(tmp)


def _parts(given: np.ndarray | Sequence[tuple[np.ndarray, Extent]]) -> Sequence[tuple[np.ndarray, Extent]]:
    return [(given, Extent(given.shape, (0,) * given.ndim))] if isinstance(given, np.ndarray) else given


def _place(name: str, array: np.ndarray, extent: Extent) -> ArrayPart:
    check_dtype(name, array.dtype)
    if name.split("/")[0] == OWN:
        raise CheckpointError(
            f'{name}: names that begin with "{OWN}/" are the checkpoint\'s own; use another one'
        )
    shape = tuple(map(int, extent.global_shape))
    start = tuple(map(int, extent.offset))
    box = Box(start, tuple(a + n for a, n in zip(start, array.shape)))
    if not len(start) == len(shape) == array.ndim or box.overlap(whole(shape)) != box:
        raise CheckpointError(
            f"{name}: {list(array.shape)} at {list(start)} is no box of {list(shape)}; fix its extent"
        )
    return ArrayPart(name, array, box, shape)


def _check_alike(writer: int, parts: list[ArrayPart]) -> None:
    """Raise CheckpointError unless the parts of one writer that make one array agree, and none has
    the name of another.
    """
    alike = {part.name: (NAMES[part.array.dtype], list(part.shape)) for part in parts}
    for part in parts:
        if (NAMES[part.array.dtype], list(part.shape)) != alike[part.name]:
            raise CheckpointError(
                f"{part.name}: parts of writer {writer} differ in dtype or whole shape; let them agree"
            )
    names = Counter(part.dataset for part in parts)
    for name, count in names.items():
        if count > 1:
            raise CheckpointError(f"{name}: writer {writer} has it {count} times; give it once")


def _digest_shared_chunks(tmp: Path, arrays: list[LogicalArray], sizes: Mapping[str, int]) -> None:
    """Digest the chunks that no writer holds whole.

    With runs of whole rows or elements there is at most one at each border of two runs.
    """
    shared = (
        (array, chunk)
        for array in arrays
        for chunk in range(array.chunks.count)
        if chunk not in array.digests
    )
    shards = Shards(tmp, sizes)
    try:
        for array, chunk in by_shard(shared):
            array.digests[chunk] = digest(shards.read(array, array.chunks.box(chunk)))
    finally:
        shards.close()
