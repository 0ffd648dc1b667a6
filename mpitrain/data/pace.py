"""Say how far the preparation of tokens is: a line at its beginning, and one every few seconds."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate

from mpitrain.data.encoding import DocumentPiece
from mpitrain.data.source import Position
from mpitrain.errors import counted

SAY_S = 5.0


class Pace:
    """How fast the bytes of a corpus become tokens. sizes: of its files.  after: where this start begins."""

    def __init__(
        self,
        say: Callable[[str], object],
        sizes: Sequence[int],
        after: Position,
        how: str,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._say = say
        self._clock = clock
        self._offsets = [0, *accumulate(sizes)]
        self._done = self._first = self._at(after)
        self._within = 0
        self._began = self._said = clock()
        kept = f", {self._done:,} of them before this start" * bool(self._done)
        say(f"tokenizing: {self._offsets[-1]:,} bytes in {counted(len(sizes), 'files', ',')}{kept}, {how}")

    def encoded(self, piece: DocumentPiece) -> None:
        """Count a piece that is encoded, and say how far this is, if it is time."""
        self._within += len(piece.text)
        if piece.is_last:
            self._done = self._at(piece.document.after)
            self._within = 0
        now = self._clock()
        if now - self._said >= SAY_S:
            self._said = now
            self._say(self._line(now))

    def _line(self, now: float) -> str:
        total = self._offsets[-1]
        done = min(self._done + self._within, total)
        rate = max(done - self._first, 1) / (now - self._began)
        left = timedelta(seconds=round((total - done) / rate))
        reached = f"{done:,} of {total:,} bytes ({done / total:.0%})"
        return f"tokenizing: {reached}, {rate / 1e6:.2f} MB/s, {left} left"

    def _at(self, position: Position) -> int:
        return self._offsets[position.files] + position.offset
