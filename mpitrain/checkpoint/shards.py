"""Shards: what each writer leaves, and how an array is put together from them again.

    parameters/head.norm.weight         a dataset: all of an array
    parameters/head.weight@3:4,100:256  a part of one, named by its box: row 3, columns 100 to 255
    parameters/head.weight@4:9,0:256    rows 4 to 8
    checkpoint/parts                    JSON: of each array the dtype, the whole shape, and the
                                        boxes that are here
    checkpoint/digests                  xxh3-128 of all chunks that a part holds whole, part by
                                        part: uint8 [chunks, 16]

One rank reads the last two of every shard, and nothing else, to know all: shards can be many, with
hundreds of parts each.
"""

import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from mpitrain.checkpoint.arrays import DIGEST_BYTES, LogicalArray, StoredPart, digest
from mpitrain.checkpoint.boxes import Box, Chunks, whole
from mpitrain.checkpoint.dtypes import DTYPES, NAMES, code_of
from mpitrain.checkpoint.files import Filler, reason
from mpitrain.checkpoint.hdf5 import Hdf5File
from mpitrain.checkpoint.hdf5_bytes import ForeignError
from mpitrain.errors import CheckpointError

OWN = "checkpoint"  # the group for what isn't an array of the user's
PARTS = f"{OWN}/parts"
DIGESTS = f"{OWN}/digests"
BLOCK_BYTES = 1 << 22  # of rows that are read at once to cut columns out of them
AHEAD = 2  # arrays that wait to be written: some are read only when it is their turn
# files a reader keeps open: a step may have more shards than a process may have files
NUM_OPEN = 128


def file_name(writer: int) -> str:
    return f"shard-{writer:05d}.h5"


def is_file_name(name: str) -> bool:
    return bool(re.fullmatch(r"shard-[0-9]{5,}\.h5", name))


class ArrayPart(NamedTuple):
    """What a writer holds of an array of `shape`: the elements of `box`."""

    name: str
    array: np.ndarray
    box: Box
    shape: tuple[int, ...]

    @property
    def dataset(self) -> str:
        return part_name(self.name, self.box, self.shape)


def part_name(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """Return what a part is called in a shard: without brackets, in which h5dump sees a selection."""
    return (
        name if box == whole(shape) else f"{name}@{','.join(f'{a}:{b}' for a, b in zip(box.start, box.stop))}"
    )


def write_parts(
    file: h5py.File, filler: Filler, parts: list[ArrayPart], each: Callable[[str], object] = lambda name: None
) -> None:
    """Write all parts of one writer, and the digests of the chunks that each of them holds whole.

    each: called with the name of one.
    """
    arrays = dict[str, dict]()
    digests = list[bytes]()
    for part in parts:
        each(part.dataset)
        array = np.asarray(part.array)
        filler.add(file, part.dataset, array)
        digests += _digests(part, array)  # while the filler writes
        known = arrays.setdefault(part.name, {"dtype": NAMES[array.dtype], "shape": part.shape, "boxes": []})
        known["boxes"].append((part.box.start, part.box.stop))
        filler.wait(AHEAD)
    filler.wait(0)
    # of fixed length: HDF5 would read back a heap of strings, even from a full disk
    file[PARTS] = np.bytes_(json.dumps(arrays))
    file[DIGESTS] = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)


def _digests(part: ArrayPart, array: np.ndarray) -> list[bytes]:
    chunks = Chunks(part.shape, array.dtype.itemsize)
    return [digest(array[chunks.box(chunk).seen_from(part.box)]) for chunk in chunks.inside(part.box)]


