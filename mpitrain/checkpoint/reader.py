"""One committed step, open for reading: any part of any array, without the rest.

It is the one door to a checkpoint, whoever wrote it.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mpitrain.checkpoint.arrays import LogicalArray
from mpitrain.checkpoint.boxes import select
from mpitrain.checkpoint.dtypes import NAMES, is_readable_as
from mpitrain.checkpoint.files import reason
from mpitrain.checkpoint.folders import step_of
from mpitrain.checkpoint.hdf5_bytes import FILE
from mpitrain.checkpoint.index import INDEX, SEAL, Index, seal_of
from mpitrain.checkpoint.meta import read_meta
from mpitrain.checkpoint.shards import Shards
from mpitrain.errors import CheckpointError
from mpitrain.inputs import read_regular

Needs = Mapping[str, tuple[np.dtype, tuple[int, ...]]]  # dtype and shape of arrays, by name


class Checkpoint:
    """A committed step.

    Owns its open files until close(); also a context manager. Opening it verifies the index alone.

    step: the step. meta, about: what commit was given. digest: the root digest, equal for equal
    arrays in any layout.
    shards: size in bytes of every shard, by file name.
    """

    def __init__(self, path: Path):
        self.path = path
        self.step = step_of(path)
        self._index = _open_index(path)
        try:
            if self._index.step != self.step:
                raise CheckpointError(
                    f"{path.name}: {INDEX} is of step {self._index.step}; name the folder by it"
                )
            self.meta: dict = read_meta(self._index.meta, self.step)
        except (CheckpointError, ValueError) as error:
            self._index.close()
            raise error if isinstance(error, CheckpointError) else _unreadable(path, error) from error
        self.digest, self.shards, self.about = self._index.digest, self._index.shards, self._index.about
        self._shards = Shards(path, self.shards)
        self._arrays: dict[str, LogicalArray] = {}

    def names(self) -> list[str]:
        """Return the names of all arrays, sorted."""
        return self._index.names

    def array(self, name: str) -> LogicalArray:
        """Return the dtype, shape and pieces of an array, without its elements. Raises CheckpointError."""
        if name not in self._arrays:
            if name not in self._index.file.datasets:
                raise CheckpointError(f"{self.path.name} has no array {name}; use a name of names()")
            try:
                self._arrays[name] = self._index.array(name)
            except CheckpointError as error:  # the pieces make no array
                raise CheckpointError(f"{self.path.name}: {error.args[0]}") from error
            except (OSError, ValueError) as error:
                raise _unreadable(self.path, error) from error
        return self._arrays[name]

    def read(self, name: str, rows: slice | tuple[slice, ...] | None = None) -> np.ndarray:
        """Return an array, or a slice of its first dim, or one slice for each of its leading dims.

        Steps are 1.

        An array of bf16 comes as its bits with dtype BF16: `array.view(np.uint16)`. Raises
        CheckpointError.
        """
        array = self.array(name)
        return self._shards.read(array, select(array.shape, rows))

    def require(self, needs: Needs) -> None:
        """Raise CheckpointError unless these arrays are there, with these shapes, and of dtypes
        that these can be read from. It reads no data.
        """
        for name, (dtype, shape) in needs.items():
            if name not in self._index.file.datasets:
                raise CheckpointError(f"{self.path.name} has no {name}; it is not a checkpoint of this model")
            array = self.array(name)
            if not is_readable_as(array.dtype, dtype) or array.shape != tuple(shape):
                stored = f"{NAMES[array.dtype]} {list(array.shape)}"
                needed = f"{NAMES[dtype]} {list(shape)}"
                raise CheckpointError(
                    f"{self.path.name}: {name} is {stored}, needed {needed}; it is not a checkpoint of this "
                    "model"
                )

    def close(self) -> None:
        self._shards.close()
        self._index.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _open_index(path: Path) -> Index:
    """Check the seal first: it tells damage from what only a stranger would write."""
    try:
        if seal_of(path) != read_regular(path / SEAL, 1000, FILE).decode():
            raise CheckpointError(f"{path.name}: {INDEX} or {SEAL} is damaged")
        return Index(path / INDEX)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name}: {Path(error.filename or INDEX).name} is missing") from error
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path.name}: {INDEX} or {SEAL} cannot be read: {reason(error)}")
