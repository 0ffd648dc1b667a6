"""Write the index of a step anew where HDF5 programs can't open the one that is there.

Shards, and so all arrays, stay as they are.

Indexes that mpitrain wrote with h5py before 3.16 have a wrong checksum in their superblock.
mpitrain reads them by their seal.
"""

import os
from contextlib import closing
from pathlib import Path

from mpitrain.checkpoint.files import reason, saving
from mpitrain.checkpoint.folders import publish
from mpitrain.checkpoint.hdf5_bytes import STEP
from mpitrain.checkpoint.index import INDEX, SEAL, Index, write_index
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.checkpoint.save import begin
from mpitrain.checkpoint.verify import check_index, check_sizes
from mpitrain.errors import CheckpointError
from mpitrain.inputs import kind_of, names_in, remove, shown, sync_folder


def format_fault(path: Path) -> str:
    """Return why HDF5 programs refuse the index of a step, or "".

    Raises CheckpointError if mpitrain refuses it, too, or the disk doesn't let it be read.

    All checksums are computed: about 5 MB/s.
    """
    with Checkpoint(path):
        pass
    try:
        with closing(Index(path / INDEX, sums=True)) as index:
            for name in index.names:
                index.array(name)
    except OSError as error:  # of the disk: it says nothing of what the index is
        raise CheckpointError(f"{path.name}: {INDEX} cannot be read: {reason(error)}") from error
    except (CheckpointError, ValueError) as error:
        return reason(error)
    return ""


def rewrite_index(path: Path) -> Path:
    """Replace the index of a step by a new one that says the same, and return the step's folder.

    One rank calls it, in a folder without a run.

    The step is made again beside itself, of the same shards by hard links, and takes its own place
    by one rename: a kill at any moment leaves one of the two whole. Digests are taken over, so that
    damage to arrays stays visible. Raises CheckpointError.
    """
    with Checkpoint(path) as source, saving(path.parent):
        check_sizes(source)
        check_index(source)
        arrays = [source.array(name) for name in source.names()]
        others = _files_next_to_the_index(path)
        tmp = begin(path.parent, source.step)
        try:
            for file in others:
                _link(path / file, tmp / file)
            write_index(tmp, source.step, source.meta, arrays, source.shards, source.about)
            if fault := format_fault(tmp):
                raise CheckpointError(
                    f"{path.name}: the new {INDEX} is no valid HDF5 either: {fault}; use another version of "
                    "h5py"
                )
            sync_folder(tmp)
        except BaseException:
            remove(tmp, STEP)
            raise
        return publish(tmp)


def _files_next_to_the_index(path: Path) -> list[str]:
    """Return the files that the new folder takes over. Raises CheckpointError if there is what it can't."""
    names = sorted({name for name, _ in names_in(path)} - {INDEX, SEAL})
    for name in names:
        if (kind := kind_of(path / name)) != "a file":
            raise CheckpointError(
                f"{path.name}: {shown(name)} is {kind or 'missing'}, needed only files; move it away"
            )
    return names


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        advice = "write the step elsewhere with mpitrain ckpt reshard"
        raise CheckpointError(
            f"{shown(source)} cannot have a hard link: {reason(error)}; {advice}"
        ) from error
