"""What computes the feed-forward without a gate.

B sequences of a microbatch, T tokens each, D width, F hidden units.
"""

from collections.abc import Mapping, Sequence

import torch

from mpitrain.kernels.activation_functions import Activation
from mpitrain.model.build_context import BuildContext
from mpitrain.model.segment import Bias, NormSegment, Segment, Tape, norm_segment
from mpitrain.parallel.microbatch import Context
from mpitrain.parallel.walk import Item
from mpitrain.parallel.zero.parameters import Parameter


def mlp(
    own: Mapping[str, Parameter], site: BuildContext, activation: Activation, after: Sequence[Item] = ()
) -> list[Item]:
    """Return the items of the layer. after: its dropout."""
    (norm,) = norm_segment(own, "ffn.norm") or [None]
    of_up = own["ffn.up.weight"], own["ffn.up.bias"]
    inner = MlpSegment(None if site.tp else norm, *of_up, own["ffn.down.weight"], activation, site.fp8)
    return site.sublayer(norm, inner, [Bias(own["ffn.down.bias"]), *after])


class MlpSegment(Segment):
    """down(activation(up(norm(x)) + bias)). Without `norm`, x is normalised already.

    With tensor parallelism its weights are those of some hidden units, and the output is partial.
    """

    def __init__(
        self,
        norm: NormSegment | None,
        up: Parameter,
        bias: Parameter,
        down: Parameter,
        activation: Activation,
        fp8: bool = False,
    ):
        self.norm = norm
        self.up = up
        self.bias = bias
        self.down = down
        self.activation = activation
        self.fp8 = fp8

    def compute(self, x_BTD: torch.Tensor, context: Context, tape: Tape) -> torch.Tensor:
        h_BTD, recompute = tape.normed_by(x_BTD, self.norm)
        (up_BTF,) = tape.linears(h_BTD, (self.up,), recompute, self.fp8)
        h_BTF, activated_again = tape.activated(tape.plus(up_BTF, self.bias), self.activation)
        return tape.linears(h_BTF, (self.down,), activated_again, self.fp8)[0]
