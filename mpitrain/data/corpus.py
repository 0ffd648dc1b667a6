"""The documents of a corpus: Python's own standard library, plain text files, or JSON lines."""

import codecs
from collections.abc import Iterator
from pathlib import Path

import msgspec

from mpitrain.data.files import SOURCES, check_source, list_files, no_text, unreadable
from mpitrain.errors import DataError

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
    text = file.read_bytes()
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"data.path: {file} is not UTF-8 text (byte {error.start}); convert it or move it out of data.path") from error
    yield name, text


def _lines(name: str, file: Path) -> Iterator[tuple[str, bytes]]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            line = line.removeprefix(codecs.BOM_UTF8).strip()
            if line:
                yield f"{name}:{number}", _text_of(line, f"{file}, line {number}")


def _text_of(line: bytes, place: str) -> bytes:
    try:
        return msgspec.json.decode(line, type=Record).text.encode()
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise DataError(f'data.path: {place}: {error}; every line must be an object with a string under the key "text"') from error
