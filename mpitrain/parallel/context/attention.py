"""Context parallelism: attention whose queries, keys and values are spread along the sequence over an axis.

| kind    | placement | what travels                      | refuses                           |
|---------|-----------|-----------------------------------|-----------------------------------|
| ring    | plain     | keys and values, round a ring     | a sequence that c doesn't divide  |
| zigzag  | zigzag    | the same, and all have equal work | a sequence that 2c doesn't divide |
| gather  | zigzag    | keys and values, to everyone      | a sequence that 2c doesn't divide |
| ulysses | plain     | positions for heads, and back     | heads that c doesn't divide, and  |
|         |           |                                   | c, K of which neither divides the |
|         |           |                                   | other                             |

An attention is causal by *position*, and within documents if they are given. Both directions are
generators, as in parallel/walk.py: they start an operation, compute, yield its Pending when they
need it, and are resumed with its result. On an axis of size 1 they send nothing.

    attention = ContextAttention(mesh["cp"], "zigzag", sequence=2048, heads=8, kv_heads=2, head_width=64)
    out, saved = yield from attention.forward(q, k, v, request)           q [B, H, t, C], k and v
                                                                          [B, K, t, C], t = T/c
    grads = yield from attention.backward(saved, grad_of_out, request)    of q, k and v

`request.documents` [B, T] or [T]: a number for each position of the *whole* sequence, ascending in each
chunk, alike on all ranks: every rank can read it with the tokens, so it needs no message. With zigzag and
gather rows can be in the order of placement.order(): then `request.order` is that. RoPE is the caller's,
before the attention. Windows and sinks stand in
kernels/attention_window.py, soft caps in kernels/attention_products.py.
"""

from typing import Any

import torch

from mpitrain.comm.axis import Axis
from mpitrain.kernels.attention import PLAIN, AttentionRequest, Kernel, choose
from mpitrain.parallel.context.all_gather import Gather
from mpitrain.parallel.context.ring import Ring
from mpitrain.parallel.context.ulysses import Ulysses
from mpitrain.parallel.walk import Walk
from mpitrain.plan.division.sequence import placement_of


class ContextAttention:
    """One attention of `kind` over `axis`; it holds no tensors and may serve every layer.

    sequence: positions in all; `placement` says which of them are here.
    heads, kv_heads: those that this rank has, so divided by tp.
    Raises ConfigError, on all ranks alike, before anything is sent.
    """

    def __init__(self, axis: Axis, kind: str, sequence: int, heads: int, kv_heads: int, head_width: int):
        self.axis = axis
        self.kind = kind
        self.placement = placement = placement_of(kind, sequence, axis.size, heads, kv_heads)
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_width = head_width
        self._kind: Ring | Gather | Ulysses
        if kind == "ulysses":
            self._kind = Ulysses(axis, placement, heads, kv_heads)
        else:
            self._kind = (Gather if kind == "gather" else Ring)(axis, placement)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: AttentionRequest = PLAIN
    ) -> Walk:
        """Attend; return (out [B, H, t, C], what backward needs).

        q: [B, H, t, C].
        k, v: [B, K, t, C], RoPE applied.
        request: without a mask. The tensors are read until the walk ends.

        No autograd: nothing that needs a gradient is recorded.
        """
        self._require(q, self.heads)
        self._require(k, self.kv_heads)
        self._require(v, self.kv_heads)
        if request.documents is not None:
            documents = request.documents.to(q.device).view(-1, request.documents.shape[-1])
            assert documents.shape[-1] == self.placement.sequence, (
                f"documents of the whole sequence, found {tuple(documents.shape)}"
            )
            documents = documents.expand(len(q), -1)
            request = request.given(sinks=request.sinks, documents=documents, order=request.order)
        return (yield from self._kind.forward(q, k, v, request))

    def backward(self, saved: Any, grad_of_out: torch.Tensor, request: AttentionRequest = PLAIN) -> Walk:
        """Return the gradients of q, k and v, in their dtype; and of sinks, fp32 or fp64, if there are some.

        grad_of_out: [B, H, t, C].
        request: as in the forward. Its documents may be left out: they are saved.
        """
        self._require(grad_of_out, self.heads)
        return (yield from self._kind.backward(saved, grad_of_out.detach(), request))

    def kernel(self, q_BHtC: torch.Tensor, request: AttentionRequest, masked: bool) -> Kernel:
        """Return which kernel computes the largest tile of such queries, of this rank.

        masked: documents decide, too, which keys a query sees.
        """
        if self.kind == "ulysses":
            heads = self.heads // self.axis.size
            kv_heads = max(1, self.kv_heads // self.axis.size)
            queries = self.placement.sequence
        else:
            heads = self.heads
            kv_heads = self.kv_heads
            tiles = self.placement.tiles(self.axis.rank, self.axis.rank)
            queries = max(tile.queries.stop - tile.queries.start for tile in tiles)
        like = q_BHtC[:1, :1, :1]
        q = like.expand(len(q_BHtC), heads, queries, -1)
        return choose(request, q, like.expand(len(q_BHtC), kv_heads, queries, -1), masked, tile=True)

    def _require(self, x: torch.Tensor, heads: int) -> None:
        shape = tuple(x.shape[1:])
        needed = (heads, self.placement.length, self.head_width)
        assert shape == needed, (
            f"[B, heads, positions here, width]: found {tuple(x.shape)}, needed {needed} after B"
        )
