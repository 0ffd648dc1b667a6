"""Ring attention: queries stay, keys and values go round (arXiv:2310.01889).

For 4 ranks, what rank 1 holds in each turn:

    forward     turn     0: own       1: of 0      2: of 3      3: of 2
                         kv ---->  kv ---->  kv ---->  the next kv travels while a turn computes

    backward    turn     own, first   1: of 0      2: of 3      3: of 2      own, rest
                         kv ---->     kv ---->     kv ---->
                                      grad ---->  grad ---->  grad ---->

The gradient of a kv follows it round and ends at home.

Keys and values reach rank r in turn n from rank r-n. Their gradients hop one turn later, computed
while the next turn does; the last hop, home, travels during the second half of the own keys' work.
With zigzag placement all ranks have the same work in every turn.
"""

import torch

from mpitrain.comm.axis import Axis
from mpitrain.comm.collectives import shift
from mpitrain.kernels.attention import AttentionRequest
from mpitrain.kernels.precision import wide
from mpitrain.parallel.context.online_softmax import (
    SavedAttention,
    TileAttention,
    TileAttentionBackward,
    TokenPositions,
)
from mpitrain.plan.division.sequence import SequencePlacement


class Ring:
    """Attention along a ring.

    Each rank holds t = T/c positions of every sequence, by `placement`.
    """

    def __init__(self, axis: Axis, placement: SequencePlacement):
        self.axis = axis
        self.placement = placement

    def forward(self, q_BHtC, k_BKtC, v_BKtC, request: AttentionRequest):
        """Yield each shift of keys and values when it is needed; return (out [B, H, t, C], saved)."""
        axis = self.axis
        placement = self.placement
        own = held = torch.stack((k_BKtC, v_BKtC)).detach()
        whole = TokenPositions.whole(request.documents, request.order, request, placement, own.device)
        here = whole.at(placement, axis.rank)
        work = TileAttention(q_BHtC.detach(), here, request, axis.progress.poll)
        for turn in range(axis.size):
            coming = shift(held, axis) if turn + 1 < axis.size else None
            source = (axis.rank - turn) % axis.size
            tiles = placement.tiles(axis.rank, source, whole.by_documents)
            work.attend(tiles, held, whole.at(placement, source))
            if coming is not None:
                held = (yield coming).view_as(own)
        out, lse = work.result()
        return out, SavedAttention(work.q, own, out, lse, request.documents, request.order)

    def backward(self, saved: SavedAttention, grad_of_out: torch.Tensor, request: AttentionRequest):
        """Yield each shift when it is needed; return the gradients of q, k and v, and of sinks."""
        axis = self.axis
        placement = self.placement
        held = saved.kv
        whole = TokenPositions.whole(saved.documents, saved.order, request, placement, held.device)
        here = whole.at(placement, axis.rank)
        work = TileAttentionBackward(
            saved.q, saved.out, saved.lse, grad_of_out, here, request, axis.progress.poll
        )
        # 16-bit gradients would be rounded at every hop: they travel in fp32
        own = torch.zeros_like(held, dtype=wide(held.dtype))
        first, rest = placement.own_in_two()
        coming = shift(held, axis) if axis.size > 1 else None
        work.attend(first, saved.kv, own, here)
        travelling = None
        for turn in range(1, axis.size):
            held = (yield coming).view_as(held)
            coming = shift(held, axis) if turn + 1 < axis.size else None
            source = (axis.rank - turn) % axis.size
            grads = torch.zeros_like(own)
            tiles = placement.tiles(axis.rank, source, whole.by_documents)
            work.attend(tiles, held, grads, whole.at(placement, source))
            if travelling is not None:
                grads += (yield travelling).view_as(own)
            travelling = shift(grads, axis)
        work.attend(rest, saved.kv, own, here)
        if travelling is not None:
            own += (yield travelling).view_as(own)
        return work.grads(own)
