"""What computes the dense feed-forward, gated or not.

B sequences of a microbatch, T tokens each, D width, F hidden units.
"""

from dataclasses import dataclass

import torch

from mpitrain.kernels.activation_functions import SILU, Activation
from mpitrain.model.segment import NormSegment, Segment, Tape
from mpitrain.parallel.microbatch import Context
from mpitrain.parallel.zero.parameters import Parameter


@dataclass(eq=False)
class FeedForwardSegment(Segment):
    """down(silu(gate(norm(x))) * up(norm(x))): SwiGLU (arXiv:2002.05202); without a gate
    down(activation(up(norm(x)))). Without `norm`, x is normalised already. With tensor parallelism
    its weights are those of some hidden units, and the output is partial.

    opening: weights of gate and up, or of up alone. biases: of the same, or none.
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
