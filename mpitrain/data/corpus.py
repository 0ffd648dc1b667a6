"""The documents of a corpus: Python's own standard library, plain text files, or JSON lines."""

import codecs
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from mpitrain.data.files import MOST_BYTES, SOURCES, check_source, list_files, no_text, unreadable
from mpitrain.errors import DataError
from mpitrain.inputs import open_file, read_file, shown

MOST_LINE_BYTES = 1 << 26  # of a JSONL file

__all__ = ["SOURCES", "check_source", "documents"]


class Record(msgspec.Struct):
    """One line of a JSONL file; other keys are allowed and ignored."""

    text: str


def documents(source: str, path: str | Path | None) -> Iterator[tuple[str, bytes]]:
    """Yield (name, UTF-8 bytes) of every document that is not empty, always in the same order.

    A document is a file, or one line of a JSONL file; its name is for messages. One document is in memory at a time.
    """
    read = _lines if source == "jsonl" else _whole
    found = False
    for name, file in list_files(source, path):
        try:
            for document, text in read(name, file):
                if text:
                    found = True
                    yield document, text
        except OSError as error:
            raise unreadable(file, error.strerror) from error
    if not found:
        raise no_text(source, path)


def _whole(name: str, file: Path) -> Iterator[tuple[str, bytes]]:
    text = read_file(file, MOST_BYTES["text"])
    try:
        text.decode()
    except UnicodeDecodeError as error:
        found = f"{shown(file)} is not UTF-8 text (byte {error.start})"
        raise DataError(f"data.path: {found}; convert it or move it out of data.path") from error
    yield name, text


def _lines(name: str, file: Path) -> Iterator[tuple[str, bytes]]:
    with open(open_file(file, MOST_BYTES["jsonl"]), "rb") as lines:
        for number, line in enumerate(iter(partial(lines.readline, MOST_LINE_BYTES + 1), b""), start=1):
            if len(line) > MOST_LINE_BYTES:
                raise unreadable(file, f"line {number} has more than {MOST_LINE_BYTES:,} bytes")
            line = line.removeprefix(codecs.BOM_UTF8).strip()
            if line:
                yield f"{name}:{number}", _text_of(line, f"{shown(file)}, line {number}")


def _text_of(line: bytes, place: str) -> bytes:
    try:
        return msgspec.json.decode(line, type=Record).text.encode()
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise DataError(f'data.path: {place}: {shown(error)}; every line must be an object with a string under the key "text"') from error
