"""Read a compressed file as the bytes that it holds: gzip, bzip2, xz, zstd, by its first bytes.

It may have several parts (members, streams, frames), with NULs between them, as `cat` joins files. Python's
own readers, and that of zstandard, take what they can't read after a part for the end: what follows would
be lost without a word. Here a file that was cut or altered anywhere raises Damaged.
"""

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

from mpitrain.data.source import Damaged
from mpitrain.errors import LibraryError
from mpitrain.inputs import shown

ENDINGS = (".gz", ".zst", ".bz2", ".xz")
WINDOW = 1 << 27  # bytes of a zstd window: more than its own tool asks for by default
MOST_XZ_BYTES = 1 << 29  # of memory: xz -9 needs 65 MiB
PIECE = 1 << 12  # read at once: it may hold 32,000 times as much


def _zstd() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=WINDOW).decompressobj()


ZSTD = b"\x28\xb5\x2f\xfd"
ZSTD_SKIPPED = b"\x2a\x4d\x18"  # of a frame that holds no data, after a first byte
PARTS: dict[bytes, Callable[[], Any]] = {
    b"\x1f\x8b": partial(zlib.decompressobj, wbits=31),
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ\0": partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=MOST_XZ_BYTES),
    ZSTD: _zstd,
}


def unpacked(file: BinaryIO, name: object) -> BinaryIO:
    """Return what a file holds, from its first byte on; the file itself if it isn't compressed.

    name: for messages. Reading raises Damaged.
    """
    head = file.read(6)
    file.seek(0)
    if head[1:4] == ZSTD_SKIPPED:
        head = ZSTD
    for magic, begin in PARTS.items():
        if head.startswith(magic):
            try:
                return io.BufferedReader(_Unpacked(file, name, begin), 1 << 17)
            except ImportError as error:
                needed = "pip install 'mpitrain[data]' installs what reads it"
                raise LibraryError(f"{shown(name)} is compressed with zstd: {needed}") from error
    return file


class _Unpacked(io.RawIOBase):
    """The bytes of all parts of a file. begin: returns what reads a part."""

    def __init__(self, file: BinaryIO, name: object, begin: Callable[[], Any]):
        self._file = file
        self._name = name
        self._begin = begin
        self._part = begin()
        self._is_within = False  # a part that has begun
        self._packed = b""
        self._bytes = io.BytesIO()
        self._done = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not (count := self._bytes.readinto(buffer)):
            self._packed = self._packed or self._file.read(PIECE)
            if not self._packed:
                if self._is_within:
                    raise self._damaged("its last part isn't complete")
                return 0
            self._bytes = io.BytesIO(self._next())
        self._done += count
        return count

    def _next(self) -> bytes:
        """Return what the bytes that were read hold, up to the end of a part."""
        if not self._is_within:
            self._packed = self._packed.lstrip(b"\0")
            self._is_within = bool(self._packed)
        if not self._packed:
            return b""
        try:
            piece = self._part.decompress(self._packed)
        except Exception as error:  # each library has its own
            raise self._damaged(error) from None
        self._packed = self._part.unused_data if self._part.eof else b""
        if self._part.eof:
            self._part = self._begin()
            self._is_within = False
        return piece

    def _damaged(self, why: object) -> Damaged:
        return Damaged(
            f"{shown(self._name)} is damaged or cut after {self._done:,} bytes of text: {shown(why)}"
        )
