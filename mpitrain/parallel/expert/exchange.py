"""Rows on their way to the experts and back: one all-to-all of uneven parts in each direction and round."""

import torch

from mpitrain.comm.axis import Axis
from mpitrain.comm.collectives import all_to_all_v
from mpitrain.comm.progress import Pending
from mpitrain.parallel.expert.rounds import Round

Pair = tuple[torch.Tensor, torch.Tensor]
Rows = torch.Tensor | Pair | Pending  # rows that are here, alone or with what belongs to them, or their elements once they have arrived


class Exchange:
    """axis: of all ranks of the experts, or None if there is one.  divided: neighbours among them that have parts of each expert."""

    def __init__(self, axis: Axis | None, divided: int):
        self.axis, self.divided = axis, divided

    def pack(self, rows_RX: torch.Tensor, more_RY: torch.Tensor) -> torch.Tensor | Pair:
        """Return what can be sent, rows with a few numbers behind each; if nothing travels, the two as they are."""
        return (rows_RX, more_RY) if self.axis is None else torch.cat([rows_RX, more_RY.view(rows_RX.dtype)], 1)

    def unpack(self, packed: torch.Tensor | Pair, width: int, kind: torch.dtype) -> Pair:
        """Return the rows of `width`, and the number of type `kind` behind each, as elements of the rows' type: views."""
        if isinstance(packed, tuple):
            return packed
        rows = as_rows(packed, width + kind.itemsize // packed.itemsize)
        return rows[:, :width], rows[:, width:]

    def send(self, rows_RX: torch.Tensor | Pair, this: Round) -> Rows:
        """Start sending the rows of a round, each to all ranks that have a part of its expert."""
        if self.axis is None:
            return rows_RX
        parts = rows_RX.split(this.parts)
        repeated = rows_RX if self.divided == 1 else torch.cat([part for part in parts for _ in range(self.divided)])
        return _exchanged(repeated, this.sent, this.received, self.axis)

    def send_back(self, rows_RX: torch.Tensor | Pair, this: Round) -> Rows:
        """Start sending what was made of rows, in the order in which they came."""
        return rows_RX if self.axis is None else _exchanged(rows_RX, this.received, this.sent, self.axis)

    def added(self, rows_RX: torch.Tensor, this: Round) -> torch.Tensor:
        """Return one row for each that was sent: the sum of what the ranks with parts of its expert have made, in their order."""
        if self.divided == 1:
            return rows_RX
        parts = rows_RX.split([self.divided * part for part in this.parts])
        return torch.cat([part.unflatten(0, (self.divided, -1)).sum(0) for part in parts])


def _exchanged(rows: torch.Tensor, sent: list[int], received: list[int], axis: Axis) -> Pending:
    width = rows.shape[1]
    return all_to_all_v(rows.flatten(), [n * width for n in sent], [n * width for n in received], axis)


def arrived(rows: Rows) -> torch.Tensor:
    """Wait for rows, if they aren't here."""
    return rows.wait() if isinstance(rows, Pending) else rows


def as_rows(elements: torch.Tensor, width: int) -> torch.Tensor:
    """Return [R, width]. For no rows -1 would have no meaning."""
    return elements.view(elements.numel() // width, width)
