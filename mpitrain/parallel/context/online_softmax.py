"""Attention's mask of a tile, and the online softmax: results of tiles are added up as keys come by.

The queries of one rank attend to keys and values tile by tile (arXiv:1805.02867, arXiv:2112.05682).
tile_mask says what a tile hides: other documents, what a window leaves behind, and later keys. On a
CPU documents divide a tile into pieces, each of one sequence and of one document, or of some short
ones (kernels/document_spans.py).

B sequences, H query heads, K key-value heads, t positions held, S keys of a tile, C width of a
head. Keys and values are one tensor kv [2, B, K, S, C], so that they travel as one message.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from mpitrain.kernels.attention import AttentionRequest
from mpitrain.kernels.attention_tiles import attend, attend_backward
from mpitrain.kernels.attention_window import grad_of_sinks, with_sinks
from mpitrain.kernels.document_spans import spans_between, spans_of
from mpitrain.kernels.precision import wide
from mpitrain.plan.division.sequence import SequencePlacement, Tile

Poll = Callable[[], None]  # called after each tile: messages move on only when somebody enters MPI


class SavedAttention(NamedTuple):
    """What the backward needs; all of it is here.

    kv: of this rank's positions (ring), or of the whole sequence (all_gather).
    """

    q: torch.Tensor
    kv: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    documents: torch.Tensor | None
    order: torch.Tensor | None


class TokenPositions(NamedTuple):
    """Where some queries or keys are in their sequences. None where that decides nothing.

    documents: the document of each, [B, n].
    positions: the position of each in its row, [n], or [B, n].
    numbers: the positions again, on the host, for dropout.
    """

    documents: torch.Tensor | None
    positions: torch.Tensor | None
    numbers: np.ndarray | None = None

    @classmethod
    def whole(
        cls,
        documents_BT: torch.Tensor | None,
        order_BT: torch.Tensor | None,
        request: AttentionRequest,
        placement: SequencePlacement,
        device: torch.device,
    ) -> "TokenPositions":
        """Return the positions of the whole sequence.

        request: without a window and dropout, positions don't matter.
        """
        positions = None
        numbers = np.arange(placement.sequence)
        if request.window:
            positions = torch.arange(placement.sequence, device=device) if order_BT is None else order_BT
        if order_BT is not None and request.dropout is not None:
            numbers = order_BT.cpu().numpy()
        return cls(documents_BT, positions, numbers)

    def at(self, placement: SequencePlacement, rank: int) -> "TokenPositions":
        """Return the positions that `rank` holds, cut from those of the whole sequence."""
        spans = [slice(*span) for span in placement.spans(rank)]
        cut = (x if x is None else torch.cat([x[..., span] for span in spans], -1) for x in self[:2])
        return TokenPositions(*cut, self.numbers[..., placement.positions(rank)])

    def of(self, sequence: int, several: bool) -> "TokenPositions":
        """Return those of one sequence. several: documents are in question."""
        documents = self.documents[sequence : sequence + 1] if several else None
        of_row = (x if x is None or x.ndim == 1 else x[sequence] for x in self[1:])
        return TokenPositions(documents, *of_row)

    @property
    def by_documents(self) -> bool:
        """Whether documents divide tiles."""
        return self.documents is not None and self.documents.is_cpu

    @property
    def differ(self) -> bool:
        """Whether sequences have positions of their own."""
        return any(x is not None and x.ndim > 1 for x in self[1:])


class TilePiece(NamedTuple):
    """What some queries of some sequences see of some keys.

    visible: as tile_mask() makes it.
    """

    sequences: slice
    tile: Tile
    visible: torch.Tensor | None
    request: AttentionRequest

    def queries_of(self, x_BHtX: torch.Tensor) -> torch.Tensor:
        return x_BHtX[self.sequences, :, self.tile.queries]

    def keys_of(self, x_2BKSC: torch.Tensor) -> torch.Tensor:
        return x_2BKSC[:, self.sequences, :, self.tile.keys]


def tile_mask(
    queries: TokenPositions, keys: TokenPositions, tile: Tile, window: int
) -> tuple[bool, torch.Tensor | None]:
    """Return whether anything of a tile is visible, and its mask [B or 1, 1, T, S], bool.

    The mask is None if the tile's own causality says all. True is visible: same document, within
    the window, and no later key where the tile is causal.
    """
    masks = []
    if queries.documents is not None:
        masks.append(queries.documents[:, tile.queries, None] == keys.documents[:, None, tile.keys])
    if window:
        apart = queries.positions[tile.queries, None] - keys.positions[None, tile.keys]
        masks.append((apart < window)[None])
    if all(mask.all() for mask in masks):
        return True, None
    seen = masks[0] if len(masks) == 1 else masks[0] & masks[1]
    return bool(seen.any()), (seen.tril() if tile.causal else seen)[:, None]


def tile_pieces(
    queries: TokenPositions, keys: TokenPositions, tile: Tile, request: AttentionRequest
) -> Iterator[TilePiece]:
    """Yield the pieces of a tile in which something is visible."""
    if queries.by_documents:
        here = queries.documents[:, tile.queries]
        spans = spans_of(here) if tile.causal else spans_between(here, keys.documents[:, tile.keys])
        parts = [
            (span.sequence, tile.part(span.queries, span.keys), span.documents is not None) for span in spans
        ]
    elif queries.differ:
        parts = [(sequence, tile, True) for sequence in range(len(queries.documents))]
    else:
        yield from _visible(queries, keys, slice(None), tile, request)
        return
    for sequence, part, several in parts:
        among = (x.of(sequence, several) for x in (queries, keys))
        yield from _visible(*among, slice(sequence, sequence + 1), part, request.of_sequence(sequence))


def _visible(
    queries: TokenPositions, keys: TokenPositions, sequences: slice, tile: Tile, request: AttentionRequest
) -> Iterator[TilePiece]:
    """Yield a piece, unless nothing of it is visible."""
    anything, mask = tile_mask(queries, keys, tile, request.window)
    if anything:
        asked = request.between(queries.numbers[tile.queries], keys.numbers[tile.keys])
        yield TilePiece(sequences, tile, mask, asked)


class TileAttention:
    """The forward of attention by tiles: `out` and `lse` over all keys seen so far."""

    def __init__(self, q_BHtC: torch.Tensor, here: TokenPositions, request: AttentionRequest, poll: Poll):
        self.q = q_BHtC
        self.here = here
        self._request = request
        self._poll = poll
        self.out = self.lse = None

    def attend(self, tiles: Iterable[Tile], kv: torch.Tensor, there: TokenPositions) -> None:
        """Attend to the keys of some tiles.

        The very first tile must have every query, and each must see a key in it.
        """
        for tile in tiles:
            for piece in tile_pieces(self.here, there, tile, self._request):
                qkv = piece.queries_of(self.q), *piece.keys_of(kv)
                self._add(piece, *attend(*qkv, tile.causal, piece.visible, piece.request))
            self._poll()

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output in the dtype of the queries, and the log-sum-exp, both with sinks."""
        sinks_H = self._request.sinks
        out, lse = (self.out, self.lse) if sinks_H is None else with_sinks(self.out, self.lse, sinks_H)
        return out.to(self.q.dtype), lse

    def _add(self, piece: TilePiece, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Add the result of a piece, weighed by its share of the sum of exponentials.

        That is 1 / (1 + exp(old - new)): 1 for queries that have seen nothing. One of both is finite,
        as every query sees its own key first; so a new one of -inf has the weight 0, never NaN.
        """
        if self.out is None:
            if out.shape == self.q.shape:
                self.out = out.to(wide(out.dtype))
                self.lse = lse
                return
            batch, heads, length, width = self.q.shape
            self.out = lse.new_zeros(batch, length, heads, width).transpose(1, 2)
            self.lse = lse.new_full((batch, heads, length), -torch.inf)
        old_out, old_lse = map(piece.queries_of, (self.out, self.lse))
        old_out.lerp_(out.to(old_out.dtype), torch.sigmoid(lse - old_lse).unsqueeze(-1))
        old_lse.copy_(torch.logaddexp(old_lse, lse))


class TileAttentionBackward:
    """The backward of attention by tiles: the gradient of the queries over all keys seen so far.

    It adds that of each tile's keys and values where it is asked to.
    """

    def __init__(
        self,
        q_BHtC,
        out_BHtC,
        lse_BHt,
        grad_of_out,
        here: TokenPositions,
        request: AttentionRequest,
        poll: Poll,
    ):
        self._rows = (grad_of_out, q_BHtC, out_BHtC)
        self._lse = lse_BHt
        self.here = here
        self._request = request
        self._poll = poll
        self._grad_of_q = torch.zeros_like(q_BHtC, dtype=wide(q_BHtC.dtype))

    def attend(
        self, tiles: Iterable[Tile], kv: torch.Tensor, grad_of_kv: torch.Tensor, there: TokenPositions
    ) -> None:
        """Add the gradients of the keys and values of some tiles to `grad_of_kv`.

        grad_of_kv: [2, B, K, S, C], fp32 or fp64.
        """
        for tile in tiles:
            for piece in tile_pieces(self.here, there, tile, self._request):
                grad_of_out, q, out, lse = map(piece.queries_of, (*self._rows, self._lse))
                tensors = grad_of_out, q, *piece.keys_of(kv), out, lse
                for_q, *for_kv = attend_backward(*tensors, tile.causal, piece.visible, piece.request)
                piece.queries_of(self._grad_of_q).add_(for_q)
                for whole, part in zip(piece.keys_of(grad_of_kv), for_kv, strict=True):
                    whole.add_(part)
            self._poll()

    def grads(self, grad_of_kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradients of q, k, v, and of the sinks if there are some, in their dtypes.

        grad_of_kv: of the own keys and values.
        """
        grad_of_out, q, out = self._rows
        sinks_H = self._request.sinks
        of_sinks = () if sinks_H is None else (grad_of_sinks(grad_of_out, out, self._lse, sinks_H),)
        return self._grad_of_q.to(q.dtype), *grad_of_kv.to(q.dtype).unbind(), *of_sinks
