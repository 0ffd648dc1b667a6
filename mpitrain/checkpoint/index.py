"""The index of a step: every array as one virtual dataset, so that h5py or h5dump reads it without knowing who wrote it.

    /                            attributes: format, version, step, meta (JSON), digest (the root digest)
    /parameters/... /adam/...    virtual datasets over the shards beside it, by relative name: the folder can be moved
    /checkpoint/shards           name and size of every shard
    /checkpoint/digests/...      xxh3-128 of each chunk of the array of that name: uint8 [chunks, 16]
"""

import json
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
import xxhash

from mpitrain.checkpoint.arrays import DIGEST_BYTES, LogicalArray, Piece, root_digest
from mpitrain.checkpoint.boxes import Box, whole
from mpitrain.checkpoint.dtypes import dtype_of, to_hdf5
from mpitrain.checkpoint.files import creating, write_text
from mpitrain.checkpoint.shards import OWN

INDEX, SEAL = "index.h5", "index.xxh3"
FORMAT, VERSION = "mpitrain checkpoint", 1
SHARDS, DIGESTS = f"{OWN}/shards", f"{OWN}/digests"


def write_index(folder: Path, step: int, meta: Mapping, arrays: list[LogicalArray], sizes: Mapping[str, int]) -> None:
    """Write the index of a step and its seal, both synced. meta: anything that JSON can hold. Raises OSError."""
    with creating(folder / INDEX) as file:
        text = json.dumps(dict(meta), sort_keys=True)
        file.attrs.update(format=FORMAT, version=VERSION, step=step, meta=text, digest=root_digest(arrays))
        file[SHARDS] = np.array([(name.encode(), size) for name, size in sizes.items()], [("file", "S32"), ("bytes", "<u8")])
        for array in arrays:
            _add_virtual(file, array)
            digests = b"".join(array.digests[chunk] for chunk in range(array.chunks.count))
            file[f"{DIGESTS}/{array.name}"] = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)
    write_text(folder / SEAL, seal_of(folder))


def seal_of(folder: Path) -> str:
    """Return what the seal must say. HDF5's own checksums leave out some bytes: the texts among the attributes."""
    return f"{xxhash.xxh3_128_hexdigest((folder / INDEX).read_bytes())}  {INDEX}\n"


def names_in(file: h5py.File) -> list[str]:
    """Return the sorted names of the arrays."""
    names = []
    file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    return sorted(name for name in names if not name.startswith(f"{OWN}/"))


def read_shard_sizes(file: h5py.File) -> dict[str, int]:
    return {name.decode(): int(size) for name, size in file[SHARDS][...].tolist()}


def read_array(file: h5py.File, name: str) -> LogicalArray:
    """Read back what is known of an array. The pieces are those that the virtual dataset itself names."""
    dataset = file[name]
    sources = dataset.virtual_sources()
    pieces = [Piece(source.file_name, source.dset_name, _box(source.vspace, dataset.shape)) for source in sources]
    digests = dict(enumerate(map(bytes, file[f"{DIGESTS}/{name}"][...])))
    return LogicalArray(name, dtype_of(dataset), dataset.shape, pieces, digests)


def _box(space: h5py.h5s.SpaceID, shape: tuple[int, ...]) -> Box:
    bounds = space.get_select_bounds() if shape else None
    if bounds is None:  # 0-d, or empty: HDF5 has no bounds for these
        return whole(shape)
    return Box(tuple(bounds[0]), tuple(last + 1 for last in bounds[1]))


def _add_virtual(file: h5py.File, array: LogicalArray) -> None:
    layout = h5py.VirtualLayout(array.shape, h5py.Datatype(to_hdf5(array.dtype)))
    for piece in array.pieces:
        if piece.box.size or not array.chunks.count:
            source = h5py.VirtualSource(piece.file, piece.dataset, piece.box.shape)
            layout[piece.box.seen_from(whole(array.shape))] = source
    file.create_virtual_dataset(array.name, layout)
