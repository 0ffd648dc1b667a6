"""The checkpoint that a start makes of what an earlier one has copied in memory."""

from collections import defaultdict
from pathlib import Path

import numpy as np

from mpitrain.checkpoint import save
from mpitrain.checkpoint.dtypes import DTYPES
from mpitrain.checkpoint.folders import find
from mpitrain.checkpoint.meta import StepInfo
from mpitrain.comm.base.world import World
from mpitrain.errors import CheckpointError
from mpitrain.inputs import remove, shown
from mpitrain.training.saving.memory_folder import CopiedStep, copies_in, newest_copied, read_copy


def save_copied_step(world: World, folder: Path) -> None:
    """Make a checkpoint, in the same folder, of the newest step that copies hold, and remove these.

    Do nothing if a checkpoint there is as new. Collective over all ranks; raises CheckpointError
    alike on all.
    """
    copied = world.on_first_rank("looking for copies in memory", lambda: _newer(folder))
    if copied is None:
        return
    tmp = world.on_first_rank("making a folder in memory", lambda: save.begin(folder, copied.step))

    def write() -> None:
        for number in range(world.rank, copied.num_shards, world.size):
            save.write_shard(tmp, number, _parts(copied, number))

    def commit() -> None:
        manifest, copies = read_copy(copied, 0)
        meta = copies.meta(copies.generation_of(copied.step))
        save.commit(tmp, meta, copied.num_shards, about=StepInfo(manifest.config, manifest.writer))
        for path in copies_in(folder):
            remove(path)

    world.on_every_rank("writing what was copied", write)
    world.on_first_rank("committing what was copied", commit)


def _newer(folder: Path) -> CopiedStep | None:
    copied = newest_copied(folder)
    return copied if copied and copied.step > max(find(folder), default=0) else None


def _parts(copied: CopiedStep, number: int) -> dict[str, list[tuple[np.ndarray, save.Extent]]]:
    """Return what a shard holds, in its memory. Raises CheckpointError."""
    manifest, copies = read_copy(copied, number)
    generation = copies.generation_of(copied.step)
    parts = defaultdict(list)
    try:
        for part in manifest.parts:
            array = copies.array(generation, part.at, DTYPES[part.dtype], part.shape)
            parts[part.name].append((array, save.Extent(tuple(part.whole), tuple(part.offset))))
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{shown(copied.folder)}: shard {number} of copies can't be read: {error}"
        ) from None
    return parts
