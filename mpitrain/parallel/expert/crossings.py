"""The rounds of an exchange by nodes, from counts alone: every rank finds the same. Integers only.

The ranks of the experts, in their order, are M nodes of N places. The tokens of each rank are cut
into blocks. A round is some blocks in a row, counted over the ranks first, as many as leave no rank
with more than `limit` rows: neither rows that have come to its experts, nor rows that it sends on
inside its node. So all rows of a token travel in one round, and it crosses to a node once.

    block, rank     0,0  0,1  0,2  0,3  1,0  1,1  1,2  1,3
    rows to send on  3    1    2    4    2    0    5    3     (of the most loaded: each has limits
                                                              of its own)
    limit = 8       [   round 0   ][    round 1       ][ 2 ]

A block is so short that it fits alone, wherever its tokens go (plan/settings/dispatch.py:
tokens_at_once).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mpitrain.parallel.expert.rounds import Round, Rounds


class Crossing(NamedTuple):
    """One round, as one rank sees it.

    blocks: the first of its own, and the one after the last.
    sent, received: token rows to and from its place on each node.
    inside: the round within the node that follows.
    """

    blocks: tuple[int, int]
    sent: list[int]
    received: list[int]
    inside: Round


@dataclass(frozen=True)
class Crossings:
    """The rounds of one exchange.

    choices: rows that each block of each rank has for each expert, [S, C, E].
    tokens: tokens of it that go to each node, [S, C, M].
    rank: this one.
    divided: neighbours that divide each expert (etp).
    limit: rows that a rank holds at once.
    """

    choices: np.ndarray
    tokens: np.ndarray
    rank: int
    divided: int
    limit: int

    @property
    def num(self) -> int:
        """How many rounds there are: at least one."""
        return len(self._bounds) - 1

    @property
    def _places(self) -> int:
        return len(self.choices) // self.tokens.shape[-1]

    @cached_property
    def _bounds(self) -> list[int]:
        """The first block of each round, in the order of blocks and then of ranks; and how many there are."""
        nodes = self.tokens.shape[-1]
        places = self._places
        rows = np.concatenate(self.choices.transpose(1, 0, 2))
        to_parts = rows.reshape(len(rows), nodes * places // self.divided, -1).sum(-1)
        sent_on = np.zeros((len(rows), nodes, places), rows.dtype)
        sent_on[np.arange(len(rows)), :, np.arange(len(rows)) % places] = (
            rows.reshape(len(rows), nodes, -1).sum(-1) * self.divided
        )
        until = np.concatenate([to_parts, sent_on.reshape(len(rows), -1)], 1).cumsum(0)
        bounds = [0]
        before = np.zeros_like(until[0])
        while (until[-1] - before > self.limit).any():
            bounds.append(int(np.argmax((until - before > self.limit).any(1))))
            assert bounds[-1] > bounds[-2], "a block that doesn't fit alone"
            before = until[bounds[-1] - 1]
        return [*bounds, len(rows)]

    def __getitem__(self, number: int) -> Crossing:
        """Return a round."""
        ranks, (node, place), places = len(self.choices), divmod(self.rank, self._places), self._places
        first, end = (
            [-((rank - bound) // ranks) for rank in range(ranks)]
            for bound in self._bounds[number : number + 2]
        )
        choices, tokens = (self._between(counts, first, end) for counts in (self.choices, self.tokens))
        here = choices.reshape(-1, places, self.tokens.shape[-1], choices.shape[1] // self.tokens.shape[-1])[
            :, :, node
        ].sum(0)
        inside = Rounds(here, place, self.divided, max(1, int(here.sum())))[0]
        return Crossing(
            (first[self.rank], end[self.rank]),
            tokens[self.rank].tolist(),
            tokens[place::places, node].tolist(),
            inside,
        )

    def _between(self, counts: np.ndarray, first: list[int], end: list[int]) -> np.ndarray:
        """Return the sums of each rank over its blocks, [S, any]."""
        return np.stack([of_rank[a:b].sum(0) for of_rank, a, b in zip(counts, first, end)])
