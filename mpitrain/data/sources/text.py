"""Plain text files, each a document. Of a folder every file is read; what is no text there is left out."""

import codecs
from collections.abc import Iterator

from mpitrain.data.file_kinds import HEAD_BYTES, UTF_16, kind_of, markup_of, with_advice
from mpitrain.data.memory_left import shortage
from mpitrain.data.source import NO_TEXT, Damaged, Document, File, Position, Source
from mpitrain.inputs import read_file, shown

MOST_BYTES = 1 << 32  # a document is in memory at once
COPIES = 4  # of a document: its pieces, the whole, and as text
BINARY = "no text but "


def whole_text(file: File, begin: Position) -> Document:
    """Return a file as a document. Raises Damaged if it is no UTF-8."""
    size = file.path.stat().st_size
    if size <= MOST_BYTES and (lacking := shortage(COPIES * size)):
        raise Damaged(f"{shown(file.path)} is one document: {lacking}", "")
    text = read_file(file.path, MOST_BYTES)
    try:
        text.decode()
    except UnicodeDecodeError as error:
        kind = kind_of(text[:HEAD_BYTES])
        found = f"is {kind}, not UTF-8 text" if kind else f"is not UTF-8 text (byte {error.start:,})"
        raise Damaged(with_advice(f"{shown(file.path)} {found}", kind), kind) from None
    text = text.removeprefix(codecs.BOM_UTF8)
    markup = markup_of(file.name, text[:HEAD_BYTES])
    return Document(file.name, text, Position(begin.files + 1), "" if text else NO_TEXT, markup=markup)


def read(file: File, begin: Position, text_key: str) -> Iterator[Document]:
    """Yield the one document of a file, without text for one that lies in a folder and is something else."""
    try:
        yield whole_text(file, begin)
    except Damaged as error:
        _, kind = error.args
        if kind in ("", UTF_16) or file.chosen:
            raise
        yield Document(file.name, b"", Position(begin.files + 1), BINARY + kind)


TEXT = Source("text", read, most_bytes=MOST_BYTES)
