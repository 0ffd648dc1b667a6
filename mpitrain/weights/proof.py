"""The proof of an export: its files are read back by the way in, and every chunk of a weight has to have the
digest of the checkpoint's numbers after the one cast that is stated. One that hasn't, or of which
none is known, is compared number by number.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mpitrain.checkpoint.arrays import LogicalArray, digest, root_digest
from mpitrain.checkpoint.boxes import Box, Chunks
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.errors import InputError, MpitrainError
from mpitrain.inputs import closed_on_error, listed, shown
from mpitrain.plan.plan import Plan
from mpitrain.weights.ahead import ahead
from mpitrain.weights.bits import DTYPES, cast
from mpitrain.weights.expected import (
    PARAMETERS,
    Digests,
    ExportDigests,
    as_read,
    dtype_read,
    largest_difference,
)
from mpitrain.weights.folder import ModelFolder
from mpitrain.weights.keys import require_same_model
from mpitrain.weights.matching import Matched, Weight, match
from mpitrain.weights.weight_source import FolderSource, bands

Each = Callable[[int], object]


class ExportError(MpitrainError):
    """What was exported isn't what was to be. Exit code 1."""


def opened(path: Path, plan: Plan) -> tuple[ModelFolder, Matched]:
    """Open an export by the way in. Raises ExportError unless it is the plan's model, with all weights."""
    try:
        folder = ModelFolder(path)
        with closed_on_error(folder):
            matched = match(folder, plan, require_same_model(folder, plan))
            if matched.absent:
                raise ExportError(f"{shown(matched.absent[0].name)} wasn't written")
            return folder, matched
    except InputError as error:
        raise ExportError(f"what was written can't be read back: {error.args[0]}") from None


def read_back(
    source: FolderSource, weights: Sequence[Weight], saved: Checkpoint, expected: Digests, each: Each
) -> ExportDigests:
    """Read weights of an export, and return the digests of their chunks. each: hears of bytes read.

    Raises ExportError for the first number that isn't the checkpoint's.
    """
    digests: dict[str, dict[int, bytes]] = {}
    largest = 0.0
    for weight, band, found in ahead(_bands_of(source, weights, saved)):
        chunks = Chunks(weight.box.shape, saved.array(PARAMETERS + weight.name).dtype.itemsize)
        mine = digests.setdefault(weight.name, {})
        for chunk in chunks.inside(band):
            box = chunks.box(chunk)
            numbers = found[box.seen_from(band)]
            mine[chunk] = digest(numbers)
            known = expected.get(weight.name, {}).get(chunk)
            if mine[chunk] != known:
                code = source.folder.entry(weight.tensors[0]).code
                largest = max(largest, _compare(saved, weight, box, numbers, code))
                if known is not None:
                    raise ExportError(f"{shown(saved.path)}: {weight.name} changed while it was exported")
        each(found.nbytes)
    return ExportDigests(digests, largest)


def _bands_of(
    source: FolderSource, weights: Sequence[Weight], saved: Checkpoint
) -> Iterator[tuple[Weight, Box, np.ndarray]]:
    for weight in weights:
        dtype = saved.array(PARAMETERS + weight.name).dtype
        row_bytes = math.prod(weight.box.shape[1:]) * dtype.itemsize
        for band in bands(weight.box, row_bytes, Chunks(weight.box.shape, dtype.itemsize).rows):
            values = np.empty(band.shape, dtype_read(dtype))
            source.read(weight.name, band, values)
            yield weight, band, values


def _compare(saved: Checkpoint, weight: Weight, box: Box, found: np.ndarray, code: str) -> float:
    """Return the largest difference that the cast has made. Raises ExportError for any other."""
    name = PARAMETERS + weight.name
    kept = saved.read(name, box.slices)
    array = saved.array(name)
    for chunk in array.chunks.inside(box):
        if digest(kept[array.chunks.box(chunk).seen_from(box)]) != array.digests[chunk]:
            what = f"{name} isn't what was saved (chunk {chunk})"
            raise ExportError(f"{shown(saved.path)}: {what}; use another step")
    expected = as_read(cast(kept, DTYPES[code]), kept.dtype)
    bits = f"u{found.itemsize}"
    wrong = expected.view(bits) != found.view(bits)
    if wrong.any():
        at = [int(i) + a for i, a in zip(np.argwhere(wrong)[0], box.start)]
        is_other = f"is {found[wrong][0]!r} in the export, needed {expected[wrong][0]!r}"
        differ = f"{int(wrong.sum()):,} of {wrong.size:,} numbers there differ"
        raise ExportError(f"{weight.name}{at} {is_other}; {differ}")
    return largest_difference(found, kept)


def digest_of(weights: Sequence[Weight], saved: Checkpoint, found: Digests) -> str:
    """Return the digest that an import of an export has. Raises ExportError for a part not read."""
    arrays = []
    for weight in weights:
        dtype = saved.array(PARAMETERS + weight.name).dtype
        digests = dict(found.get(weight.name, {}))
        arrays.append(LogicalArray(weight.name, dtype, weight.box.shape, digests=digests))
    if lost := [array.name for array in arrays if len(array.digests) != array.chunks.count]:
        raise ExportError(f"{listed(lost)}: not read back")
    return root_digest(arrays)


def digest_of_checkpoint(saved: Checkpoint, names: Sequence[str]) -> str:
    """Return the digest of weights of a checkpoint, by their names, without reading them."""
    return root_digest(replace(saved.array(PARAMETERS + name), name=name) for name in names)
