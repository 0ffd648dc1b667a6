"""The state of several ranks in one of them, which writes one file for all (run.shards = "node" or "one").

The first rank of a group is sent the boxes of the others, and joins those that make a whole array.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mpitrain.checkpoint.boxes import Box, whole
from mpitrain.checkpoint.save import Extent
from mpitrain.comm.base.group import Group
from mpitrain.training.saving.state_io import Parts, Snapshot


class BoxHeader(NamedTuple):
    """A box that a rank sends: its name in the checkpoint, what is in it, and where it lies."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    extent: Extent


class Gathered:
    """A group's weights and moments, in host memory of its first rank, as they were last taken.

    snapshot: what this rank counts; not copied, or else it would be in memory twice.
    num_bytes: that this rank writes; none but on the first.
    own_bytes: what this rank gives.
    """

    def __init__(self, snapshot: Snapshot, group: Group):
        self._snapshot = snapshot
        self._group = group
        self.own_bytes = snapshot.own_bytes
        headers = [
            BoxHeader(name, array.dtype, array.shape, extent)
            for name, array, extent in _boxes(snapshot.parts())
        ]
        self._headers = group.gather("what its ranks have to save", headers) or []
        self._parts = _memory([header for rank_headers in self._headers for header in rank_headers])
        self.num_bytes = sum(array.nbytes for parts in self._parts.values() for array, _ in parts)
        sent = [header for rank_headers in self._headers[1:] for header in rank_headers]
        self._largest = max((math.prod(h.shape) * h.dtype.itemsize for h in sent), default=0)

    def take(self) -> None:
        """Have everything as it is now. Collective over the group; training stands still."""
        boxes = _boxes(self._snapshot.parts())
        if self._group.rank:
            for name, array, _ in boxes:
                self._group.give(name, array)
            return
        for name, array, extent in boxes:
            self._target(name, array.shape, extent)[...] = array
        message = np.empty(self._largest, np.uint8)
        for rank, headers in enumerate(self._headers[1:], 1):
            for name, dtype, shape, extent in headers:
                array = message[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
                self._group.take(name, rank, array)
                self._target(name, shape, extent)[...] = array

    def parts(self) -> Parts:
        """Return what was taken, as checkpoint.save takes it; but on the first rank, nothing."""
        return self._parts

    @property
    def description(self) -> str:
        """Say what this rank holds."""
        held = f"{self.num_bytes / 1e6:.2f} MB are what rank 0 holds"
        return f"{held} to save {self._group.size} ranks in one file (run.shards)"

    def _target(self, name: str, shape: tuple[int, ...], extent: Extent) -> np.ndarray:
        box = _box(shape, extent)
        for array, place in self._parts[name]:
            if (held := _box(array.shape, place)).overlap(box) == box:
                return array[box.seen_from(held)]
        raise AssertionError(f"{name} {box} was not announced")


def _boxes(parts: Parts) -> Iterator[tuple[str, np.ndarray, Extent]]:
    for name, held in parts.items():
        yield from ((name, array, extent) for array, extent in held)


def _box(shape: tuple[int, ...], extent: Extent) -> Box:
    return Box(extent.offset, tuple(a + n for a, n in zip(extent.offset, shape)))


def _memory(headers: list[BoxHeader]) -> Parts:
    """Return uninitialised memory for these boxes, one piece for those that make a whole array."""
    by_name = defaultdict(list)
    for header in headers:
        by_name[header.name].append(header)
    parts = {}
    for name, same_name in by_name.items():
        dtype = same_name[0].dtype
        shape = same_name[0].extent.global_shape
        if sum(math.prod(header.shape) for header in same_name) == whole(shape).size:
            parts[name] = [(np.empty(shape, dtype), Extent(shape, whole(shape).start))]
        else:
            parts[name] = [(np.empty(header.shape, dtype), header.extent) for header in same_name]
    return parts
