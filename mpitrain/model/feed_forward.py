"""What computes the dense feed-forward, gated or not.

B sequences of a microbatch, T tokens each, D width, F hidden units.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mpitrain.kernels.activation_functions import SILU, Activation
from mpitrain.model.build_context import BuildContext
from mpitrain.model.segment import Bias, NormSegment, Segment, Tape, norm_segment
from mpitrain.parallel.microbatch import Context
from mpitrain.parallel.walk import Item
from mpitrain.parallel.zero.parameters import Parameter


def feed_forward(
    own: Mapping[str, Parameter], site: BuildContext, activation: Activation, after: Sequence[Item] = ()
) -> list[Item]:
    """Return the items of the layer. after: its dropout.

    own: which norm, gate and biases there are, their names say.
    """
    (norm,) = norm_segment(own, "ffn.norm") or [None]
    opening = [name for name in ("ffn.gate", "ffn.up") if f"{name}.weight" in own]
    weights = tuple(own[f"{name}.weight"] for name in opening)
    biases = tuple(own[f"{name}.bias"] for name in opening if f"{name}.bias" in own)
    normed = None if site.tp else norm
    inner = FeedForwardSegment(normed, weights, own["ffn.down.weight"], site.fp8, activation, biases)
    added = [Bias(own["ffn.down.bias"])] if biases else []
    return site.sublayer(norm, inner, [*added, *after])


@dataclass(eq=False)
class FeedForwardSegment(Segment):
    """down(silu(gate(norm(x))) * up(norm(x))): SwiGLU (arXiv:2002.05202); without a gate
    down(activation(up(norm(x)))). Without `norm`, x is normalised already.

    opening: weights of gate and up, or of up alone. biases: of the same, or none.

    With tensor parallelism its weights are those of some hidden units, and the output is partial.
    """

    norm: NormSegment | None
    opening: tuple[Parameter, ...]
    down: Parameter
    fp8: bool = False
    activation: Activation = SILU
    biases: tuple[Parameter, ...] = ()

    def compute(self, x_BTD: torch.Tensor, context: Context, tape: Tape) -> torch.Tensor:
        h_BTD, recompute = tape.normed_by(x_BTD, self.norm)
        opened = tape.linears(h_BTD, self.opening, recompute, self.fp8)
        if self.biases:
            opened = [tape.plus(x, bias) for x, bias in zip(opened, self.biases)]
        activate = tape.gated if len(self.opening) > 1 else tape.activated
        h_BTF, activated_again = activate(*opened, self.activation)
        return tape.linears(h_BTF, (self.down,), activated_again, self.fp8)[0]
