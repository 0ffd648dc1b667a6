"""Causal attention with grouped queries (arXiv:2305.13245), rotary positions or none, after a norm or none.

Kept of it, with n = B T positions on this rank, width D, H C query and K C key-value features; of a
norm's factor 1 per position, of attention's log-sum-exp H in fp32 at least:

    none         2 n D + n + 2 n H C + 2 n K C + n H  unit and normed input | q, k, v, result; in
                                                      bf16 without n H, and with the probabilities
                                                      of short sequences
                                                      (plan/declared/probabilities.py)
    selective    n D + n + n H C + 2 n K C            input | q, k, v
    from I to W  2 n D + 2 n H C + 2 n K C            both factors of each weight gradient, in every
                                                      mode
    normed       n (H + K) (C + 1)                    besides: unit queries and keys, in every mode
    working      3 n D, 3 n D or n (H + 2 K) C        forward, backward: gradients of q, k and v;
                                                      selective 2.5 n H C more; in bf16 on a CPU
                                                      pieces of probabilities, and gradients of k
                                                      and v in fp32

With fp8 these factors (normed input, result) have one byte a number, the rest two. tp divides H and
K, cp divides n; with `sequence`, tp divides what stands before the gather, too. There the normed
input has travelled, or the result will have: it is kept in selective mode, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mpitrain.model.layers.rope import Rope
from mpitrain.plan.declared import probabilities
from mpitrain.plan.declared.dropout_sites import AFTER_ATTENTION, MASK_BYTES
from mpitrain.plan.declared.layer import Layer, Sizes, Working
from mpitrain.plan.declared.layer_traffic import attended
from mpitrain.plan.declared.parameters import (
    COLUMNS,
    EPS,
    ROWS,
    NormKind,
    Spec,
    bias,
    matrix,
    norm,
    product_flops,
    residual_std,
)
from mpitrain.plan.declared.resolved import ResolvedParallel
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.declared.traffic import LOCAL, Traffic
from mpitrain.plan.declared.work import HeadSizes, PartWork, Product, attention_work

if TYPE_CHECKING:
    from mpitrain.model.build_context import BuildContext
    from mpitrain.parallel.walk import Item
    from mpitrain.parallel.zero.parameters import Parameter


@dataclass(frozen=True)
class Attention(Layer):
    """depth: layers whose outputs are added to the residual stream; projections back into it start
    smaller (GPT-2, section 2.3).

    rope: of the first features of a head, or of all; None: without positions (arXiv:2305.19466).
    eps: of norms. kind: of all of them.
    normed: queries and keys of each head have a norm (arXiv:2302.05442, section 2).
    normed_whole: those of all heads together have one, which tp divides (model/width_norm.py).
    dropout, residual_dropout: the shares that are dropped of the probabilities, and of what block
    `block` adds to the residual stream.
    biased, biased_output: products of queries, keys and values have a bias, and that of the output.
    head_width: of a head; 0: that of `rope`.
    scale: what scores are multiplied by; None: 1 / sqrt(width of a head).
    window: positions that a query sees, its own included; 0: all before it.
    sinks: each head can attend to nothing.
    soft_cap: c: scores become c tanh(score / c) (kernels/attention_products.py); 0: none.
    """

    width: int
    heads: int
    kv_heads: int
    rope: Rope | None
    depth: int
    eps: float = EPS
    normed: bool = False
    biased: bool = False
    window: int = 0
    sinks: bool = False
    soft_cap: float = 0.0
    biased_output: bool = False
    head_width: int = 0
    scale: float | None = None
    kind: NormKind = NormKind.RMS
    normed_whole: bool = False
    dropout: float = 0.0
    residual_dropout: float = 0.0
    block: int = field(default=0, compare=False)  # blocks that differ in it alone do the same

    @property
    def head_size(self) -> int:
        """The width of a head."""
        return self.head_width or self.rope.width

    def parameters(self) -> tuple[Spec, ...]:
        features = self.head_size * self.heads
        kv_features = self.head_size * self.kv_heads
        rows = dict(q=(features, 0), k=(kv_features, self.kv_heads), v=(kv_features, self.kv_heads))
        specs = [*norm("attention.norm", self.width, self.eps, self.kind)]
        for name, (length, pieces) in rows.items():
            specs.append(matrix(f"attention.{name}.weight", length, self.width, ROWS, pieces=pieces))
        if self.biased:
            for name, (length, pieces) in rows.items():
                specs.append(bias(f"attention.{name}.bias", length, pieces=pieces))
        if self.normed:
            for name in "qk":
                specs += norm(f"attention.{name}_norm", self.head_size, self.eps, self.kind, met_apart=True)
        if self.normed_whole:
            for name in "qk":
                length, pieces = rows[name]
                (weight,) = norm(f"attention.{name}_norm", length, self.eps)
                specs.append(replace(weight, divided=ROWS, pieces=pieces))
        if self.sinks:
            specs.append(bias("attention.sinks", self.heads))
        std = residual_std(self.depth)
        specs.append(matrix("attention.output.weight", self.width, features, COLUMNS, std=std))
        if self.biased_output:
            specs.append(bias("attention.output.bias", self.width, None))
        return tuple(specs)

    def flops(self, sequence: int) -> float:
        """Half of the scores are masked, and what is before the window."""
        core = 12.0 * self.heads * self.head_size * seen(sequence, self.window)
        return product_flops(self.parameters()) + core

    def kept(self, sizes: Sizes, segment: int) -> int:
        heads = self.heads // sizes.tp
        kv_heads = self._kv_heads(sizes)
        width = self.head_size
        by_tiles = bool(self.window or self.sinks or self.soft_cap or self.dropout)
        kept = kept_by_core(sizes, heads, kv_heads, width, width, by_tiles, self.normed_whole)
        if self.normed:
            kept += (heads + kv_heads) * sizes.norm(width)
        if self.normed_whole:
            kept += sizes.norm(heads * width) + sizes.norm(kv_heads * width)
        kept_once = segment * self.history(sizes)  # copied to beside this segment's
        if not by_tiles:
            kept_once += sizes.probabilities(heads, width)
        return sizes.normed(self.width, sizes.factor, self.kind) + sizes.positions * kept + kept_once

    def left(self, sizes: Sizes) -> int:
        heads = 2 * self.heads // sizes.tp + 2 * self._kv_heads(sizes)
        return (2 * self.width + heads * self.head_size) * sizes.factor * sizes.positions

    def working(self, sizes: Sizes) -> Working:
        heads = self.heads // sizes.tp
        forward, backward = working_of_core(sizes, self.width, heads, self._kv_heads(sizes), self.head_size)
        if self.soft_cap:
            capped = _scores_at_once(sizes, heads) * sizes.wide
            forward, backward = forward + 3 * capped, backward + 5 * capped
        # when the scores are gone
        dropping = sizes.dropped(self.width) if self.residual_dropout else 0
        attending = self._dropping(sizes, heads) if self.dropout else Working(0, 0)
        forward += max(dropping, attending.forward)
        return Working(forward, backward + max(dropping, attending.backward))

    def _dropping(self, sizes: Sizes, heads: int) -> Working:
        """Return what is made of scores with dropout, and the gradients of some queries."""
        mask = _scores_at_once(sizes, heads)  # a byte of each
        at_once = mask * sizes.wide
        masks = mask * MASK_BYTES
        grads = sizes.positions * self.head_size * (heads + 2 * self._kv_heads(sizes)) * sizes.wide
        return Working(max(3 * at_once + mask, masks), max(5 * at_once + mask + 2 * grads, masks))

    def history(self, sizes: Sizes) -> int:
        """Keys and values."""
        return 2 * sizes.positions * self._kv_heads(sizes) * self.head_size * sizes.itemsize

    def cache_bytes(self, positions: int, itemsize: int) -> int:
        """Keys and values, of a window if there is one."""
        return 2 * min(self.window or positions, positions) * self.kv_heads * self.head_size * itemsize

    def _kv_heads(self, sizes: Sizes | StepLayout) -> int:
        """Return how many heads of keys this rank has; fewer than ranks are repeated."""
        return max(1, self.kv_heads // sizes.tp)

    def traffic(self, sizes: Sizes) -> tuple[Traffic, ...]:
        heads = self.heads // sizes.tp, self._kv_heads(sizes), self.head_size
        normed = self.kind is not NormKind.NONE
        whole = self.normed_whole
        items = attended(sizes, heads, self.width, self.width, normed=normed, with_width_norms=whole)
        return *items, *(self.biased_output + bool(self.residual_dropout)) * (LOCAL,)

    def work(self, layout: StepLayout, load: float) -> PartWork:
        n, width = layout.positions, self.head_size
        sizes = HeadSizes(self.heads // layout.tp, self._kv_heads(layout), width, width)
        of_qkv = Product(n, (sizes.queries + 2 * sizes.kv) * width, self.width)
        products = of_qkv, Product(n, self.width, sizes.queries * width)
        return attention_work(
            layout, self.width, products, sizes, window=self.window, biased=self.biased_output,
            dropped=bool(self.residual_dropout),
        )  # fmt: skip

    def items(self, own: Mapping[str, "Parameter"], site: "BuildContext") -> list["Item"]:
        from mpitrain.kernels.attention import AttentionRequest  # torch
        from mpitrain.kernels.dropout import ProbabilityDropout
        from mpitrain.model.attention import Core, Output, Projection, attended
        from mpitrain.model.build_context import Heads
        from mpitrain.model.residual_dropout import dropout_of
        from mpitrain.model.segment import Bias, norm_segment
        from mpitrain.model.width_norm import WidthNorms
        from mpitrain.parallel.walk import Residual

        sizes = site.plan.sizes
        heads = Heads(self.heads // sizes.tp, self._kv_heads(sizes), self.head_size)
        (norm,) = norm_segment(own, "attention.norm") or [None]
        weights = tuple(own[f"attention.{name}.weight"] for name in "qkv")
        biases = tuple(own[f"attention.{name}.bias"] for name in "qkv") if self.biased else ()
        has_norms = self.normed or self.normed_whole
        norms = tuple(own[f"attention.{name}_norm.weight"] for name in "qk") if has_norms else ()
        rotary = None if self.rope is None else site.rotary(self.rope)
        projection = Projection(
            None if site.tp else norm,
            weights,
            rotary,
            heads.width,
            site.fp8,
            biases,
            norms,
            self.normed_whole,
        )
        over_tp = None
        if self.normed_whole and site.tp:
            over_tp = WidthNorms(norms, site.tp, rotary, heads.width)
        first = heads.queries * (site.tp.rank if site.tp else 0)
        of_rank = range(first, first + heads.queries)
        dropout = ProbabilityDropout(self.dropout, self.block, of_rank) if self.dropout else None
        request = AttentionRequest(
            scale=self.scale, window=self.window, soft_cap=self.soft_cap, dropout=dropout
        )
        core = Core(request, own.get("attention.sinks"))
        output = Output(own["attention.output.weight"], site.fp8)
        inner = attended(projection, core, heads, output, site, over_tp, norm)
        added = [Bias(own["attention.output.bias"])] if self.biased_output else []
        dropped = dropout_of(self.residual_dropout, self.block, AFTER_ATTENTION, site)
        return [Residual([*inner, *added, *dropped])]


def _scores_at_once(sizes: Sizes, heads: int) -> int:
    """Return how many scores of some queries to all keys are made at once. heads: of this rank."""
    rows = min(probabilities.ROWS, sizes.length)
    return sizes.config.batch.micro * heads * rows * sizes.config.data.sequence


def seen(sequence: int, window: int = 0) -> float:
    """Return how many positions a query sees on average, a half of its own.

    In a window of w, those after the first w see all w.
    """
    window = min(window or sequence, sequence)
    return window * (1 - window / (2 * sequence))


def _kv_heads_at_once(parallel: ResolvedParallel, kv_heads: int) -> int:
    """Return of how many heads a rank has keys when it attends, as long as its own positions."""
    if parallel.context == "gather":
        return kv_heads * parallel.cp
    return max(kv_heads, parallel.cp) if parallel.context == "ulysses" else kv_heads


def kept_by_core(
    sizes: Sizes,
    heads: int,
    kv_heads: int,
    width: int,
    value_width: int,
    by_tiles: bool = False,
    side_by_side: bool = False,
) -> int:
    """Return what attention proper keeps for a position.

    heads, kv_heads: of this rank. value_width: of a head's result.
    side_by_side: queries lie with the heads of a position side by side, whatever tp sends.
    by_tiles: by kernels/attention_tiles.py, as always with cp. Tiles, and torch's own
    attention, which is taken for all but bf16, keep the log-sum-exp and their result, and what the
    output multiplies, too, where that is another. In fp16 this is the most: a CPU that widens it
    (kernels/processor.py) keeps what it would in bf16.
    """
    parallel = sizes.config.parallel
    kept = width * (heads + 2 * _kv_heads_at_once(parallel, kv_heads)) * sizes.itemsize
    if sizes.selective and not sizes.core_alone:
        return kept
    # queries came from other ranks, and lie head by head
    by_head = (parallel.async_tp and not side_by_side) or parallel.context == "ulysses"
    is_copied = (heads > 1 and (by_head or value_width < width)) or sizes.factor < sizes.itemsize
    copied = is_copied * heads * value_width * sizes.factor
    keeps_log_sum_exp = sizes.config.precision.compute not in ("bf16", "fp8")
    if keeps_log_sum_exp or by_tiles or parallel.cp > 1:
        return kept + heads * (width * sizes.itemsize + sizes.wide) + copied
    return kept + (copied or heads * width * sizes.factor)


def working_of_core(sizes: Sizes, width: int, heads: int, kv_heads: int, head_width: int) -> Working:
    """Return what attention works with. width: of the residual stream.  heads, kv_heads: of this rank."""
    stream = sizes.stream(width)
    number = sizes.positions * head_width
    rotated = number * (heads + 2 * kv_heads) * sizes.itemsize
    forward = 3 * stream + sizes.gathered(width)
    backward = max(3 * stream, rotated) + sizes.gathered(width) + sizes.regathered(width)
    if sizes.selective:
        backward += 5 * number * heads * sizes.itemsize // 2
    if sizes.in_pieces:
        piece = probabilities.piece(sizes.config.batch.micro, heads, kv_heads, sizes.length) * sizes.itemsize
        forward = max(forward, 2 * piece)
        backward = backward + 4 * piece + 2 * number * kv_heads * 4
        if sizes.selective and probabilities.are_kept(sizes.length, head_width):
            backward += sizes.config.batch.micro * heads * probabilities.count(sizes.length) * sizes.itemsize
    return Working(forward, backward)
