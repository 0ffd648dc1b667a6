"""The queries of one rank attend to keys and values as these come by, tile by tile; the results are added up here.

B sequences, H query heads, K key-value heads, t positions held, S keys of a tile, C width of a head. Keys and values are one tensor
kv [2, B, K, S, C], so that they travel as one message.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from mpitrain.layout.sequence import Placement, Tile
from mpitrain.parallel.context.flash import attend, attend_backward
from mpitrain.parallel.precision import wide

Poll = Callable[[], None]  # called after each tile: messages move on only when somebody enters MPI


class Saved(NamedTuple):
    """What the backward needs; all of it is here. kv: of this rank's positions (ring), or of the whole sequence (all_gather)."""

    q: torch.Tensor
    kv: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    documents: torch.Tensor | None


def documents_at(documents_BT: torch.Tensor | None, placement: Placement, rank: int) -> torch.Tensor | None:
    """Cut from the documents of the whole sequence those of the positions that `rank` holds, [B, t]."""
    if documents_BT is None:
        return None
    return torch.cat([documents_BT[:, begin:end] for begin, end in placement.spans(rank)], 1)


def sight(documents_BT, documents_BS, tile: Tile) -> tuple[bool, torch.Tensor | None]:
    """Return whether anything of a tile is visible, and the mask [B, 1, T, S] if there is more to it than the tile's own causality."""
    if documents_BT is None:
        return True, None
    same_BTS = documents_BT[:, tile.queries, None] == documents_BS[:, None, tile.keys]
    if same_BTS.all():
        return True, None
    return bool(same_BTS.any()), (same_BTS.tril() if tile.causal else same_BTS)[:, None]


class Attending:
    """The forward: `out` and `lse` over all keys seen so far."""

    def __init__(self, q_BHtC: torch.Tensor, documents_Bt: torch.Tensor | None, poll: Poll):
        self.q, self.documents, self._poll = q_BHtC, documents_Bt, poll
        self.out = self.lse = None

    def see(self, tiles: Iterable[Tile], kv: torch.Tensor, documents_BS: torch.Tensor | None) -> None:
        """Attend to the keys of some tiles. The very first tile must have every query, and each must see a key in it."""
        for tile in tiles:
            anything, visible = sight(self.documents, documents_BS, tile)
            if anything:
                k, v = kv[..., tile.keys, :]
                self._add(tile.queries, *attend(self.q[..., tile.queries, :], k, v, tile.causal, visible))
            self._poll()

    def _add(self, queries: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Weigh the new result by its share of the sum of exponentials: 1 / (1 + exp(old - new)).

        The old log-sum-exp is finite, as every query has seen its own key first; so a new one of -inf has the weight 0, never NaN.
        """
        if self.out is None:
            self.out, self.lse = out.to(wide(out.dtype)), lse
            return
        old_out, old_lse = self.out[..., queries, :], self.lse[..., queries]
        old_out.lerp_(out.to(old_out.dtype), torch.sigmoid(lse - old_lse).unsqueeze(-1))
        old_lse.copy_(torch.logaddexp(old_lse, lse))


class AttendingBackward:
    """The backward: the gradient of the queries over all keys seen so far, and that of each tile's keys and values where it is told."""

    def __init__(self, q_BHtC, out_BHtC, lse_BHt, grad_of_out, documents_Bt: torch.Tensor | None, poll: Poll):
        self._rows = (grad_of_out, q_BHtC, out_BHtC)
        self._lse, self.documents, self._poll = lse_BHt, documents_Bt, poll
        self._grad_of_q = torch.zeros_like(q_BHtC, dtype=wide(q_BHtC.dtype))

    def see(self, tiles: Iterable[Tile], kv: torch.Tensor, grad_of_kv: torch.Tensor, documents_BS: torch.Tensor | None) -> None:
        """Add the gradients of the keys and values of some tiles to `grad_of_kv` [2, B, K, S, C], which is fp32 or fp64."""
        for tile in tiles:
            anything, visible = sight(self.documents, documents_BS, tile)
            if anything:
                grad_of_out, q, out = (x[..., tile.queries, :] for x in self._rows)
                k, v = kv[..., tile.keys, :]
                lse = self._lse[..., tile.queries]
                for_q, for_k, for_v = attend_backward(grad_of_out, q, k, v, out, lse, tile.causal, visible)
                self._grad_of_q[..., tile.queries, :] += for_q
                grad_of_kv[0, ..., tile.keys, :] += for_k
                grad_of_kv[1, ..., tile.keys, :] += for_v
            self._poll()

    def grad_of_q(self) -> torch.Tensor:
        """Return the gradient of the queries in their dtype."""
        return self._grad_of_q.to(self._rows[1].dtype)
