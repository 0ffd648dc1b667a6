"""Files of token ids, of any format: which documents they hold.

    ends by        documents
    an index       stretches that the index names; an end of text that closes one isn't part of it
    a token        what stands between ends of text, wherever these stand: after each document, or
                   before it; nothing between two of them is no document
    nothing        the whole file

A begin of text that opens a document isn't part of it either. tokens.bin then has the run's own ends
and begins (data.end_of_text, data.begin_of_text): one corpus has the same tokens in every format.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mpitrain.data.memory_left import shortage
from mpitrain.data.read_tokens import pread
from mpitrain.data.source import NO_TEXT, Damaged, Document, File, Position, TokenFile, TokenRule
from mpitrain.inputs import open_file, shown

BLOCK = 1 << 20  # ids that are read at once
LONGEST = 1 << 28  # ids of a document, which is in memory at once
MOST_BYTES = 1 << 60
INDEX_COPIES = 5  # of an index, until the ends of documents are made of it
LOSS = ".loss"  # what the name of a mask has after that of the ids
TYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "uint16", "uint32", "uint64")}
NO_RULE = TokenRule()


class StoredArray:
    """Numbers in a file. They are read, not mapped: a map of a disk that fails ends the process."""

    def __init__(self, path: Path, dtype: np.dtype, begin: int = 0, count: int | None = None):
        """begin: bytes before them.  count: how many; None: up to the end. Raises Damaged, OSError."""
        self.path = path
        self.dtype = dtype
        self._begin = begin
        size = file_size(path) - begin
        self.count = size // dtype.itemsize if count is None else count
        if count is None and size % dtype.itemsize:
            raise Damaged(
                f"{shown(path)} has {size:,} bytes of ids, which is no multiple of {dtype.itemsize}: it was "
                f"cut, or has ids of another size than {dtype.name} (data.dtype)"
            )
        if count is not None and size != count * dtype.itemsize:
            raise Damaged(
                f"{shown(path)} has {size:,} bytes after its header, needed {count * dtype.itemsize:,} for "
                f"{count:,} numbers of type {dtype.name}: it was cut, or its header is damaged"
            )

    def read(self, first: int, last: int) -> np.ndarray:
        """Return numbers `first` to `last`. Raises Damaged, OSError."""
        return read_part(self.path, self.dtype, self._begin + first * self.dtype.itemsize, last - first)


def type_of_ids(rule: TokenRule, usual: str) -> np.dtype:
    """Return the type of ids in a file that doesn't say it. usual: that of its format."""
    return TYPES[rule.dtype or usual]


def file_size(path: Path) -> int:
    """Return the bytes of a regular file. Raises OSError."""
    with open(open_file(path, MOST_BYTES), "rb", buffering=0) as file:
        return os.fstat(file.fileno()).st_size


def head_of(path: Path, count: int) -> bytes:
    """Return the first bytes of a file. Raises OSError."""
    with open(open_file(path, MOST_BYTES), "rb", buffering=0) as file:
        return pread(file.fileno(), count, 0)


def read_part(path: Path, dtype: np.dtype, begin: int, count: int) -> np.ndarray:
    """Return `count` numbers that begin at a byte of a file. Raises Damaged, OSError."""
    size = count * dtype.itemsize
    if lacking := shortage(INDEX_COPIES * size):
        raise Damaged(f"{shown(path)} declares {count:,} numbers: {lacking}")
    with open(open_file(path, MOST_BYTES), "rb", buffering=0) as file:
        content = pread(file.fileno(), size, begin)
    if len(content) != size:
        raise Damaged(f"{shown(path)} became shorter while it was read")
    return np.frombuffer(content, dtype)


def with_ending(path: Path, ending: str) -> Path:
    """Return the file with the same name and an ending more."""
    return path.with_name(path.name + ending)


def mask_of(path: Path, count: int) -> StoredArray | None:
    """Return the loss mask that lies beside a file of ids: a byte each, 0 or 1. Raises Damaged, OSError."""
    mask = with_ending(path, LOSS)
    return StoredArray(mask, np.dtype("u1"), count=count) if mask.exists() else None


