"""What a virtual dataset of HDF5 is made of, as its file says it."""

from collections.abc import Iterator

from mpitrain.checkpoint.boxes import Box
from mpitrain.checkpoint.hdf5_bytes import Cursor, ForeignError
from mpitrain.checkpoint.lookup3 import lookup3

MOST_SOURCES = 1_000_000  # 100,000 writers have three each at most
# kinds of a selection
NOTHING = 0
HYPERSLABS = 2
ALL = 3


def sources_of(description: bytes) -> Iterator[tuple[str, str, Box | None, Box | None]]:
    """Yield file, dataset, and the boxes of it and of the virtual dataset: None for all of one, or
    for nothing of an empty one.
    """
    body = Cursor(description[:-4])  # a checksum
    body.expect(b"\0", "a virtual dataset")
    count = body.number(8)
    if count > MOST_SOURCES:
        raise ForeignError(f"a virtual dataset has {count:,} sources, at most {MOST_SOURCES:,} can be")
    for _ in range(count):
        yield body.text(), body.text(), _selection(body), _selection(body)


def has_right_checksum(description: bytes) -> bool:
    return lookup3(description[:-4]) == int.from_bytes(description[-4:], "little")


def _selection(body: Cursor) -> Box | None:
    kind = body.number(4)
    version = body.number(4)
    if kind in (NOTHING, ALL):
        body.take(8)
        return None
    if kind != HYPERSLABS or version not in (1, 2, 3):
        raise ForeignError("a virtual dataset selects more than boxes")
    return _blocks(body) if version == 1 else _regular(body, version)


def _blocks(body: Cursor) -> Box:
    """Read a list of blocks by their corners: one block."""
    body.take(8)
    num_dims = body.number(4)
    count = body.number(4)
    if num_dims > body.left or count != 1:
        raise ForeignError("a virtual dataset selects more than a box")
    start = tuple(body.number(4) for _ in range(num_dims))
    return Box(start, tuple(body.number(4) + 1 for _ in range(num_dims)))


def _regular(body: Cursor, version: int) -> Box:
    """Read start, stride, count and block of each dim: blocks that touch one another."""
    flags = body.number(1)
    size = 8 if version == 2 else body.number(1)
    if version == 2:
        body.take(4)
    num_dims = body.number(4)
    if flags != 1 or size not in (2, 4, 8) or num_dims > body.left:
        raise ForeignError("a virtual dataset selects more than a box")
    dims = [[body.number(size) for _ in range(4)] for _ in range(num_dims)]
    if any(count != 1 and stride != block for _, stride, count, block in dims):
        raise ForeignError("a virtual dataset selects more than a box")
    return Box(
        tuple(start for start, *_ in dims), tuple(start + count * block for start, _, count, block in dims)
    )
