"""Tokens that aren't complete yet: a run that leaves, or is killed, resumes there at its next start.

tokens.bin.tmp, ends.bin.tmp  so far, and perhaps some that aren't noted yet
unscored.bin.tmp              likewise, once there are targets without loss
tokens.part.json              Kept: how much of them is on disk. Written after each sync; digests
                              say whether it is still the same
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from mpitrain.data.origin import (
    ENDS_DTYPE,
    MOST_BYTES,
    NUMBERS,
    OWN,
    Count,
    CountOrNone,
    Origin,
    ReadCounts,
    write_struct,
)
from mpitrain.data.read_tokens import Tokens, open_numbers
from mpitrain.data.source import BEGIN, Position
from mpitrain.inputs import DRAFT, decoded, open_regular, read_regular, remove

PART = "tokens.part.json"
BLOCK_BYTES = 1 << 20
KEEP_S = 20.0  # of work that a kill can cost, at most
FIRST_KEEP_S = 1.0  # of work that it can cost at the beginning


class Kept(msgspec.Struct, frozen=True):
    """What is on disk of a draft.

    digest, ends: xxh3-128 of the first `count` tokens, and of the ends of all documents but the last.
    after: where the next document begins.
    unscored: digest of the runs of tokens without loss; num_unscored: twice as many as these.
    """

    origin: Origin
    count: Count
    digest: str
    after: Position
    ends: str
    tally: ReadCounts
    unscored: str = ""
    num_unscored: CountOrNone = 0


class GrowingFile:
    """An array that grows on disk. count, digest: of all its elements so far."""

    def __init__(self, path: Path, dtype: np.dtype):
        self.path = path
        self._dtype = dtype
        self.count = 0
        self.digest = xxhash.xxh3_128()

    def begin(self) -> None:
        """Make the file, which is not there. Raises OSError."""
        self.count = 0
        self.digest = xxhash.xxh3_128()
        new = os.O_RDWR | os.O_CREAT | os.O_EXCL
        # closed in close() and cut()
        self._file = open(open_regular(self.path, new, OWN), "r+b")  # noqa: SIM115

    def take_up(self, count: int, digest: str, below: int, each: Callable[[str], object]) -> bool:
        """Continue after the first `count` elements, all below a limit; return whether there are these."""
        try:
            self._file = open(open_regular(self.path, os.O_RDWR, OWN), "r+b")  # noqa: SIM115
        except OSError:
            return False
        if self._read(count, below, each) and self.digest.hexdigest() == digest:
            self._file.truncate(self._file.tell())
            return True
        self._file.close()
        return False

    def add(self, elements: np.ndarray) -> None:
        self.digest.update(elements)
        self._file.write(elements)
        self.count += elements.size

    def sync(self) -> None:
        """Bring all to the disk. Raises OSError."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def mapped(self) -> Tokens:
        return open_numbers(self.path, self._dtype, self.count)

    def cut(self, count: int) -> None:
        """Leave the first `count` elements, and close the file."""
        descriptor = os.dup(self._file.fileno())
        with suppress(OSError):  # a disk that is full: the error that is raised says so
            self._file.close()
        os.ftruncate(descriptor, count * self._dtype.itemsize)
        os.close(descriptor)

    def _read(self, count: int, below: int, each: Callable[[str], object]) -> bool:
        """Read the first `count` elements; return whether there are as many."""
        left = count * self._dtype.itemsize
        while left and (block := self._file.read(min(BLOCK_BYTES, left))):
            each("checking the tokens that were kept")
            if len(block) % self._dtype.itemsize or int(np.frombuffer(block, self._dtype).max()) >= below:
                return False
            self.digest.update(block)
            left -= len(block)
        self.count = count
        return not left


