"""Attention to gathered keys and values: each rank fetches them all and computes its own queries (Llama 3, arXiv:2407.21783, 3.3.2).

    forward     all-gather of kv          | meanwhile the own keys     then those of the other ranks
    backward    those of the other ranks, then reduce-scatter of their gradients | meanwhile the own keys

One large message instead of many; in exchange each rank holds the keys and values of the whole sequence, which grouped queries keep
small. They are kept for the backward, which therefore gathers nothing. Placement zigzag: every rank has the same work.
"""

import torch

from mpitrain.comm.axis import Axis
from mpitrain.comm.collectives import all_gather, reduce_scatter
from mpitrain.layout.sequence import Placement
from mpitrain.parallel.context.accumulate import Attending, AttendingBackward, Saved, documents_at
from mpitrain.parallel.precision import wide


class Gather:
    """Attention to gathered keys and values. Each rank holds t = T/c positions of every sequence, by `placement`."""

    def __init__(self, axis: Axis, placement: Placement):
        self.axis, self.placement = axis, placement

    def forward(self, q_BHtC, k_BKtC, v_BKtC, documents_BT=None):
        """Yield the all-gather; return (out [B, H, t, C], saved)."""
        axis, placement = self.axis, self.placement
        own = torch.stack((k_BKtC, v_BKtC)).detach()
        gathered = own.new_empty(axis.size, *own.shape)
        pending = all_gather(own, axis, gathered)
        here = documents_at(documents_BT, placement, axis.rank)
        work = Attending(q_BHtC.detach(), here, axis.progress.poll)
        work.see(placement.tiles(axis.rank, axis.rank), own, here)
        yield pending
        kv = own.new_empty(*own.shape[:-2], placement.sequence, own.shape[-1])
        for rank, held, positions in placement.pieces():
            kv[..., positions, :] = gathered[rank][..., held, :]
        work.see(placement.tiles_of_others(axis.rank), kv, documents_BT)
        out = work.out.to(q_BHtC.dtype)
        return out, Saved(work.q, kv, out, work.lse, documents_BT)

    def backward(self, saved: Saved, grad_of_out: torch.Tensor):
        """Yield the reduce-scatter; return the gradients of q, k and v."""
        axis, placement, kv = self.axis, self.placement, saved.kv
        here = documents_at(saved.documents, placement, axis.rank)
        work = AttendingBackward(saved.q, saved.out, saved.lse, grad_of_out, here, axis.progress.poll)
        grads = torch.zeros_like(kv, dtype=wide(kv.dtype))
        work.see(placement.tiles_of_others(axis.rank), kv, grads, saved.documents)
        shards = kv.new_empty(axis.size, *kv.shape[:-2], placement.length, kv.shape[-1])
        for rank, held, positions in placement.pieces():
            shards[rank][..., held, :] = grads[..., positions, :]
        pending = reduce_scatter(shards, axis)
        own_kv = torch.cat([kv[..., begin:end, :] for begin, end in placement.spans(axis.rank)], -2)
        own = torch.zeros_like(own_kv, dtype=grads.dtype)
        for tiles in placement.own_in_two():
            work.see(tiles, own_kv, own, here)
        own += (yield pending).view_as(own)
        return work.grad_of_q(), *own.to(kv.dtype).unbind()
