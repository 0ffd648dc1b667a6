"""Ring attention: queries stay, keys and values go round (arXiv:2310.01889). For 4 ranks, what rank 1 holds in each turn:

    forward     turn     0: own       1: of 0      2: of 3      3: of 2
                         kv ---->     kv ---->     kv ---->                   the next kv travels while a turn computes

    backward    turn     own, first   1: of 0      2: of 3      3: of 2      own, rest
                         kv ---->     kv ---->     kv ---->
                                      grad ---->   grad ---->   grad ---->    the gradient of a kv follows it round and ends at home

Keys and values reach rank r in turn n from rank r-n. Their gradients hop one turn later, computed while the next turn does; the last
hop, home, travels during the second half of the own keys' work. With zigzag placement all ranks have the same work in every turn.
"""

import torch

from mpitrain.comm.axis import Axis
from mpitrain.comm.collectives import shift
from mpitrain.layout.sequence import Placement
from mpitrain.parallel.context.accumulate import Attending, AttendingBackward, Saved, documents_at
from mpitrain.parallel.precision import wide


class Ring:
    """Attention along a ring. Each rank holds t = T/c positions of every sequence, by `placement`."""

    def __init__(self, axis: Axis, placement: Placement):
        self.axis, self.placement = axis, placement

    def forward(self, q_BHtC, k_BKtC, v_BKtC, documents_BT=None):
        """Yield each shift of keys and values when it is needed; return (out [B, H, t, C], saved)."""
        axis, placement = self.axis, self.placement
        own = held = torch.stack((k_BKtC, v_BKtC)).detach()
        work = Attending(q_BHtC.detach(), documents_at(documents_BT, placement, axis.rank), axis.progress.poll)
        for turn in range(axis.size):
            coming = shift(held, axis) if turn + 1 < axis.size else None
            source = (axis.rank - turn) % axis.size
            work.see(placement.tiles(axis.rank, source), held, documents_at(documents_BT, placement, source))
            if coming is not None:
                held = (yield coming).view_as(own)
        out = work.out.to(q_BHtC.dtype)
        return out, Saved(work.q, own, out, work.lse, documents_BT)

    def backward(self, saved: Saved, grad_of_out: torch.Tensor):
        """Yield each shift when it is needed; return the gradients of q, k and v."""
        axis, placement, held = self.axis, self.placement, saved.kv
        here = documents_at(saved.documents, placement, axis.rank)
        work = AttendingBackward(saved.q, saved.out, saved.lse, grad_of_out, here, axis.progress.poll)
        own = torch.zeros_like(held, dtype=wide(held.dtype))  # 16-bit gradients would be rounded at every hop: they travel in fp32
        first, rest = placement.own_in_two()
        coming = shift(held, axis) if axis.size > 1 else None
        work.see(first, saved.kv, own, here)
        travelling = None
        for turn in range(1, axis.size):
            held = (yield coming).view_as(held)
            coming = shift(held, axis) if turn + 1 < axis.size else None
            source, grads = (axis.rank - turn) % axis.size, torch.zeros_like(own)
            work.see(placement.tiles(axis.rank, source), held, grads, documents_at(saved.documents, placement, source))
            if travelling is not None:
                grads += (yield travelling).view_as(own)
            travelling = shift(grads, axis)
        work.see(rest, saved.kv, own, here)
        if travelling is not None:
            own += (yield travelling).view_as(own)
        return work.grad_of_q(), *own.to(held.dtype).unbind()
