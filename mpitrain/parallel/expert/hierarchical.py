"""The exchange by nodes: a token crosses once to each node that has experts of it, and once back.

    rank (a, i)  -- far: a row of the token -->  rank (b, i)  -- near: a row an expert -->  ranks (b, j)
    rank (a, i)  <-- far: their sum, one row --  rank (b, i)  <-- near: what each made ---  ranks (b, j)

(a, i): place i on node a. n tokens on this rank, K experts of each, C of them at most on one node;
R token rows, each with the experts that it is for, numbered on their node, -1 where there are fewer
than C; D features. Partial results of a token are added on the node in the order of the experts, in
fp32 at least, and those of its nodes in their order. A rank that passes rows on holds at once at
most as many of them as `limit`, with their copies for the ranks of its node
(parallel/expert/crossings.py).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from mpitrain.comm.axis import Axis
from mpitrain.kernels.precision import wide
from mpitrain.parallel.expert.crossings import Crossing, Crossings
from mpitrain.parallel.expert.exchange import (
    Choices,
    CombinedRows,
    DispatchedRows,
    DispatchRounds,
    RowExchange,
    as_rows,
    exchanged,
    gathered_counts,
)
from mpitrain.parallel.expert.packing import packed, split, typed, unpacked
from mpitrain.parallel.walk import Walk
from mpitrain.plan.settings.dispatch import Dispatch, num_bytes

NOBODY = -1


class SentTokens(NamedTuple):
    """The token rows that this rank sends in a round.

    tokens, slots: [R], which, and where what comes back belongs.
    choices: [R, C], numbers, or NOBODY.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    choices: torch.Tensor


@dataclass(frozen=True)
class HierarchicalDispatchedRows(DispatchedRows):
    """DispatchedRows of an exchange by nodes.

    crossing: the round in which they came.
    sent: what this rank sent in it.
    places: of each row that this rank passed on inside its node, [any]: which of the token rows
    that came to it, times C, and the column of its expert.
    """

    crossing: Crossing
    sent: SentTokens
    places: torch.Tensor


