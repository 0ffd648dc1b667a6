"""A data source in a file of its own: tokens as little-endian 16-bit ids; a 0 ends each document.

PYTHONPATH=tests/support mpitrain run --set data.source=token_ids:TOKEN_IDS --set data.path=folder
"""

import os
from collections.abc import Iterator

import numpy as np

from mpitrain.data.source import Document, File, Position, Source
from mpitrain.inputs import read_file


def read(file: File, begin: Position, text_key: str) -> Iterator[Document]:
    """Yield the documents of a file. A position is a number of bytes, and of documents."""
    ids = np.frombuffer(read_file(file.path, 1 << 30), "<u2")
    first = begin.offset // ids.itemsize
    ends = [first + end for end in np.flatnonzero(ids[first:] == 0).tolist()]
    for number, end in enumerate([*ends, len(ids)], start=begin.lines + 1):
        after = Position(begin.files, (end + 1) * ids.itemsize, number)
        yield Document(f"{file.name}:{number}", b"", after, ids=ids[first:end])
        first = end + 1


TOKEN_IDS = Source("token-ids", read, suffixes=(".ids",))
if "NOTE_IMPORT" in os.environ:
    open(os.environ["NOTE_IMPORT"], "a").close()
