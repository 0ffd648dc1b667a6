"""Write a step anew: the same arrays in another number of files, for whoever copies or reads them.

A run needs no such thing.
"""

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpitrain.checkpoint import save
from mpitrain.checkpoint.boxes import Box, run_boxes, whole
from mpitrain.checkpoint.folders import remove_empty
from mpitrain.checkpoint.hdf5_bytes import STEP
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.checkpoint.steps import same_everywhere, steps_at
from mpitrain.cluster.lock import NAME as LOCK
from mpitrain.cluster.progress_bar import ProgressBar
from mpitrain.cluster.team import Team
from mpitrain.errors import CheckpointError, InputError
from mpitrain.inputs import os_errors_as, remove, shown


class Resharded(NamedTuple):
    """A step that was written anew. seconds: it took."""

    step: int
    digest: str
    num_bytes: int
    seconds: float


def reshard(team: Team, given: str, folder: Path, step: int | None, num_shards: int) -> Resharded:
    """Write a step into a folder in so many shards. Each rank writes some of them. Collective.

    Raises CheckpointError, and leaves nothing, if the step is damaged, or a run uses the folder.
    """
    steps = team.on_first_rank("finding the checkpoint", lambda: steps_at(given, step))
    begin_s = time.monotonic()
    with team.on_every_rank("opening the checkpoint", lambda: steps.open(steps.newest)) as source:
        same_everywhere(team, source)
        total = sum(_bytes_of(source, name) for name in source.names())
        tmp, made = team.on_first_rank("making the folder", lambda: _begin(folder, source.step, total))
        mine = range(team.rank, num_shards, team.size)
        try:
            with ProgressBar(
                f"writing step {source.step}", total * len(mine) // num_shards, team.rank
            ) as progress:
                team.on_every_rank("writing shards", lambda: _write(tmp, source, mine, num_shards, progress))
            team.on_first_rank("committing", lambda: _commit(tmp, source, num_shards))
        except InputError:
            team.on_first_rank("removing what was written", lambda: _undo(tmp, made))
            raise
    return Resharded(source.step, source.digest, total, time.monotonic() - begin_s)


def _begin(folder: Path, step: int, num_bytes: int) -> tuple[Path, list[Path]]:
    """Return the folder to write to, and those that were made for it, the innermost first."""
    with os_errors_as(CheckpointError, shown(folder), "give another folder"):
        locks = [path for path in (folder / LOCK, folder.parent / LOCK) if path.exists()]
        is_run = (folder / "config.toml").exists()
    if locks:
        raise CheckpointError(
            f"{shown(folder)}: {shown(locks[0])} says that a run uses it; give another folder"
        )
    if is_run:
        raise CheckpointError(f"{shown(folder)} is a run directory; give a folder of checkpoints")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        return save.begin(folder, step, num_bytes), made
    except CheckpointError:
        remove_empty(made)
        raise


def _undo(tmp: Path, made: list[Path]) -> None:
    with suppress(OSError):  # the command's error is reported; the next save removes it
        remove(tmp, STEP)
    remove_empty(made)


def _write(tmp: Path, source: Checkpoint, mine: range, num_shards: int, progress: ProgressBar) -> None:
    for number in mine:
        save.write_shard(tmp, number, _parts(source, number, num_shards, progress))


def _parts(
    source: Checkpoint, number: int, num_shards: int, progress: ProgressBar
) -> Mapping[str, list[tuple[save.LaterPart, save.Extent]]]:
    """Return an equal part of all bytes, arrays one after the other.

    Whole arrays, but for the first and the last one.
    """
    total = sum(_bytes_of(source, name) for name in source.names())
    at = 0
    parts = {}
    begin, end = (total * n // num_shards for n in (number, number + 1))
    for name in source.names():
        array = source.array(name)
        first = at
        at = at + _bytes_of(source, name)
        # rounded up
        low, high = (max(0, min(edge, at) - first) // -array.dtype.itemsize * -1 for edge in (begin, end))
        boxes = [box for box, _ in run_boxes(array.shape, low, high)] if low < high else []
        if at == first and number == 0:  # nothing, but of a shape
            boxes = [whole(array.shape)]
        read = partial(_read, source, progress, name)
        if boxes:
            later = [save.LaterPart(box, array.dtype, read) for box in boxes]
            extents = [save.Extent(array.shape, box.start) for box in boxes]
            parts[name] = list(zip(later, extents))
    return parts


def _read(source: Checkpoint, progress: ProgressBar, name: str, box: Box, dtype: np.dtype) -> np.ndarray:
    values = source.read(name, box.slices)
    progress.add(values.nbytes)
    return values


def _bytes_of(source: Checkpoint, name: str) -> int:
    array = source.array(name)
    return math.prod(array.shape) * array.dtype.itemsize


def _commit(tmp: Path, source: Checkpoint, num_shards: int) -> None:
    """Commit, if what was read is what was once written: its digests were computed anew.

    Raises CheckpointError.
    """
    about = replace(
        source.about,
        writer={**source.about.writer, "shards": num_shards, "resharded_from": len(source.shards)},
    )
    save.commit(tmp, source.meta, num_shards, about=about, expected=source.digest)
