"""Context parallelism: attention whose queries, keys and values are spread along the sequence over an axis.

| kind    | placement | what travels                       | refuses                                       |
|---------|-----------|------------------------------------|-----------------------------------------------|
| ring    | plain     | keys and values, round a ring      | a sequence that c doesn't divide              |
| zigzag  | zigzag    | the same, and all have equal work  | a sequence that 2c doesn't divide             |
| gather  | zigzag    | keys and values, to everyone       | a sequence that 2c doesn't divide             |
| ulysses | plain     | positions for heads, and back      | heads that c doesn't divide; K and c
                                                           unrelated |

An attention is causal by *position*, and within documents if they are given. Both directions are
generators, as in parallel/walk.py: they start an operation, compute, yield its Pending when they
need it, and are resumed with its result. On an axis of size 1 they send nothing.

    attention = context_attention(mesh["cp"], "zigzag", sequence=2048, heads=8, kv_heads=2,
        head_width=64)
    out, saved = yield from attention.forward(q, k, v, documents)         q [B, H, t, C], k and v
                                                                          [B, K, t, C], t = T/c
    grads = yield from attention.backward(saved, grad_of_out)             of q, k and v

`documents` [B, T] or [T]: a number for each position of the *whole* sequence, in order, alike on
all ranks: every rank can read it with the tokens, so it needs no message. RoPE is the caller's, at
placement.positions(rank), before the attention. Windows and sinks are told in
kernels/attention_window.py, soft caps in kernels/attention_products.py.
"""

from typing import Any, Protocol

import torch

from mpitrain.comm.axis import Axis
from mpitrain.layout import traffic
from mpitrain.layout.sequence import SequencePlacement, placement_of
from mpitrain.parallel.context.all_gather import Gather
from mpitrain.parallel.context.ring import Ring
from mpitrain.parallel.context.ulysses import Ulysses
from mpitrain.parallel.walk import Shape, Walk


class Kind(Protocol):
    """What the four kinds have in common."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        documents: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> Walk:
        """Return (out, saved)."""

    def backward(self, saved: Any, grad_of_out: torch.Tensor, sinks: torch.Tensor | None) -> Walk:
        """Return the gradients of q, k and v, and of sinks if there are some."""


def context_attention(
    axis: Axis,
    kind: str,
    sequence: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    window: int = 0,
    soft_cap: float = 0.0,
) -> "ContextAttention":
    """Return the attention of `kind` over `axis`.

    Raises ConfigError, on all ranks alike, before anything is sent.

    sequence: positions in all.  heads, kv_heads: those that this rank has, so divided by tp.
    """
    return ContextAttention(
        axis,
        kind,
        placement_of(kind, sequence, axis.size, heads, kv_heads),
        heads,
        kv_heads,
        head_width,
        window,
        soft_cap,
    )


class ContextAttention:
    """One attention over `axis`; it holds no tensors and may serve every layer.

    `placement` says which positions are here.
    """

    def __init__(
        self,
        axis: Axis,
        kind: str,
        placement: SequencePlacement,
        heads: int,
        kv_heads: int,
        head_width: int,
        window: int = 0,
        soft_cap: float = 0.0,
    ):
        self.axis = axis
        self.kind = kind
        self.placement = placement
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_width = head_width
        self._kind: Kind
        if kind == "ulysses":
            self._kind = Ulysses(axis, placement, heads, kv_heads, window, soft_cap)
        else:
            self._kind = (Gather if kind == "gather" else Ring)(axis, placement, window, soft_cap)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        documents: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Walk:
        """Attend; return (out [B, H, t, C], what backward needs).

        q: [B, H, t, C].
        k, v: [B, K, t, C], RoPE applied.
        documents: [B, T] or [T], integers, of the whole sequence.
        sinks: [H]. The tensors are read until the walk ends.
        No autograd: nothing that needs a gradient is recorded.
        """
        self._require(q, self.heads)
        self._require(k, self.kv_heads)
        self._require(v, self.kv_heads)
        if documents is not None:
            documents = documents.to(q.device).view(-1, documents.shape[-1])
            assert documents.shape[-1] == self.placement.sequence, (
                f"documents of the whole sequence, found {tuple(documents.shape)}"
            )
        return (yield from self._kind.forward(q, k, v, documents, sinks))

    def backward(self, saved: Any, grad_of_out: torch.Tensor, sinks: torch.Tensor | None = None) -> Walk:
        """Return the gradients of q, k and v, in their dtype; and of sinks, fp32 or fp64, if there are some.

        grad_of_out: [B, H, t, C].
        """
        self._require(grad_of_out, self.heads)
        return (yield from self._kind.backward(saved, grad_of_out.detach(), sinks))

    def sends(self, shape: Shape, itemsize: int) -> tuple[traffic.Traffic, Shape]:
        """Return what one forward and one backward start, alike on all ranks."""
        found = traffic.attention(
            self.kind, self.axis.name, self.axis.size, batch=shape[0], heads=self.heads,
            kv_heads=self.kv_heads,
            head_width=self.head_width, sequence=self.placement.sequence, itemsize=itemsize,
        )  # fmt: skip
        return found, shape

    def _require(self, x: torch.Tensor, heads: int) -> None:
        found = tuple(x.shape[1:])
        needed = (heads, self.placement.length, self.head_width)
        assert found == needed, (
            f"[B, heads, positions here, width]: found {tuple(x.shape)}, needed {needed} behind B"
        )
