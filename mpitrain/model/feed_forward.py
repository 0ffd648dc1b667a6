"""What computes the gated feed-forward.

B sequences of a microbatch, T tokens each, D width, F hidden units.
"""

from collections.abc import Mapping

import torch

from mpitrain.kernels.gates import SILU, Gate
from mpitrain.model.build_context import BuildContext
from mpitrain.model.layers.feed_forward import FeedForward as Layer
from mpitrain.model.segment import NormSegment, Segment, Tape
from mpitrain.parallel.async_tp import Chunked
from mpitrain.parallel.microbatch import Context
from mpitrain.parallel.walk import Item, Residual
from mpitrain.parallel.zero.parameters import Parameter


def feed_forward(layer: Layer, own: Mapping[str, Parameter], site: BuildContext) -> list[Item]:
    """Return the items of the layer."""
    norm, *weights = (own[f"ffn.{name}.weight"] for name in ("norm", "gate", "up", "down"))
    inner = FeedForwardSegment(None if site.tp else norm, *weights, site.fp8, layer.gate)
    if site.by_chunks:
        return [Residual([NormSegment(norm), Chunked(inner, site.tp, gather=True, scatter=True)])]
    return site.residual(inner, norm)


class FeedForwardSegment(Segment):
    """down(silu(gate(norm(x))) * up(norm(x))): SwiGLU (arXiv:2002.05202).

    Without `norm`, x is normalised already.
    activation: silu, if no other is given.

    With tensor parallelism its weights are those of some hidden units, and the output is partial.
    """

    def __init__(
        self,
        norm: Parameter | None,
        gate: Parameter,
        up: Parameter,
        down: Parameter,
        fp8: bool = False,
        activation: Gate = SILU,
    ):
        self.norm = norm
        self.gate = gate
        self.up = up
        self.down = down
        self.fp8 = fp8
        self.activation = activation

    def compute(self, x_BTD: torch.Tensor, context: Context, tape: Tape) -> torch.Tensor:
        h_BTD, recompute = tape.normed(x_BTD, self.norm)
        gate_BTF, up_BTF = tape.linears(h_BTD, (self.gate, self.up), recompute, self.fp8)
        h_BTF, gated_recompute = tape.gated(gate_BTF, up_BTF, self.activation)
        return tape.linears(h_BTF, (self.down,), gated_recompute, self.fp8)[0]
