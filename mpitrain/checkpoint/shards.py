"""Shards: what each writer leaves, and how an array is put together from them again."""

from collections import OrderedDict
from pathlib import Path

import h5py
import numpy as np
from h5py import h5s

from mpitrain.checkpoint.arrays import DIGEST_BYTES, LogicalArray, Piece, digest
from mpitrain.checkpoint.boxes import Box
from mpitrain.checkpoint.dtypes import NAMES, dtype_of, to_hdf5
from mpitrain.checkpoint.files import opening, reason
from mpitrain.errors import CheckpointError

OWN = "checkpoint"  # the group for what isn't an array of the user's
DIGESTS = f"{OWN}/digests"
NUM_OPEN = 128  # files a reader keeps open: a step may have more shards than a process may have files


def file_name(writer: int) -> str:
    return f"shard-{writer:05d}.h5"


def names_in(file: h5py.File) -> list[str]:
    """Return the sorted names of the arrays in a shard or an index."""
    names = []
    file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    return sorted(name for name in names if not name.startswith(f"{OWN}/"))


def add_array(file: h5py.File, name: str, array: np.ndarray, box: Box, shape: tuple[int, ...]) -> None:
    """Write `array`, which is `box` of a logical array of `shape`, and beside it the digests of all chunks it holds whole."""
    array = np.asarray(array, order="C")
    kind = to_hdf5(array.dtype)
    dataset = file.create_dataset(name, shape=array.shape, dtype=h5py.Datatype(kind))
    if array.size:
        dataset.id.write(h5s.ALL, h5s.ALL, array, kind)
    chunks = LogicalArray(name, array.dtype, shape).chunks
    held = chunks.inside(box)
    digests = b"".join(digest(array[chunks.box(chunk).seen_from(box)]) for chunk in held)
    file[f"{DIGESTS}/{name}"] = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)
    dataset.attrs.update(global_shape=np.array(shape, np.int64), offset=np.array(box.start, np.int64), first_chunk=held.start)


def gather(folder: Path, files: list[str]) -> list[LogicalArray]:
    """Read the headers of all shards: what they hold together, with the digests their writers have computed."""
    arrays: dict[str, LogicalArray] = {}
    for file in files:
        try:
            with opening(folder / file) as shard:
                for name in names_in(shard):
                    _join(arrays, file, shard[name], shard[f"{DIGESTS}/{name}"][...])
        except (OSError, KeyError) as error:
            raise CheckpointError(f"{folder.name}: {file} cannot be read: {reason(error)}; save the step again") from error
    return list(arrays.values())


def _join(arrays: dict[str, LogicalArray], file: str, part: h5py.Dataset, digests: np.ndarray) -> None:
    name, shape = part.name.lstrip("/"), tuple(part.attrs["global_shape"].tolist())
    array = arrays.setdefault(name, LogicalArray(name, dtype_of(part), shape))
    if (array.dtype, array.shape) != (dtype_of(part), shape):
        found, needed = f"{NAMES[dtype_of(part)]} {list(shape)}", f"{NAMES[array.dtype]} {list(array.shape)}"
        raise CheckpointError(f"{name} is {found} in {file}, {needed} in {array.pieces[0].file}; let all writers agree")
    start = tuple(part.attrs["offset"].tolist())
    array.pieces.append(Piece(file, Box(start, tuple(a + n for a, n in zip(start, part.shape)))))
    array.digests.update(enumerate(map(bytes, digests), int(part.attrs["first_chunk"])))


class Shards:
    """The shards of one step, opened when they are needed.

    They are read directly: the index's virtual datasets would give zeros for a shard that can't be opened, without a word.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: OrderedDict[str, h5py.File] = OrderedDict()  # least recently used first

    def read(self, array: LogicalArray, box: Box) -> np.ndarray:
        """Return `box` of a logical array, whoever wrote it; nothing else is read. Raises CheckpointError."""
        out = np.empty(box.shape, array.dtype)
        for piece in array.pieces:
            part = piece.box.overlap(box)
            if part.size:
                self._read_part(array.name, piece, part, out, part.seen_from(box))
        return out

    def _read_part(self, name: str, piece: Piece, part: Box, out: np.ndarray, where: tuple) -> None:
        try:
            dataset = self._file(piece.file)[name]
            source, target = _space(dataset.shape, part.seen_from(piece.box)), _space(out.shape, where)
            dataset.id.read(target, source, out, to_hdf5(out.dtype))
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.folder.name}: {piece.file} is missing") from error
        except (OSError, KeyError, ValueError) as error:
            raise CheckpointError(f"{self.folder.name}: {piece.file}: {name} cannot be read: {reason(error)}") from error

    def _file(self, name: str) -> h5py.File:
        if name not in self._open:
            self._open[name] = opening(self.folder / name)
            if len(self._open) > NUM_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(name)
        return self._open[name]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


def _space(shape: tuple[int, ...], where: tuple) -> h5s.SpaceID:
    """Return the HDF5 selection of one box, given by its slices."""
    space = h5s.create_simple(shape)
    slices = where[: len(shape)]
    if slices:  # a 0-d space has nothing to select from
        space.select_hyperslab(tuple(s.start for s in slices), tuple(s.stop - s.start for s in slices))
    return space
