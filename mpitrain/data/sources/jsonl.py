"""Files of JSON lines (JSONL), each line a document: the text under a key.

What nobody reads of a line may be anything that Python's json writes: NaN, halves of characters.
"""

import codecs
import io
import json
from collections.abc import Collection, Iterator
from functools import cache, partial
from typing import Any, BinaryIO

import msgspec

from mpitrain.data.compressed import ENDINGS, unpacked
from mpitrain.data.file_kinds import HEAD_BYTES, kind_of, with_advice
from mpitrain.data.source import NO_TEXT, Damaged, Document, File, Position, Source
from mpitrain.inputs import PIECE, listed, open_file, shown

MOST_BYTES = 1 << 50
SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")
MOST_LINE_BYTES = 1 << 26
KINDS = {dict: "an object", list: "an array", str: "a string", bool: "true or false"}
KINDS |= {int: "a number", float: "a number", type(None): "null"}
MARK = codecs.BOM_UTF8.decode()
MOST_DIGITS = 640  # that Python reads as an integer, however it is set


def read(file: File, begin: Position, text_key: str) -> Iterator[Document]:
    """Yield a document for each line that is not blank; a damaged one says what is wrong with it."""
    for line, after in lines_of(file, begin):
        text, damage = b"", ""
        try:
            text = text_of(line, text_key)
        except ValueError as error:
            damage = f"{shown(file.path)}, line {after.lines}: found {error}"
        name = f"{file.name}:{after.lines}"
        yield Document(name, text, after, "" if text or damage else NO_TEXT, damage=damage)


def lines_of(file: File, begin: Position) -> Iterator[tuple[bytes, Position]]:
    """Yield the lines that are not blank, and where each ends. Raises Damaged, OSError."""
    with open(open_file(file.path, MOST_BYTES), "rb") as opened:
        lines = io.BufferedReader(unpacked(opened, file.path), HEAD_BYTES)
        _require_lines(file, lines.peek(HEAD_BYTES)[:HEAD_BYTES])
        if lines.seekable():
            lines.seek(begin.offset)
        else:  # compressed: it has to be read up to there
            left = begin.offset
            while left and (piece := lines.read(min(left, PIECE))):
                left -= len(piece)
        yield from _lines(file, lines, begin)


def _require_lines(file: File, head: bytes) -> None:
    """Raise Damaged for a file that begins as one of another kind."""
    if _is_array(head):
        advice = "write its objects one a line, as jq -c '.[]' does"
        raise Damaged(f"{shown(file.path)} is one JSON array, not lines of JSON: {advice}")
    if kind := kind_of(head):
        raise Damaged(with_advice(f"{shown(file.path)} is {kind}, not lines of JSON", kind))


def _lines(file: File, lines: BinaryIO, begin: Position) -> Iterator[tuple[bytes, Position]]:
    """Yield the lines that are not blank, from a position on, and where each ends."""
    offset = begin.offset
    every = iter(partial(lines.readline, MOST_LINE_BYTES + 1), b"")
    for number, line in enumerate(every, start=begin.lines + 1):
        if len(line) > MOST_LINE_BYTES:
            found = f"line {number} has more than {MOST_LINE_BYTES:,} bytes"
            raise Damaged(f"{shown(file.path)} cannot be read: {found}")
        offset += len(line)
        if line := line.removeprefix(codecs.BOM_UTF8).strip():
            yield line, Position(begin.files, offset, number)


def _is_array(head: bytes) -> bool:
    """Return whether a file begins as an array of objects does, on a line or over several."""
    begin = head.removeprefix(codecs.BOM_UTF8).lstrip()
    return begin[:1] == b"[" and begin[1:].lstrip()[:1] in (b"{", b"")


def text_of(line: bytes, key: str) -> bytes:
    """Return the text under a key, in UTF-8. Raises ValueError that says what is there instead."""
    try:
        text = msgspec.json.decode(line, type=_record(key)).text
    except (msgspec.MsgspecError, ValueError, RecursionError):
        text = _slowly(line, key)
    try:
        return text.removeprefix(MARK).encode()
    except UnicodeEncodeError as error:
        half = f"half of a character that JSON writes as two ({shown(text[error.start])})"
        raise ValueError(f'{half} under the key "{shown(key)}"') from None


@cache
def _record(key: str) -> type[msgspec.Struct]:
    """Return the type of a line; other keys are allowed and ignored."""
    return msgspec.defstruct("Record", [("text", str)], rename={"text": key})


def _slowly(line: bytes, key: str) -> str:
    """Return the text of a line that msgspec doesn't take."""
    found = loaded(line)
    if not isinstance(found, dict):
        raise ValueError(f"{KINDS[type(found)]}, not an object")
    if key not in found:
        others = f", but {listed(found)}: {_advice(found)}" if found else ""
        raise ValueError(f'an object without "{shown(key)}"{others}')
    if not isinstance(found[key], str):
        raise ValueError(f'{KINDS[type(found[key])]} under the key "{shown(key)}"')
    return found[key]


def loaded(line: bytes) -> Any:
    """Return what a line of JSON holds. Raises ValueError that says what is there instead."""
    try:
        return json.loads(line, parse_int=_number)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start:,} of the line)") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON ({shown(error.msg)}, character {error.pos:,})") from None
    except RecursionError:
        raise ValueError("brackets within brackets, too deep") from None


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) <= MOST_DIGITS else float(digits)


def _advice(keys: Collection[str]) -> str:
    if "messages" in keys or {"prompt", "completion"} <= {*keys}:
        return 'data.source = "chat" trains on answers'
    return "data.text_key says which one has the text"


JSONL = Source(
    "jsonl",
    read,
    suffixes=(*SUFFIXES, *(suffix + ending for suffix in (*SUFFIXES, ".json") for ending in ENDINGS)),
    most_bytes=MOST_BYTES,
    wanted="a .jsonl file with text",
    advice='every line must be an object with a string under the key "{text_key}" (data.text_key)',
    keyed=True,
)
