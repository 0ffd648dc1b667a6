"""Megatron-LM's data: ids in NAME.bin, sequences and documents in NAME.idx (indexed_dataset.py there)."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mpitrain.data.source import Damaged, File, Source, TokenFile, TokenRule
from mpitrain.data.token_files import StoredArray, file_size, head_of, read_part, require_ascending
from mpitrain.inputs import shown

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, type of ids, sequences, document indices
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOATS = {6: "float64", 7: "float32"}
BIN, IDX = ".bin", ".idx"
WRAPPED = "index whose offsets are wrapped at 2**32 bytes, recomputed from its lengths"


def index_of(path: Path) -> Path:
    """Return the index of a .bin file."""
    return path.with_suffix(IDX)


def companions(path: Path) -> Sequence[Path]:
    return [index_of(path)] if path.suffix == BIN else []


def main(path: Path) -> Path:
    """Return the .bin file of a path, which may name the index, or neither, as Megatron's own options do."""
    if path.suffix == IDX:
        return path.with_suffix(BIN)
    prefixed = path.with_name(path.name + BIN)
    return prefixed if path.suffix != BIN and not path.exists() and prefixed.exists() else path


def tokens(file: File, rule: TokenRule) -> TokenFile:
    """Return ids and ends of documents. Raises Damaged unless both files agree."""
    index = index_of(file.path)
    if not index.exists():
        raise Damaged(f"{shown(file.path)} has no {shown(index.name)} beside it")
    dtype, sequences, documents = _header(index)
    begin = HEADER.size
    lengths = read_part(index, np.dtype("<i4"), begin, sequences)
    offsets = read_part(index, np.dtype("<i8"), begin + 4 * sequences, sequences)
    indices = read_part(index, np.dtype("<i8"), begin + 12 * sequences, documents)
    if (lengths < 0).any():
        raise Damaged(f"{shown(index)}: sequence {int(np.argmax(lengths < 0)):,} has a negative length")
    last = np.cumsum(lengths, dtype=np.int64)
    count = int(last[-1]) if sequences else 0
    ids = StoredArray(file.path, dtype, count=count)
    expected = np.append(0, last[:-1]) * dtype.itemsize if sequences else last
    differ = offsets != expected
    if differ.any() and ((offsets - expected) % (1 << 32)).any():
        wrong = int(np.argmax(differ))
        found = f"sequence {wrong:,} begins at byte {int(offsets[wrong]):,}, by the lengths before it at"
        raise Damaged(f"{shown(index)}: {found} {int(expected[wrong]):,}")
    ends = _ends(index, indices, np.append(0, last), sequences)
    remark = WRAPPED if differ.any() else ""
    return TokenFile(ids, require_ascending(ends, count, index, "index"), remark=remark)


def _header(index: Path) -> tuple[np.dtype, int, int]:
    """Return the type of ids, and how many sequences and document indices there are."""
    head = head_of(index, HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise Damaged(f"{shown(index)} is no index of Megatron: it doesn't begin with MMIDIDX and a version")
    _, version, code, sequences, documents = HEADER.unpack(head)
    if version != 1:
        raise Damaged(f"{shown(index)} is of version {version}, known is 1")
    if code not in TYPES:
        kind = f"holds {FLOATS[code]}, needed integers" if code in FLOATS else f"has unknown type {code}"
        raise Damaged(f"{shown(index)} {kind}")
    size = file_size(index)
    needed = HEADER.size + 12 * sequences + 8 * documents
    if size not in (needed, needed + sequences):  # modes, of several modalities
        found = f"{size:,} bytes, needed {needed:,} for {sequences:,} sequences and {documents:,} indices"
        raise Damaged(f"{shown(index)} has {found}: it was cut, or its header is damaged")
    return np.dtype(TYPES[code]), sequences, documents


def _ends(index: Path, indices: np.ndarray, ends: np.ndarray, sequences: int) -> np.ndarray:
    """Return where documents end, by the sequences that each begins with."""
    if not indices.size or int(indices[0]) != 0 or int(indices[-1]) != sequences:
        raise Damaged(f"{shown(index)}: its documents don't go from sequence 0 to {sequences:,}")
    if (indices < 0).any() or (indices > sequences).any():
        raise Damaged(f"{shown(index)}: a document begins at a sequence that isn't there")
    return ends[indices[1:]]


MEGATRON = Source(
    "megatron",
    suffixes=(BIN,),
    wanted="a .bin file and its .idx",
    advice="write both files again, or leave them out of data.path",
    tokens=tokens,
    companions=companions,
    main=main,
)
