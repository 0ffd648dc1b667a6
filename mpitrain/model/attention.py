"""What computes attention: projection, the attention proper, output.

B sequences of a microbatch, T tokens each, D width, H query heads, K key-value heads, C width of a head.
"""

from collections.abc import Mapping

import torch

from mpitrain.layout.traffic import Traffic
from mpitrain.model import selective
from mpitrain.model.layers.attention import Attention as Layer
from mpitrain.model.offload import restored
from mpitrain.model.rotary import Rotary
from mpitrain.model.segment import Again, Norm, Segment, Tape, side_by_side
from mpitrain.model.sequence_history import attend
from mpitrain.model.site import Site
from mpitrain.parallel.context.attention import ContextAttention
from mpitrain.parallel.microbatch import Context
from mpitrain.parallel.tensor_overlap import Chunked
from mpitrain.parallel.walk import Item, Later, Residual, Shape, Walk, sends
from mpitrain.parallel.zero.parameters import Parameter


def attention(layer: Layer, own: Mapping[str, Parameter], site: Site) -> list[Item]:
    """Return the items of the layer. With context parallelism attention is a segment, an exchange of keys and values, and a segment.

    One rank: norm, projection, attention and output are one segment. With `by_chunks` projection and output are chunk by chunk, and the
    attention proper is between them.
    """
    norm, *weights, output = (own[f"attention.{name}.weight"] for name in ("norm", "q", "k", "v", "output"))
    projection = Projection(None if site.tp else norm, *weights, site.rotary(layer.head_width), site.fp8)
    back = Output(output, site.fp8)
    tp = site.plan.config.parallel.tp
    core = site.attention_over_cp(layer.heads // tp, max(1, layer.kv_heads // tp), layer.head_width)
    if not site.by_chunks:
        return site.residual(SpreadAttention(projection, core, back) if core else Attention(projection, back), norm)
    before, behind = Chunked(projection, site.tp, gather=True), Chunked(back, site.tp, scatter=True)
    return [Residual([Norm(norm), *([SpreadAttention(before, core, behind)] if core else [before, Core(), behind])])]


class Projection(Segment):
    """Queries, keys and values of norm(x), turned by their positions. Without `norm`, x is normalised already.

    fp8: here and below, multiply in fp8.
    """

    def __init__(self, norm: Parameter | None, q: Parameter, k: Parameter, v: Parameter, rotary: Rotary, fp8: bool = False):
        self.norm, self.q, self.k, self.v, self.rotary, self.fp8 = norm, q, k, v, rotary, fp8

    def compute(self, x_BTD: torch.Tensor, context: Context, tape: Tape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h_BTD, once_more = tape.normed(x_BTD, self.norm)
        q_BHTC, k_BKTC, v_BKTC = (
            x.unflatten(-1, (-1, self.rotary.width)).transpose(1, 2)
            for x in tape.linears(h_BTD, (self.q, self.k, self.v), once_more, self.fp8)
        )
        return self.rotary(q_BHTC, context.start), self.rotary(k_BKTC, context.start), v_BKTC


class Output(Segment):
    """Attention's result [B, H, T, C] back to the width of the model."""

    def __init__(self, output: Parameter, fp8: bool = False):
        self.output, self.fp8 = output, fp8

    def compute(self, a_BHTC: torch.Tensor, context: Context, tape: Tape) -> torch.Tensor:
        return self.of(side_by_side(a_BHTC), None, tape)

    def of(self, a_BTD: torch.Tensor, once_more: Again | None, tape: Tape) -> torch.Tensor:
        """Multiply heads that stand side by side."""
        return tape.linears(a_BTD, (self.output,), once_more, self.fp8)[0]


class Core(Segment):
    """Attention proper, of queries, keys and values: causal, grouped queries (arXiv:2305.13245). The whole sequence is here."""

    def compute(self, qkv: tuple[torch.Tensor, ...], context: Context, tape: Tape) -> torch.Tensor:
        return selective.attention(*self.with_history(qkv, context, tape), context.visible)

    def with_history(self, qkv: tuple[torch.Tensor, ...], context: Context, tape: Tape) -> tuple[torch.Tensor, ...]:
        """Put the keys and values of earlier segments before these."""
        q_BHTC, k_BKTC, v_BKTC = qkv
        if context.history is not None:
            k_BKTC, v_BKTC, tape.attended = attend(context.history.setdefault(self, []), context.segment, k_BKTC, v_BKTC)
        return q_BHTC, k_BKTC, v_BKTC


class Attention(Segment):
    """output(attention(norm(x))) in one segment.

    With tensor parallelism its weights are those of some heads, and the output is partial.
    """

    def __init__(self, projection: Projection, output: Output):
        self.projection, self.core, self.output = projection, Core(), output

    def compute(self, x_BTD: torch.Tensor, context: Context, tape: Tape) -> torch.Tensor:
        qkv = self.projection.compute(x_BTD, context, tape)
        a_BTD, once_more = tape.attention(self.core.with_history(qkv, context, tape), context.visible)
        return self.output.of(a_BTD, once_more, tape)


class SpreadAttention:
    """The same with the sequence spread over the context-parallel axis: a segment, what the ranks exchange, a segment."""

    def __init__(self, projection: Projection, core: ContextAttention, output: Output):
        self.projection, self.core, self.output = projection, core, output

    def forward(self, x: torch.Tensor, context: Context) -> Walk:
        qkv, projected = yield from self.projection.forward(x, context)
        a, attended = yield from self.core.forward(*qkv, context.microbatch.documents)
        attended = context.keeping.put(attended)
        y, saved = yield from self.output.forward(a, context)
        return y, (projected, attended, saved) if torch.is_grad_enabled() else None

    def backward(self, saved: tuple, grad_of_output: torch.Tensor, later: Later) -> Walk:
        projected, attended, output = saved
        grad = yield from self.output.backward(output, grad_of_output, later)
        grads = yield from self.core.backward(restored(attended), grad)
        return (yield from self.projection.backward(projected, tuple(grads), later))

    def sends(self, shape: Shape, itemsize: int) -> tuple[Traffic, Shape]:
        """What the exchange between the segments starts."""
        return sends((self.projection, self.core, self.output), shape, itemsize)
