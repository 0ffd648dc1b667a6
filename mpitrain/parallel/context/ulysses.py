"""Ulysses: from positions to heads and back (arXiv:2309.14509).

Each rank attends over the whole sequence with some of the heads.

    [B, H, T/c, C]  -- all-to-all -->  [B, H/c, T, C]
    attention
    [B, H/c, T, C]  -- all-to-all -->  [B, H, T/c, C]

Queries, keys and values travel as one message. With fewer key-value heads than ranks (c a multiple
of K) each is sent to the c/K ranks whose query heads use it, and its gradient is the sum of theirs.
SequencePlacement plain: the sequence arrives in order.
"""

from dataclasses import replace
from typing import NamedTuple

import torch

from mpitrain.comm.axis import Axis
from mpitrain.comm.collectives import all_to_all
from mpitrain.kernels.attention import AttentionRequest
from mpitrain.kernels.attention_documents import attend_by_documents, attend_by_documents_backward
from mpitrain.kernels.attention_window import attend_in_window, attend_in_window_backward, grad_of_sinks
from mpitrain.kernels.document_spans import spans_of
from mpitrain.kernels.precision import wide
from mpitrain.parallel.context.online_softmax import TokenPositions, tile_mask
from mpitrain.plan.division.sequence import SequencePlacement, Tile


class SavedHeads(NamedTuple):
    """What the backward needs: some heads of the whole sequence."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    documents: torch.Tensor | None


class Ulysses:
    """Attention with the heads spread over `axis`, between two all-to-alls."""

    def __init__(self, axis: Axis, placement: SequencePlacement, heads: int, kv_heads: int):
        self.axis = axis
        self.placement = placement
        self._copies = max(1, axis.size // kv_heads)
        # heads of q, k and v here
        self._counts = [heads // axis.size] + 2 * [kv_heads * self._copies // axis.size]
        self._tile = Tile(slice(0, placement.sequence), slice(0, placement.sequence), causal=True)

    def forward(self, q_BHtC, k_BKtC, v_BKtC, request: AttentionRequest):
        """Yield both all-to-alls; return (out [B, H, t, C], saved)."""
        spread = (
            x.detach().repeat_interleave(copies, 1)
            for x, copies in zip((q_BHtC, k_BKtC, v_BKtC), (1, *2 * [self._copies]))
        )
        packed = torch.cat([x.unflatten(1, (self.axis.size, -1)) for x in spread], 2).flatten(1, 2)
        q, k, v = (yield from self._to_heads(packed)).split(self._counts, 1)
        asked = self._for_own_heads(request)
        documents_BT = request.documents
        if documents_BT is not None and documents_BT.is_cpu:
            out, lse = attend_by_documents(q, k, v, asked, spans_of(documents_BT))
        else:
            out, lse = attend_in_window(q, k, v, asked, self._visible(documents_BT))
        out_BHtC = yield from self._to_positions(out)
        return out_BHtC, SavedHeads(q, k, v, out, lse, request.documents)

    def backward(self, saved: SavedHeads, grad_of_out: torch.Tensor, request: AttentionRequest):
        """Yield both all-to-alls; return the gradients of q, k and v, and of sinks.

        Other ranks have those of the sinks of other heads.
        """
        q, k, v, out, lse, documents_BT = saved
        grad = yield from self._to_heads(grad_of_out)
        sinks_H = request.sinks
        asked = self._for_own_heads(request)
        tensors = grad, q, k, v, out, lse, asked
        if documents_BT is not None and documents_BT.is_cpu:
            grads = attend_by_documents_backward(*tensors, spans_of(documents_BT))
        else:
            grads = attend_in_window_backward(*tensors, self._visible(documents_BT))
        packed = yield from self._to_positions(torch.cat(grads, 1))
        for_q, *for_kv = packed.unflatten(1, (self.axis.size, -1)).split(self._counts, 2)
        of_sinks = () if sinks_H is None else (torch.zeros_like(sinks_H, dtype=lse.dtype),)
        for of_all in of_sinks:
            self._here(of_all).copy_(grad_of_sinks(grad, out, lse, self._here(sinks_H)))
        return for_q.flatten(1, 2), *(self._sum_of_copies(x.flatten(1, 2)) for x in for_kv), *of_sinks

    def _visible(self, documents_BT: torch.Tensor | None) -> torch.Tensor | None:
        every = TokenPositions(documents_BT, None)
        return tile_mask(every, every, self._tile, 0)[1]

    def _for_own_heads(self, request: AttentionRequest) -> AttentionRequest:
        asked = request if request.sinks is None else request.given(sinks=self._here(request.sinks))
        if asked.dropout is None:
            return asked
        heads = asked.dropout.heads
        count = len(heads) // self.axis.size
        mine = heads[self.axis.rank * count :][:count]
        return replace(asked, dropout=replace(asked.dropout, heads=mine))

    def _here(self, sinks_H: torch.Tensor) -> torch.Tensor:
        """Return the part of this rank's heads."""
        return sinks_H.view(self.axis.size, -1)[self.axis.rank]

    def _sum_of_copies(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, K, t, C]: the sum over the ranks that had a copy of a key-value head."""
        return x.unflatten(1, (-1, self._copies)).sum(2, dtype=wide(x.dtype)).to(x.dtype)

    def _to_heads(self, x_BNtC: torch.Tensor):
        """Yield an all-to-all; return [B, N/c, T, C]. The adjoint of _to_positions."""
        parts = x_BNtC.unflatten(1, (self.axis.size, -1)).movedim(1, 0).contiguous()
        came = (yield all_to_all(parts, self.axis)).view_as(parts)
        return came.movedim(0, 2).flatten(2, 3)

    def _to_positions(self, x_BnTC: torch.Tensor):
        """Yield an all-to-all; return [B, n c, t, C]. The adjoint of _to_heads."""
        parts = x_BnTC.unflatten(2, (self.axis.size, -1)).movedim(2, 0).contiguous()
        came = (yield all_to_all(parts, self.axis)).view_as(parts)
        return came.movedim(0, 1).flatten(1, 2)
