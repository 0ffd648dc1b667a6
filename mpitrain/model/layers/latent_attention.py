"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1; V3, arXiv:2412.19437,
section 2.1.1), after an RMSNorm.

Keys and values of all heads are made of one latent vector a position, queries of another; both are
normed. Positions are in features of their own: each head's queries have some, the keys have them in
common.

    h = norm(x)                                               of the positions that are here
    latent = norm(q_down h) | norm(kv_down h) | rotary keys   one tensor: with tensor parallelism
                                                              it is gathered instead of h
    queries = q_up latent, keys | values = kv_up latent       each rank those of its heads

Without `q_rank` queries are made of h itself. Attention's kernels want keys and values of one
width: values are padded with zeros.

Kept of it, with n = B T positions on this rank, D width, L = Q + K + R width of what is gathered
(latent of queries, of keys and values, rotary), H heads, C = head_width + R, V width of values:

    none         2 n D + n + n (Q + 1) + n (K + 1) | n L | 4 n H C - n H (C - V) + n H
                 units and inputs | latent | q, k, v, result twice; in bf16 without n H, with
                 probabilities as in attention.py
    selective    n D + n + n (Q + 1) + n (K + 1) | n L | 3 n H C
    from I to W  2 n D + n (Q + K + R) + n L + n H (C + head_width + 2 V)
                 both factors of each weight gradient

tp divides H, cp divides n; with `sequence`, tp divides what stands before the gather, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpitrain.errors import ConfigError
from mpitrain.model.layers.attention import kept_by_core, seen, working_of_core
from mpitrain.model.layers.rope import Rope
from mpitrain.plan.declared.family import refuse_odd, width_of_head
from mpitrain.plan.declared.layer import Layer, Sizes, Working
from mpitrain.plan.declared.layer_traffic import attended
from mpitrain.plan.declared.parameters import (
    COLUMNS,
    EPS,
    ROWS,
    Spec,
    matrix,
    norm,
    product_flops,
    residual_std,
)
from mpitrain.plan.declared.resolved import ResolvedModel
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.declared.traffic import LOCAL, Traffic
from mpitrain.plan.declared.work import HeadSizes, PartWork, Product, attention_work

if TYPE_CHECKING:
    from mpitrain.model.build_context import BuildContext
    from mpitrain.parallel.walk import Item
    from mpitrain.parallel.zero.parameters import Parameter