def gather(folder: Path, files: list[str]) -> list[LogicalArray]:
    """Read the headers of all shards: what they hold together, with the digests their writers have
    computed.
    """
    arrays: dict[str, LogicalArray] = {}
    for file in files:
        try:
            with closing(Hdf5File(folder / file, only=OWN)) as shard:
                parts = json.loads(shard.read(shard.datasets[PARTS]))
                digests = map(
                    bytes,
                    np.frombuffer(shard.read(shard.datasets[DIGESTS]), np.uint8).reshape(-1, DIGEST_BYTES),
                )
        except (OSError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{folder.name}: {file} cannot be read: {reason(error)}; save the step again"
            ) from error
        for name, part in parts.items():
            dtype = DTYPES[part["dtype"]]
            shape = tuple(part["shape"])
            array = arrays.setdefault(name, LogicalArray(name, dtype, shape))
            if (array.dtype, array.shape) != (dtype, shape):
                given = f"{NAMES[dtype]} {list(shape)}"
                needed = f"{NAMES[array.dtype]} {list(array.shape)}"
                raise CheckpointError(
                    f"{name} is {given} in {file}, {needed} in {array.pieces[0].file}; let all writers agree"
                )
            for start, stop in part["boxes"]:
                box = Box(tuple(start), tuple(stop))
                array.pieces.append(StoredPart(file, part_name(name, box, shape), box))
                array.digests.update(zip(array.chunks.inside(box), digests))
    return list(arrays.values())


class Shards:
    """The shards of one step, opened when they are needed. sizes: in bytes, of those that may be opened.

    They are read directly, not through the index's virtual datasets: those would give zeros for a
    shard that can't be opened, without a word, and what a stranger's name.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int]):
        self.folder = folder
        self.sizes = sizes
        self._open: OrderedDict[str, Hdf5File] = OrderedDict()  # least recently used first

    def read(self, array: LogicalArray, box: Box) -> np.ndarray:
        """Return `box` of a logical array, whoever wrote it; nothing else is read. Raises CheckpointError."""
        out = np.empty(box.shape, array.dtype)
        for piece in array.pieces_of(box):
            part = piece.box.overlap(box)
            self._read_part(piece, part, out[part.seen_from(box)])
        return out

    def _read_part(self, piece: StoredPart, part: Box, out: np.ndarray) -> None:
        try:
            file = self._file(piece.file)
            dataset = file.datasets.get(piece.dataset)
            if dataset is None:
                raise ForeignError("there is no such dataset")
            if (dataset.shape, dataset.datatype, dataset.virtual) != (
                piece.box.shape,
                code_of(out.dtype),
                None,
            ):
                raise ForeignError(f"it isn't {NAMES[out.dtype]} {list(piece.box.shape)}")
            _read_box(file, dataset.address, piece.box, part, out)
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.folder.name}: {piece.file} is missing") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder.name}: {piece.file}: {piece.dataset} cannot be read: {reason(error)}"
            ) from error

    def _file(self, name: str) -> Hdf5File:
        if name not in self._open:
            file = Hdf5File(self.folder / name)
            if file.size != self.sizes[name]:
                file.close()
                raise ForeignError(f"the file has {file.size:,} bytes, {self.sizes[name]:,} needed")
            self._open[name] = file
            if len(self._open) > NUM_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(name)
        return self._open[name]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


def _read_box(file: Hdf5File, address: int, box: Box, part: Box, out: np.ndarray) -> None:
    """Read `part` of the dataset at `address`, which holds `box`.

    Whole rows, of which the columns are cut out.
    """
    row_bytes = math.prod(box.shape[1:]) * out.itemsize
    if part.shape[1:] == box.shape[1:] and out.flags.c_contiguous:
        first = part.start[0] - box.start[0] if box.shape else 0
        file.read_into(memoryview(out.reshape(-1).view(np.uint8)), address + first * row_bytes)
        return
    first = part.start[0] - box.start[0]
    columns = part.seen_from(box)[1:]
    if row_bytes > BLOCK_BYTES:
        for row in range(len(out)):
            inner = Box(box.start[1:], box.stop[1:]), Box(part.start[1:], part.stop[1:])
            _read_box(file, address + (first + row) * row_bytes, *inner, out[row])
        return
    step = BLOCK_BYTES // row_bytes
    for row in range(0, len(out), step):
        rows = np.empty((min(step, len(out) - row), *box.shape[1:]), out.dtype)
        file.read_into(memoryview(rows.reshape(-1).view(np.uint8)), address + (first + row) * row_bytes)
        out[row : row + step] = rows[(slice(None), *columns)]
