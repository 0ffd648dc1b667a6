"""The links of a group that has more than eight of them.

Their names in a tree, the links themselves in a heap.

    header BTHD -> BTIN ... -> BTLF  records: hash of a name (4 bytes), place and length of its link
                                     in the heap (7)
    header FRHP -> FHIB ... -> FHDB  blocks of 512, 1024, ... bytes: one address space, cut in rows
                                     of four blocks

All sizes are constants of HDF5 (H5Gdense.c), the same from 1.8 to 2.0; other ones are refused.
"""

import math
from collections.abc import Iterator

from mpitrain.checkpoint.hdf5_bytes import UNDEFINED, Bytes, Cursor, ForeignError
from mpitrain.checkpoint.lookup3 import lookup3

# overhead: signature, version, type, checksum
NODE_BYTES = 512
RECORD_BYTES = 11
NODE_OVERHEAD = 10
WIDTH = 4
FIRST_BYTES = 512
LARGEST_BYTES = 65536
HEAP_BITS = 32
# the first two rows are of equal blocks
DIRECT_ROWS = int(math.log2(LARGEST_BYTES // FIRST_BYTES)) + 2
MOST_ROWS = HEAP_BITS - int(math.log2(FIRST_BYTES * WIDTH)) + 1
MOST_DEPTH = 8


def dense_links(file: Bytes, heap: int, names: int) -> Iterator[Cursor]:
    """Yield the links of a group, each as the body of a link message."""
    blocks = _Heap(file, heap)
    for place in _records(file, names):
        yield blocks.object(place)


def _records(file: Bytes, address: int) -> Iterator[bytes]:
    """Yield the heap IDs in a B-tree of version 2, type 5."""
    header = file.block(address, 38, b"BTHD\0\x05")
    if (header.number(4), header.number(2)) != (NODE_BYTES, RECORD_BYTES):
        raise ForeignError("the names of a group lie in another tree")
    depth = header.number(2)
    _ = header.number(2)
    root = header.number(8)
    count = header.number(2)
    if depth > MOST_DEPTH:
        raise ForeignError(f"the names of a group lie in a tree of depth {depth}")
    if count:
        yield from _node(file, root, count, depth, _node_sizes(depth))


def _node_sizes(depth: int) -> list[tuple[int, int]]:
    """Return of each level, leaves first: the most records of a node, and bytes of a count of all
    below it.
    """
    most = every = (NODE_BYTES - NODE_OVERHEAD) // RECORD_BYTES
    sizes = [(most, 0)]
    for _ in range(depth):
        pointer = 8 + _bytes_of(sizes[0][0]) + sizes[-1][1]
        most = (NODE_BYTES - NODE_OVERHEAD - pointer) // (RECORD_BYTES + pointer)
        every = (most + 1) * every + most
        sizes.append((most, _bytes_of(every)))
    return sizes


def _bytes_of(number: int) -> int:
    return (number.bit_length() - 1) // 8 + 1


def _node(file: Bytes, address: int, count: int, depth: int, sizes: list[tuple[int, int]]) -> Iterator[bytes]:
    node = file.block(address, _used(count, depth, sizes), b"BTIN\0\x05" if depth else b"BTLF\0\x05")
    for _ in range(count):
        yield node.take(RECORD_BYTES)[4:]
    for _ in range(count + 1 if depth else 0):
        child = node.number(8)
        num_records = node.number(_bytes_of(sizes[0][0]))
        node.take(sizes[depth - 1][1])
        yield from _node(file, child, num_records, depth - 1, sizes)


def _used(count: int, depth: int, sizes: list[tuple[int, int]]) -> int:
    """Return the bytes of a node that are in use: its checksum comes after them."""
    if count > sizes[depth][0]:
        raise ForeignError(f"a node with {count} names; needed at most {sizes[depth][0]}")
    pointers = (count + 1) * (8 + _bytes_of(sizes[0][0]) + sizes[depth - 1][1]) if depth else 0
    return NODE_OVERHEAD + count * RECORD_BYTES + pointers


class _Heap:
    """A fractal heap: its blocks are read when something in them is asked for."""

    def __init__(self, file: Bytes, address: int):
        self.file = file
        self.address = address
        header = file.block(address, 146, b"FRHP\0")
        header.expect((7).to_bytes(2, "little") + bytes(2), "a heap")  # length of an ID, no filters
        self.sums = header.number(1) & 2 and file.sums
        header.take(4 + 8 + 8 + 8 + 8 + 8 + 8 + 8 + 8)
        if any(header.take(32)):
            raise ForeignError("a heap has huge or tiny objects")
        layout = header.number(2), header.number(8), header.number(8), header.number(2)
        if layout != (WIDTH, FIRST_BYTES, LARGEST_BYTES, HEAP_BITS):
            raise ForeignError("a heap has blocks of other sizes")
        header.take(2)
        root = header.number(8)
        rows = header.number(2)
        # by the place where a block begins: its size and its address in the file
        self.blocks: dict[int, tuple[int, int]] = {}
        self.read: dict[int, bytes] = {}
        if rows:
            self._add_rows(root, rows, 0)
        elif root != UNDEFINED:
            self.blocks[0] = (FIRST_BYTES, root)

    def _add_rows(self, address: int, rows: int, place: int) -> None:
        """Take note of the blocks of an indirect block."""
        if rows > MOST_ROWS:
            raise ForeignError(f"a heap has a block of {rows} rows")
        block = self.file.block(address, 4 + 1 + 8 + 4 + 8 * rows * WIDTH + 4, b"FHIB\0")
        self._expect_place(block, place)
        for row in range(rows):
            size = FIRST_BYTES << max(0, row - 1)
            for _ in range(WIDTH):
                child = block.number(8)
                if child != UNDEFINED and row < DIRECT_ROWS:
                    self.blocks[place] = (size, child)
                elif child != UNDEFINED:
                    self._add_rows(child, int(math.log2(size // (FIRST_BYTES * WIDTH))) + 1, place)
                place += size

    def _expect_place(self, block: Cursor, place: int) -> None:
        block.expect(self.address.to_bytes(8, "little") + place.to_bytes(4, "little"), "a block of a heap")

    def object(self, heap_id: bytes) -> Cursor:
        """Return an object by its ID: kind, place, length."""
        if heap_id[0]:
            raise ForeignError("a heap has an object of another kind")
        place = int.from_bytes(heap_id[1:5], "little")
        length = int.from_bytes(heap_id[5:], "little")
        begin = next((begin for begin in self._candidates(place) if begin in self.blocks), None)
        if begin is None:
            raise ForeignError("a heap lacks a block")
        block = Cursor(self._block(begin))
        block.take(place - begin)
        return Cursor(block.take(length))

    def _candidates(self, place: int) -> Iterator[int]:
        """Yield where the block that has a place can begin: blocks of each size lie at multiples of it."""
        yield from (place - place % size for size in (FIRST_BYTES << k for k in range(DIRECT_ROWS - 1)))

    def _block(self, begin: int) -> bytes:
        if begin not in self.read:
            size, address = self.blocks[begin]
            self.read[begin] = self.file.bytes_at(address, size)
            block = Cursor(self.read[begin])
            block.expect(b"FHDB\0", "a block of a heap")
            self._expect_place(block, begin)
            if self.sums:
                signature = block.take(4)
                rest = block.take(block.left)
                if lookup3(block.data[: -len(rest) - 4] + bytes(4) + rest) != int.from_bytes(
                    signature, "little"
                ):
                    raise ForeignError(f"the checksum of a heap's block at {address} is wrong")
        return self.read[begin]
