"""Shards: what each writer leaves, and how an array is put together from them again.

    parameters/head.norm.weight             a dataset: all of an array
    parameters/head.weight@3:4,100:256      a part of one, named by its box: row 3, columns 100 to 255
    parameters/head.weight@4:9,0:256        rows 4 to 8
    checkpoint/parts                        JSON: of each array the dtype, the whole shape, and the boxes that are here
    checkpoint/digests                      xxh3-128 of all chunks that a part holds whole, part by part: uint8 [chunks, 16]

One rank reads the last two of every shard, and nothing else, to know all: shards can be many, with hundreds of parts each.
"""

import json
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
from h5py import h5d, h5s

from mpitrain.checkpoint.arrays import DIGEST_BYTES, LogicalArray, Piece, digest
from mpitrain.checkpoint.boxes import Box, Chunks, whole
from mpitrain.checkpoint.dtypes import DTYPES, NAMES, to_hdf5
from mpitrain.checkpoint.files import opening, reason
from mpitrain.errors import CheckpointError

OWN = "checkpoint"  # the group for what isn't an array of the user's
PARTS, DIGESTS = f"{OWN}/parts", f"{OWN}/digests"
NUM_OPEN = 128  # files a reader keeps open: a step may have more shards than a process may have files


def file_name(writer: int) -> str:
    return f"shard-{writer:05d}.h5"


class Part(NamedTuple):
    """What a writer holds of an array of `shape`: the elements of `box`."""

    name: str
    array: np.ndarray
    box: Box
    shape: tuple[int, ...]

    @property
    def dataset(self) -> str:
        return _dataset(self.name, self.box, self.shape)


def _dataset(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """Return what a part is called in a shard. Without brackets: h5dump takes what is in them for a selection."""
    return name if box == whole(shape) else f"{name}@{','.join(f'{a}:{b}' for a, b in zip(box.start, box.stop))}"


def write_parts(file: h5py.File, parts: list[Part]) -> None:
    """Write all parts of one writer, and the digests of the chunks that each of them holds whole."""
    arrays, digests = {}, []
    for part in parts:
        array = np.asarray(part.array, order="C")
        kind = to_hdf5(array.dtype)
        dataset = file.create_dataset(part.dataset, shape=array.shape, dtype=h5py.Datatype(kind))
        if array.size:
            dataset.id.write(h5s.ALL, h5s.ALL, array, kind)
        chunks = Chunks(part.shape, array.dtype.itemsize)
        digests += [digest(array[chunks.box(chunk).seen_from(part.box)]) for chunk in chunks.inside(part.box)]
        known = arrays.setdefault(part.name, {"dtype": NAMES[array.dtype], "shape": part.shape, "boxes": []})
        known["boxes"].append((part.box.start, part.box.stop))
    file[PARTS] = np.bytes_(json.dumps(arrays))  # of fixed length: HDF5 would read back a heap of strings, even from a full disk
    file[DIGESTS] = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)


def gather(folder: Path, files: list[str]) -> list[LogicalArray]:
    """Read the headers of all shards: what they hold together, with the digests their writers have computed."""
    arrays: dict[str, LogicalArray] = {}
    for file in files:
        try:
            with opening(folder / file) as shard:
                parts, digests = json.loads(shard[PARTS][()]), map(bytes, shard[DIGESTS][...])
        except (OSError, KeyError, ValueError) as error:
            raise CheckpointError(f"{folder.name}: {file} cannot be read: {reason(error)}; save the step again") from error
        for name, part in parts.items():
            dtype, shape = DTYPES[part["dtype"]], tuple(part["shape"])
            array = arrays.setdefault(name, LogicalArray(name, dtype, shape))
            if (array.dtype, array.shape) != (dtype, shape):
                found, needed = f"{NAMES[dtype]} {list(shape)}", f"{NAMES[array.dtype]} {list(array.shape)}"
                raise CheckpointError(f"{name} is {found} in {file}, {needed} in {array.pieces[0].file}; let all writers agree")
            for start, stop in part["boxes"]:
                box = Box(tuple(start), tuple(stop))
                array.pieces.append(Piece(file, _dataset(name, box, shape), box))
                array.digests.update(zip(array.chunks.inside(box), digests))
    return list(arrays.values())


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
        for piece in array.pieces_of(box):
            part = piece.box.overlap(box)
            self._read_part(piece, part, out, part.seen_from(box))
        return out

    def _read_part(self, piece: Piece, part: Box, out: np.ndarray, where: tuple) -> None:
        try:
            dataset = h5d.open(self._file(piece.file).id, piece.dataset.encode())
            source, target = _space(dataset.shape, part.seen_from(piece.box)), _space(out.shape, where)
            dataset.read(target, source, out, to_hdf5(out.dtype))
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.folder.name}: {piece.file} is missing") from error
        except (OSError, KeyError, ValueError) as error:
            raise CheckpointError(f"{self.folder.name}: {piece.file}: {piece.dataset} cannot be read: {reason(error)}") from error

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
