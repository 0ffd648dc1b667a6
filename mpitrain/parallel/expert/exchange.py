"""Dispatch and combine: one all-to-all of uneven parts in each direction and round.

n tokens on this rank, K experts of each, D features; R rows that have come to the experts of this
rank. What an exchange is:

    exchange_counts  tells all ranks how many rows each expert will get; returns DispatchRounds
    dispatch         sends what this rank has for one round; returns DispatchedRows, in the experts' order
    combine          sends back what the experts made of it; returns CombinedRows, and where they belong

Each is a walk (parallel/walk.py), collective over the ranks of the experts. Activations are [n, D] and
weights [n, K]. A token has `slots` places, [n slots, D] in all, and the sum of them is what its experts
made of it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from mpitrain.comm.axis import Axis
from mpitrain.comm.collectives import all_gather, all_to_all_v
from mpitrain.comm.progress import Pending
from mpitrain.kernels.pinned import on_device
from mpitrain.kernels.precision import wide
from mpitrain.parallel.expert.crossings import Crossings
from mpitrain.parallel.expert.packing import packed, unpacked
from mpitrain.parallel.expert.rounds import Round, Rounds
from mpitrain.parallel.walk import Walk
from mpitrain.plan.settings.dispatch import Forms


class Choices(NamedTuple):
    """Which experts tokens are sent to. A choice k of token t has the number t K + k.

    experts: [n, K], ascending.
    order: the choices that nobody dropped, in the order of experts, those of one in that of tokens.
    counts: how many of these each expert has, [E].
    """

    experts: torch.Tensor
    order: torch.Tensor
    counts: np.ndarray


@dataclass(frozen=True)
class DispatchedRows:
    """What has come to the experts of a rank in one round, in their order.

    An exchange adds what its `combine` has to know to send rows back.

    x: [R, D].
    weights: [R, 1], if sent.
    loads: rows of each expert.
    """

    x: torch.Tensor
    weights: torch.Tensor | None
    loads: list[int]


class CombinedRows(NamedTuple):
    """What has come back to the rank of the tokens in one round.

    slots: the places of the rows, [any].
    rows: what experts made of a token, [any, D].
    choices: numbers of those whose weights came along, [any].
    weights: the gradients of their weights, [any], if any came along.
    """

    slots: torch.Tensor
    rows: torch.Tensor
    choices: torch.Tensor
    weights: torch.Tensor | None


class DispatchRounds(NamedTuple):
    """The rounds in which the rows of a microbatch are dispatched: as many on all ranks of the experts.

    choices: what they were made for.
    rounds: of an exchange by nodes, its crossings.
    """

    choices: Choices
    rounds: Rounds | Crossings

    @property
    def num(self) -> int:
        """How many there are."""
        return self.rounds.num


class RowExchange:
    """All-to-alls of rows of bytes over one axis, or none.

    axis: of ranks with parts of experts, or None if there is one.
    divided: neighbours among them that have parts of each expert.
    """

    def __init__(self, axis: Axis | None, divided: int):
        self.axis = axis
        self.divided = divided

    def dispatch(self, rows_RB: torch.Tensor, this: Round) -> Walk:
        """Send the rows of a round, each to all ranks with a part of its expert; return what came.

        It stands in the order of experts. What isn't needed any more is let go at once, here and
        below: model/layers/experts.py predicts the most of it.
        """
        if self.axis is not None:
            width = rows_RB.shape[1]
            rows_RB = self._repeated(rows_RB, this)
            rows_RB = as_rows((yield exchanged(rows_RB, this.sent, this.received, self.axis)), width)
        return rows_RB if this.order is None else rows_RB.index_select(0, index(this.order, rows_RB))

    def _repeated(self, rows_RB: torch.Tensor, this: Round) -> torch.Tensor:
        """Return the rows of each expert as many times as there are ranks with parts of it."""
        if self.divided == 1:
            return rows_RB
        return torch.cat([part for part in rows_RB.split(this.parts) for _ in range(self.divided)])

    def combine(self, rows_RB: torch.Tensor, this: Round) -> Walk:
        """Send rows in the order of experts back; return those that this rank had sent, or their parts."""
        if this.order is not None:
            rows_RB = rows_RB.index_select(0, index(inverse(this.order), rows_RB))
        if self.axis is None:
            return rows_RB
        return as_rows((yield exchanged(rows_RB, this.received, this.sent, self.axis)), rows_RB.shape[1])

    def added(self, rows_RX: torch.Tensor, this: Round) -> torch.Tensor:
        """Return one row for each that was sent: the sum of what the ranks with its expert's parts made.

        They are added in their order.
        """
        if self.divided == 1:
            return rows_RX
        parts = rows_RX.split([self.divided * part for part in this.parts])
        return torch.cat([part.unflatten(0, (self.divided, -1)).sum(0) for part in parts])


@dataclass(frozen=True)
class FlatDispatchedRows(DispatchedRows):
    """DispatchedRows of a flat exchange.

    round: in which they came.
    sent_choices: numbers of the choices that this rank sent in it, in that order.
    """

    round: Round
    sent_choices: torch.Tensor


class Flat:
    """A row for each expert of a token, straight to the ranks that have it.

    limit: rows that a rank receives at once.
    """

    def __init__(self, axis: Axis | None, divided: int, active: int, limit: int, forms: Forms):
        self.axis = axis
        self.row_exchange = RowExchange(axis, divided)
        self.limit = limit
        self.forms = forms
        self.slots = active

    def exchange_counts(self, choices: Choices) -> Walk:
        """Tell all ranks how many rows each expert will get; return DispatchRounds."""
        if self.axis is None:
            counts, rank = choices.counts[None], 0
        else:
            counts, rank = (yield from gathered_counts(choices.counts, self.axis)), self.axis.rank
        return DispatchRounds(choices, Rounds(counts, rank, self.row_exchange.divided, self.limit))

    def dispatch(
        self, rounds: DispatchRounds, number: int, x_ND: torch.Tensor, weights_NK: torch.Tensor | None = None
    ) -> Walk:
        """Send the rows of round `number`, one for each choice; return FlatDispatchedRows."""
        this = rounds.rounds[number]
        width = x_ND.shape[1]
        form = self.forms.dispatch
        choices = rounds.choices.order if this.rows is None else rounds.choices.order[index(this.rows, x_ND)]
        extra = () if weights_NK is None else (weights_NK.flatten()[choices].unsqueeze(-1),)
        tokens = choices.div(self.slots, rounding_mode="floor")
        if self.axis is None:  # in the order of the experts already
            x = x_ND.index_select(0, tokens)
            return FlatDispatchedRows(x, extra[0] if extra else None, this.loads, this, choices)
        rows = yield from self.row_exchange.dispatch(packed(x_ND.index_select(0, tokens), form, *extra), this)
        x, *weights = unpacked(rows, form, width, x_ND.dtype, *((weights.dtype, 1) for weights in extra))
        return FlatDispatchedRows(x, weights[0] if weights else None, this.loads, this, choices)

    def combine(
        self, dispatched: FlatDispatchedRows, made_RD: torch.Tensor, of_weights_R1: torch.Tensor | None = None
    ) -> Walk:
        """Send what was made of dispatched rows, in their order; return CombinedRows, one for each choice."""
        this, choices = dispatched.round, dispatched.sent_choices
        if self.axis is None:
            of_weights = None if of_weights_R1 is None else of_weights_R1.flatten()
            return CombinedRows(choices, made_RD, choices, of_weights)
        extra = () if of_weights_R1 is None else (of_weights_R1,)
        parts = unpacked(
            (yield from self.row_exchange.combine(packed(made_RD, self.forms.combine, *extra), this)),
            self.forms.combine,
            made_RD.shape[1],
            made_RD.dtype,
            *((wide(made_RD.dtype), 1) for _ in extra),
        )
        made, *weights = (self.row_exchange.added(part, this) for part in parts)
        return CombinedRows(choices, made, choices, weights[0].flatten() if weights else None)


def gathered_counts(mine: np.ndarray, axis: Axis) -> Walk:
    """Return the counts of all ranks, with the ranks as a further dim in front."""
    flat = np.ascontiguousarray(mine).ravel()
    every = yield all_gather(flat, axis, np.empty(axis.size * len(flat), flat.dtype))
    return every.reshape(axis.size, *mine.shape)


def exchanged(rows_RB: torch.Tensor, sent: list[int], received: list[int], axis: Axis) -> Pending:
    """Start an all-to-all of rows: how many to and from each rank."""
    width = rows_RB.shape[1]
    return all_to_all_v(rows_RB.flatten(), [n * width for n in sent], [n * width for n in received], axis)


def as_rows(elements: torch.Tensor, width: int) -> torch.Tensor:
    """Return elements as rows, [R, width]. For no rows -1 would have no meaning."""
    return elements.view(elements.numel() // width, width)


def inverse(order: np.ndarray) -> np.ndarray:
    """Return the permutation that undoes one.

    To read by it is deterministic anywhere; to write by the other, a GPU would sort first.
    """
    back = np.empty_like(order)
    back[order] = np.arange(len(order), dtype=order.dtype)
    return back


def index(places: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Return places as an index on the device of `like`."""
    return on_device(places, like.device)