@dataclass(frozen=True)
class LatentAttention(Layer):
    """head_width: of queries and keys, without positions.

    rope: of the features with positions.
    depth, eps: as in attention.py.
    q_rank, kv_rank: widths of the latent vectors; q_rank 0: queries have none.
    latent_eps: of the norms of latent vectors; None: eps.
    """

    width: int
    heads: int
    head_width: int
    value_width: int
    q_rank: int
    kv_rank: int
    rope: Rope
    depth: int
    eps: float = EPS
    latent_eps: float | None = None

    @property
    def key_width(self) -> int:
        return self.head_width + self.rope.width

    @property
    def latent_widths(self) -> tuple[int, int, int]:
        """What is gathered: what queries are made of, what keys and values are, rotary keys."""
        return self.q_rank or self.width, self.kv_rank, self.rope.width

    def parameters(self) -> tuple[Spec, ...]:
        queries, of_kv, rotary = self.latent_widths
        eps = self.eps if self.latent_eps is None else self.latent_eps
        std = residual_std(self.depth)
        low_rank = (
            matrix("attention.q_down.weight", queries, self.width, None),
            *norm("attention.q_norm", queries, eps),
        )
        return (
            *norm("attention.norm", self.width, self.eps),
            *(low_rank if self.q_rank else ()),
            matrix("attention.q_up.weight", self.heads * self.key_width, queries, ROWS),
            matrix("attention.kv_down.weight", of_kv + rotary, self.width, None),
            *norm("attention.kv_norm", of_kv, eps),
            matrix("attention.kv_up.weight", self.heads * (self.head_width + self.value_width), of_kv, ROWS),
            matrix("attention.output.weight", self.width, self.heads * self.value_width, COLUMNS, std=std),
        )

    def flops(self, sequence: int) -> float:
        """Half of the scores are masked; padding isn't counted."""
        core = 6.0 * self.heads * (self.key_width + self.value_width) * seen(sequence)
        return product_flops(self.parameters()) + core

    def kept(self, sizes: Sizes, segment: int) -> int:
        heads = self.heads // sizes.tp
        latent = sum(self.latent_widths)
        norms = sum(map(sizes.norm, filter(None, (self.width, self.q_rank, self.kv_rank))))
        inputs = 0 if sizes.selective else self.width * sizes.itemsize
        core = kept_by_core(sizes, heads, heads, self.key_width, self.value_width)
        kept_once = segment * self.history(sizes) + sizes.probabilities(heads, self.key_width)
        gathered = sizes.positions * (latent * sizes.itemsize + core)
        return sizes.shared * (norms + inputs) + gathered + kept_once

    def left(self, sizes: Sizes) -> int:
        """Where a gather has put sequences side by side, the inputs of both products are copies,
        and leave the rotary keys behind.
        """
        parallel = sizes.config.parallel
        latent = sum(self.latent_widths)
        heads = self.heads // sizes.tp
        if sizes.tp > 1 and parallel.sequence and not parallel.async_tp and sizes.config.batch.micro > 1:
            latent -= self.rope.width
        down = sizes.shared * (self.width + self.q_rank + self.kv_rank + self.rope.width)
        up = latent + heads * (self.key_width + self.head_width + 2 * self.value_width) + self.width
        return (down + sizes.positions * up) * sizes.itemsize

    def working(self, sizes: Sizes) -> Working:
        heads = self.heads // sizes.tp
        latent = sizes.positions * sum(self.latent_widths) * sizes.itemsize
        forward, backward = working_of_core(sizes, self.width, heads, heads, self.key_width)
        return Working(forward + latent, backward + latent)

    def history(self, sizes: Sizes) -> int:
        """Keys and padded values."""
        return 2 * sizes.positions * self.heads // sizes.tp * self.key_width * sizes.itemsize

    def cache_bytes(self, positions: int, itemsize: int) -> int:
        """Latent vectors of keys and values, and rotary keys."""
        return positions * (self.kv_rank + self.rope.width) * itemsize

    def traffic(self, sizes: Sizes) -> tuple[Traffic, ...]:
        heads = self.heads // sizes.tp
        latent = sum(self.latent_widths)
        return LOCAL, *attended(sizes, (heads, heads, self.key_width), self.width, latent)

    def work(self, layout: StepLayout, load: float) -> PartWork:
        n = layout.positions
        heads = self.heads // layout.tp
        queries, of_kv, rotary = self.latent_widths
        products = (
            *((Product(n, queries, self.width),) if self.q_rank else ()),
            Product(n, heads * self.key_width, queries),
            Product(n, of_kv + rotary, self.width),
            Product(n, heads * (self.head_width + self.value_width), of_kv),
            Product(n, self.width, heads * self.value_width),
        )
        sizes = HeadSizes(heads, heads, self.key_width, self.value_width)
        latent = sum(self.latent_widths)
        return attention_work(layout, self.width, products, sizes, gathered_width=latent)

    def items(self, own: Mapping[str, "Parameter"], site: "BuildContext") -> list["Item"]:
        from mpitrain.model.attention import Output, attended  # torch
        from mpitrain.model.build_context import Heads
        from mpitrain.model.latent_attention import Down, LatentCore, Up
        from mpitrain.parallel.walk import Residual

        own = {name.removeprefix("attention.").removesuffix(".weight"): own[name] for name in own}
        # with tp, Down is of the positions that are here, the rest of all positions and some heads
        of_q = own.get("q_down"), own.get("q_norm")
        down = Down(self, own["norm"], *of_q, own["kv_down"], own["kv_norm"])
        up = Up(self, own["q_up"], own["kv_up"], site.rotary(self.rope))
        output = Output(own["output"], value_width=self.value_width)
        num_heads = self.heads // site.plan.sizes.tp
        heads = Heads(num_heads, num_heads, self.key_width)
        return [Residual([down, *attended(up, LatentCore(up), heads, output, site)])]


def latent_heads(model: ResolvedModel, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of latent attention that are open, by the width of a head (DeepSeek-V2,
    arXiv:2405.04434, section 3.1.2; V3's are the same). Raises ConfigError for what can't be.

    keys: those of the table `attention`, with their values so far.
    """
    width = keys["head_width"] or width_of_head(model)
    by_width = {
        "q_rank": 12 * width,
        "kv_rank": 4 * width,
        "rotary_width": max(2, width // 4 * 2),
        "value_width": width,
    }
    sizes = {"head_width": width} | {
        key: size if keys[key] is None else keys[key] for key, size in by_width.items()
    }
    for key in ("kv_rank", "rotary_width", "value_width"):
        if not sizes[key]:
            raise ConfigError(
                f"attention.{key} = 0: latent attention needs at least 1; leave it out to derive it from the "
                "head's width"
            )
    refuse_odd("attention.rotary_width", sizes["rotary_width"])
    if sizes["value_width"] > width + sizes["rotary_width"]:  # kernels are given no more
        raise ConfigError(
            f"attention.value_width = {sizes['value_width']} is more than attention.head_width + "
            f"attention.rotary_width = {width} + {sizes['rotary_width']}, the width of queries and keys; "
            "lower it"
        )
    return sizes
