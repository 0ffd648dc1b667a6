"""Rows on their way to the experts and back: one all-to-all of uneven parts in each direction and round.

n tokens on this rank, K experts of each, D features; R rows that have come to the experts of this
rank. What an exchange is:

    agree  tells the ranks of the experts how many rows will come; from it all know the rounds     -> Trip
    there  sends what this rank has for one round; what has come, in the order of the experts       -> Visit
    back   sends what the experts made of it; what has come back, and the places where it belongs   -> Home

Each is a walk (parallel/walk.py). A token has `slots` places, [n slots, D] in all, and the sum of
them is what its experts made of it.
"""

from typing import NamedTuple, Protocol

import numpy as np
import torch

from mpitrain.comm.axis import Axis
from mpitrain.comm.collectives import all_gather, all_to_all_v
from mpitrain.comm.progress import Pending
from mpitrain.kernels.precision import wide
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


class Visit(NamedTuple):
    """What has come to the experts of a rank, in their order.

    x: [R, D].
    weights: [R, 1], if sent.
    loads: rows of each expert.
    """

    x: torch.Tensor
    weights: torch.Tensor | None
    loads: list[int]
    way: tuple


class Home(NamedTuple):
    """What has come back.

    slots: places of the rows [any, D].
    choices: numbers of those whose `weights` [any] came along, if any.
    """

    slots: torch.Tensor
    rows: torch.Tensor
    choices: torch.Tensor
    weights: torch.Tensor | None


class Trip(Protocol):
    """The rounds of a microbatch. All ranks of the experts make as many. choices: what it was made for."""

    choices: Choices

    @property
    def num(self) -> int: ...


class Exchange(Protocol):
    """A way to the experts and back. slots: places of a token."""

    slots: int

    def agree(self, choices: Choices) -> Walk:
        """Return a Trip. Collective over the ranks of the experts, as all of these."""

    def there(
        self, trip: Trip, number: int, x_ND: torch.Tensor, weights_NK: torch.Tensor | None = None
    ) -> Walk:
        """Send what belongs to round `number`; return a Visit."""

    def back(self, visit: Visit, made_RD: torch.Tensor, of_weights_R1: torch.Tensor | None = None) -> Walk:
        """Send what was made of a visit, in its order; return what has come Home."""


class Hop:
    """All-to-alls of rows of bytes over one axis, or none.

    axis: of ranks with parts of experts, or None if there is one.
    divided: neighbours among them that have parts of each expert.
    """

    def __init__(self, axis: Axis | None, divided: int):
        self.axis = axis
        self.divided = divided

    def there(self, rows_RB: torch.Tensor, this: Round) -> Walk:
        """Send the rows of a round, each to all ranks that have a part of its expert.

        Return what came, in the order of experts.
        """
        if self.axis is not None:
            parts = rows_RB.split(this.parts)
            repeated = (
                rows_RB
                if self.divided == 1
                else torch.cat([part for part in parts for _ in range(self.divided)])
            )
            rows_RB = as_rows(
                (yield exchanged(repeated, this.sent, this.received, self.axis)), rows_RB.shape[1]
            )
        return rows_RB if this.order is None else rows_RB.index_select(0, index(this.order, rows_RB))

    def back(self, rows_RB: torch.Tensor, this: Round) -> Walk:
        """Send rows in the order of experts back to where they came from.

        Return those that this rank had sent, or their parts.
        """
        rows = rows_RB if this.order is None else rows_RB.index_select(0, index(inverse(this.order), rows_RB))
        if self.axis is None:
            return rows
        return as_rows((yield exchanged(rows, this.received, this.sent, self.axis)), rows.shape[1])

    def added(self, rows_RX: torch.Tensor, this: Round) -> torch.Tensor:
        """Return one row for each that was sent.

        The sum of what the ranks with parts of its expert have made, in their order.
        """
        if self.divided == 1:
            return rows_RX
        parts = rows_RX.split([self.divided * part for part in this.parts])
        return torch.cat([part.unflatten(0, (self.divided, -1)).sum(0) for part in parts])


class FlatTrip(NamedTuple):
    choices: Choices
    rounds: Rounds

    @property
    def num(self) -> int:
        return self.rounds.num


class Flat:
    """A row for each expert of a token, straight to the ranks that have it.

    limit: rows that a rank receives at once.
    """

    def __init__(self, axis: Axis | None, divided: int, active: int, limit: int, forms: Forms):
        self.axis = axis
        self.hop = Hop(axis, divided)
        self.limit = limit
        self.forms = forms
        self.slots = active

    def agree(self, choices: Choices) -> Walk:
        """Tell how many rows each expert will get."""
        if self.axis is None:
            return FlatTrip(choices, Rounds(choices.counts[None], 0, self.hop.divided, self.limit))
        gathered = yield from gathered_counts(choices.counts, self.axis)
        return FlatTrip(choices, Rounds(gathered, self.axis.rank, self.hop.divided, self.limit))

    def there(
        self, trip: FlatTrip, number: int, x_ND: torch.Tensor, weights_NK: torch.Tensor | None = None
    ) -> Walk:
        """As Exchange has it."""
        this = trip.rounds[number]
        width = x_ND.shape[1]
        form = self.forms.there
        choices = trip.choices.order if this.rows is None else trip.choices.order[index(this.rows, x_ND)]
        extra = () if weights_NK is None else (weights_NK.flatten()[choices].unsqueeze(-1),)
        x = x_ND.index_select(0, choices.div(self.slots, rounding_mode="floor"))
        if self.axis is None:  # in the order of the experts already
            return Visit(x, extra[0] if extra else None, this.loads, (this, choices))
        rows = yield from self.hop.there(packed(x, form, *extra), this)
        x, *weights = unpacked(rows, form, width, x_ND.dtype, *((weights.dtype, 1) for weights in extra))
        return Visit(x, weights[0] if weights else None, this.loads, (this, choices))

    def back(self, visit: Visit, made_RD: torch.Tensor, of_weights_R1: torch.Tensor | None = None) -> Walk:
        """As Exchange has it."""
        this, choices = visit.way
        if self.axis is None:
            return Home(choices, made_RD, choices, None if of_weights_R1 is None else of_weights_R1.flatten())
        extra = () if of_weights_R1 is None else (of_weights_R1,)
        rows = yield from self.hop.back(packed(made_RD, self.forms.back, *extra), this)
        parts = unpacked(
            rows,
            self.forms.back,
            made_RD.shape[1],
            made_RD.dtype,
            *((wide(made_RD.dtype), 1) for _ in extra),
        )
        made, *weights = (self.hop.added(part, this) for part in parts)
        return Home(choices, made, choices, weights[0].flatten() if weights else None)


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
    """Return [R, width]. For no rows -1 would have no meaning."""
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
    return torch.from_numpy(places).to(like.device)
