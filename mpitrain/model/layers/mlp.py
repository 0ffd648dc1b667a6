"""The feed-forward without a gate (arXiv:1706.03762, section 3.3; GPT-2 with GELU), after a norm.

Kept of it, with n = B T positions on this rank, width D, F hidden units:

    none         2 n D + n + 2 n F  unit and normed input | before and after the activation
    selective    n D + n + n F      input | before the activation
    from I to W  2 n D + 2 n F      both factors of each weight gradient, in every mode
    working      3 n D, 3 n F       forward, backward

tp divides F. What fp8, tp, `sequence` and cp change stands in layers/attention.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
class Mlp(Layer):
    """down(activation(up(norm(x)))), with biases. depth, eps, kind: as in attention.py.

    activation: its function (kernels/activation_functions.py).
    dropout: the share that is dropped of what block `block` adds to the residual stream.
    """

    width: int
    ffn: int
    depth: int
    eps: float = EPS
    activation: Activation = SILU
    kind: NormKind = NormKind.LAYER
    dropout: float = 0.0
    block: int = field(default=0, compare=False)

    def parameters(self) -> tuple[Spec, ...]:
        return (
            *norm("ffn.norm", self.width, self.eps, self.kind),
            matrix("ffn.up.weight", self.ffn, self.width, ROWS),
            bias("ffn.up.bias", self.ffn),
            matrix("ffn.down.weight", self.width, self.ffn, COLUMNS, std=residual_std(self.depth)),
            bias("ffn.down.bias", self.width, None),
        )

    def kept(self, sizes: Sizes, segment: int) -> int:
        of_unit = sizes.itemsize + (0 if sizes.selective else sizes.factor)
        normed = sizes.normed(self.width, sizes.factor, self.kind)
        return normed + sizes.positions * of_unit * self.ffn // sizes.tp

    def left(self, sizes: Sizes) -> int:
        return (2 * self.width + 2 * self.ffn // sizes.tp) * sizes.factor * sizes.positions

    def working(self, sizes: Sizes) -> Working:
        stream = sizes.stream(self.width)
        hidden = sizes.positions * self.ffn // sizes.tp * sizes.itemsize
        gathered = sizes.gathered(self.width)
        returned = gathered + sizes.regathered(self.width)
        # hidden units aren't there when what is added is dropped from
        dropping = 3 * stream + (sizes.dropped(self.width) if self.dropout else 0)
        return Working(max(dropping, 2 * hidden) + gathered, max(dropping, 4 * hidden) + returned)

    def traffic(self, sizes: Sizes) -> tuple[Traffic, ...]:
        local_items = 2 if self.dropout else 1
        return sublayer(sizes, self.width, normed=self.kind is not NormKind.NONE, num_behind=local_items)

    def work(self, layout: StepLayout, load: float) -> PartWork:
        return feed_forward_work(layout, self.width, self.ffn, gated=False, dropped=bool(self.dropout))

    def items(self, own: Mapping[str, "Parameter"], site: "BuildContext") -> list["Item"]:
        from mpitrain.model.mlp import mlp
        from mpitrain.model.residual_dropout import ResidualDropout  # torch

        rate = self.dropout
        dropout_items = [ResidualDropout(rate, self.block, AFTER_FFN, site)] if rate else []
        return mlp(own, site, self.activation, dropout_items)
