"""A reader of HDF5 for files of strangers.

It knows what mpitrain writes, refuses all else, and needs no HDF5 library.

The library follows what a file tells it: links into other files, storage in /etc/passwd, filters
that load code; and crafted bytes have sent it into endless loops. Here each structure is read once,
within the file, and has to be one of these:

    superblock, groups (links in their headers, or in a heap: hdf5_links.py), hard links,
    attributes of the root (numbers and texts),
    datasets that lie in one piece in the file or are virtual, of plain types, without filters

Names as in https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html; all numbers are
little-endian, offsets have 8 bytes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from mpitrain.checkpoint.hdf5_bytes import UNDEFINED, Bytes, Cursor, ForeignError
from mpitrain.checkpoint.hdf5_links import dense_links
from mpitrain.inputs import closed_on_error, shown

# version 3, offsets and lengths of 8 bytes
SIGNATURE = b"\x89HDF\r\n\x1a\n\x03\x08\x08"
SUPERBLOCK_BYTES = 48
MOST_OBJECTS = 1_000_000  # a model of 100,000 parameters has fewer in its index
MOST_CHARACTERS = 1000  # of a path: groups in groups make a small file large in memory
MOST_DIMS = 32  # as HDF5
REFUSED = {0x07: "external storage", 0x0B: "a filter", 0x11: "an old group", 0x16: "more than one link"}
LINK_KINDS = {1: "a soft link", 64: "an external link"}
CONTIGUOUS, VIRTUAL = 1, 3
# classes of datatypes
INTEGER = 0
VARIABLE_LENGTH = 9
# of a collection and of each object; HDF5 makes no smaller collection
HEAP_HEAD_BYTES = 16
LEAST_HEAP_BYTES = 4096


class HeaderMessage(IntEnum):
    """What the header of an object has messages of, in files that mpitrain writes."""

    NIL = 0x00
    DATASPACE = 0x01
    LINK_INFO = 0x02
    DATATYPE = 0x03
    FILL = 0x05
    LINK = 0x06
    LAYOUT = 0x08
    GROUP_INFO = 0x0A
    ATTRIBUTE = 0x0C
    CONTINUATION = 0x10
    ATTRIBUTE_INFO = 0x15


KNOWN = frozenset(HeaderMessage)


@dataclass(frozen=True)
class Dataset:
    """datatype: as in the file, without its version.  address: of the bytes, or None for none.

    virtual: where the description of a virtual dataset is: collection and object of a heap.
    """

    datatype: bytes
    shape: tuple[int, ...]
    address: int | None
    virtual: tuple[int, int] | None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int.from_bytes(self.datatype[4:8], "little")


class Hdf5File(Bytes):
    """An open file of which all headers have been read. Raises OSError, or ForeignError (a ValueError).

    datasets: all of the file, by path.
    attributes: of the root.
    sums: whether to check HDF5's checksums; a sealed file needs none.
    only: the one group of the root that is read; "" for all.
    """

    def __init__(self, path: Path, sums: bool = True, only: str = ""):
        super().__init__(path, sums)
        self._only = only
        self.datasets: dict[str, Dataset] = {}
        self.attributes: dict[str, int | str] = {}
        # by address: place and size of each object
        self._heaps: dict[int, dict[int, tuple[int, int]]] = {}
        with closed_on_error(self):
            self._walk(self._superblock())

    def read(self, dataset: Dataset) -> bytes:
        """Return all elements of a dataset that isn't virtual."""
        return b"" if dataset.address is None else self.bytes_at(dataset.address, dataset.num_bytes)

    def _superblock(self) -> int:
        """Return the address of the root group."""
        superblock = self.block(0, SUPERBLOCK_BYTES, SIGNATURE)
        # closed, no user block, no extension
        superblock.expect(b"\0" + bytes(8) + b"\xff" * 8, "the superblock")
        if superblock.number(8) != self.size:
            raise ForeignError("the superblock has another size of the file")
        return superblock.number(8)

    def _walk(self, root: int) -> None:
        """Read all objects that can be reached from the root."""
        waiting = [("", root)]
        while waiting:
            if len(self.blocks_read) > MOST_OBJECTS:
                raise ForeignError(f"more than {MOST_OBJECTS:,} objects")
            path, address = waiting.pop()
            if len(path) > MOST_CHARACTERS:
                raise ForeignError(f"a path of {len(path):,} characters")
            messages = list(self._messages(address))
            kinds = {kind for kind, _ in messages}
            if unknown := kinds - KNOWN:
                raise ForeignError(
                    f"{path or '/'} has {REFUSED.get(min(unknown), f'a message of type {min(unknown)}')}"
                )
            if HeaderMessage.ATTRIBUTE in kinds and path:
                raise ForeignError(f"{path} has an attribute")
            if HeaderMessage.LINK_INFO in kinds:
                self._read_attributes(messages)
                links = [(f"{path}/{name}".removeprefix("/"), at) for name, at in self._links(path, messages)]
                waiting += [link for link in links if path or self._only in ("", link[0])]
            else:
                self.datasets[path] = self._dataset(path, messages)

    def _messages(self, address: int) -> Iterator[tuple[int, Cursor]]:
        """Yield type and body of the messages of an object header, version 2."""
        start = Cursor(self.bytes_at(address, min(34, self.size - address) if address < self.size else 34))
        start.expect(b"OHDR\x02", f"the header at {address}")
        flags = start.number(1)
        # times; limits of attributes
        start.take((16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0))
        num_bytes = start.number(1 << (flags & 3))
        chunk = self.block(address, start.at + num_bytes + 4, b"OHDR\x02")
        chunk.take(start.at - 5)
        blocks = [chunk]
        for block in blocks:
            while block.left >= (head := 6 if flags & 4 else 4):
                kind = block.number(1)
                size = block.number(2)
                how = block.number(1)
                block.take(head - 4)
                body = Cursor(block.take(size))
                if how & 2:
                    raise ForeignError("a header shares a message with another one")
                if kind == HeaderMessage.CONTINUATION:
                    at = body.number(8)
                    count = body.number(8)
                    blocks.append(self.block(at, count, b"OCHK"))
                else:
                    yield kind, body

    def _links(self, path: str, messages: list[tuple[int, Cursor]]) -> Iterator[tuple[str, int]]:
        """Yield name and address of the objects in a group."""
        for kind, body in messages:
            if kind == HeaderMessage.LINK:
                yield self._link(path, body)
            elif kind == HeaderMessage.LINK_INFO:
                body.expect(b"\0\0", f"group {path}")  # no order of creation
                heap = body.number(8)
                names = body.number(8)
                if heap != UNDEFINED:
                    yield from (self._link(path, link) for link in dense_links(self, heap, names))

    def _link(self, path: str, body: Cursor) -> tuple[str, int]:
        body.expect(b"\x01", f"a link of {path}")
        flags = body.number(1)
        kind = body.number(1) if flags & 8 else 0
        if flags & ~0x1B:
            raise ForeignError(f"a link of {path} is not as mpitrain writes it")
        if flags & 16:
            body.take(1)  # the character set
        name = body.take(body.number(1 << (flags & 3))).decode()
        if kind:
            raise ForeignError(
                f"{path}/{shown(name)} is {LINK_KINDS.get(kind, 'a link of an unknown kind')}".removeprefix(
                    "/"
                )
            )
        if not name or "/" in name or "\0" in name or shown(name) != name:
            raise ForeignError(f"a link of {path or '/'} has the name {shown(name)!r}")
        return name, body.number(8)

    def _dataset(self, path: str, messages: list[tuple[int, Cursor]]) -> Dataset:
        body_by_kind = {
            kind: body for kind, body in messages if kind not in (HeaderMessage.NIL, HeaderMessage.FILL)
        }
        wanted = {HeaderMessage.DATASPACE, HeaderMessage.DATATYPE, HeaderMessage.LAYOUT}
        if body_by_kind.keys() - {HeaderMessage.ATTRIBUTE_INFO} != wanted or sum(
            kind in wanted for kind, _ in messages
        ) != len(wanted):
            raise ForeignError(f"{path} is neither a group nor a dataset")
        shape = _shape(path, body_by_kind[HeaderMessage.DATASPACE])
        datatype = _datatype(body_by_kind[HeaderMessage.DATATYPE])
        layout = body_by_kind[HeaderMessage.LAYOUT]
        version = layout.number(1)
        kind = layout.number(1)
        if version not in (3, 4) or kind not in (CONTIGUOUS, VIRTUAL):
            raise ForeignError(f"{path} doesn't lie in one piece")
        if kind == VIRTUAL:
            return Dataset(datatype, shape, None, (layout.number(8), layout.number(4)))
        address = layout.number(8)
        num_bytes = layout.number(8)
        dataset = Dataset(datatype, shape, None if address == UNDEFINED else address, None)
        if num_bytes != dataset.num_bytes or (address == UNDEFINED and num_bytes):
            raise ForeignError(f"{path} has {num_bytes:,} bytes, {dataset.num_bytes:,} needed")
        if address != UNDEFINED and address + num_bytes > self.size:
            raise ForeignError(f"{path} is beyond the end of the file")
        return dataset

    def _read_attributes(self, messages: list[tuple[int, Cursor]]) -> None:
        for kind, body in messages:
            if kind == HeaderMessage.ATTRIBUTE_INFO:
                body.take(body.left - 16)
                body.expect(b"\xff" * 16, "a place for many attributes")
            if kind != HeaderMessage.ATTRIBUTE:
                continue
            body.expect(b"\x03\0", "an attribute")
            sizes = [body.number(2) for _ in range(3)]
            body.take(1)  # the character set
            name, datatype, space = (body.take(size) for size in sizes)
            value = body.take(body.left)
            known = _datatype(Cursor(datatype)), _shape("an attribute", Cursor(space))
            self.attributes[name.rstrip(b"\0").decode()] = self._value(*known, value)

    def _value(self, datatype: bytes, shape: tuple[int, ...], value: bytes) -> int | str:
        if shape:
            raise ForeignError("an attribute has more than one value")
        if datatype[0] == INTEGER and len(value) == int.from_bytes(datatype[4:8], "little") <= 8:
            return int.from_bytes(value, "little", signed=bool(datatype[1] & 8))
        if datatype[0] == VARIABLE_LENGTH and datatype[1] & 15 == 1 and len(value) == 16:  # a text
            value = Cursor(value)
            length = value.number(4)
            heap = value.number(8)
            index = value.number(4)
            return self.heap_object(heap, index)[:length].decode() if length else ""
        raise ForeignError("an attribute is neither a number nor a text")

    def heap_object(self, address: int, index: int) -> bytes:
        """Return an object of a global heap collection."""
        if address not in self._heaps:
            self._heaps[address] = self._objects_of(address)
        if index not in self._heaps[address]:
            raise ForeignError(f"the heap at {address} has no object {index}")
        return self.bytes_at(*self._heaps[address][index])

    def _objects_of(self, address: int) -> dict[int, tuple[int, int]]:
        """Return place and size of each object of a global heap collection.

        They fill it; object 0 is what is free.
        """
        start = Cursor(self.bytes_at(address, HEAP_HEAD_BYTES))
        start.expect(b"GCOL\x01\0\0\0", f"the heap at {address}")
        num_bytes = start.number(8)
        end = address + num_bytes
        at = address + HEAP_HEAD_BYTES
        objects = {}
        if num_bytes < LEAST_HEAP_BYTES or num_bytes % 8 or end > self.size:
            raise ForeignError(f"the heap at {address} has {num_bytes:,} bytes")
        while at + HEAP_HEAD_BYTES <= end:
            head = Cursor(self.bytes_at(at, HEAP_HEAD_BYTES))
            number = head.number(2)
            _ = head.number(6)
            size = head.number(8)
            # what is free counts its own head
            used = HEAP_HEAD_BYTES + -(-size // 8) * 8 if number else size
            if used < HEAP_HEAD_BYTES or number in objects or at + used > end:
                raise ForeignError(f"object {number} of the heap at {address} is not as mpitrain writes it")
            objects[number] = at + HEAP_HEAD_BYTES, size
            at += used
        objects.pop(0, None)
        return objects


def _datatype(body: Cursor) -> bytes:
    """Return a datatype without its version: plain types are the same in all of them."""
    first = body.number(1)
    return bytes([first & 15]) + body.take(body.left)


def _shape(path: str, body: Cursor) -> tuple[int, ...]:
    body.expect(b"\x02", f"the dataspace of {path}")
    num_dims = body.number(1)
    has_limits = body.number(1)
    kind = body.number(1)
    if num_dims > MOST_DIMS or kind != (num_dims > 0) or has_limits > 1:
        raise ForeignError(f"the dataspace of {path} is not as mpitrain writes it")
    shape = tuple(body.number(8) for _ in range(num_dims))
    if has_limits and tuple(body.number(8) for _ in range(num_dims)) != shape:
        raise ForeignError(f"{path} can be extended")
    if math.prod(n for n in shape if n) >= 1 << 60:
        raise ForeignError(f"{path} has the shape {list(shape)}")
    return shape
