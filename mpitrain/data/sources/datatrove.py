"""datatrove's tokens: ids in NAME.ds, ends of documents in NAME.ds.index, a loss mask in NAME.ds.loss."""

from collections.abc import Sequence
from pathlib import Path

from mpitrain.data.source import Damaged, File, Source, TokenFile, TokenRule
from mpitrain.data.token_files import (
    LOSS,
    TYPES,
    StoredArray,
    file_size,
    mask_of,
    require_ascending,
    with_ending,
)
from mpitrain.inputs import shown

DS = ".ds"
INDEX = ".index"
SIZES = {2: TYPES["uint16"], 4: TYPES["uint32"]}


def companions(path: Path) -> Sequence[Path]:
    return [with_ending(path, ending) for ending in (INDEX, LOSS, ".metadata")] if path.suffix == DS else []


def tokens(file: File, rule: TokenRule) -> TokenFile:
    """Return ids and ends of documents. Raises Damaged unless the files agree."""
    index = with_ending(file.path, INDEX)
    if not index.exists():
        raise Damaged(f"{shown(file.path)} has no {shown(index.name)} beside it")
    stored = StoredArray(index, TYPES["uint64"])
    ends = stored.read(0, stored.count)
    count = int(ends[-1]) if ends.size else 0
    size = file_size(file.path)
    dtype = SIZES.get(size // count if count and not size % count else 0, SIZES[2])
    if count * dtype.itemsize != size:
        found = f"{size:,} bytes, and its index says {count:,} ids of 2 or 4 bytes"
        raise Damaged(f"{shown(file.path)} has {found}: one of both was cut")
    ids = StoredArray(file.path, dtype, count=count)
    return TokenFile(ids, require_ascending(ends, count, index, "index"), scored=mask_of(file.path, count))


DATATROVE = Source(
    "datatrove",
    suffixes=(DS,),
    wanted="a .ds file and its .ds.index",
    advice="write the files again, or leave them out of data.path",
    tokens=tokens,
    companions=companions,
)
