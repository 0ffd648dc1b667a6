"""The names of steps, and the moment in which a step comes to exist: one rename.

    step-00000030.tmp   being written         not a checkpoint
    step-00000030       committed             the checkpoint of step 30
    step-00000030.old   about to be replaced  the checkpoint of step 30 while there is no
                                              step-00000030
    step-00000030.gone  being removed         not a checkpoint

Saving a step again, after a resume, replaces it. A folder can't be replaced by one rename, so the
old one steps aside first; in between a reader finds it under its other name.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mpitrain.checkpoint.files import reason
from mpitrain.checkpoint.hdf5_bytes import STEP
from mpitrain.errors import CheckpointError
from mpitrain.inputs import names_in, remove, rename, shown, sync_folder

TMP = ".tmp"
OLD = ".old"
GONE = ".gone"


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step that a folder's name means, whatever its suffix; None for anything else."""
    match = re.fullmatch(r"step-([0-9]{8,})(\.tmp|\.old|\.gone)?", path.name)
    # a step has one name
    return int(match[1]) if match and name_of(int(match[1])) == f"step-{match[1]}" else None


def require_own(folder: Path) -> None:
    """Raise CheckpointError if the folder of the checkpoints is a link.

    What is read and removed there would be somewhere else.
    """
    if folder.is_symlink():
        raise CheckpointError(f"{shown(folder)} is a symbolic link; set run.dir to the place itself")


def find(folder: Path) -> dict[int, Path]:
    """Return the folder of every committed step. Nothing is said about whether it can be used."""
    committed = {}
    for path in _step_folders(folder):
        if path.suffix == "" or (path.suffix == OLD and not path.with_suffix("").is_dir()):
            committed[step_of(path)] = path
    return dict(sorted(committed.items()))


def find_one(folder: Path, step: int) -> Path | None:
    """Return the folder of one committed step, without looking at the others; None if there is none."""
    require_own(folder)
    final = folder / name_of(step)
    return next((path for path in (final, final.with_suffix(OLD)) if path.is_dir()), None)


def leftovers(folder: Path) -> list[Path]:
    """Return what a killed save has left, and no reader needs."""
    folders = _step_folders(folder)
    return [
        path
        for path in folders
        if path.suffix in (TMP, GONE) or (path.suffix == OLD and path.with_suffix("").is_dir())
    ]


def remove_leftovers(folder: Path, suffixes: Iterable[str] = (TMP, GONE, OLD)) -> None:
    for path in leftovers(folder):
        if path.suffix in suffixes:
            remove(path, STEP)


def publish(tmp: Path) -> Path:
    """Give a complete step its final name, atomically. An OSError leaves what was there before.

    At no moment is there less than before: neither this step's old state nor any other.
    """
    final = tmp.with_suffix("")
    old = tmp.with_suffix(OLD)
    replaced = os.path.lexists(final)
    if replaced:
        remove(old, STEP)
        rename(final, old.name, STEP)
    try:
        rename(tmp, final.name, STEP)
        sync_folder(final.parent)
    except OSError:
        with suppress(OSError):  # names that can't be given back mean the same steps to a reader
            if not os.path.lexists(tmp):
                rename(final, tmp.name, STEP)
            if replaced:
                rename(old, final.name, STEP)
        raise
    with suppress(OSError):  # the next save removes it
        remove(old, STEP)
    return final


def discard(path: Path) -> None:
    """Remove a committed step.

    Its name goes first, and for good: what a kill leaves of it is no checkpoint.
    """
    gone = path.with_suffix(GONE)
    remove(gone, STEP)
    rename(path, gone.name, STEP)
    sync_folder(path.parent)
    remove(gone, STEP)


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders that were made for a step, but for those in which something is by now."""
    for path in folders:
        with suppress(OSError):
            path.rmdir()


def _step_folders(folder: Path) -> list[Path]:
    require_own(folder)
    try:
        return [
            folder / name
            for name, is_folder in names_in(folder)
            if is_folder and step_of(folder / name) is not None
        ]
    except FileNotFoundError:
        return []
    except OSError as error:
        is_file = isinstance(error, NotADirectoryError)
        advice = "give a run directory" if is_file else "check the file system, then run the command again"
        raise CheckpointError(f"{shown(folder)} cannot be read: {reason(error)}; {advice}") from error
