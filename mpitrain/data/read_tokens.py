"""Prepared tokens in a file: mapped into memory, or read by calls where they are asked for (data.read)."""

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mpitrain.data.origin import OWN
from mpitrain.errors import DataError
from mpitrain.inputs import open_regular, os_errors_as

MAP = "map"


class ReadTokens:
    """Numbers in a file, of which a slice or some places are read by pread. Threads may share it."""

    def __init__(self, file: Path, opened: BinaryIO, dtype: np.dtype, count: int):
        """opened: the file; it is closed with this object."""
        self.dtype = dtype
        self._count = count
        self._file = file
        self._opened = opened

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, places: slice | np.ndarray) -> np.ndarray:
        """Return the numbers of a stretch, or those at some places. Raises DataError."""
        if isinstance(places, slice):
            begin, last, _ = places.indices(self._count)
            return self._read(begin, last)
        found = [self._read(place, place + 1) for place in places.tolist()]
        return np.concatenate(found) if found else np.empty(0, self.dtype)

    def _read(self, begin: int, last: int) -> np.ndarray:
        size = max(last - begin, 0) * self.dtype.itemsize
        with os_errors_as(DataError, f"{self._file} cannot be read", "start again"):
            content = pread(self._opened.fileno(), size, begin * self.dtype.itemsize)
        if len(content) < size:
            raise DataError(f"{self._file} became shorter while it was read; start again")
        return np.frombuffer(content, self.dtype)


Tokens = np.ndarray | ReadTokens


def pread(descriptor: int, count: int, place: int) -> bytes:
    """Read so many bytes, or up to the end of the file; the system may give fewer at a time."""
    pieces = list[bytes]()
    while count and (piece := os.pread(descriptor, min(count, 1 << 30), place)):
        pieces.append(piece)
        place += len(piece)
        count -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def open_numbers(file: Path, dtype: np.dtype, count: int, read: str = MAP) -> Tokens:
    """Open all numbers of a file, read-only: [count]. A map that is refused is replaced by reading.

    read: data.read. Raises OSError, and DataError for another number of bytes.
    """
    opened = open(open_regular(file, own=OWN), "rb")  # noqa: SIM115
    found = os.fstat(opened.fileno()).st_size
    needed = count * dtype.itemsize
    if found != needed or not needed:
        opened.close()
        raise DataError(f"{file} has {found} bytes, {needed} needed")
    if read == MAP:
        # a file system without maps, or with too many of them
        with suppress(OSError):
            mapped = np.memmap(opened, dtype, mode="r", shape=(count,))
            opened.close()
            return mapped
    return ReadTokens(file, opened, dtype, count)
