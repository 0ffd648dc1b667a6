"""The safetensors files of an export: which tensors are in which, and writing one, band by band."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np

from mpitrain.checkpoint.boxes import whole
from mpitrain.checkpoint.files import SEND_BYTES, start_writeback
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.config import Config
from mpitrain.errors import MpitrainError
from mpitrain.inputs import closed_on_error, open_regular, shown
from mpitrain.weights.ahead import ahead
from mpitrain.weights.bits import CODES, DTYPES, cast, is_exact
from mpitrain.weights.expected import CastRows, ExpectedDigests
from mpitrain.weights.folder import SINGLE
from mpitrain.weights.header import header_of
from mpitrain.weights.matching import Weight, tensors_of
from mpitrain.weights.syncing import Syncing
from mpitrain.weights.weight_source import bands

Parts = Iterator[tuple[np.ndarray, CastRows | None]]  # of a tensor, each with what it was cast from
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # a file that isn't there yet


@dataclass(frozen=True)
class OutTensor:
    """A tensor to be written. parts: weights in it, each with its expert's number; none: zeros."""

    name: str
    code: str
    shape: tuple[int, ...]
    parts: tuple[tuple[Weight, int], ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.code].itemsize


def tensors_to_write(
    weights: Sequence[Weight], zeros: Sequence[Weight], saved: Checkpoint, code: str
) -> list[OutTensor]:
    """Return all tensors in order, zeros last. code: dtype of those that aren't written exactly."""
    kept = CODES[saved.array(f"parameters/{weights[0].name}").dtype]
    filled = [(name, parts[0][0], tuple(parts)) for name, parts in tensors_of(weights).items()]
    empty = [(name, weight, ()) for weight in zeros for name in weight.tensors]
    return [
        OutTensor(name, kept if weight.stored.exact else code, weight.shape, parts)
        for name, weight, parts in filled + empty
    ]


def shards_of(tensors: Sequence[OutTensor], most_bytes: int) -> dict[str, list[OutTensor]]:
    """Return the files, each with its tensors, of at most so many bytes unless one tensor has more."""
    groups: list[list[OutTensor]] = []
    size = most_bytes
    for tensor in tensors:
        if size + tensor.num_bytes > most_bytes or not groups:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.num_bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    of_all = f"of-{len(groups):05d}.safetensors"
    return {f"model-{number:05d}-{of_all}": group for number, group in enumerate(groups, start=1)}


def write_shard(
    path: Path,
    tensors: Sequence[OutTensor],
    saved: Checkpoint,
    config: Config,
    expected: ExpectedDigests,
    syncing: Syncing,
    each: Callable[[int], object],
) -> None:
    """Write a new file, and have it synced. each: hears of bytes. Raises OSError and InputError."""
    with new_file(path, syncing, own=2) as file:
        write_all(file, header_of((tensor.name, tensor.code, tensor.shape) for tensor in tensors))
        sent = 0
        parts = ahead(part for tensor in tensors for part in _contents(tensor, saved, config))
        for content in ahead(_noted(parts, expected)):  # read and cast, noted, written: a thread each
            write_all(file, np.ascontiguousarray(content).reshape(-1).view(np.uint8))
            each(content.nbytes)
            if file.tell() - sent >= SEND_BYTES:
                start_writeback(file.fileno(), sent, file.tell() - sent)
                sent = file.tell()


@contextmanager
def new_file(path: Path, syncing: Syncing, own: int) -> Iterator[FileIO]:
    """Yield a file that isn't there yet, and have it synced after the block. own: of open_regular()."""
    file = FileIO(open_regular(path, NEW, own=own), "wb")
    with closed_on_error(file):
        yield file
    syncing.add(path, file)


def write_all(file: FileIO, content: bytes | np.ndarray) -> None:
    """Write all of it, in as many calls as that takes."""
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


def _noted(parts: Parts, expected: ExpectedDigests) -> Iterator[np.ndarray]:
    for content, rows in parts:
        if rows is not None:
            expected.add(rows)
        yield content


def _contents(tensor: OutTensor, saved: Checkpoint, config: Config) -> Parts:
    """Yield a tensor's numbers in order, maybe none at first, and rows that were cast for them."""
    dtype = DTYPES[tensor.code]
    if not tensor.parts:
        yield np.zeros(tensor.shape, dtype), None
        return
    weight, expert = tensor.parts[0]
    if weight.stored.plain and len(tensor.parts) == 1:
        for rows in _cast_rows(weight, expert, saved, tensor):
            yield rows.found, rows
        return
    theirs = np.empty(tensor.shape, dtype)
    written = 0
    for weight, expert in tensor.parts:
        ours = np.empty(weight.ours, dtype)
        for rows in _cast_rows(weight, expert, saved, tensor):
            ours[rows.box.start[0] : rows.box.stop[0]] = rows.found
            yield theirs[:0], rows
        for view, other in weight.stored.views(ours, theirs, config):
            other[...] = view
            written += view.size
    if written != theirs.size:
        what = f"{shown(tensor.name)}: its weights fill {written:,} of {theirs.size:,} numbers"
        raise MpitrainError(f"{what}; the family's weight_names are wrong")
    yield theirs, None


def _cast_rows(weight: Weight, expert: int, saved: Checkpoint, tensor: OutTensor) -> Iterator[CastRows]:
    name = f"parameters/{weight.name}"
    row_bytes = math.prod(weight.ours[1:]) * saved.array(name).dtype.itemsize
    for box in bands(whole(weight.ours), row_bytes):
        of_expert = (slice(expert, expert + 1),) if weight.by_expert else ()
        kept = saved.read(name, (*of_expert, *box.slices))
        kept = kept[0] if weight.by_expert else kept
        exact = is_exact(kept, DTYPES[tensor.code])
        yield CastRows(weight, expert, box, kept, cast(kept, DTYPES[tensor.code], exact), exact)
