"""A part of the prepared tokens, to read windows from: stretches of tokens.bin, one after the other.

tokens.bin  a  b  .  c  d  e  .  f  g  .  stretches [0, 3), [7, 10)
text        a  b  .  f  g  .              a window may go over the end of a stretch, where a
                                          document ends, too
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mpitrain.data.read_tokens import Tokens


class TokenRows(NamedTuple):
    """tokens: int64 [rows, length].

    ends: of this shape, true at the last token of a document; None if that isn't asked for.
    scored: of this shape, whether a token carries loss as a target; None: all do.
    """

    tokens: np.ndarray
    ends: np.ndarray | None = None
    scored: np.ndarray | None = None

    def divided(self, number: int) -> "TokenRows":
        """Return so many rows in place of each (batch.lengths): one ends with the next one's first token.

        tokens  a b c d e    2 rows each    a b c
                                            c d e
        """
        if number == 1:
            return self
        length = (self.tokens.shape[1] - 1) // number
        places = np.arange(number)[:, None] * length + np.arange(length + 1)
        return TokenRows(*(x if x is None else x[:, places].reshape(-1, length + 1) for x in self))


class Text:
    """tokens: all that are prepared.  stretches: begin and end of each part [n, 2]; None: all.

    ends: of documents, as ends.bin has them; or the token that ends each, of tokens of form 1;
    None: rows need not tell.
    unscored: runs of tokens without loss, as unscored.bin has them; None: there are none.
    """

    def __init__(
        self,
        tokens: Tokens,
        stretches: np.ndarray | None = None,
        ends: np.ndarray | int | None = None,
        unscored: np.ndarray | None = None,
    ):
        whole = np.array([[0, len(tokens)]], np.int64)
        # an ndarray view of the memmap: rows are then ndarrays too
        self._tokens = np.asarray(tokens) if isinstance(tokens, np.ndarray) else tokens
        self._begins, self._lasts = (whole if stretches is None else stretches).T
        # where each stretch begins in this text
        self._offsets = np.concatenate([[0], np.cumsum(self._lasts - self._begins)])
        self._ends = ends if ends is None or isinstance(ends, int) else np.asarray(ends)
        self._unscored = None if unscored is None else np.asarray(unscored)

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def rows(self, starts: np.ndarray, length: int) -> TokenRows:
        """Return the windows that begin at `starts`."""
        tokens = np.empty((len(starts), length), np.int64)
        ends = None if self._ends is None else np.zeros(tokens.shape, bool)
        scored = None if self._unscored is None else np.ones(tokens.shape, bool)
        for row, start in enumerate(starts.tolist()):
            place = 0
            for begin, last, number in self.pieces(start, length):
                tokens[row, place : place + last - begin] = self._tokens[begin:last]
                if isinstance(self._ends, np.ndarray):
                    self._mark(ends[row], place, begin, last, number)
                if scored is not None:
                    self._leave_out(scored[row, place : place + last - begin], begin, last)
                place += last - begin
        return TokenRows(tokens, tokens == self._ends if isinstance(self._ends, int) else ends, scored)

    def pieces(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield the pieces of tokens.bin that a window has: begin, end, and the stretch's number."""
        while length:
            number = int(np.searchsorted(self._offsets, start, side="right")) - 1
            begin = int(self._begins[number]) + start - int(self._offsets[number])
            last = min(begin + length, int(self._lasts[number]))
            yield begin, last, number
            start += last - begin
            length -= last - begin

    @cached_property
    def _in_stretches(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the first document of each stretch, and their number up to the end of each."""
        assert isinstance(self._ends, np.ndarray)
        first = np.searchsorted(self._ends, self._begins, side="right")
        counts = np.searchsorted(self._ends, self._lasts) + 1 - first
        return first, np.cumsum(counts * (self._lasts > self._begins))

    @property
    def num_documents(self) -> int:
        """Return how many documents there are; a stretch may begin or end with a part of one."""
        return int(self._in_stretches[1][-1]) if len(self._begins) else 0

    def documents(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where documents begin and end in tokens.bin. It takes ends.bin."""
        assert isinstance(self._ends, np.ndarray)
        first, totals = self._in_stretches
        stretches = np.searchsorted(totals, numbers, side="right")
        before = np.concatenate([[0], totals])[stretches]
        found = first[stretches] + numbers - before
        begins = np.where(found, self._ends[np.maximum(found - 1, 0)], 0)
        return (
            np.maximum(begins, self._begins[stretches]),
            np.minimum(self._ends[found], self._lasts[stretches]),
        )

    def packed(self, rows: Sequence[Sequence[tuple[int, int]]], length: int) -> TokenRows:
        """Return rows of pieces of tokens.bin side by side; what is after the last one carries no loss."""
        tokens = np.zeros((len(rows), length), np.int64)
        ends = np.zeros(tokens.shape, bool)
        scored = np.zeros(tokens.shape, bool)
        for row, pieces in enumerate(rows):
            place = 0
            for begin, last in pieces:
                here = slice(place, place + last - begin)
                tokens[row, here] = self._tokens[begin:last]
                scored[row, here] = True
                if self._unscored is not None:
                    self._leave_out(scored[row, here], begin, last)
                place = here.stop
                ends[row, place - 1] = True
        return TokenRows(tokens, ends, scored)

    def _leave_out(self, scored: np.ndarray, begin: int, last: int) -> None:
        """Mark which of tokens `begin` to `last` carry no loss."""
        assert self._unscored is not None
        first = np.searchsorted(self._unscored[:, 1], begin, side="right")
        stop = np.searchsorted(self._unscored[:, 0], last)
        for run_begin, run_end in self._unscored[first:stop].tolist():
            scored[max(run_begin - begin, 0) : run_end - begin] = False

    def _mark(self, ends: np.ndarray, place: int, begin: int, last: int, stretch: int) -> None:
        """Mark the last tokens of documents among tokens `begin` to `last`, which stand from `place` on."""
        first, stop = np.searchsorted(self._ends, [begin + 1, last + 1])
        ends[place - 1 + self._ends[first:stop] - begin] = True
        # within a document, perhaps: what follows in this text isn't its rest
        if last == self._lasts[stretch]:
            ends[place + last - begin - 1] = True