class Hierarchical:
    """A row of a token to each node that has experts of it, which is copied there.

    every: axis of all ranks of the experts.
    far: axis of the ranks that have this place on their nodes.
    near: axis of the ranks on this node, None if this one is alone there.
    itemsize: bytes of a number of a row.
    """

    def __init__(self, every: Axis, far: Axis, near: Axis | None, settings: Dispatch, itemsize: int):
        self.every = every
        self.far = far
        self.row_exchange = RowExchange(near, settings.config.parallel.etp)
        self.settings = settings
        self.forms = settings.forms(itemsize)
        experts = settings.config.experts
        self.per_node = experts.count // far.size
        self.columns = settings.columns
        self.slots = min(experts.active, far.size)

    # ------------------------------------------------------------ rounds

    def exchange_counts(self, choices: Choices) -> Walk:
        """Tell all ranks how many rows each expert will get, and how many tokens each node.

        They are counted block by block. Return DispatchRounds.
        """
        num, active = choices.experts.shape
        tokens = choices.order.div(active, rounding_mode="floor")
        experts = choices.experts.flatten()[choices.order]
        blocks = tokens // self.settings.tokens_at_once
        count = self.per_node * self.far.size
        shape = (self.settings.blocks, -1)
        rows = torch.bincount(blocks * count + experts, minlength=self.settings.blocks * count).view(shape)
        at_node = torch.bincount(
            (tokens * self.far.size + experts // self.per_node).unique(), minlength=num * self.far.size
        )
        of_block = torch.arange(num, device=tokens.device) // self.settings.tokens_at_once
        to_nodes = rows.new_zeros(self.settings.blocks, self.far.size).index_add_(
            0, of_block, at_node.view(num, -1)
        )
        counts = yield from gathered_counts(torch.cat([rows, to_nodes], 1).cpu().numpy(), self.every)
        crossings = Crossings(
            *np.split(counts, [count], -1), self.every.rank, self.row_exchange.divided, self.settings.limit
        )
        return DispatchRounds(choices, crossings)

    def _sent(self, choices: Choices, blocks: tuple[int, int]) -> SentTokens:
        """Return the token rows of some blocks, in the order of the nodes and then of the tokens."""
        num, active = choices.experts.shape
        begin, end = (min(num, block * self.settings.tokens_at_once) for block in blocks)
        kept = torch.zeros(num * active, dtype=torch.bool, device=choices.order.device)
        kept[choices.order] = True
        node = torch.where(kept.view(num, active), choices.experts // self.per_node, self.far.size)[begin:end]
        goes = torch.zeros(end - begin, self.far.size + 1, dtype=torch.bool, device=node.device).scatter_(
            1, node, True
        )[:, :-1]
        to, tokens = goes.t().nonzero(as_tuple=True)
        numbers = (goes.t().flatten().cumsum(0) - 1).view(self.far.size, -1)
        # experts of the token before this one on its node
        column = (node.unsqueeze(2) == node.unsqueeze(1)).tril(-1).sum(2)
        token, k = (node < self.far.size).nonzero(as_tuple=True)
        of_rows = torch.full((len(to), self.columns), NOBODY, device=node.device)
        of_rows[numbers[node[token, k], token], column[token, k]] = (begin + token) * active + k
        slots = (begin + tokens) * self.slots + goes.cumsum(1)[tokens, to] - 1
        return SentTokens(begin + tokens, slots, of_rows)

    # ------------------------------------------------------------ dispatch and combine

    def dispatch(
        self, rounds: DispatchRounds, number: int, x_ND: torch.Tensor, weights_NK: torch.Tensor | None = None
    ) -> Walk:
        """Send the rows of round `number`, one to each node of a token; return HierarchicalDispatchedRows."""
        this = rounds.rounds[number]
        form = self.forms.dispatch
        width = x_ND.shape[1]
        sent = self._sent(rounds.choices, this.blocks)
        local = torch.where(
            sent.choices < 0, NOBODY, rounds.choices.experts.flatten()[sent.choices] % self.per_node
        )
        extra = [local.to(torch.int32)]
        extra += [] if weights_NK is None else [weights_NK.flatten()[sent.choices]]
        rows = packed(x_ND[sent.tokens], form, *extra)
        rows = as_rows((yield exchanged(rows, this.sent, this.received, self.far)), rows.shape[1])
        sizes = num_bytes(form, width, x_ND.itemsize), *(self.columns * part.itemsize for part in extra)
        x, local, *weights = split(rows, sizes)
        local = typed(local, torch.int32).flatten()
        places = (local >= 0).nonzero().flatten()
        # of experts, in their order: row * C + column
        places = places[local[places].argsort(stable=True)]
        of_rows = [
            typed(part, weights_NK.dtype).flatten()[places].unsqueeze(-1).view(torch.uint8)
            for part in weights
        ]
        copies = torch.cat([x[places.div(self.columns, rounding_mode="floor")], *of_rows], 1)
        arrived = yield from self.row_exchange.dispatch(copies, this.inside)
        x, *weights = unpacked(arrived, form, width, x_ND.dtype, *((weights_NK.dtype, 1) for _ in weights))
        return HierarchicalDispatchedRows(
            x, weights[0] if weights else None, this.inside.loads, this, sent, places
        )

    def combine(
        self,
        dispatched: HierarchicalDispatchedRows,
        made_RD: torch.Tensor,
        of_weights_R1: torch.Tensor | None = None,
    ) -> Walk:
        """Send what was made of dispatched rows, in their order; return CombinedRows, one for each node."""
        this, sent, places = dispatched.crossing, dispatched.sent, dispatched.places
        form, dtype, width = self.forms.combine, made_RD.dtype, made_RD.shape[1]
        extra = () if of_weights_R1 is None else (of_weights_R1,)
        returned = yield from self.row_exchange.combine(packed(made_RD, form, *extra), this.inside)
        parts = unpacked(returned, form, width, dtype, *((wide(dtype), 1) for _ in extra))
        made, *weights = (self.row_exchange.added(part, this.inside) for part in parts)
        total = self._summed(made, places, sum(this.received))
        weights = [self._placed(part, places, len(total)) for part in weights]
        rows = packed(total, form, *weights)
        rows = as_rows((yield exchanged(rows, this.received, this.sent, self.far)), rows.shape[1])
        total, *weights = unpacked(rows, form, width, dtype, *((wide(dtype), self.columns) for _ in weights))
        to_somebody = sent.choices >= 0
        return CombinedRows(
            sent.slots, total, sent.choices[to_somebody], weights[0][to_somebody] if weights else None
        )

    def _placed(self, weights: torch.Tensor, places: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return the weights at their places, and zeros elsewhere, [num_tokens, C].

        put_ isn't deterministic on a GPU, and would be refused.
        """
        placed = weights.new_zeros(num_tokens * self.columns)
        placed[places] = weights.flatten()
        return placed.view(num_tokens, self.columns)

    def _summed(self, made_RD: torch.Tensor, places: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return the sum of each token's rows, [num_tokens, D].

        They are added column by column: the experts of a token in their order.
        """
        total = made_RD.new_zeros(num_tokens, made_RD.shape[1], dtype=wide(made_RD.dtype))
        rows = places.div(self.columns, rounding_mode="floor")
        columns = places % self.columns
        for column in range(self.columns):
            found = (columns == column).nonzero().flatten()
            total[rows[found]] += made_RD[found]
        return total.to(made_RD.dtype)
