"""The dense feed-forward, after a norm: gated (SwiGLU, arXiv:2002.05202), or not (arXiv:1706.03762,
section 3.3; GPT-2 with GELU).

Kept of it, with n = B T positions on this rank, width D, F hidden units:

    none         2 n D + n + 4 n F  unit and normed input | gate, silu(gate), up, product; with
                                    run.compile, and of another activation, not silu(gate)
    selective    n D + n + 2 n F    input | gate, up
    from I to W  2 n D + 3 n F      both factors of each weight gradient, in every mode
    working      3 n D, 3 n F       forward, backward; selective 2 n F, 5 n F: what isn't kept is
                                    made, and made again

and without a gate

    none         2 n D + n + 2 n F  unit and normed input | before and after the activation
    selective    n D + n + n F      input | before the activation
    from I to W  2 n D + 2 n F      both factors of each weight gradient, in every mode
    working      3 n D, 3 n F       forward, backward

tp divides F. What fp8, tp, `sequence` and cp change stands in layers/attention.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from mpitrain.kernels.activation_functions import SILU, Activation
from mpitrain.plan.declared.dropout_sites import AFTER_FFN
from mpitrain.plan.declared.layer import Layer, Sizes, Working
from mpitrain.plan.declared.layer_traffic import sublayer
from mpitrain.plan.declared.parameters import (
    COLUMNS,
    EPS,
    ROWS,
    NormKind,
    Spec,
    bias,
    matrix,
    norm,
    residual_std,
)
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.declared.traffic import Traffic
from mpitrain.plan.declared.work import PartWork, feed_forward_work

if TYPE_CHECKING:
    from mpitrain.model.build_context import BuildContext
    from mpitrain.parallel.walk import Item
    from mpitrain.parallel.zero.parameters import Parameter


@dataclass(frozen=True)
class FeedForward(Layer):
    """depth, eps, kind: as in layers/attention.py.

    activation: its function (kernels/activation_functions.py).
    biased: the products have a bias.
    gated: the activation's result is multiplied by a further product.
    dropout: the share that is dropped of what block `block` adds to the residual stream.
    """

    width: int
    ffn: int
    depth: int
    eps: float = EPS
    activation: Activation = SILU
    kind: NormKind = NormKind.RMS
    biased: bool = False
    gated: bool = True
    dropout: float = 0.0
    block: int = field(default=0, compare=False)

    def parameters(self) -> tuple[Spec, ...]:
        pairs = [
            (matrix(f"ffn.{name}.weight", self.ffn, self.width, ROWS), bias(f"ffn.{name}.bias", self.ffn))
            for name in self._opening
        ]
        std = residual_std(self.depth)
        down = matrix("ffn.down.weight", self.width, self.ffn, COLUMNS, std=std)
        pairs.append((down, bias("ffn.down.bias", self.width, None)))
        # gated, biases come after all weights: buckets and checkpoints keep their order
        ordered = chain(*(zip(*pairs) if self.gated else pairs))
        kept = [spec for spec in ordered if self.biased or spec.name.endswith(".weight")]
        return *norm("ffn.norm", self.width, self.eps, self.kind), *kept

    @property
    def _opening(self) -> tuple[str, ...]:
        """The products that the activation is taken of, or multiplies."""
        return ("gate", "up") if self.gated else ("up",)

    def kept(self, sizes: Sizes, segment: int) -> int:
        if self.gated:
            of_unit = sizes.gated(sizes.factor, self.activation == SILU)
        else:
            of_unit = sizes.itemsize + (0 if sizes.selective else sizes.factor)
        normed = sizes.normed(self.width, sizes.factor, self.kind)
        return normed + sizes.positions * of_unit * self.ffn // sizes.tp

    def left(self, sizes: Sizes) -> int:
        hidden = (3 if self.gated else 2) * self.ffn // sizes.tp
        return (2 * self.width + hidden) * sizes.factor * sizes.positions

    def working(self, sizes: Sizes) -> Working:
        stream = sizes.stream(self.width)
        hidden = sizes.positions * self.ffn // sizes.tp * sizes.itemsize
        gathered = sizes.gathered(self.width)
        returned = gathered + sizes.regathered(self.width)
        if self.gated and self.activation == SILU and not sizes.selective:
            return Working(3 * stream + gathered, 3 * max(stream, hidden) + returned)
        # hidden units aren't there when what is added is dropped from
        dropping = 3 * stream + (sizes.dropped(self.width) if self.dropout else 0)
        made = (5 if self.gated else 4) * hidden
        return Working(max(dropping, 2 * hidden) + gathered, max(dropping, made) + returned)

    def traffic(self, sizes: Sizes) -> tuple[Traffic, ...]:
        normed = self.kind is not NormKind.NONE
        local_items = self.biased + bool(self.dropout)
        return sublayer(sizes, self.width, normed=normed, num_after=local_items)

    def work(self, layout: StepLayout, load: float) -> PartWork:
        return feed_forward_work(
            layout, self.width, self.ffn, gated=self.gated, biased=self.biased, dropped=bool(self.dropout)
        )

    def items(self, own: Mapping[str, "Parameter"], site: "BuildContext") -> list["Item"]:
        from mpitrain.model.feed_forward import FeedForwardSegment  # torch
        from mpitrain.model.residual_dropout import dropout_of
        from mpitrain.model.segment import Bias, norm_segment

        weights = tuple(own[f"ffn.{name}.weight"] for name in self._opening)
        biases = tuple(own[f"ffn.{name}.bias"] for name in self._opening) if self.biased else ()
        (norm,) = norm_segment(own, "ffn.norm") or [None]
        inner = FeedForwardSegment(
            None if site.tp else norm, weights, own["ffn.down.weight"], site.fp8, self.activation, biases
        )
        added = [Bias(own["ffn.down.bias"])] if self.biased else []
        dropped = dropout_of(self.dropout, self.block, AFTER_FFN, site)
        return site.sublayer(norm, inner, [*added, *dropped])
