"""Which rows go where, and when: the exchange of experts in rounds, from the counts alone.

Integers only: every rank finds the same.

A rank sends a row for each expert that a token of its own has chosen, in the order of the experts.
What comes to the ranks of an expert stands in the order of the ranks that sent it, and is cut into
rounds of at most `limit` rows:

    from rank  0 0 0 0 0 0 0 1 2 2 2 2 2
    expert     4 4 4 5 5 7 7 5 4 4 6 7 7
    limit = 8  [    round 0     ][ round 1 ]  in each round, rows of one expert are brought
                                              together, and multiplied at once

All ranks make as many rounds as the one to which most comes: an exchange is collective, also for
those that have nothing to send.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np


class Round(NamedTuple):
    """One round, as one rank sees it.

    rows: which of its rows it sends, in the order in which it does; those for one part of the
    experts together, whichever of the ranks that divide them they go to. None stands for all.
    sent, received: how many to and from each rank of the axis.
    parts: how many of `rows` go to each part.
    order: of what has come, so that rows of one expert stand together. None if they do already.
    loads: how many of them each expert has that is here.
    """

    rows: np.ndarray | None
    parts: list[int]
    sent: list[int]
    received: list[int]
    order: np.ndarray | None
    loads: list[int]


@dataclass(frozen=True)
class Rounds:
    """The rounds of one exchange.

    counts: rows that each rank of the axis sends to each expert, [S, E].
    rank: this one.
    divided: neighbours that divide each expert (etp).
    limit: rows that a rank receives at once.
    """

    counts: np.ndarray
    rank: int
    divided: int
    limit: int

    @cached_property
    def _to_parts(self) -> np.ndarray:
        """Rows from each rank to each part of the experts, [S, ep]."""
        return self.counts.reshape(len(self.counts), -1, self.experts_here).sum(-1)

    @property
    def experts_here(self) -> int:
        return self.counts.shape[1] * self.divided // len(self.counts)

    @property
    def num(self) -> int:
        """How many rounds there are: at least one."""
        return max(1, -(-int(self._to_parts.sum(0).max()) // self.limit))

    def _experts_of_rows(self) -> np.ndarray:
        """Return which of its experts each row is for that this rank receives in all rounds."""
        here = self.rank // self.divided
        own = slice(here * self.experts_here, (here + 1) * self.experts_here)
        return np.repeat(np.tile(np.arange(self.experts_here), len(self.counts)), self.counts[:, own].ravel())

    def __getitem__(self, number: int) -> Round:
        """Return a round."""
        # where the rows of each rank begin, among what comes
        first = self._to_parts.cumsum(0) - self._to_parts
        to = self._to_parts
        begin, end = (np.clip(bound * self.limit - first, 0, to) for bound in (number, number + 1))
        here = self.rank // self.divided
        # where the rows for each part begin, among those of this rank
        starts = to[self.rank].cumsum() - to[self.rank]
        bounds = zip(starts + begin[self.rank], starts + end[self.rank])
        rows = None if self.num == 1 else np.concatenate([np.arange(a, b) for a, b in bounds])
        parts = (end - begin)[self.rank]
        received = (end - begin)[:, here]
        experts = self._experts_of_rows()[number * self.limit : (number + 1) * self.limit]
        order = None if len(self.counts) == 1 else np.argsort(experts, kind="stable")
        loads = np.bincount(experts, minlength=self.experts_here)
        return Round(
            rows,
            parts.tolist(),
            np.repeat(parts, self.divided).tolist(),
            received.tolist(),
            order,
            loads.tolist(),
        )
