"""Tables of Parquet and Arrow: each row a document, the text or the ids under a column.

A folder of the datasets library (save_to_disk) has its files in state.json. pyarrow, which is
written in C++, reads in a child with limits (data/table_reader.py).
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from mpitrain.data.limited import LimitedError, Limits, parts
from mpitrain.data.source import NO_TEXT, Damaged, Document, File, Position, Source
from mpitrain.data.table_reader import TableRequest, TableRow
from mpitrain.errors import DataError
from mpitrain.inputs import listed, read_file, shown

SUFFIXES = (".parquet", ".arrow")
STATE, SPLITS = "state.json", "dataset_dict.json"
STATE_BYTES = 1 << 24
LIMITS = Limits(memory=6 << 30, cpu_s=1 << 20)  # address space: pyarrow itself takes 1 GB of it
READER = "mpitrain.data.table_reader"
ROWS = msgspec.msgpack.Decoder(list[TableRow])


def read(file: File, begin: Position, text_key: str) -> Iterator[Document]:
    """Yield a document for each row from a position on, counted in rows. Raises Damaged, LibraryError."""
    number = begin.offset
    request = msgspec.msgpack.encode(TableRequest(str(file.path.absolute()), text_key, number))
    try:
        for part in parts(READER, request, LIMITS):
            for row in ROWS.decode(part):
                number += 1
                yield _document(file, row, number, Position(begin.files, number, number))
    except LimitedError as error:
        raise Damaged(f"{shown(file.path)} can't be read after row {number:,}: {shown(error)}") from None


def _document(file: File, row: TableRow, number: int, after: Position) -> Document:
    name = f"{file.name}, row {number:,}"
    if row.damage:
        return Document(name, b"", after, damage=f"{shown(file.path)}, row {number:,}: {row.damage}")
    if row.ids is None:
        return Document(name, row.text, after, "" if row.text else NO_TEXT)
    ids = np.frombuffer(row.ids.content, row.ids.dtype)
    scored = None if row.scored is None else np.frombuffer(row.scored, bool)
    return Document(name, b"", after, "" if ids.size else NO_TEXT, ids=ids, scored=scored)


def files_in(root: Path) -> Sequence[Path] | None:
    """Return the files of a folder of the datasets library, in its order; None for another folder.

    Raises DataError for one that has several splits, or an order that isn't that of its files.
    """
    if (root / SPLITS).exists():
        names = listed([root / str(split) for split in _list(_json(root / SPLITS), "splits")])
        raise DataError(f"data.path = {shown(root)} has several splits; set it to one of them: {names}")
    if not (root / STATE).exists():
        return None
    state = _json(root / STATE)
    if state.get("_indices_data_files"):
        raise DataError(
            f"data.path = {shown(root)} has its rows in another order than its files "
            "(_indices_data_files); save it after dataset.flatten_indices()"
        )
    found = [entry.get("filename") for entry in _list(state, "_data_files") if isinstance(entry, dict)]
    if not found or not all(isinstance(name, str) and Path(name).name == name for name in found):
        raise DataError(f"data.path: {shown(root / STATE)} names no files of its folder; save it again")
    return [root / name for name in found]


def _list(tree: dict, key: str) -> list:
    value = tree.get(key)
    return value if isinstance(value, list) else []


def _json(path: Path) -> dict:
    try:
        found = json.loads(read_file(path, STATE_BYTES))
    except OSError as error:
        raise DataError(f"data.path: {shown(path)} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"data.path: {shown(path)} is no JSON: {shown(error)}; save it again") from None
    if not isinstance(found, dict):
        raise DataError(f"data.path: {shown(path)} is no JSON object; save it again")
    return found


PARQUET = Source(
    "parquet",
    read,
    suffixes=SUFFIXES,
    most_bytes=1 << 50,
    wanted="a .parquet or .arrow file with text",
    advice='data.text_key says which column has the text or the ids: "{text_key}" now',
    keyed=True,
    files_in=files_in,
)
