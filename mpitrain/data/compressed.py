"""Read a compressed file as the bytes that it holds: gzip, bzip2, xz, zstd, by its first bytes.

What is read is bounded by who reads; a file that was cut or altered raises Damaged.
"""

import bz2
import gzip
import io
import lzma
import zlib
from typing import Any, BinaryIO

from mpitrain.data.source import Damaged
from mpitrain.errors import LibraryError
from mpitrain.inputs import shown

ENDINGS = (".gz", ".zst", ".bz2", ".xz")
ZSTD = b"\x28\xb5\x2f\xfd"
ZSTD_SKIPPED = b"\x2a\x4d\x18"  # of a frame that holds no data, after a first byte
WINDOW = 1 << 27  # bytes of a zstd window: more than its own tool asks for by default
ZSTD_PIECE = 1 << 12  # read at once: it may hold 32,000 times as much
OPENERS = {b"\x1f\x8b": gzip.GzipFile, b"BZh": bz2.BZ2File, b"\xfd7zXZ\0": lzma.LZMAFile}


def unpacked(file: BinaryIO, name: object) -> BinaryIO:
    """Return what a file holds, from its first byte on; the file itself if it isn't compressed.

    name: for messages. Reading raises Damaged.
    """
    head = file.read(6)
    file.seek(0)
    if head.startswith(ZSTD) or head[1:4] == ZSTD_SKIPPED:
        return io.BufferedReader(_Unpacked(_Zstd(file, name), name), 1 << 17)
    for magic, opener in OPENERS.items():
        if head.startswith(magic):
            opened: Any = gzip.GzipFile(fileobj=file) if opener is gzip.GzipFile else opener(file)
            return io.BufferedReader(_Unpacked(opened, name), 1 << 17)
    return file


class _Unpacked(io.RawIOBase):
    """A reader whose errors name the file."""

    def __init__(self, inner: Any, name: object):
        self._inner = inner
        self._name = name
        self._done = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        try:
            piece = self._inner.read(len(buffer))
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise Damaged(
                f"{shown(self._name)} is damaged or cut after {self._done:,} bytes of text: {shown(error)}"
            ) from None
        self._done += len(piece)
        buffer[: len(piece)] = piece
        return len(piece)


class _Zstd:
    """The bytes of all frames of a file. The library's own reader takes the end of a cut file for its end."""

    def __init__(self, file: BinaryIO, name: object):
        try:
            import zstandard
        except ImportError as error:
            raise LibraryError(
                f"{shown(name)} is compressed with zstd: pip install 'mpitrain[data]' installs what reads it"
            ) from error
        self._error = zstandard.ZstdError
        self._library = zstandard.ZstdDecompressor(max_window_size=WINDOW)
        self._file = file
        self._frame: Any = None
        self._packed = b""
        self._bytes = io.BytesIO()

    def read(self, count: int) -> bytes:
        """Return up to `count` bytes, b"" at the end. Raises EOFError, OSError without a number."""
        while not (piece := self._bytes.read(count)):
            self._packed = self._packed or self._file.read(ZSTD_PIECE)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("a frame isn't complete")
                return b""
            self._bytes = io.BytesIO(self._next())
        return piece

    def _next(self) -> bytes:
        self._frame = self._frame or self._library.decompressobj()
        try:
            piece = self._frame.decompress(self._packed)
        except self._error as error:
            raise OSError(str(error)) from None
        self._packed = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None
        return piece
