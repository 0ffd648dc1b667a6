"""Ids in .npy files: with NumPy's header, or without one, as OLMo and dolma write them.

NAME.npy         \\x93NUMPY: its header says the type; else unsigned ids of the least type that
                 has the vocabulary, or of data.dtype
NAME.csv.gz      of dolma: begin, end, ... of each document, in ids
NAME.npy.loss    loss mask, a byte for each id
"""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import TextIO

import numpy as np

from mpitrain.data import file_kinds
from mpitrain.data.compressed import unpacked
from mpitrain.data.source import Damaged, File, Source, TokenFile, TokenRule
from mpitrain.data.token_files import (
    LOSS,
    MOST_BYTES,
    StoredArray,
    head_of,
    mask_of,
    require_ascending,
    type_of_ids,
    with_ending,
)
from mpitrain.inputs import open_file, shown

NPY = ".npy"
MAGIC = b"\x93NUMPY"
HEADER_BYTES = 10_000  # NumPy reads no longer header of a stranger either
CHECKED = 1 << 16  # ids
LINE_BYTES = 1 << 16
MOST_UPPER = 4  # upper halves of ids below 262,144
# of two or three bytes: ids may be these
MAGIC_OF_FILES = {magic: kind for magic, kind in file_kinds.MAGIC.items() if len(magic) > 3}


def companions(path: Path) -> Sequence[Path]:
    return [with_ending(path, LOSS), _table_of(path)] if path.suffix == NPY else []


def tokens(file: File, rule: TokenRule) -> TokenFile:
    """Return the ids. Raises Damaged for another array than of integers in a row."""
    if head_of(file.path, len(MAGIC)) == MAGIC:
        ids = _with_header(file.path)
    else:
        ids = StoredArray(file.path, type_of_ids(rule, least_type(rule.vocab)))
        require_type(ids)
    table = _table_of(file.path)
    ends = _ends(file.path, ids.count) if table.exists() else None
    return TokenFile(ids, ends, mask_of(file.path, ids.count))


def least_type(vocab: int) -> str:
    """Return the type in which OLMo stores ids, by the size of the vocabulary."""
    return np.min_scalar_type(vocab - 1).name


def require_type(ids: StoredArray) -> None:
    """Raise Damaged for a file of another format, or halves of larger ids, which look like ids."""
    first = ids.read(0, min(ids.count, CHECKED))
    head = first[:8].tobytes()
    if kind := next((kind for magic, kind in MAGIC_OF_FILES.items() if head.startswith(magic)), ""):
        raise Damaged(f"{shown(ids.path)} is {kind}, not ids without a header")
    halves = first[: first.size // 2 * 2].reshape(-1, 2)
    upper, lower = halves[:, 1], halves[:, 0]
    may_be_halves = ids.dtype.itemsize < 8 and len(halves) > 8
    if may_be_halves and (upper < MOST_UPPER).all() and (lower >= MOST_UPPER).any():
        found = f"every second number is below {MOST_UPPER}, read as {ids.dtype.name}"
        advice = f'data.dtype = "uint{16 * ids.dtype.itemsize}" says so'
        raise Damaged(f"{shown(ids.path)}: {found}: its ids are larger; {advice}")


def _with_header(path: Path) -> StoredArray:
    head = io.BytesIO(head_of(path, HEADER_BYTES + 16))
    library = np.lib.format
    try:
        version = library.read_magic(head)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"it is of version {version}")
        read = library.read_array_header_1_0 if version == (1, 0) else library.read_array_header_2_0
        shape, _, dtype = read(head, max_header_size=HEADER_BYTES)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, TokenError) as error:
        raise Damaged(f"{shown(path)}: NumPy can't read its header: {shown(error)}") from None
    if dtype.kind not in "iu" or len(shape) != 1:
        found = f"{shown(str(dtype))} and shape {shape}"
        raise Damaged(f"{shown(path)} has {found}, needed integers in a row, as array.reshape(-1) has them")
    return StoredArray(path, dtype, head.tell(), shape[0])


def _table_of(path: Path) -> Path:
    return path.with_suffix(".csv.gz")


def _short_lines(lines: TextIO, table: Path) -> Iterator[str]:
    while line := lines.readline(LINE_BYTES):
        if len(line) == LINE_BYTES:
            raise Damaged(f"{shown(table)} has a line of more than {LINE_BYTES:,} characters")
        yield line


def _ends(path: Path, count: int) -> np.ndarray:
    """Return where documents end, by dolma's table of them. count: ids in the file of this path."""
    table = _table_of(path)
    ends = []
    last = 0
    try:
        with open(open_file(table, MOST_BYTES), "rb") as opened:
            lines = io.TextIOWrapper(unpacked(opened, table), newline="")
            for number, row in enumerate(csv.reader(_short_lines(lines, table)), start=1):
                begin, end = int(row[0]), int(row[1])
                if begin != last or not begin <= end <= count:
                    found = f"{begin:,} to {end:,} after {last:,}, of {count:,} ids"
                    raise Damaged(f"{shown(table)}, line {number:,}: {found}")
                if number > count:
                    raise Damaged(f"{shown(table)} has more documents than {shown(path)} has ids")
                ends.append(end)
                last = end
    except (ValueError, IndexError, csv.Error) as error:
        raise Damaged(f"{shown(table)}, line {len(ends) + 1:,}: {shown(error) or 'cut'}") from None
    if last < count:  # of no document, dolma says; here it is the last one
        ends.append(count)
    return require_ascending(np.array(ends, np.int64), count, table, "table")


NUMPY_ARRAY = Source(
    "npy",
    suffixes=(NPY,),
    wanted="a .npy file of ids",
    advice="data.dtype says the type of ids without a header; else write the file again",
    tokens=tokens,
    companions=companions,
)
