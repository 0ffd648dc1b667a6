"""The proof of an export: its files are read back by the way in, and every weight is compared with the
checkpoint's, bit for bit, after the one cast that is stated. The checkpoint is held against its
digests.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from mpitrain.checkpoint.arrays import LogicalArray, digest
from mpitrain.checkpoint.boxes import Box, Chunks
from mpitrain.checkpoint.dtypes import BF16, NAMES
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.errors import InputError, MpitrainError
from mpitrain.inputs import listed, shown
from mpitrain.plan.plan import Plan
from mpitrain.weights.ahead import ahead
from mpitrain.weights.bits import DTYPES, cast, difference_from_bf16, widened
from mpitrain.weights.folder import ModelFolder
from mpitrain.weights.keys import require_same_model
from mpitrain.weights.matching import Matched, Weight, match
from mpitrain.weights.weight_source import FolderSource, bands

PARAMETERS = "parameters/"


@dataclass(frozen=True)
class ReadBack:
    """What one rank has read back of an export.

    digests: of the chunks of each weight, as they are in the folder, by name and number.
    largest: difference from the checkpoint, which the cast has made.
    """

    digests: dict[str, dict[int, bytes]]
    largest: float


class ExportError(MpitrainError):
    """What was exported isn't what was to be. Exit code 1."""


def opened(path: Path, plan: Plan) -> tuple[ModelFolder, Matched]:
    """Open an export by the way in. Raises ExportError unless it is the plan's model, with all weights."""
    try:
        folder = ModelFolder(path)
        try:
            found = require_same_model(folder, plan)
            return folder, match(folder, plan, found.kind, found.vocab, found.further)
        except BaseException:
            folder.close()
            raise
    except InputError as error:
        raise ExportError(f"what was written can't be read back: {error.args[0]}") from None


def read_back(
    folder: ModelFolder,
    matched: Matched,
    plan: Plan,
    saved: Checkpoint,
    share: Sequence[int],
    each: Callable[[int], object],
) -> ReadBack:
    """Read some weights of an export, by their numbers, and compare them with the checkpoint's.

    each: hears how many bytes were read.

    Raises ExportError for the first number that differs.
    """
    weights = [matched.weights[number] for number in share]
    source = FolderSource(folder, matched, plan.config)
    digests: dict[str, dict[int, bytes]] = {}
    largest = 0.0
    # each is read by a thread of its own
    pairs = zip(ahead(_whole_bands(weights, saved)), ahead(_bands_of(source, weights, saved)), strict=True)
    for (weight, band, kept), found in pairs:
        chunks = Chunks(weight.box.shape, kept.dtype.itemsize)
        mine = digests.setdefault(weight.name, {})
        largest = max(largest, _compare(weight, band, kept, found, folder.entry(weight.tensors[0]).code))
        for chunk in chunks.inside(band):
            mine[chunk] = digest(found[chunks.box(chunk).seen_from(band)])
        each(kept.nbytes)
    return ReadBack(digests, largest)


def _whole_bands(weights: Sequence[Weight], saved: Checkpoint) -> Iterator[tuple[Weight, Box, np.ndarray]]:
    """Yield runs of rows of weights as the checkpoint has them, held against its digests."""
    for weight, band, array in _all_bands(weights, saved):
        kept = saved.read(PARAMETERS + weight.name, _slices(band))
        own = Chunks(array.shape, array.dtype.itemsize)
        _require_whole(saved, array.digests, own, band, kept, weight)
        yield weight, band, kept


def _bands_of(source: FolderSource, weights: Sequence[Weight], saved: Checkpoint) -> Iterator[np.ndarray]:
    """Yield the same runs of rows as the folder has them."""
    for weight, band, array in _all_bands(weights, saved):
        found = np.empty(band.shape, np.float64 if array.dtype.itemsize == 8 else np.float32)
        source.read(weight.name, band, found)
        yield found


def _all_bands(weights: Sequence[Weight], saved: Checkpoint) -> Iterator[tuple[Weight, Box, LogicalArray]]:
    """Yield runs of rows of weights, each of whole chunks, with the array of the checkpoint."""
    for weight in weights:
        array = saved.array(PARAMETERS + weight.name)
        row_bytes = math.prod(array.shape[1:]) * array.dtype.itemsize
        for band in bands(weight.box, row_bytes, Chunks(weight.box.shape, array.dtype.itemsize).rows):
            yield weight, band, array


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop))


def _require_whole(
    saved: Checkpoint, digests: dict[int, bytes], chunks: Chunks, band: Box, kept: np.ndarray, weight: Weight
) -> None:
    for chunk in chunks.inside(band):
        if digest(kept[chunks.box(chunk).seen_from(band)]) != digests[chunk]:
            raise ExportError(
                f"{shown(saved.path)}: {PARAMETERS}{weight.name} isn't what was saved (chunk {chunk}); use "
                "another step"
            )


def _compare(weight: Weight, band: Box, kept: np.ndarray, found: np.ndarray, code: str) -> float:
    """Return the largest difference that the cast has made. Raises ExportError for any other."""
    if kept.dtype == np.float32 and DTYPES[code] == BF16 and found.dtype == np.float32:
        difference = difference_from_bf16(kept, found)
        if difference is not None:
            return difference
    expected = widened(cast(kept, DTYPES[code])).astype(found.dtype, copy=False)
    if not np.array_equal(expected, found):
        wrong = expected != found
        at = [int(i) + a for i, a in zip(np.argwhere(wrong)[0], band.start)]
        raise ExportError(
            f"{weight.name}{at} is {found[wrong][0]!r} in the export, needed {expected[wrong][0]!r}; "
            f"{int(wrong.sum()):,} of {wrong.size:,} numbers there differ"
        )
    if kept.dtype == DTYPES[code] or np.array_equal(found, widened(kept)):
        return 0.0
    difference = found - widened(kept)
    return float(max(difference.max(initial=0.0), -difference.min(initial=0.0)))


def digest_of(weights: Sequence[Weight], saved: Checkpoint, parts: Sequence[ReadBack]) -> str:
    """Return the digest of all weights as they are in an export: what a checkpoint of its import has.

    Raises ExportError if a part of them wasn't read.
    """
    together: dict[str, dict[int, bytes]] = {}
    for part in parts:
        for name, chunks in part.digests.items():
            together.setdefault(name, {}).update(chunks)
    arrays = []
    lost = []
    for weight in weights:
        dtype = saved.array(PARAMETERS + weight.name).dtype
        chunks = Chunks(weight.box.shape, dtype.itemsize)
        found = together.get(weight.name, {})
        lost += [weight.name] * (len(found) != chunks.count)
        arrays.append(
            (weight.name, NAMES[dtype], weight.box.shape, [found.get(i, b"") for i in range(chunks.count)])
        )
    if lost:
        raise ExportError(f"{listed(lost)}: not read back")
    return _digest(arrays)


def digest_of_checkpoint(saved: Checkpoint, names: Sequence[str]) -> str:
    """Return the digest of weights of a checkpoint, by their names, without reading them."""
    arrays = []
    for name in names:
        array = saved.array(PARAMETERS + name)
        digests = [array.digests[chunk] for chunk in range(array.chunks.count)]
        arrays.append((name, NAMES[array.dtype], array.shape, digests))
    return _digest(arrays)


def _digest(arrays: Sequence[tuple[str, str, tuple[int, ...], list[bytes]]]) -> str:
    root = xxhash.xxh3_128()
    for name, dtype, shape, digests in sorted(arrays):
        root.update(f"{name}\0{dtype}\0{list(shape)}\0".encode())
        root.update(b"".join(digests))
    return root.hexdigest()
