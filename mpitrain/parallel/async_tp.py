"""Tensor parallelism whose messages travel while it computes.

With sequence parallelism rank r has chunk r of the positions, and a block gathers all chunks,
computes and scatters the sum of what the ranks made. All but the core of attention treats each
position alone, so it is done chunk by chunk, as chunks come and go (Wang et al., "Overlap
communication with dependent computation via decomposition", ASPLOS 2023). For 4 ranks, what rank 1
computes:

    gather   own         of 0  of 3  of 2             each other chunk as it arrives
    scatter              of 0  of 3  of 2  own        each result leaves for its owner at once
    both     own, first  of 0  of 3  of 2  own, rest  the messages both ways beside half of the own
                                                      chunk

The adjoint of one is the other. In a backward the weight gradients of each chunk come before the
next wait; see parallel/walk.py.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from mpitrain.comm.axis import Axis
from mpitrain.comm.base.buffers import flat, sum_in_order
from mpitrain.comm.collectives import shift
from mpitrain.comm.progress import Pending
from mpitrain.parallel.microbatch import Context
from mpitrain.parallel.walk import Item, Later, Walk

TOKENS = -2  # dim of [B, T, D] and of [B, H, T, C]
Tensors = torch.Tensor | tuple[torch.Tensor, ...]


class ChunkRange(NamedTuple):
    """Positions [begin, end) of the whole, in the chunk of the rank that stands `distance` after
    on the axis; 0: the own.
    """

    distance: int
    begin: int
    end: int


Work = Callable[[ChunkRange, Tensors], Walk]  # returns what it made of that part of the input


class Chunked:
    """An item that treats each position alone, with a gather before it, a scatter after it, or
    both, chunk by chunk over `axis`.

    Its context says at which position it starts. What is sent is the same in both directions, since
    gather and scatter change places.
    """

    def __init__(self, inner: Item, axis: Axis, *, gather: bool = False, scatter: bool = False):
        self.inner = inner
        self.axis = axis
        self.gather = gather
        self.scatter = scatter

    def forward(self, x: Tensors, context: Context) -> Walk:
        """Return (output, what each piece saved)."""
        saved = {}

        def work(piece: ChunkRange, part: Tensors) -> Walk:
            y, saved[piece] = yield from self.inner.forward(
                part, replace(context, start=context.start + piece.begin)
            )
            return y

        y = yield from self._walk(x, work, self.gather, self.scatter)
        return y, saved if torch.is_grad_enabled() else None

    def backward(self, saved: dict, grad_of_output: Tensors, later: Later) -> Walk:
        """Return the gradient of the input; each piece hands over its weight gradients."""

        def work(piece: ChunkRange, part: Tensors) -> Walk:
            return self.inner.backward(saved.pop(piece), part, later)

        return (yield from self._walk(grad_of_output, work, self.scatter, self.gather))

    def _walk(self, x: Tensors, work: Work, gather: bool, scatter: bool) -> Walk:
        """Let `work` have piece after piece of the whole input.

        Return the whole result, or the own chunk of the sum over the ranks.

        x: the own chunk of the whole if `gather`, else the whole.
        """
        axis = self.axis
        x = x.contiguous() if gather else x
        arriving = [shift(x, axis, distance) for distance in range(1, axis.size)] if gather else []
        leaving: list[Pending] = []
        made: dict[int, Tensors] = {}  # by position
        for piece in self._pieces(x, gather, scatter):
            others = piece.distance > 0
            part = (
                (yield arriving[piece.distance - 1]).view_as(x)
                if others and gather
                else self._cut(x, piece, gather)
            )
            y = yield from work(piece, part)
            if others and scatter:
                leaving.append(shift(y.contiguous(), axis, -piece.distance))
            else:
                made[piece.begin] = y
        result = _joined([made[begin] for begin in sorted(made)])
        return (yield from self._sum(result, leaving)) if scatter else result

    def _pieces(self, x: Tensors, gather: bool, scatter: bool) -> list[ChunkRange]:
        """Return the pieces in the order in which they are computed."""
        size = self.axis.size
        rank = self.axis.rank
        tokens = _num_tokens(x)
        length = tokens if gather else tokens // size
        begin = rank * length
        end = (rank + 1) * length
        middle = begin + (length // 2 if scatter else length) * gather
        others = [(distance, (rank - distance) % size * length) for distance in range(1, size)]
        every = [
            ChunkRange(0, begin, middle),
            *(ChunkRange(d, at, at + length) for d, at in others),
            ChunkRange(0, middle, end),
        ]
        return [piece for piece in every if piece.begin < piece.end]

    def _cut(self, x: Tensors, piece: ChunkRange, gather: bool) -> Tensors:
        """Return a piece of what this rank has."""
        if isinstance(x, tuple):
            return tuple(self._cut(part, piece, gather) for part in x)
        offset = self.axis.rank * x.shape[TOKENS] if gather else 0
        return x.narrow(TOKENS, piece.begin - offset, piece.end - piece.begin)

    def _sum(self, own: torch.Tensor, leaving: list[Pending]) -> Walk:
        """Yield what was sent; return the sum of the own result and of those that came for it: of
        the next rank, the one after it, ...
        """
        parts = [flat(own)]
        for pending in leaving:
            parts.append((yield pending))
        in_order = [parts[(rank - self.axis.rank) % self.axis.size] for rank in range(self.axis.size)]
        out = parts[-1]  # received, so nobody else's
        sum_in_order(in_order, out)
        return out.view_as(own)


def _num_tokens(x: Tensors) -> int:
    return (x[0] if isinstance(x, tuple) else x).shape[TOKENS]


def _joined(parts: list[Tensors]) -> Tensors:
    """Return pieces side by side."""
    if len(parts) == 1:
        return parts[0]
    return (
        tuple(torch.cat(part, TOKENS) for part in zip(*parts))
        if isinstance(parts[0], tuple)
        else torch.cat(parts, TOKENS)
    )
