"""The index of a step: every array as one virtual dataset, so that h5py or h5dump reads it without
knowing who wrote it.

/                          attributes: format, version, step, meta (JSON), digest (the root digest),
                           config (TOML), writer (JSON)
/parameters/... /adam/...  virtual datasets over the shards beside it, by relative name: the folder
                           can be moved
/checkpoint/shards         name and size of every shard
/checkpoint/digests        xxh3-128 of each chunk of each array, array by array as their names are
                           sorted: uint8 [chunks, 16]
"""

import errno
import json
import os
import re
from collections.abc import Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path

import h5py
import numpy as np
import xxhash
from h5py import h5d, h5p

from mpitrain.checkpoint.arrays import DIGEST_BYTES, LogicalArray, StoredPart, check_tiles, root_digest
from mpitrain.checkpoint.boxes import Box, Chunks, whole
from mpitrain.checkpoint.dtypes import BY_CODE, code_of, to_hdf5
from mpitrain.checkpoint.files import INTERMEDIATE_GROUPS, add_dataset, in_memory, space_of, write_bytes
from mpitrain.checkpoint.hdf5 import Hdf5File
from mpitrain.checkpoint.hdf5_bytes import FILE, ForeignError
from mpitrain.checkpoint.hdf5_virtual import has_right_checksum, sources_of
from mpitrain.checkpoint.meta import NOBODY, StepInfo, read_about, read_meta
from mpitrain.checkpoint.shards import OWN, is_file_name, part_name
from mpitrain.inputs import closed_on_error, open_regular, shown

INDEX, SEAL = "index.h5", "index.xxh3"
FORMAT = "mpitrain checkpoint"
VERSION = 3
# the first had neither config nor writer; until the third there was a dataset of digests for each
# array
READ = (1, 2, VERSION)
SHARDS = f"{OWN}/shards"
DIGESTS = f"{OWN}/digests"
SHARDS_DTYPE = np.dtype([("file", "S32"), ("bytes", "<u8")])
SHARDS_CODE = bytes.fromhex(
    "06020000 28000000 66696c6500 00 13010000 20000000 627974657300 20 10000000 08000000 0000 4000"
)
MOST_INDEX_BYTES = 1 << 28  # that of 100,000 writers has less


def write_index(
    folder: Path,
    step: int,
    meta: Mapping,
    arrays: list[LogicalArray],
    sizes: Mapping[str, int],
    about: StepInfo = NOBODY,
) -> None:
    """Write the index of a step and its seal, both synced.

    meta: what read_meta() takes.
    Raises OSError, ForeignError.

    It is made in memory, since it takes hundreds of small writes.
    """
    arrays = sorted(arrays, key=lambda array: array.name)
    text = json.dumps(dict(meta), sort_keys=True)
    read_meta(text, step)
    about.require_readable()
    with in_memory() as (file, image):
        file.attrs.update(
            format=FORMAT,
            version=VERSION,
            step=step,
            meta=text,
            digest=root_digest(arrays),
            **about.attributes(),
        )
        file[SHARDS] = np.array([(name.encode(), size) for name, size in sizes.items()], SHARDS_DTYPE)
        for array in arrays:
            _add_virtual(file, array)
        digests = b"".join(array.digests[chunk] for array in arrays for chunk in range(array.chunks.count))
        add_dataset(file, DIGESTS, np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES))
    write_bytes(folder / INDEX, image[0])
    write_bytes(folder / SEAL, seal_of(folder).encode())


