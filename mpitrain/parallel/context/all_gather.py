"""Attention to gathered keys and values.

Each rank fetches them all and computes its own queries (Llama 3, arXiv:2407.21783, 3.3.2).

    forward   all-gather of kv          | meanwhile the own keys     then those of the other ranks
    backward  those of the other ranks, then reduce-scatter of their gradients | meanwhile the own
              keys

One large message instead of many; in exchange each rank holds the keys and values of the whole
sequence, which grouped queries keep small. They are kept for the backward, which therefore gathers
nothing. SequencePlacement zigzag: every rank has the same work.
"""

import torch

from mpitrain.comm.axis import Axis
from mpitrain.comm.collectives import all_gather, reduce_scatter
from mpitrain.kernels.attention import AttentionRequest
from mpitrain.kernels.precision import wide
from mpitrain.parallel.context.online_softmax import (
    SavedAttention,
    TileAttention,
    TileAttentionBackward,
    TokenPositions,
)
from mpitrain.plan.division.sequence import SequencePlacement


class Gather:
    """Attention to gathered keys and values.

    Each rank holds t = T/c positions of every sequence, by `placement`.
    """

    def __init__(self, axis: Axis, placement: SequencePlacement):
        self.axis = axis
        self.placement = placement

    def forward(self, q_BHtC, k_BKtC, v_BKtC, request: AttentionRequest):
        """Yield the all-gather; return (out [B, H, t, C], saved)."""
        axis = self.axis
        placement = self.placement
        own = torch.stack((k_BKtC, v_BKtC)).detach()
        gathered = own.new_empty(axis.size, *own.shape)
        pending = all_gather(own, axis, gathered)
        whole = TokenPositions.whole(request.documents, request.order, request, placement, own.device)
        here = whole.at(placement, axis.rank)
        work = TileAttention(q_BHtC.detach(), here, request, axis.progress.poll)
        work.attend(placement.tiles(axis.rank, axis.rank, whole.by_documents), own, here)
        yield pending
        kv = own.new_empty(*own.shape[:-2], placement.sequence, own.shape[-1])
        for rank, held, positions in placement.pieces():
            kv[..., positions, :] = gathered[rank][..., held, :]
        work.attend(placement.tiles_of_others(axis.rank, whole.by_documents), kv, whole)
        out, lse = work.result()
        return out, SavedAttention(work.q, kv, out, lse, request.documents, request.order)

    def backward(self, saved: SavedAttention, grad_of_out: torch.Tensor, request: AttentionRequest):
        """Yield the reduce-scatter; return the gradients of q, k and v, and of sinks."""
        axis = self.axis
        placement = self.placement
        kv = saved.kv
        whole = TokenPositions.whole(saved.documents, saved.order, request, placement, kv.device)
        here = whole.at(placement, axis.rank)
        work = TileAttentionBackward(
            saved.q, saved.out, saved.lse, grad_of_out, here, request, axis.progress.poll
        )
        grads = torch.zeros_like(kv, dtype=wide(kv.dtype))
        work.attend(placement.tiles_of_others(axis.rank, whole.by_documents), kv, grads, whole)
        shards = kv.new_empty(axis.size, *kv.shape[:-2], placement.length, kv.shape[-1])
        for rank, held, positions in placement.pieces():
            shards[rank][..., held, :] = grads[..., positions, :]
        pending = reduce_scatter(shards, axis)
        own_kv = torch.cat([kv[..., begin:end, :] for begin, end in placement.spans(axis.rank)], -2)
        own = torch.zeros_like(own_kv, dtype=grads.dtype)
        for tiles in placement.own_in_two():
            work.attend(tiles, own_kv, own, here)
        own += (yield pending).view_as(own)
        return work.grads(own)
