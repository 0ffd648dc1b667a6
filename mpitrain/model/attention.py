"""What computes attention: projection, the attention proper, output.

B sequences of a microbatch, T tokens each, D width, H query heads, K key-value heads, C width of a
head. Items before and after it: model/build_context.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mpitrain.kernels.attention import PLAIN, AttentionRequest
from mpitrain.kernels.attention_one_query import attend_one_query
from mpitrain.kernels.document_spans import Spans
from mpitrain.model.build_context import BuildContext, Heads
from mpitrain.model.kv_history import attend
from mpitrain.model.offload import restored
from mpitrain.model.rotary import Rotary
from mpitrain.model.segment import Again, NormSegment, Segment, Tape, Tensors
from mpitrain.model.width_norm import WidthNorms
from mpitrain.parallel.async_tp import Chunked
from mpitrain.parallel.context.attention import ContextAttention
from mpitrain.parallel.microbatch import Context
from mpitrain.parallel.walk import Addend, Item, Later, Walk, WeightGradients, backward, forward
from mpitrain.parallel.zero.parameters import Parameter


def attended(
    projection: Segment,
    core: "Core",
    heads: Heads,
    output: "Output",
    site: BuildContext,
    over_tp: WidthNorms | None = None,
    norm: NormSegment | None = None,
) -> list[Item]:
    """Return projection, attention proper and output, with what tp sends before and after them.

    With context parallelism attention is a segment, an exchange of keys and values, and a segment;
    with `by_chunks` projection and output are chunk by chunk, the attention proper between them.

    heads: of this rank.
    over_tp: norms of all heads together, after a projection that leaves them out.
    norm: before what tp sends; without tp, the projection has it.
    """
    over_cp = site.attention_over_cp(heads)
    site.note_kernel(core.asked(), heads, over_cp)
    before, after = projection, output
    if site.by_chunks:
        before = Chunked(projection, site.tp, gather=True)
        after = Chunked(output, site.tp, scatter=True)
    inner: list[Item] = [before, over_tp] if over_tp else [before]
    if over_cp:
        inner = [SpreadAttention(inner, core, over_cp, after)]
    elif site.by_chunks:
        inner += [core, after]
    elif over_tp:
        inner.append(AttentionSegment(None, core, output))
    else:
        inner = [AttentionSegment(projection, core, output)]
    if site.by_chunks:
        return [norm, *inner] if norm else inner
    return site.between(inner, norm)


@dataclass(eq=False)
class Projection(Segment):
    """Queries, keys and values of norm(x), turned by their positions; without `norm`, of x.

    weights, biases: of queries, keys and values.
    rotary: None: they aren't turned.
    fp8: here and below, multiply in fp8.
    norms: of each head's queries, and of its keys.
    whole: norms are of all heads together. With tensor parallelism an item after this one has
    them, and here nothing is turned or divided into heads.
    """

    norm: NormSegment | None
    weights: tuple[Parameter, Parameter, Parameter]
    rotary: Rotary | None
    head_width: int
    fp8: bool = False
    biases: tuple[Parameter, ...] = ()
    norms: tuple[Parameter, ...] = ()
    whole: bool = False

    def compute(
        self, x_BTD: torch.Tensor, context: Context, tape: Tape
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h_BTD, recompute = tape.normed_by(x_BTD, self.norm)
        flat = tape.linears(h_BTD, self.weights, recompute, self.fp8)
        if self.biases:
            flat = [tape.plus(x, bias) for x, bias in zip(flat, self.biases)]
        if self.whole:
            if any(norm.spec.shape != norm.spec.whole for norm in self.norms):
                return tuple(flat)
            flat = [*(tape.norm(x, norm) for x, norm in zip(flat, self.norms)), flat[2]]
        q_BTHC, k_BTKC, v_BTKC = (x.unflatten(-1, (-1, self.head_width)) for x in flat)
        if self.norms and not self.whole:
            q_BTHC, k_BTKC = (tape.norm(x, norm) for x, norm in zip((q_BTHC, k_BTKC), self.norms))
        q_BHTC, k_BKTC, v_BKTC = (x.transpose(1, 2) for x in (q_BTHC, k_BTKC, v_BTKC))
        if self.rotary is None:
            return q_BHTC, k_BKTC, v_BKTC
        at = context.start, context.microbatch.order
        return self.rotary(q_BHTC, *at), self.rotary(k_BKTC, *at), v_BKTC


@dataclass(eq=False)
class Output(Segment):
    """AttentionSegment's result [B, H, T, C] back to the width of the model. value_width: features of
    a head that are values; None: all.
    """

    output: Parameter
    fp8: bool = False
    value_width: int | None = None

    def compute(self, a_BHTC: torch.Tensor, context: Context, tape: Tape) -> torch.Tensor:
        return self.of(a_BHTC, None, tape)

    def of(self, a_BHTC: torch.Tensor, recompute: Again | None, tape: Tape) -> torch.Tensor:
        """Multiply. recompute: makes attention's result again."""
        again = None if recompute is None else lambda: self._side_by_side(recompute())
        return tape.linears(self._side_by_side(a_BHTC), (self.output,), again, self.fp8)[0]

    def _side_by_side(self, a_BHTC: torch.Tensor) -> torch.Tensor:
        return a_BHTC[..., : self.value_width].transpose(1, 2).flatten(-2)