def seal_of(folder: Path) -> str:
    """Return what the seal of an index must say.

    HDF5's own checksums leave out some bytes: the texts among the attributes.
    """
    path = folder / INDEX
    digest = xxhash.xxh3_128()
    with open(open_regular(path, own=FILE), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > MOST_INDEX_BYTES:
            raise OSError(
                errno.EFBIG, f"it has {size:,} bytes, at most {MOST_INDEX_BYTES:,} can be an index", str(path)
            )
        while block := file.read(1 << 20):
            digest.update(block)
    return f"{digest.hexdigest()}  {INDEX}\n"


class Index:
    """An open index of a stranger: all it says is held against what write_index writes.

    Raises OSError or ForeignError.

    step: the step it was written for. meta, digest: as saved, a text each. about: who wrote it.
    shards: sizes by name.
    names: of the arrays, sorted. sums: whether to check HDF5's checksums: the seal covers more, but
    other programs need them.
    """

    def __init__(self, path: Path, sums: bool = False):
        self.file = Hdf5File(path, sums)
        with closed_on_error(self):
            self._check_attributes()
            self.shards = self._read_shards()
            self._check_arrays()

    def close(self) -> None:
        self.file.close()

    def _check_attributes(self) -> None:
        attributes = self.file.attributes
        if attributes.get("format") != FORMAT or attributes.get("version") not in READ:
            what = shown(f"{attributes.get('format')} version {attributes.get('version')}")
            raise ForeignError(f"found {what}, needed {FORMAT} version 1 to {VERSION}")
        for name, kind in (("step", int), ("meta", str), ("digest", str)):
            if type(attributes.get(name)) is not kind:
                raise ForeignError(
                    f"the attribute {name} is missing, or isn't {'a text' if kind is str else 'an integer'}"
                )
        self.version, self.step, self.meta, self.digest = (
            attributes[name] for name in ("version", "step", "meta", "digest")
        )
        if not re.fullmatch("[0-9a-f]{32}", self.digest):
            raise ForeignError("the attribute digest is none")
        self.about = read_about(attributes) if self.version > 1 else NOBODY

    def _read_shards(self) -> dict[str, int]:
        table = self.file.datasets.get(SHARDS)
        if table is None or table.virtual or table.datatype != SHARDS_CODE or len(table.shape) != 1:
            raise ForeignError(f"{SHARDS} is not as mpitrain writes it")
        rows = [
            (name.decode(), size)
            for name, size in np.frombuffer(self.file.read(table), SHARDS_DTYPE).tolist()
        ]
        for name, _ in rows:
            if not is_file_name(name):
                raise ForeignError(f"{SHARDS} names {shown(name)!r}, which is no shard")
        if len(dict(rows)) != len(rows):
            raise ForeignError(f"{SHARDS} names a shard twice")
        return dict(rows)

    def _check_arrays(self) -> None:
        """Check that there is nothing but arrays and their digests, of known dtypes, and not more
        than the shards can hold.
        """
        datasets = self.file.datasets
        self.names = sorted(name for name in datasets if not name.startswith(f"{OWN}/"))
        others = datasets.keys() - self.names - {SHARDS}
        digests = {DIGESTS} if self.version > 2 else {f"{DIGESTS}/{name}" for name in self.names}
        for name in others ^ digests:
            raise ForeignError(f"{name} is {'nothing that mpitrain writes' if name in others else 'missing'}")
        for name in self.names:
            if datasets[name].virtual is None or datasets[name].datatype not in BY_CODE:
                raise ForeignError(f"{name} is no virtual dataset of numbers")
        num_bytes = sum(datasets[name].num_bytes for name in self.names)
        most = sum(self.shards.values())
        if num_bytes > most:
            raise ForeignError(f"the arrays have {num_bytes:,} bytes, the shards {most:,}")

    def array(self, name: str) -> LogicalArray:
        """Return an array with the pieces that the virtual dataset itself names; they make it whole."""
        dataset = self.file.datasets[name]
        array = LogicalArray(name, BY_CODE[dataset.datatype], dataset.shape)
        description = self.file.heap_object(*dataset.virtual)
        if self.file.sums and not has_right_checksum(description):
            raise ForeignError(f"{name}: the checksum of its sources is wrong")
        array.pieces = [self._piece(array, *source) for source in sources_of(description)]
        check_tiles(array)
        rows = (
            self._every_digest[name]
            if self.version > 2
            else self._digests(f"{DIGESTS}/{name}", array.chunks.count)
        )
        array.digests = dict(enumerate(rows))
        return array

    @cached_property
    def _every_digest(self) -> dict[str, list[bytes]]:
        """Return the digests of all arrays, by their names."""
        shapes = {name: self.file.datasets[name] for name in self.names}
        counts = [
            Chunks(dataset.shape, BY_CODE[dataset.datatype].itemsize).count for dataset in shapes.values()
        ]
        rows = iter(self._digests(DIGESTS, sum(counts)))
        return {name: list(islice(rows, count)) for name, count in zip(shapes, counts)}

    def _digests(self, name: str, count: int) -> list[bytes]:
        """Read a dataset of digests, of so many chunks."""
        dataset = self.file.datasets[name]
        if (dataset.virtual, dataset.datatype, dataset.shape) != (
            None,
            code_of(np.dtype("u1")),
            (count, DIGEST_BYTES),
        ):
            raise ForeignError(f"{name}: the digests are not those of {count} chunks")
        return [
            bytes(row) for row in np.frombuffer(self.file.read(dataset), np.uint8).reshape(-1, DIGEST_BYTES)
        ]

    def _piece(
        self, array: LogicalArray, file: str, dataset: str, source: Box | None, box: Box | None
    ) -> StoredPart:
        box = whole(array.shape) if box is None else box
        inside = len(box.start) == len(array.shape) and box.overlap(whole(array.shape)) == box
        fits = inside and (box.size or not array.chunks.count)
        known = file in self.shards and dataset == part_name(array.name, box, array.shape)
        if not (fits and known and source in (None, whole(box.shape))):
            raise ForeignError(f"{array.name}: {shown(file)} {shown(dataset)} is no part of it in a shard")
        return StoredPart(file, dataset, box)


def _add_virtual(file: h5py.File, array: LogicalArray) -> None:
    """Add an array as a virtual dataset.

    HDF5's own calls do it: there are thousands, and h5py's take four times as long.
    """
    layout = h5p.create(h5p.DATASET_CREATE)
    space = space_of(array.shape)
    layout.set_layout(h5d.VIRTUAL)
    for piece in array.pieces:
        if piece.box.size or not array.chunks.count:
            here = space
            if piece.box.shape != array.shape:
                here = space.copy()
                here.select_hyperslab(piece.box.start, piece.box.shape)
            layout.set_virtual(here, piece.file.encode(), piece.dataset.encode(), space_of(piece.box.shape))
    h5d.create(file.id, array.name.encode(), to_hdf5(array.dtype), space, layout, INTERMEDIATE_GROUPS)
