"""Attention's mask of a tile, and the online softmax: results of tiles are added up as keys come by.

The queries of one rank attend to keys and values tile by tile (arXiv:1805.02867, arXiv:2112.05682).
tile_mask says what a tile hides: other documents, what a window leaves behind, and later keys.

B sequences, H query heads, K key-value heads, t positions held, S keys of a tile, C width of a
head. Keys and values are one tensor kv [2, B, K, S, C], so that they travel as one message.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch

from mpitrain.kernels.attention import AttentionRequest
from mpitrain.kernels.attention_tiles import attend, attend_backward
from mpitrain.kernels.attention_window import grad_of_sinks, with_sinks
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


class TokenPositions(NamedTuple):
    """Where some queries or keys are in their sequences. None where that decides nothing.

    documents: the document of each, [B, n].
    positions: the position of each, [n].
    numbers: the positions again, on the host, for dropout.
    """

    documents: torch.Tensor | None
    positions: torch.Tensor | None
    numbers: np.ndarray | None = None

    @classmethod
    def whole(
        cls,
        documents_BT: torch.Tensor | None,
        window: int,
        placement: SequencePlacement,
        device: torch.device,
    ) -> "TokenPositions":
        """Return the positions of the whole sequence.

        window: as in kernels/attention_window.py; without one, positions don't matter.
        """
        positions = torch.arange(placement.sequence, device=device) if window else None
        return cls(documents_BT, positions, np.arange(placement.sequence))

    def at(self, placement: SequencePlacement, rank: int) -> "TokenPositions":
        """Return the positions that `rank` holds, cut from those of the whole sequence."""
        spans = [slice(*span) for span in placement.spans(rank)]
        cut = (x if x is None else torch.cat([x[..., span] for span in spans], -1) for x in self[:2])
        return TokenPositions(*cut, placement.positions(rank))


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
        masks.append((queries.positions[tile.queries, None] - keys.positions[None, tile.keys] < window)[None])
    if all(mask.all() for mask in masks):
        return True, None
    seen = masks[0] if len(masks) == 1 else masks[0] & masks[1]
    return bool(seen.any()), (seen.tril() if tile.causal else seen)[:, None]


def _asked_of(
    tile: Tile, request: AttentionRequest, queries: TokenPositions, keys: TokenPositions
) -> AttentionRequest:
    """Return what is asked of a tile."""
    return request.between(queries.numbers[tile.queries], keys.numbers[tile.keys])


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
            anything, visible = tile_mask(self.here, there, tile, self._request.window)
            if anything:
                k, v = kv[..., tile.keys, :]
                q = self.q[..., tile.queries, :]
                asked = _asked_of(tile, self._request, self.here, there)
                self._add(tile.queries, *attend(q, k, v, tile.causal, visible, asked))
            self._poll()

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output in the dtype of the queries, and the log-sum-exp, both with sinks."""
        sinks_H = self._request.sinks
        out, lse = (self.out, self.lse) if sinks_H is None else with_sinks(self.out, self.lse, sinks_H)
        return out.to(self.q.dtype), lse

    def _add(self, queries: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Add the result of a tile, weighed by its share of the sum of exponentials.

        That is 1 / (1 + exp(old - new)). The old log-sum-exp is finite, as every query has seen its
        own key first; so a new one of -inf has the weight 0, never NaN.
        """
        if self.out is None:
            self.out = out.to(wide(out.dtype))
            self.lse = lse
            return
        old_out = self.out[..., queries, :]
        old_lse = self.lse[..., queries]
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
            anything, visible = tile_mask(self.here, there, tile, self._request.window)
            if anything:
                grad_of_out, q, out = (x[..., tile.queries, :] for x in self._rows)
                k, v = kv[..., tile.keys, :]
                lse = self._lse[..., tile.queries]
                asked = _asked_of(tile, self._request, self.here, there)
                for_q, for_k, for_v = attend_backward(
                    grad_of_out, q, k, v, out, lse, tile.causal, visible, asked
                )
                self._grad_of_q[..., tile.queries, :] += for_q
                grad_of_kv[0, ..., tile.keys, :] += for_k
                grad_of_kv[1, ..., tile.keys, :] += for_v
            self._poll()

    def grads(self, grad_of_kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradients of q, k, v, and of the sinks if there are some, in their dtypes.

        grad_of_kv: of the own keys and values.
        """
        grad_of_out, q, out = self._rows
        sinks_H = self._request.sinks
        of_sinks = () if sinks_H is None else (grad_of_sinks(grad_of_out, out, self._lse, sinks_H),)
        return self._grad_of_q.to(q.dtype), *grad_of_kv.to(q.dtype).unbind(), *of_sinks