@dataclass(eq=False)
class Core(Segment):
    """Attention proper, of queries, keys and values: causal, grouped queries (arXiv:2305.13245).
    The whole sequence is here. request: without tensors.
    """

    request: AttentionRequest = PLAIN
    sinks: Parameter | None = None

    def asked(
        self,
        mask: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
        spans: Spans | None = None,
    ) -> AttentionRequest:
        """Return what is asked of a microbatch, with the sinks as they are now."""
        sinks = None if self.sinks is None else self.sinks.data
        return self.request.given(sinks=sinks, mask=mask, documents=documents, order=order, spans=spans)

    def compute(self, qkv: tuple[torch.Tensor, ...], context: Context, tape: Tape) -> torch.Tensor:
        return self.attend(qkv, context, tape, again=False)[0]

    def attend(
        self, qkv: tuple[torch.Tensor, ...], context: Context, tape: Tape, again: bool
    ) -> tuple[torch.Tensor, Again | None]:
        """Return attention [B, H, T, C] and, if the product after it may ask, how to remake it."""
        if context.cache is not None:
            return self.attend_with_cache(qkv, context, tape), None
        if context.history is not None:  # keys and values of earlier segments come before these
            q_BHTC, *kv = qkv
            earlier = context.history.setdefault(self, [])
            *kv, tape.attended = attend(earlier, context.segment, *kv)
            qkv = q_BHTC, *kv
        request = self.asked(context.visible, spans=context.spans).drawn(context.dropout)
        return tape.attention(qkv, request, self.sinks, again)

    def attend_with_cache(self, qkv: tuple[torch.Tensor, ...], context: Context, tape: Tape) -> torch.Tensor:
        """Return attention [B, H, T, C] of a text that is generated: of its beginning, or its next token."""
        q_BHTC, *kv = qkv
        cached = context.cache.of(self, self.request.window)
        cached.put(context.start, *kv)
        if context.start == 0:
            return tape.attention(qkv, self.asked(context.visible).drawn(None), self.sinks, False)[0]
        return attend_one_query(q_BHTC, *cached.tensors(), self.asked(cached.seen(context.visible)))


@dataclass(eq=False)
class AttentionSegment(Segment):
    """output(attention(norm(x))) in one segment; with tensor parallelism of some heads: partial.
    projection: None: x is queries, keys and values.
    """

    projection: Segment | None
    core: Core
    output: Output

    def compute(self, x: Tensors, context: Context, tape: Tape) -> torch.Tensor:
        qkv = x if self.projection is None else self.projection.compute(x, context, tape)
        a_BHTC, recompute = self.core.attend(qkv, context, tape, again=True)
        return self.output.of(a_BHTC, recompute, tape)


@dataclass(eq=False)
class SpreadAttention:
    """The same with the sequence spread over cp: a segment, what the ranks exchange, a segment."""

    projection: Sequence[Item]
    core: Core
    over_cp: ContextAttention
    output: Item

    def forward(self, x: torch.Tensor, context: Context) -> Walk:
        qkv, projected = yield from forward(self.projection, x, context)
        rows = context.microbatch
        request = self.core.asked(documents=rows.documents, order=rows.order).drawn(context.dropout)
        a, attended = yield from self.over_cp.forward(*qkv, request)
        attended = context.keeping.put(attended)
        y, saved = yield from self.output.forward(a, context)
        return y, (projected, attended, saved, context.dropout) if torch.is_grad_enabled() else None

    def backward(self, saved: tuple, grad_of_output: torch.Tensor, later: Later) -> Walk:
        projected, attended, output, draw = saved
        grad = yield from self.output.backward(output, grad_of_output, later)
        asked = self.core.asked().drawn(draw)
        grads = yield from self.over_cp.backward(restored(attended), grad, asked)
        if self.core.sinks is not None:
            *grads, of_sinks = grads
            later(WeightGradients([Addend(self.core.sinks, of_sinks)]))
        return (yield from backward(self.projection, projected, tuple(grads), later))
