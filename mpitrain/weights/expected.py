"""What an export has to hold: digests of a checkpoint's numbers after the cast, made while they are written.

To read the checkpoint once more for the proof would take as long as to write the export. Meanwhile what is
read is held against the checkpoint's own digests.
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
    """Digests of the chunks of an array whose elements come in order, in runs that end anywhere.

    A chunk has none if its elements didn't come one after the other.
    """

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


class DigestPair:
    """Digests of a weight as the checkpoint has it, and as it is read back; one as long as both are the same.

    saved: its chunks in the checkpoint. read: those of what is read back, if they are others.
    """

    def __init__(self, saved: Chunks, read: Chunks | None):
        self.saved = ChunkDigests(saved)
        self.read = ChunkDigests(read) if read else None

    def divide(self) -> None:
        """From now on other numbers are written than the checkpoint has."""
        if self.read is None:
            self.read = self.saved.copy()


class ExpectedDigests:
    """Digests of all that this rank writes; the checkpoint's own are checked on the way."""

    def __init__(self, saved: Checkpoint):
        self._saved = saved
        self._digests: dict[str, dict[int, bytes]] = {}
        self._largest = 0.0
        self._pairs: dict[str, DigestPair] = {}

    def add(
        self, weight: Weight, expert: int, box: Box, kept: np.ndarray, found: np.ndarray, exact: bool
    ) -> None:
        """Take rows of what one tensor has of a weight: as the checkpoint has them, and as they are written.

        exact: the cast has changed none of them.
        Raises CheckpointError for a chunk that isn't what was saved, WeightsError for what isn't finite.
        """
        name = PARAMETERS + weight.name
        array = self._saved.array(name)
        pair = self._pair_of(weight)
        if not exact:
            pair.divide()
        begin = expert * math.prod(weight.ours) + box.start[0] * math.prod(weight.ours[1:])
        complete = dict(pair.saved.add(begin, kept))
        for chunk, digest in complete.items():
            if digest != array.digests[chunk]:
                raise CheckpointError(
                    f"{shown(self._saved.path)}: {name} isn't what was saved (chunk {chunk}); use another "
                    "step"
                )
        if pair.read is None:
            difference = 0.0 if all_finite(found) else math.inf
        else:
            read = as_read(found, kept.dtype)
            complete = dict(pair.read.add(begin, read))
            difference = largest_difference(read, kept)
        if not math.isfinite(difference):
            raise _not_finite(name, kept, found.dtype)
        self._digests.setdefault(weight.name, {}).update(complete)
        self._largest = max(self._largest, difference)

    def _pair_of(self, weight: Weight) -> DigestPair:
        if weight.name not in self._pairs:
            array = self._saved.array(PARAMETERS + weight.name)
            written = Chunks(weight.box.shape, array.dtype.itemsize)
            same = written == array.chunks and dtype_read(array.dtype) == array.dtype
            self._pairs[weight.name] = DigestPair(array.chunks, None if same else written)
        return self._pairs[weight.name]

    @property
    def so_far(self) -> ExportDigests:
        """What was written until now."""
        return ExportDigests(self._digests, self._largest)


def _not_finite(name: str, kept: np.ndarray, dtype: np.dtype) -> WeightsError:
    if all_finite(kept):
        return WeightsError(
            f"{shown(name)} holds numbers that {NAME_OF[CODES[dtype]]} can't; use another --dtype"
        )
    return WeightsError(f"{shown(name)} holds NaN or infinite numbers; use another step")


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
    """Return the largest difference of numbers of an export from those of the checkpoint.

    NaN or infinite if one of them is.
    """
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
