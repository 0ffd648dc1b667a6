"""The bytes of an HDF5 file of a stranger, read within its bounds and once (hdf5.py says what they mean)."""

import os
from pathlib import Path

from mpitrain.checkpoint.lookup3 import lookup3
from mpitrain.inputs import open_regular

UNDEFINED = 2**64 - 1  # an address of nothing
# names that are a run's own: checkpoints/step-00000030/index.h5; none of them may be a link
STEP = 2
FILE = 3
MOST_BLOCK_BYTES = 1 << 20  # of a block of headers, of which HDF5 writes less than 64 KiB


class ForeignError(ValueError):
    """A file isn't one that mpitrain has written."""


class Cursor:
    """Bytes that are taken from the front; more than there are raise ForeignError."""

    def __init__(self, data: bytes):
        self.data = data
        self.at = 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, count: int) -> bytes:
        if not 0 <= count <= self.left:
            raise ForeignError("a structure ends too early")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, num_bytes: int) -> int:
        return int.from_bytes(self.take(num_bytes), "little")

    def text(self) -> str:
        """Take a text up to its zero byte."""
        end = self.data.find(b"\0", self.at)
        text = self.take(end - self.at).decode()
        self.at += 1
        return text

    def expect(self, wanted: bytes, what: str) -> None:
        if self.take(len(wanted)) != wanted:
            raise ForeignError(f"{what} is not as mpitrain writes it")


class Bytes:
    """An open file. Owns its descriptor until close().  sums: whether to check HDF5's own checksums."""

    def __init__(self, path: Path, sums: bool):
        self.descriptor = open_regular(path, own=FILE)
        self.sums = sums
        self.size = os.fstat(self.descriptor).st_size
        self.blocks_read: set[int] = set()  # by address
        # structures don't share bytes; the beginning of a header is read twice
        self._unread = 2 * self.size

    def close(self) -> None:
        os.close(self.descriptor)

    def read_into(self, target: memoryview, address: int) -> None:
        """Fill `target` with the bytes from `address` on."""
        if address + len(target) > self.size:
            raise ForeignError("data lie beyond the end of the file")
        done = 0
        while done < len(target):
            count = os.preadv(self.descriptor, [target[done:]], address + done)
            if count == 0:
                raise ForeignError("the file has become shorter")
            done += count

    def bytes_at(self, address: int, count: int) -> bytes:
        if address + count > self.size:
            raise ForeignError("a structure is beyond the end of the file")
        self._unread -= count
        if self._unread < 0:
            raise ForeignError("structures lie in one another")
        data = bytearray(count)
        self.read_into(memoryview(data), address)
        return bytes(data)

    def block(self, address: int, count: int, signature: bytes) -> Cursor:
        """Return what is between the signature and the checksum of a structure, which is read once."""
        if address in self.blocks_read:
            raise ForeignError("two links lead to one object")
        self.blocks_read.add(address)
        if count > MOST_BLOCK_BYTES:
            raise ForeignError(f"a structure of {count:,} bytes; needed at most {MOST_BLOCK_BYTES:,}")
        data = self.bytes_at(address, count)
        name = "the superblock" if address == 0 else signature[:4].decode("latin-1")
        if not data.startswith(signature):
            raise ForeignError(f"no {name.removeprefix('the ')} at {address}")
        if self.sums and lookup3(data[:-4]) != int.from_bytes(data[-4:], "little"):
            raise ForeignError(f"the checksum of {name} at {address} is wrong")
        return Cursor(data[len(signature) : -4])