def require_ascending(ends: np.ndarray, count: int, path: Path, what: str) -> np.ndarray:
    """Return ends of documents as int64. Raises Damaged unless they ascend up to the number of ids."""
    if ends.size and int(ends[-1]) != count:
        found = f"says that documents end at {int(ends[-1]):,}, there are {count:,} ids"
        raise Damaged(f"{shown(path)} {found}: {what} and ids don't match, or one was cut")
    signed = ends.astype(np.int64)
    if (signed < 0).any() or (np.diff(signed) < 0).any():
        wrong = int(np.argmax(np.append(False, np.diff(signed) < 0)))
        raise Damaged(f"{shown(path)}: document {wrong + 1:,} ends before the one before it")
    return signed


def token_documents(file: File, tokens: TokenFile, begin: Position, rule: TokenRule) -> Iterator[Document]:
    """Yield the documents of a file of ids from a position on. Raises Damaged, OSError."""
    remark = tokens.remark
    stretches = _by_token if tokens.ends is None else _by_index
    for number, (first, ids, scored, after) in enumerate(
        stretches(file, tokens, begin, rule), start=begin.lines + 1
    ):
        begins = int(bool(ids.size) and int(ids[0]) == rule.begin_of_text)
        # without its end, which an index leaves where it is
        ends = int(ids.size > begins and tokens.ends is not None and int(ids[-1]) == rule.end_of_text)
        last = ids.size - ends
        yield Document(
            f"{file.name}, document {number:,} (token {first:,})",
            b"",
            Position(begin.files, after * tokens.ids.dtype.itemsize, number),
            "" if last > begins else NO_TEXT,
            ids=ids[begins:last],
            scored=None if scored is None else scored[begins:last] != 0,
            remark=remark,
        )
        remark = ""


# (where it begins, its ids, their mask, where the next one begins)
_Stretch = tuple[int, np.ndarray, np.ndarray | None, int]


def _by_index(file: File, tokens: TokenFile, begin: Position, rule: TokenRule) -> Iterator[_Stretch]:
    """Yield the documents of an index, as many in a read as have BLOCK ids together."""
    ends = tokens.ends
    assert ends is not None
    number = begin.lines
    while number < len(ends):
        first = int(ends[number - 1]) if number else 0
        stop = max(number + 1, int(np.searchsorted(ends, first + BLOCK, side="right")))
        stop = min(stop, number + BLOCK)
        _require_length(file, int(ends[number]) - first)
        last = int(ends[stop - 1])
        ids = tokens.ids.read(first, last)
        scored = tokens.scored.read(first, last) if tokens.scored else None
        place = first
        for end in ends[number:stop].tolist():
            within = slice(place - first, end - first)
            yield place, ids[within], None if scored is None else scored[within], end
            place = end
        number = stop


def _by_token(file: File, tokens: TokenFile, begin: Position, rule: TokenRule) -> Iterator[_Stretch]:
    """Yield what stands between two ends of text, where that is anything."""
    count = tokens.ids.count
    first = begin.offset // tokens.ids.dtype.itemsize
    pieces = list[np.ndarray]()  # of a document, of which no end was seen yet
    for place in range(first, count, BLOCK):
        ids = tokens.ids.read(place, min(place + BLOCK, count))
        ends = [] if rule.end is None else np.flatnonzero(ids == rule.end).tolist()
        done = 0
        for end in ends:
            whole = np.concatenate([*pieces, ids[done:end]]) if pieces else ids[done:end]
            if whole.size:
                yield first, whole, _mask(tokens, first, whole.size), place + end + 1
            pieces = []
            done = end + 1
            first = place + done
        pieces += [ids[done:]] * (done < ids.size)
        _require_length(file, place + ids.size - first)
    if pieces:
        yield first, np.concatenate(pieces), _mask(tokens, first, count - first), count


def _mask(tokens: TokenFile, first: int, count: int) -> np.ndarray | None:
    return tokens.scored.read(first, first + count) if tokens.scored else None


def _require_length(file: File, length: int) -> None:
    if length > LONGEST:
        raise Damaged(
            f"{shown(file.path)} has a document of more than {LONGEST:,} ids: "
            "data.ends says which id ends one"
        )