class Draft:
    """The growing files of one rank.

    tally: of all that was read so far.
    after: the document to continue with.
    """

    def __init__(self, folder: Path, origin: Origin, dtype: np.dtype, each: Callable[[str], object]):
        """Continue with what is kept, if it was made from `origin` and is whole; else begin anew.

        each: called while it is checked.
        """
        self._folder = folder
        self._origin = origin
        dtypes = zip(NUMBERS, (dtype, ENDS_DTYPE, ENDS_DTYPE), strict=True)
        self._files = [GrowingFile(folder / f"{name}{DRAFT}", of_file) for name, of_file in dtypes]
        self._tokens, self._ends, self._unscored = self._files
        self._last_unscored = 0  # where the last run of tokens without loss ends
        self.after = BEGIN
        self.tally = ReadCounts()
        self._kept_at = time.monotonic()
        self._keep_s = min(FIRST_KEEP_S, KEEP_S)
        self._noted = self.tally
        kept = read_kept(folder)
        if kept is None or not self._take_up(kept, each):
            remove_draft(folder)
            for file in self._files:
                file.begin()
        self._kept = self._counts

    @property
    def count(self) -> int:
        return self._tokens.count

    @property
    def digests(self) -> tuple[str, str]:
        """Those of the tokens, and of the ends."""
        return self._tokens.digest.hexdigest(), self._ends.digest.hexdigest()

    @property
    def unscored(self) -> tuple[str, int]:
        """The digest of the runs of tokens without loss, and how many there are; "": none."""
        count = self._unscored.count // 2
        return (self._unscored.digest.hexdigest() if count else "", count)

    def add(
        self,
        between: np.ndarray,
        ids: np.ndarray,
        after: Position,
        tally: ReadCounts,
        scored: np.ndarray | None,
    ) -> None:
        """Append the tokens of a document. between: what ends the document before it, if there is one.

        scored: whether each carries loss as a target; None: all do. An end is as the last token is.
        """
        if self.count:
            if between.size and self._unscored.count and self._last_unscored == self.count:
                self._add_unscored(np.array([self.count, self.count + between.size]))
            self._tokens.add(between)
            self._end_document()
        if scored is not None:
            self._add_unscored(self.count + runs_of(~scored))
        self._tokens.add(ids)
        self.after = after
        self.tally = tally
        self._noted = tally
        if time.monotonic() - self._kept_at > self._keep_s:
            self.keep()
            self._keep_s = min(2 * self._keep_s, KEEP_S)

    def keep(self) -> None:
        """Bring what there is to the disk, and note it. Raises OSError."""
        self._sync()
        if self.count:
            digest, ends = self.digests
            runs = self._unscored.digest.hexdigest(), self._unscored.count
            kept = Kept(self._origin, self.count, digest, self.after, ends, self._noted, *runs)
            write_struct(self._folder / PART, kept)
        self._kept = self._counts
        self._kept_at = time.monotonic()

    def complete(self) -> tuple[Tokens, np.ndarray]:
        """Bring all tokens and ends to the disk, and return both."""
        self._end_document()
        self._sync()
        return self._tokens.mapped(), self._ends.mapped()[:]

    @property
    def carries_loss(self) -> bool:
        """Whether any token does, once all are complete."""
        if not self._unscored.count:
            return True
        begins, lasts = self._unscored.mapped()[:].reshape(-1, 2).T
        return int((lasts - begins).sum()) < self.count

    def close(self) -> None:
        for file in self._files:
            file.close()

    def stop(self) -> None:
        """Leave what is noted for another start, and nothing where nothing is."""
        for file, count in zip(self._files, self._kept, strict=True):
            file.cut(count)
        if not self._kept[0]:
            remove_draft(self._folder)

    @property
    def _counts(self) -> list[int]:
        return [file.count for file in self._files]

    def _add_unscored(self, runs: np.ndarray) -> None:
        """Append runs as runs_of() gives them."""
        self._unscored.add(runs.astype(ENDS_DTYPE))
        if runs.size:
            self._last_unscored = int(runs[-1])

    def _end_document(self) -> None:
        self._ends.add(np.array([self.count], ENDS_DTYPE))

    def _sync(self) -> None:
        for file in self._files:
            file.sync()

    def _take_up(self, kept: Kept, each: Callable[[str], object]) -> bool:
        """Open what is kept, without what comes after it; return False if it isn't what it was."""
        if not kept.origin.gives_the_same_as(self._origin) or not kept.tally.documents:
            return False
        noted = (
            (kept.count, kept.digest, self._origin.vocab),
            (kept.tally.documents - 1, kept.ends, kept.count + 1),
            (kept.num_unscored, kept.unscored, kept.count + 1),
        )
        for number, (file, of_file) in enumerate(zip(self._files, noted, strict=True)):
            if not file.take_up(*of_file, each):
                for earlier in self._files[:number]:
                    earlier.close()
                return False
        self._last_unscored = int(self._unscored.mapped()[-1:][0]) if kept.num_unscored else 0
        self.after = kept.after
        self.tally = kept.tally
        self._noted = kept.tally
        return True


def remove_draft(folder: Path) -> None:
    """Remove what is kept of tokens that aren't complete. Raises OSError."""
    for name in (PART, *(f"{name}{DRAFT}" for name in NUMBERS)):
        remove(folder / name, OWN)


def runs_of(chosen: np.ndarray) -> np.ndarray:
    """Return where runs of true begin and end, in turn: [2 n]."""
    return np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]])))


def read_kept(folder: Path) -> Kept | None:
    """Return what is noted of a draft; None if nothing is, or it can't be read."""
    try:
        return decoded(read_regular(folder / PART, MOST_BYTES, OWN), Kept)
    except (OSError, ValueError):
        return None
