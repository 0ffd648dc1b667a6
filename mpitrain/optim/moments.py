"""What an optimiser keeps of the pieces of a rank, in the type of the weights, or in bf16
(`optimizer.moments`).

Moments of bf16 are computed with in the type of the weights, CHUNK elements at a time, and rounded
by chance (stochastic_rounding.py). Of processor time, on one busy core: AdamW's update takes 6.0 ns
a parameter instead of 0.8 (of two moments: to widen 0.2, to draw 1.6, to round 0.9, and what caches
lose), which is 2.4 % of a step of the `reference` model with 3072 tokens instead of 0.3 %.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from mpitrain.optim.stochastic_rounding import draw, places, round_into
from mpitrain.parallel.zero.shards import ParameterShard

# elements: few enough for the cache of a core, enough for all of a GPU
CHUNK = 2**17
CHUNK_GPU = 2**24


class UpdateBatch(NamedTuple):
    """Tensors to update, of one type: weights, gradients, and one of each kind of moment for each."""

    weights: list[torch.Tensor]
    grads: list[torch.Tensor]
    moments: list[list[torch.Tensor]]


class Moments:
    """At most two kinds of moments of some pieces, zeros at first. names: of the kinds, in a checkpoint."""

    def __init__(self, pieces: Sequence[ParameterShard], names: Sequence[str], *, narrow: bool, seed: int):
        self._pieces = pieces
        self._names = names
        self._narrow = narrow
        self._seed = seed
        dtype = torch.bfloat16 if narrow else None
        self._kept = {
            piece.weight: [torch.zeros_like(piece.weight, dtype=dtype) for _ in names] for piece in pieces
        }

    def of(self, piece: ParameterShard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the moments of a piece with their names."""
        yield from zip(self._names, self._kept[piece.weight])

    def __contains__(self, piece: ParameterShard) -> bool:
        return piece.weight in self._kept

    def opened(
        self, num_updates: int, pieces: Sequence[ParameterShard] | None = None
    ) -> Iterator[UpdateBatch]:
        """Yield what to update of some pieces, or all. Moments are kept when the next is asked for.
        num_updates: made so far.
        """
        pieces = self._pieces if pieces is None else pieces
        if self._narrow and self._names:
            for piece in pieces:
                yield from self._in_chunks(piece, num_updates)
        elif pieces:
            kinds = [[self._kept[piece.weight][kind] for piece in pieces] for kind in range(len(self._names))]
            yield UpdateBatch([piece.weight for piece in pieces], [piece.grad for piece in pieces], kinds)

    def _in_chunks(self, piece: ParameterShard, num_updates: int) -> Iterator[UpdateBatch]:
        length = CHUNK if piece.weight.device.type == "cpu" else CHUNK_GPU
        chunks = zip(
            piece.weight.split(length),
            piece.grad.split(length),
            *(x.split(length) for x in self._kept[piece.weight]),
        )
        begin = piece.begin
        for weight, grad, *kept in chunks:
            wide = [x.to(weight.dtype) for x in kept]
            yield UpdateBatch([weight], [grad], [[x] for x in wide])
            counters = places(piece.spec, begin, begin + len(weight), weight.device)
            chance = draw(self._seed, num_updates, piece.spec.name, counters)
            for narrow, x in zip(kept, wide):
                round_into(narrow, x, chance.clone())
                chance = chance.bitwise_right_shift_(16)  # the other half is for the other kind
            begin += len(weight)
