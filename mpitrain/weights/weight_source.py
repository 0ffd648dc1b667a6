"""Where first weights come from: any box of any weight, read from a Hugging Face folder or a checkpoint.

A few megabytes at a time; of a weight that lies there otherwise than here, its tensor.
"""

import math
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from mpitrain.checkpoint.boxes import Box, whole
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.config import Config
from mpitrain.errors import CheckpointError, WeightsError
from mpitrain.inputs import shown
from mpitrain.plan.plan import Plan
from mpitrain.weights.bits import DTYPES, widen_into, widened
from mpitrain.weights.folder import ModelFolder
from mpitrain.weights.matching import EMBEDDING, Matched, Weight, unused_biases

# read at once. Of less, threads that hand it on cost more than they save: export of 1.5 G parameters takes
# 3.5 s and 4.5 of processor time with 1 MiB, 2.7 and 3.6 with this, 3.6 and 4.9 with 16 (Zen 5, 2026-11-28)
BAND_BYTES = 1 << 22


class WeightSource(Protocol):
    """Weights that lie somewhere."""

    def box(self, name: str) -> Box | None:
        """Return the part of a weight that is there; None for a weight that isn't."""

    def read(self, name: str, box: Box, out: np.ndarray) -> None:
        """Fill `out`, fp32 or fp64 of the box's shape. Raises InputError, also for what isn't finite."""

    def close(self) -> None:
        """Close all files."""


def bands(box: Box, row_bytes: int, multiple: int = 1, most_bytes: int = BAND_BYTES) -> Iterator[Box]:
    """Yield the box in runs of rows of some megabytes each, which begin at multiples of `multiple`."""
    rows = max(1, most_bytes // max(1, row_bytes) // multiple) * multiple
    at = box.start[0]
    while at < box.stop[0]:
        end = min((at // rows + 1) * rows, box.stop[0])
        yield Box((at, *box.start[1:]), (end, *box.stop[1:]))
        at = end


class FolderSource:
    """The weights of a Hugging Face folder, which stays open as long as this is used."""

    def __init__(self, folder: ModelFolder, matched: Matched, config: Config):
        self.folder = folder
        self._weights = {weight.name: weight for weight in (*matched.weights, *matched.zeros)}
        self._config = config
        # what was read last of weights that lie there otherwise than here
        self._tensor: tuple[str, np.ndarray] | None = None
        self._assembled: tuple[tuple[str, str], np.ndarray] | None = None

    def box(self, name: str) -> Box | None:
        return self._weights[name].box if name in self._weights else None

    def read(self, name: str, box: Box, out: np.ndarray) -> None:
        weight = self._weights[name]
        if not weight.by_expert:
            self._read(weight, weight.tensors[0], box, out)
            return
        inner = Box(box.start[1:], box.stop[1:])
        for expert in range(box.start[0], box.stop[0]):
            self._read(weight, weight.tensors[expert], inner, out[expert - box.start[0]])

    def close(self) -> None:
        self.folder.close()

    def _read(self, weight: Weight, tensor: str, box: Box, out: np.ndarray) -> None:
        if not weight.stored.plain:
            self._take(tensor, out, self._whole(weight, tensor)[box.slices])
            return
        entry = self.folder.entry(tensor)
        row_bytes = math.prod(entry.shape[1:]) * DTYPES[entry.code].itemsize
        for band in bands(box, row_bytes):
            rows = self.folder.rows(tensor, band.start[0], band.stop[0])
            self._take(tensor, out[band.seen_from(box)], rows[(slice(None), *box.slices[1:])])

    def _take(self, tensor: str, out: np.ndarray, found: np.ndarray) -> None:
        if not widen_into(out, found):
            where = self.folder.where(self.folder.names[tensor])
            or_large = ", or too large ones for fp32" * (found.dtype.itemsize > out.dtype.itemsize)
            what = f"{shown(tensor)} holds NaN or infinite numbers{or_large}"
            raise WeightsError(f"{where}: {what}; get another copy of the model")

    def _whole(self, weight: Weight, tensor: str) -> np.ndarray:
        """Return what a tensor has of a weight, in the tensor's dtype; a view of it where that will do."""
        key = weight.name, tensor
        if self._assembled is None or self._assembled[0] != key:
            self._assembled = None  # before there are two
            if self._tensor is None or self._tensor[0] != tensor:
                self._tensor = None
                self._tensor = tensor, self.folder.rows(tensor, 0, self.folder.entry(tensor).shape[0])
            theirs = self._tensor[1]
            ours = np.empty(weight.ours, theirs.dtype)
            for view, other in weight.stored.views(ours, theirs, self._config):
                view[...] = other
            self._assembled = key, ours
        return self._assembled[1]


def require_tied_head(matched: Matched, source: FolderSource) -> None:
    """Raise WeightsError unless the head that lies beside a tied embedding is the same numbers."""
    if not matched.head:
        return
    folder = source.folder
    entry = folder.entry(matched.head)
    box = source.box(EMBEDDING)
    dtype = np.dtype(np.float64 if entry.code == "F64" else np.float32)
    for band in bands(box, math.prod(entry.shape[1:]) * dtype.itemsize):
        expected = np.empty(band.shape, dtype)
        source.read(EMBEDDING, band, expected)
        rows = entry.shape == box.shape and widened(folder.rows(matched.head, band.start[0], band.stop[0]))
        if rows is False or not np.array_equal(rows, expected):
            what = f"{shown(folder.path)}: {matched.head} is another matrix than the embedding"
            change = "tie_word_embeddings says that they are one; set it to false in config.json"
            raise WeightsError(f"{what}, and {change}")


def require_no_bias(source: WeightSource, plan: Plan, where: str) -> None:
    """Raise WeightsError for a bias of a router that isn't 0, where the model has none."""
    for spec in unused_biases(plan):
        if (box := source.box(spec.name)) is None:
            continue
        numbers = np.empty(box.shape, np.float64)
        source.read(spec.name, box, numbers)
        if numbers.any():
            balance = f'with experts.balance = "{plan.config.experts.balance}" there is none'
            change = 'Use experts.balance = "bias"; with experts.bias_rate = 0 it stays as it is'
            what = f"{spec.name} isn't 0, and chooses experts; {balance}, and it is another model"
            raise WeightsError(f"{where}: {what}. {change}")


class CheckpointSource:
    """The weights of a step of mpitrain's own."""

    def __init__(self, saved: Checkpoint):
        self._saved = saved
        self._names = set(saved.names())

    def box(self, name: str) -> Box | None:
        stored = f"parameters/{name}"
        return whole(self._saved.array(stored).shape) if stored in self._names else None

    def read(self, name: str, box: Box, out: np.ndarray) -> None:
        stored = f"parameters/{name}"
        for band in bands(box, math.prod(box.shape[1:]) * out.itemsize):
            values = self._saved.read(stored, band.slices)
            if not widen_into(out[band.seen_from(box)], values):
                what = f"{shown(stored)} holds NaN or infinite numbers"
                raise CheckpointError(f"{shown(self._saved.path)}: {what}; use another step")

    def close(self) -> None:
        self._saved.close()
