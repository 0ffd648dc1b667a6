"""The documents of a corpus: Python's own standard library, plain text files, or JSON lines."""

import codecs
from collections.abc import Iterator
from functools import partial
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from mpitrain.data.corpus_files import (
    MOST_BYTES,
    SOURCES,
    File,
    Listing,
    Paths,
    check_source,
    list_files,
    no_text,
    refused,
    unique,
)
from mpitrain.data.json_lines import text_of
from mpitrain.inputs import open_file, read_file, shown

MOST_LINE_BYTES = 1 << 26  # of a JSONL file
NO_TEXT = "without text"
BINARY = "no text but "
HEAD_BYTES = 8192
MAGIC = {  # what a file begins with
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
    b"\x89HDF": "HDF5",
    b"%PDF": "PDF",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
TEXT_AFTER_ALL = {"UTF-16": "convert it to UTF-8"} | dict.fromkeys(
    ("gzip", "zstd", "bzip2", "xz", "zip"), "unpack it"
)

__all__ = ["SOURCES", "check_source", "documents"]


class Position(msgspec.Struct, frozen=True):
    """Where a document ends: in how many files before this one all is read, and how much of this
    one, in bytes and lines.
    """

    files: Annotated[int, Meta(ge=0)] = 0
    offset: Annotated[int, Meta(ge=0)] = 0
    lines: Annotated[int, Meta(ge=0)] = 0


BEGIN = Position()


class Document(NamedTuple):
    """text: in UTF-8.

    after: where the next one begins.
    left_out: why there is no text, if there is none.
    file: its number.
    """

    name: str
    text: bytes
    after: Position
    left_out: str = ""
    file: int = 0


class Damaged(Exception):
    """What is wrong with a file, for a message that names it."""


def documents(
    source: str, path: Paths, begin: Position = BEGIN, text_key: str = "text"
) -> Iterator[Document]:
    """Yield every document that is not empty, always in the same order, from `begin` on.

    A document is a file, or one line of a JSONL file; its name is for messages. One document is in
    memory at a time. Raises DataError that names all files that can't be read, when it has come to
    the end.
    """
    for document in all_documents(source, path, unique(source, list_files(source, path)), begin, text_key):
        if document.text:
            yield document


def all_documents(
    source: str, path: Paths, listing: Listing, begin: Position = BEGIN, text_key: str = "text"
) -> Iterator[Document]:
    """Yield the documents of a listing, and what has no text, too.

    From the first file on that is damaged, they have none any more.
    """
    read = partial(_lines, key=text_key) if source == "jsonl" else partial(_whole, source)
    found = begin != BEGIN
    problems = list[str]()
    for number, file in enumerate(listing.files[begin.files :], start=begin.files):
        within = begin if number == begin.files else Position(number)
        try:
            for document in read(file, within):
                found = found or bool(document.text)
                yield document._replace(text=b"" if problems else document.text, file=number)
        except Damaged as error:
            problems.append(error.args[0])
        except OSError as error:
            problems.append(f"{shown(file.path)} cannot be read: {error.strerror}")
    if problems:
        raise refused(problems, _advice(source, text_key))
    if not found:
        raise no_text(source, path, listing.left_out)


def _advice(source: str, text_key: str) -> str:
    if source == "jsonl":
        return f'every line must be an object with a string under the key "{shown(text_key)}" (data.text_key)'
    return (
        "convert it or move it out of data.path, or choose files by a pattern, such as data.path = "
        '"folder/**/*.txt"'
    )


def _whole(source: str, file: File, begin: Position) -> Iterator[Document]:
    text = read_file(file.path, MOST_BYTES["text"])
    after = Position(begin.files + 1)
    try:
        text.decode()
    except UnicodeDecodeError as error:
        kind = _kind(text[:HEAD_BYTES])
        if kind not in ("", "UTF-16") and not file.chosen and source == "text":
            yield Document(file.name, b"", after, BINARY + kind)
            return
        found = (
            f"{shown(file.path)} is {kind}, not UTF-8 text"
            if kind
            else f"{shown(file.path)} is not UTF-8 text (byte {error.start:,})"
        )
        raise Damaged(f"{found}{': ' * (kind in TEXT_AFTER_ALL)}{TEXT_AFTER_ALL.get(kind, '')}") from None
    text = text.removeprefix(codecs.BOM_UTF8)
    yield Document(file.name, text, after, "" if text else NO_TEXT)


def _lines(file: File, begin: Position, key: str) -> Iterator[Document]:
    first, damaged = "", 0
    with open(open_file(file.path, MOST_BYTES["jsonl"]), "rb") as lines:
        head = lines.read(HEAD_BYTES)
        kind = _kind(head)
        if _is_array(head):
            advice = "write its objects one a line, as jq -c '.[]' does"
            raise Damaged(f"{shown(file.path)} is one JSON array, not lines of JSON: {advice}")
        if kind:
            raise Damaged(
                f"{shown(file.path)} is {kind}, not lines of "
                f"JSON{': ' * (kind in TEXT_AFTER_ALL)}{TEXT_AFTER_ALL.get(kind, '')}"
            )
        lines.seek(begin.offset)
        offset = begin.offset
        for number, line in enumerate(
            iter(partial(lines.readline, MOST_LINE_BYTES + 1), b""), start=begin.lines + 1
        ):
            if len(line) > MOST_LINE_BYTES:
                raise Damaged(
                    f"{shown(file.path)} cannot be read: line {number} has more than {MOST_LINE_BYTES:,} "
                    "bytes"
                )
            offset += len(line)
            line = line.removeprefix(codecs.BOM_UTF8).strip()
            if not line:
                continue
            text = b""
            after = Position(begin.files, offset, number)
            try:
                text = text_of(line, key)
            except ValueError as error:
                damaged = damaged + 1
                first = first or f"{shown(file.path)}, line {number}: found {error}"
            yield Document(f"{file.name}:{number}", b"" if damaged else text, after, "" if text else NO_TEXT)
    if damaged:
        raise Damaged(f"{first}{f' (and {damaged - 1:,} lines more)' * (damaged > 1)}")


def _is_array(head: bytes) -> bool:
    """Return whether a file begins as an array of objects does, on a line or over several."""
    begin = head.removeprefix(codecs.BOM_UTF8).lstrip()
    return begin[:1] == b"[" and begin[1:].lstrip()[:1] in (b"{", b"")


def _kind(head: bytes) -> str:
    """Return what a file is that is no UTF-8 text, by its first bytes; "" if that isn't known."""
    for magic, kind in MAGIC.items():
        if head.startswith(magic):
            return kind
    return "binary" if b"\0" in head and not _is_utf8(head) else ""


def _is_utf8(head: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True
