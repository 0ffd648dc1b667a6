"""What computes the gated feed-forward.

B sequences of a microbatch, T tokens each, D width, F hidden units.
"""

from collections.abc import Mapping

import torch

from mpitrain.kernels.activation_functions import SILU, Activation
from mpitrain.model.build_context import BuildContext
from mpitrain.model.segment import Bias, NormSegment, Segment, Tape, norm_segment
from mpitrain.parallel.microbatch import Context
from mpitrain.parallel.walk import Item
from mpitrain.parallel.zero.parameters import Parameter


def feed_forward(own: Mapping[str, Parameter], site: BuildContext, activation: Activation) -> list[Item]:
    """Return the items of the layer.

    own: which norm and biases there are, their names say.
    """
    weights = (own[f"ffn.{name}.weight"] for name in ("gate", "up", "down"))
    (norm,) = norm_segment(own, "ffn.norm") or [None]
    biased = "ffn.down.bias" in own
    biases = tuple(own[f"ffn.{name}.bias"] for name in ("gate", "up")) if biased else ()
    inner = FeedForwardSegment(None if site.tp else norm, *weights, site.fp8, activation, biases)
    added = [Bias(own["ffn.down.bias"])] if biased else []
    return site.sublayer(norm, inner, added)


class FeedForwardSegment(Segment):
    """down(silu(gate(norm(x))) * up(norm(x))): SwiGLU (arXiv:2002.05202).

    Without `norm`, x is normalised already.
    activation: silu, if no other is given.
    biases: of gate and up.

    With tensor parallelism its weights are those of some hidden units, and the output is partial.
    """

    def __init__(
        self,
        norm: NormSegment | None,
        gate: Parameter,
        up: Parameter,
        down: Parameter,
        fp8: bool = False,
        activation: Activation = SILU,
        biases: tuple[Parameter, ...] = (),
    ):
        self.norm = norm
        self.gate = gate
        self.up = up
        self.down = down
        self.fp8 = fp8
        self.activation = activation
        self.biases = biases

    def compute(self, x_BTD: torch.Tensor, context: Context, tape: Tape) -> torch.Tensor:
        h_BTD, recompute = tape.normed_by(x_BTD, self.norm)
        gate_BTF, up_BTF = tape.linears(h_BTD, (self.gate, self.up), recompute, self.fp8)
        if self.biases:
            gate_BTF, up_BTF = (tape.plus(x, bias) for x, bias in zip((gate_BTF, up_BTF), self.biases))
        h_BTF, gated_recompute = tape.gated(gate_BTF, up_BTF, self.activation)
        return tape.linears(h_BTF, (self.down,), gated_recompute, self.fp8)[0]
