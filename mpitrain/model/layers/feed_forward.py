"""The gated feed-forward (SwiGLU, arXiv:2002.05202), after an RMSNorm.

Kept of it, with n = B T positions on this rank, width D, F hidden units:

    none         2 n D + n + 4 n F  unit and normed input | gate, silu(gate), up, product; with
                                    run.compile, and of another activation, not silu(gate)
    selective    n D + n + 2 n F    input | gate, up
    from I to W  2 n D + 3 n F      both factors of each weight gradient, in every mode
    working      3 n D, 3 n F       forward, backward; selective 2 n F, 5 n F: what isn't kept is
                                    made, and made again

tp divides F. What fp8, tp, `sequence` and cp change stands in layers/attention.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpitrain.kernels.activation_functions import SILU, Activation
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
    biased: the three products have a bias.
    """

    width: int
    ffn: int
    depth: int
    eps: float = EPS
    activation: Activation = SILU
    kind: NormKind = NormKind.RMS
    biased: bool = False

    def parameters(self) -> tuple[Spec, ...]:
        biases = (
            bias("ffn.gate.bias", self.ffn),
            bias("ffn.up.bias", self.ffn),
            bias("ffn.down.bias", self.width, None),
        )
        return (
            *norm("ffn.norm", self.width, self.eps, self.kind),
            matrix("ffn.gate.weight", self.ffn, self.width, ROWS),
            matrix("ffn.up.weight", self.ffn, self.width, ROWS),
            matrix("ffn.down.weight", self.width, self.ffn, COLUMNS, std=residual_std(self.depth)),
            *(biases if self.biased else ()),
        )

    def kept(self, sizes: Sizes, segment: int) -> int:
        return (
            sizes.normed(self.width, sizes.factor, self.kind)
            + sizes.positions * sizes.gated(sizes.factor, self.activation == SILU) * self.ffn // sizes.tp
        )

    def left(self, sizes: Sizes) -> int:
        return (2 * self.width + 3 * self.ffn // sizes.tp) * sizes.factor * sizes.positions

    def working(self, sizes: Sizes) -> Working:
        stream = sizes.stream(self.width)
        hidden = sizes.positions * self.ffn // sizes.tp * sizes.itemsize
        gathered = sizes.gathered(self.width)
        returned = gathered + sizes.regathered(self.width)
        if sizes.selective or self.activation != SILU:
            return Working(max(3 * stream, 2 * hidden) + gathered, max(3 * stream, 5 * hidden) + returned)
        return Working(3 * stream + gathered, 3 * max(stream, hidden) + returned)

    def traffic(self, sizes: Sizes) -> tuple[Traffic, ...]:
        normed = self.kind is not NormKind.NONE
        return sublayer(sizes, self.width, normed=normed, num_behind=int(self.biased))

    def work(self, layout: StepLayout, load: float) -> PartWork:
        return feed_forward_work(layout, self.width, self.ffn, gated=True)

    def items(self, own: Mapping[str, "Parameter"], site: "BuildContext") -> list["Item"]:
        from mpitrain.model.feed_forward import feed_forward  # torch

        return feed_forward(own, site, self.activation)
