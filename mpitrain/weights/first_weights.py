"""The first weights of a rank: its own part of each weight, read from where they lie."""

from collections.abc import Iterable

import numpy as np
import torch

from mpitrain.checkpoint.boxes import Box, run_boxes
from mpitrain.parallel.zero.initial import fresh
from mpitrain.parallel.zero.shards import ParameterShard
from mpitrain.weights.weight_source import WeightSource, bands


def fill(pieces: Iterable[ParameterShard], source: WeightSource, seed: int) -> None:
    """Fill the weights that a rank updates; fresh ones that the source lacks. Raises InputError."""
    for piece in pieces:
        spec, weight = piece.spec, piece.weight
        there = source.box(spec.name)
        boxes = []  # where boxes of the rank's box lie in the whole weight
        for box, here in run_boxes(spec.shape, piece.begin, piece.end):
            start = tuple(a + b for a, b in zip(spec.offset, box.start))
            boxes.append((Box(start, tuple(a + n for a, n in zip(start, box.shape))), here))
        if there is None or any(box.overlap(there) != box for box, _ in boxes):
            fresh(spec, piece.begin, piece.end, seed, weight)
        for box, here in boxes if there is not None else ():
            both = box.overlap(there)
            if both.size:
                _read(source, spec.name, both, weight[here].view(box.shape)[both.seen_from(box)])


def _read(source: WeightSource, name: str, box: Box, out: torch.Tensor) -> None:
    """Fill a tensor; one of a GPU, or of 16 bits, by way of a few megabytes of the host's."""
    if out.is_cpu and out.dtype in (torch.float32, torch.float64):
        source.read(name, box, out.numpy())
        return
    dtype = np.dtype(np.float64 if out.dtype == torch.float64 else np.float32)
    for band in bands(box, box.size // max(1, box.shape[0]) * dtype.itemsize):
        part = np.empty(band.shape, dtype)
        source.read(name, band, part)
        out[band.seen_from(box)].copy_(torch.from_numpy(part))
