"""The header of a safetensors file, which may be a stranger's: read with limits, and refused unless the
tensors that it names tile the rest of the file.

    8 bytes         the header's length, little-endian
    header          JSON: {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}
    data            tensor after tensor, offsets from here on
"""

import errno
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import WeightsError
from mpitrain.inputs import closed_on_error, open_file, os_errors_as, shown
from mpitrain.weights.bits import DTYPES

MOST_HEADER_BYTES = 1 << 24  # 150,000 tensors; a shard of DeepSeek-V3 has some 600
MOST_FILE_BYTES = 1 << 50
MOST_DIMS = 8
LENGTH = struct.Struct("<Q")
ALIGNMENT = 8  # of the data, by spaces after the header
METADATA = "__metadata__"
AGAIN = "get the file again"
# of a number, by the dtype in a header. Other dtypes than those of bits.py can lie there, but aren't read
NUM_BYTES = {code: dtype.itemsize for code, dtype in DTYPES.items()}
NUM_BYTES |= dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1)
NUM_BYTES |= dict(I16=2, U16=2, I32=4, U32=4, I64=8, U64=8, C64=8)


class Entry(NamedTuple):
    """A tensor of a file. begin: its first byte in the file."""

    name: str
    code: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f"{shown(key)} appears twice")
        fields[key] = value
    return fields


def parsed(content: bytes | bytearray, what: str) -> dict[str, Any]:
    """Return an object of JSON of a stranger. Raises ValueError, of one line, that begins with `what`."""
    try:
        value = json.loads(content.decode(), object_pairs_hook=_once)
    except (RecursionError, ValueError) as error:
        deep = isinstance(error, RecursionError)
        why = "brackets within brackets, too deep" if deep else shown(error)
        raise ValueError(f"{what} isn't valid JSON: {why}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no object of JSON")
    return value


class SafetensorsFile:
    """An open file, of which rows of a tensor can be read until close(). Raises WeightsError."""

    def __init__(self, path: Path):
        self.path = path
        with self._errors():
            self._descriptor = open_file(path, MOST_FILE_BYTES)
        with closed_on_error(self):
            self.entries = self._read_header()

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def rows(self, entry: Entry, first: int, last: int) -> np.ndarray:
        """Return rows [first, last) of a tensor in its own dtype; bf16 as BF16."""
        dtype = DTYPES[entry.code]
        of_row = entry.shape[1:]
        out = np.empty((last - first, *of_row), dtype)
        row_bytes = math.prod(of_row) * dtype.itemsize
        self._fill(memoryview(out.reshape(-1).view(np.uint8)), entry.begin + first * row_bytes)
        return out

    def _fill(self, out: memoryview, offset: int) -> None:
        """Read so many bytes. Not mapped: a file that is cut meanwhile is no signal."""
        while out:
            with self._errors():
                count = os.preadv(self._descriptor, [out], offset)
            if not count:
                raise self._error("it became shorter while it was read")
            offset += count
            out = out[count:]

    def _read_header(self) -> dict[str, Entry]:
        with self._errors():
            size = os.fstat(self._descriptor).st_size
        if size < LENGTH.size:
            raise self._error(f"it has {size} bytes, which is no safetensors file")
        start = bytearray(LENGTH.size)
        self._fill(memoryview(start), 0)
        (length,) = LENGTH.unpack(start)
        if length > MOST_HEADER_BYTES:
            raise self._error(f"a header of {length:,} bytes, at most {MOST_HEADER_BYTES:,} are read")
        data = LENGTH.size + length
        if data > size:
            raise self._error(f"a header of {length:,} bytes in a file of {size:,}: it was cut")
        content = bytearray(length)
        self._fill(memoryview(content), LENGTH.size)
        try:
            tree = parsed(content, "the header")
        except ValueError as error:
            raise self._error(str(error)) from None
        tree.pop(METADATA, None)
        entries = {name: self._entry(name, value, data) for name, value in tree.items()}
        self._require_tiles(entries, data, size)
        return entries

    def _entry(self, name: str, value: Any, data: int) -> Entry:
        if not isinstance(value, Mapping) or value.keys() != {"dtype", "shape", "data_offsets"}:
            raise self._error(f"{shown(name)} isn't described by dtype, shape and data_offsets")
        code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not _are_counts(shape) or len(shape) > MOST_DIMS or math.prod(shape) >= 2**50:
            raise self._error(f"{shown(name)} has the shape {shown(shape)}, which is none")
        if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._error(f"{shown(name)} has the data_offsets {shown(offsets)}, which are none")
        if not isinstance(code, str) or code not in NUM_BYTES:
            raise self._error(f"{shown(name)} has the dtype {shown(code)}, which no safetensors file has")
        num_bytes = math.prod(shape) * NUM_BYTES[code]
        given = offsets[1] - offsets[0]
        if given != num_bytes:
            takes = f"{code} {shape} takes {num_bytes:,} bytes"
            raise self._error(f"{shown(name)}: {takes}, data_offsets have {given:,}")
        return Entry(name, code, tuple(shape), data + offsets[0], num_bytes)

    def _require_tiles(self, entries: Mapping[str, Entry], data: int, size: int) -> None:
        at = data
        for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.num_bytes)):
            if entry.begin != at:
                what = "overlaps another tensor" if entry.begin < at else "leaves a gap before it"
                raise self._error(f"{shown(entry.name)} {what}")
            at += entry.num_bytes
        if at != size:
            ends = f"its tensors end at byte {at:,}, the file has {size:,}"
            raise self._error(f"{ends}: it was cut, or added to")

    def _error(self, what: str) -> WeightsError:
        return WeightsError(f"{shown(self.path)}: {what}; {AGAIN}")

    def _errors(self) -> AbstractContextManager[None]:
        return os_errors_as(WeightsError, shown(self.path), AGAIN)


def _are_counts(value: Any) -> bool:
    """Return whether a value of JSON is a list of whole numbers that a file can have."""
    return isinstance(value, list) and all(type(count) is int and 0 <= count < 2**50 for count in value)


def header_of(entries: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Return the first bytes of a file with these tensors: name, dtype, shape."""
    tree: dict[str, Any] = {METADATA: {"format": "pt"}}
    at = 0
    for name, code, shape in entries:
        end = at + math.prod(shape) * DTYPES[code].itemsize
        tree[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    content = json.dumps(tree, separators=(",", ":")).encode()
    content += b" " * (-(LENGTH.size + len(content)) % ALIGNMENT)
    if len(content) > MOST_HEADER_BYTES:
        raise OSError(errno.EFBIG, f"a header of {len(content):,} bytes; use a smaller --shard-size")
    return LENGTH.pack(len(content)) + content
