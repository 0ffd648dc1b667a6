"""Write prepared tokens in the formats of other trainers.

NAME.bin, NAME.idx             Megatron-LM: a sequence for each document
NAME.ds, .ds.index, .ds.loss   datatrove
NAME.npy, .npy.loss            NumPy's header; documents end by the end of text

Documents have their begins and ends of text, the last one, too: sources/ reads the same tokens again.
"""

import io
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import numpy as np

from mpitrain.data.sources import auto, datatrove, megatron, numpy_array
from mpitrain.data.token_files import LOSS, TYPES, with_ending
from mpitrain.data.tokens import describe, open_ends, open_tokens, open_unscored
from mpitrain.errors import DataError
from mpitrain.inputs import listed, replacing, shown

BLOCK = 1 << 20  # tokens that are written at once
MEGATRON_WIDE = 65_500  # ids from which Megatron-LM writes 4 bytes
LONGEST = 2**31 - 1  # tokens of a sequence of Megatron-LM
Contents = Mapping[Path, Iterable[bytes | np.ndarray]]  # of files


class _Stored:
    """Prepared tokens, with an end of text after the last document."""

    def __init__(self, folder: Path):
        description = describe(folder)
        self.vocab = description.origin.vocab
        self.end_of_text = description.origin.end_of_text
        self._tokens = open_tokens(folder)
        self.unscored = open_unscored(folder)
        ends = np.asarray(open_ends(folder))
        if not ends.size:
            raise DataError(f"{shown(folder)}: tokens of an older version, without ends of documents")
        self.ends = ends.copy()
        self.ends[-1] += self.end_of_text is not None
        self.count = int(self.ends[-1])

    def ids(self, dtype: np.dtype) -> Iterator[np.ndarray]:
        for begin in range(0, len(self._tokens), BLOCK):
            yield self._tokens[begin : begin + BLOCK].astype(dtype)
        if self.end_of_text is not None:
            yield np.array([self.end_of_text], dtype)

    def masks(self, runs: np.ndarray) -> Iterator[np.ndarray]:
        """Yield a byte for each id: whether it carries loss. runs: those that don't."""
        for begin in range(0, self.count, BLOCK):
            mask = np.ones(min(BLOCK, self.count - begin), np.uint8)
            first = np.searchsorted(runs[:, 1], begin, side="right")
            for one, other in runs[first : np.searchsorted(runs[:, 0], begin + len(mask))].tolist():
                mask[max(one - begin, 0) : other - begin] = 0
            yield mask


def write_tokens(folder: Path, target: Path) -> tuple[Path, ...]:
    """Write the tokens of a folder in the format of a file's suffix; return the files.

    Raises DataError for what the format can't hold, before anything is written, and OSError, which
    leaves none of the files.
    """
    stored = _Stored(folder)
    contents_of = FORMATS.get(target.suffix)
    if contents_of is None:
        raise DataError(f"--to {shown(target)}: needed a file {', '.join(FORMATS)}")
    contents = contents_of(stored, target)
    if there := [path for path in contents if path.is_file()]:
        raise DataError(f"--to {shown(target)}: {listed(there)} already exists; give a new name")
    if stale := [path for path in auto.companions(target) if path not in contents and path.exists()]:
        raise DataError(
            f"--to {shown(target)}: {listed(stale)} of other tokens would be read with it; remove it"
        )
    written = list[Path]()
    try:
        for path, content in contents.items():
            with replacing(path) as file:
                file.writelines(content)
            written.append(path)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    return tuple(written)


def _megatron(stored: _Stored, target: Path) -> Contents:
    lengths = np.diff(stored.ends, prepend=0)
    if stored.unscored is not None:
        raise DataError(f"--to {shown(target)}: Megatron-LM's files hold no loss masks; use .ds or .npy")
    if (longest := int(lengths.max())) > LONGEST:
        found = f"a document has {longest:,} tokens; needed at most {LONGEST:,}"
        raise DataError(f"--to {shown(target)}: {found}")
    code = 8 if stored.vocab < MEGATRON_WIDE else 4
    dtype = np.dtype(megatron.TYPES[code])
    header = megatron.HEADER.pack(megatron.MAGIC, 1, code, len(lengths), len(lengths) + 1)
    offsets = (stored.ends - lengths) * dtype.itemsize
    documents = np.arange(len(lengths) + 1)
    arrays = lengths.astype("<i4"), offsets.astype("<i8"), documents.astype("<i8")
    index = [header, *(array.tobytes() for array in arrays)]
    return {target: stored.ids(dtype), megatron.index_of(target): index}


def _datatrove(stored: _Stored, target: Path) -> Contents:
    dtype = TYPES["uint16" if stored.vocab <= 1 << 16 else "uint32"]
    index = {with_ending(target, datatrove.INDEX): [stored.ends.astype("<u8").tobytes()]}
    return {target: stored.ids(dtype), **_masks(stored, target), **index}


def _numpy(stored: _Stored, target: Path) -> Contents:
    if stored.end_of_text is None:
        raise DataError(f"--to {shown(target)}: no token ends the documents of these; use .bin or .ds")
    dtype = TYPES[numpy_array.least_type(stored.vocab)]
    head = io.BytesIO()
    about = {"descr": dtype.str, "fortran_order": False, "shape": (stored.count,)}
    np.lib.format.write_array_header_1_0(head, about)
    return {target: chain([head.getvalue()], stored.ids(dtype)), **_masks(stored, target)}


def _masks(stored: _Stored, target: Path) -> Contents:
    runs = stored.unscored
    return {} if runs is None else {with_ending(target, LOSS): stored.masks(runs)}


FORMATS = {".bin": _megatron, ".ds": _datatrove, ".npy": _numpy}
