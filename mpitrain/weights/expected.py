"""What an export has to hold: digests of a checkpoint's numbers after the cast, made while they are written.

To read the checkpoint once more for the proof would take as long as to write the export.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import NamedTuple

import numpy as np
import xxhash

from mpitrain.checkpoint.boxes import Box, Chunks
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.errors import CheckpointError, WeightsError
from mpitrain.inputs import shown
from mpitrain.weights.bits import CODES, NAME_OF, all_finite, widened
from mpitrain.weights.matching import Weight

PARAMETERS = "parameters/"
Digests = Mapping[str, Mapping[int, bytes]]  # of the chunks of weights, by name and number


class ExportDigests(NamedTuple):
    """Digests of weights as an export has them. largest: difference from the checkpoint by the cast."""

    digests: Digests
    largest: float


class ChunkDigests:
    """Digests of an array's chunks from runs of elements; none of one that came out of order."""

    def __init__(self, chunks: Chunks):
        self._length = chunks.rows * math.prod(chunks.shape[1:])
        self._total = math.prod(chunks.shape)
        self._next = -1  # the element with which the running chunk continues
        self._running = xxhash.xxh3_128()

    def copy(self) -> "ChunkDigests":
        """Return the same as it is now, to continue with other numbers."""
        other = copy(self)
        other._running = self._running.copy()
        return other

    def add(self, begin: int, numbers: np.ndarray) -> Iterator[tuple[int, bytes]]:
        """Yield each chunk that is complete now, with its digest. begin: which element the first one is."""
        flat = np.ascontiguousarray(numbers).reshape(-1)
        at = begin
        while at < begin + flat.size:
            chunk = at // self._length
            end = min((chunk + 1) * self._length, self._total)
            until = min(end, begin + flat.size)
            if at == chunk * self._length:
                self._running.reset()
                self._next = at
            if at == self._next:
                self._running.update(flat[at - begin : until - begin].view(np.uint8))
                self._next = until
                if until == end:
                    yield chunk, self._running.digest()
            at = until


class CastRows(NamedTuple):
    """Rows of what one tensor has of a weight: as the checkpoint has them, and cast. exact: unchanged."""

    weight: Weight
    expert: int
    box: Box
    kept: np.ndarray
    found: np.ndarray
    exact: bool


class ExpectedDigests:
    """Digests of all that this rank writes; the checkpoint's own are checked on the way."""

    def __init__(self, saved: Checkpoint):
        self._saved = saved
        self._digests: dict[str, dict[int, bytes]] = {}
        self._largest = 0.0
        self._running: dict[str, ChunkDigests] = {}  # of weights as the checkpoint has them
        self._running_read: dict[str, ChunkDigests] = {}  # and as they are read back, once these differ

    def add(self, rows: CastRows) -> None:
        """Take rows. Raises CheckpointError for other chunks than saved, WeightsError for NaN."""
        weight, expert, box, kept, found, exact = rows
        name = PARAMETERS + weight.name
        array = self._saved.array(name)
        if weight.name not in self._running:
            self._running[weight.name] = ChunkDigests(array.chunks)
            written = Chunks(weight.box.shape, array.dtype.itemsize)
            if written != array.chunks or dtype_read(array.dtype) != array.dtype:
                self._running_read[weight.name] = ChunkDigests(written)
        running = self._running[weight.name]
        if not exact and weight.name not in self._running_read:
            self._running_read[weight.name] = running.copy()
        begin = expert * math.prod(weight.ours) + box.start[0] * math.prod(weight.ours[1:])
        complete = dict(running.add(begin, kept))
        for chunk, digest in complete.items():
            if digest != array.digests[chunk]:
                what = f"{name} isn't what was saved (chunk {chunk})"
                raise CheckpointError(f"{shown(self._saved.path)}: {what}; use another step")
        if weight.name not in self._running_read:
            difference = 0.0 if all_finite(found) else math.inf
        else:
            read = as_read(found, kept.dtype)
            complete = dict(self._running_read[weight.name].add(begin, read))
            difference = largest_difference(read, kept)
        if not math.isfinite(difference):
            what = "NaN or infinite numbers; use another step"
            if all_finite(kept):
                what = f"numbers that {NAME_OF[CODES[found.dtype]]} can't; use another --dtype"
            raise WeightsError(f"{shown(name)} holds {what}")
        self._digests.setdefault(weight.name, {}).update(complete)
        self._largest = max(self._largest, difference)

    @property
    def so_far(self) -> ExportDigests:
        """What was written until now."""
        return ExportDigests(self._digests, self._largest)


def dtype_read(saved_as: np.dtype) -> np.dtype:
    """Return what an import has of numbers that were saved as these."""
    return np.dtype(np.float64 if saved_as.itemsize == 8 else np.float32)


def as_read(found: np.ndarray, saved_as: np.dtype) -> np.ndarray:
    """Return numbers of an export as an import into the same model has them."""
    wanted = dtype_read(saved_as)
    if found.dtype == wanted:
        return found
    return widened(found).astype(wanted, copy=False)


def largest_difference(read: np.ndarray, kept: np.ndarray) -> float:
    """Return how far an export is off the checkpoint; NaN or infinite if one of its numbers is."""
    with np.errstate(invalid="ignore"):
        difference = np.subtract(read, widened(kept))
    return max(float(difference.max(initial=0.0)), -float(difference.min(initial=0.0)))


def together(parts: Iterable[ExportDigests]) -> ExportDigests:
    """Return the digests of all ranks."""
    digests: dict[str, dict[int, bytes]] = {}
    largest = 0.0
    for part in parts:
        for name, found in part.digests.items():
            digests.setdefault(name, {}).update(found)
        largest = max(largest, part.largest)
    return ExportDigests(digests, largest)
