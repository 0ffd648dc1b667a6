"""Causal attention with grouped queries (arXiv:2305.13245) and rotary positions, after an RMSNorm.

Kept of it, with n = B T positions on this rank, width D, H C query and K C key-value features; of a norm's factor 1 per position, of
attention's log-sum-exp H:

    none        2 n D + n + 3 n H C + 2 n K C + n H    unit and normed input | q, k, v, result, result side by side
    selective   n D + n + n H C + 2 n K C              input | q, k, v
    from I to W 2 n D + 2 n H C + 2 n K C              both factors of each weight gradient, in every mode

With fp8 these factors (normed input, result side by side) have one byte a number, the rest two. tp divides H and K, cp divides n; with
`sequence`, tp divides what stands before the gather, too. There the normed input has travelled, or the result will have: it is kept in
selective mode, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mpitrain.layout.layer import Sizes
from mpitrain.layout.parameters import COLUMNS, ROWS, Spec, matrix, product_flops, residual_std, vector

if TYPE_CHECKING:
    from mpitrain.model.site import Site
    from mpitrain.parallel.walk import Item
    from mpitrain.parallel.zero.parameters import Parameter


@dataclass(frozen=True)
class Attention:
    """depth: layers whose outputs are added to the residual stream; projections back into it start smaller (GPT-2, section 2.3)."""

    tells: ClassVar[tuple[str, ...]] = ()
    width: int
    heads: int
    kv_heads: int
    depth: int

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    def parameters(self) -> tuple[Spec, ...]:
        kv_width = self.head_width * self.kv_heads
        return (
            vector("attention.norm.weight", self.width),
            matrix("attention.q.weight", self.width, self.width, ROWS),
            matrix("attention.k.weight", kv_width, self.width, ROWS, pieces=self.kv_heads),
            matrix("attention.v.weight", kv_width, self.width, ROWS, pieces=self.kv_heads),
            matrix("attention.output.weight", self.width, self.width, COLUMNS, std=residual_std(self.depth)),
        )

    def cost(self, sequence: int) -> float:
        return float(sum(spec.numel for spec in self.parameters()) + sequence * self.width)

    def flops(self, sequence: int) -> float:
        """Half of the scores are masked."""
        return product_flops(self.parameters()) + 6.0 * sequence * self.width

    def kept(self, sizes: Sizes, segment: int) -> int:
        """On a GPU attention's result is there only once, but with fp8, where its copy side by side is another."""
        parallel, heads, kv_heads = sizes.config.parallel, self.heads // sizes.tp, self._kv_heads(sizes)
        if parallel.cp > 1 and parallel.context == "gather":
            kv_heads *= parallel.cp
        elif parallel.cp > 1 and parallel.context == "ulysses":
            kv_heads = max(kv_heads, parallel.cp)
        kept = self.head_width * (heads + 2 * kv_heads) * sizes.itemsize
        in_pieces = parallel.cp > 1 or (parallel.tp > 1 and parallel.async_tp)  # then attention isn't one segment
        if not sizes.selective or in_pieces:
            kept += heads * (self.head_width + 1) * sizes.itemsize
            if heads > 1 or sizes.factor < sizes.itemsize:  # a single head lies side by side with itself
                kept += heads * self.head_width * sizes.factor
        earlier = segment * self.history(sizes)  # copied to beside this segment's
        return sizes.normed(self.width, sizes.factor) + sizes.positions * kept + earlier

    def left(self, sizes: Sizes) -> int:
        features = 2 * self.width + 2 * self.width // sizes.tp + 2 * self._kv_heads(sizes) * self.head_width
        return features * sizes.factor * sizes.positions

    def history(self, sizes: Sizes) -> int:
        """Keys and values."""
        return 2 * sizes.positions * self._kv_heads(sizes) * self.head_width * sizes.itemsize

    def _kv_heads(self, sizes: Sizes) -> int:
        """Of this rank; fewer than ranks are repeated."""
        return max(1, self.kv_heads // sizes.tp)

    def items(self, own: Mapping[str, "Parameter"], site: "Site") -> list["Item"]:
        from mpitrain.model.attention import attention  # torch

        return attention(self, own, site)
