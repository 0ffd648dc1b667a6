"""Prepared tokens in a file: mapped into memory, or read by calls where they are asked for (data.read)."""

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mpitrain.data.origin import OWN
from mpitrain.errors import DataError
from mpitrain.inputs import open_regular

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
        offset = begin * self.dtype.itemsize
        size = max(last - begin, 0) * self.dtype.itemsize
        parts = list[bytes]()
        while size:
            try:
                part = os.pread(self._opened.fileno(), size, offset)
            except OSError as error:
                raise DataError(f"{self._file} cannot be read: {error.strerror}; start again") from error
            if not part:
                raise DataError(f"{self._file} became shorter while it was read; start again")
            parts.append(part)
            offset += len(part)
            size -= len(part)
        return np.frombuffer(b"".join(parts), self.dtype)


Tokens = np.ndarray | ReadTokens


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
