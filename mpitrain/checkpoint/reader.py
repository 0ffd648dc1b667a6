"""One committed step, open for reading: any part of any array, without the rest."""

import json
from pathlib import Path

import h5py
import numpy as np

from mpitrain.checkpoint.arrays import LogicalArray
from mpitrain.checkpoint.boxes import select
from mpitrain.checkpoint.files import opening, reason
from mpitrain.checkpoint.folders import step_of
from mpitrain.checkpoint.index import FORMAT, INDEX, SEAL, VERSION, names_in, read_array, read_shard_sizes, seal_of
from mpitrain.checkpoint.shards import Shards
from mpitrain.errors import CheckpointError


class Checkpoint:
    """A committed step. Owns its open files until close(); also a context manager. Opening it verifies the index alone.

    step: the step. meta: what commit was given. digest: the root digest, equal for equal arrays in any layout.
    shards: size in bytes of every shard, by file name.
    """

    def __init__(self, path: Path):
        self.path = path
        self.step = step_of(path)
        self._index = _open_index(path)
        try:
            self.meta: dict = json.loads(self._index.attrs["meta"])
            self.digest = str(self._index.attrs["digest"])
            self.shards = read_shard_sizes(self._index)
        except (OSError, KeyError, ValueError) as error:
            self._index.close()
            raise CheckpointError(f"{path.name}: {INDEX} cannot be read: {reason(error)}") from error
        self._shards = Shards(path)
        self._arrays: dict[str, LogicalArray] = {}

    def names(self) -> list[str]:
        """Return the names of all arrays, sorted."""
        return names_in(self._index)

    def array(self, name: str) -> LogicalArray:
        """Return the dtype, shape and pieces of an array, without its elements."""
        if name not in self._arrays:
            if name not in self._index:
                raise CheckpointError(f"{self.path.name} has no array {name}; use a name of names()")
            self._arrays[name] = read_array(self._index, name)
        return self._arrays[name]

    def read(self, name: str, rows: slice | tuple[slice, ...] | None = None) -> np.ndarray:
        """Return an array, or a slice of its first dim, or one slice for each of its leading dims; steps are 1.

        An array of bf16 comes as its bits with dtype BF16: `array.view(np.uint16)`. Raises CheckpointError.
        """
        array = self.array(name)
        return self._shards.read(array, select(array.shape, rows))

    def close(self) -> None:
        self._shards.close()
        self._index.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _open_index(path: Path) -> h5py.File:
    try:
        _check_seal(path)
        index = opening(path / INDEX)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name}: {Path(error.filename or INDEX).name} is missing") from error
    except (OSError, UnicodeError) as error:
        raise CheckpointError(f"{path.name}: {INDEX} or {SEAL} cannot be read: {reason(error)}") from error
    found = (index.attrs.get("format"), index.attrs.get("version"))
    if found != (FORMAT, VERSION):
        index.close()
        raise CheckpointError(f"{path.name}: {INDEX} is {found[0]} version {found[1]}, needed {FORMAT} version {VERSION}")
    return index


def _check_seal(path: Path) -> None:
    """Read the index as bytes before HDF5 does: one altered byte has sent HDF5 2.0 into an endless loop."""
    if seal_of(path) != (path / SEAL).read_text():
        raise CheckpointError(f"{path.name}: {INDEX} or {SEAL} is altered")
