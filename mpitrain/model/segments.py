"""The local segments of a Llama-style decoder: embedding, attention, feed-forward, head.

B sequences of a microbatch, T tokens each, D width, H query heads, K key-value heads, C width of a head, V vocabulary, F ffn width.

A segment's forward builds a small autograd graph; its backward differentiates it at once. Weight gradients of matrix products don't
go through autograd: the graph leaves (input, gradient of output) pairs behind, and the products are added straight into the gradient
buffer, then or later. They run under no_grad, or the buffer would keep the history of every microbatch alive. Gradients of norms and
of the embedding are never put off.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional

from mpitrain.data.documents import IGNORED
from mpitrain.layout.traffic import Traffic
from mpitrain.model import fp8
from mpitrain.model import selective as again
from mpitrain.model.linear import add_product, product
from mpitrain.model.offload import keeping_of, restored
from mpitrain.model.sequence_history import Attended, attend
from mpitrain.parallel.context.attention import ContextAttention
from mpitrain.parallel.precision import wide
from mpitrain.parallel.walk import Later, Local, Shape, Walk, sends
from mpitrain.parallel.zero.parameters import Parameter

Tensors = torch.Tensor | tuple[torch.Tensor, ...]
Edges = GradientEdge | tuple[GradientEdge, ...]
Again = Callable[[], torch.Tensor]  # makes a tensor once more that wasn't kept


class _Products(torch.autograd.Function):
    """x @ weight.T for each of some weights, whose backward gives the gradient of x and leaves those of the weights for later.

    The weights themselves aren't saved: with ZeRO-3 they are dropped and fetched again. `once_more` makes x, if it isn't kept.
    """

    @staticmethod
    def forward(ctx, x, parameters: tuple[Parameter, ...], deferred: list, once_more: Again | None):
        if once_more is None:
            ctx.save_for_backward(x)
        ctx.parameters, ctx.deferred, ctx.once_more = parameters, deferred, once_more
        return tuple(product(x, parameter.data) for parameter in parameters)

    @staticmethod
    def backward(ctx, *grads_of_outputs):
        x = ctx.once_more() if ctx.once_more else ctx.saved_tensors[0]
        grads = [grad.flatten(0, -2) for grad in grads_of_outputs]
        ctx.deferred.append(partial(_add_products, ctx.parameters, x.flatten(0, -2), grads))
        grad_of_x = product(grads[0], ctx.parameters[0].data.t())
        for grad, parameter in zip(grads[1:], ctx.parameters[1:]):
            grad_of_x += product(grad, parameter.data.t())
        return grad_of_x.view(x.shape), None, None, None


def _add_products(parameters: tuple[Parameter, ...], x: torch.Tensor, grads: list[torch.Tensor]) -> None:
    for parameter, grad in zip(parameters, grads):
        add_product(parameter.grad, grad, x)


class _CrossEntropy(torch.autograd.Function):
    """The summed cross-entropy of logits [N, V] and targets [N], IGNORED ones left out; the gradient overwrites what was saved."""

    @staticmethod
    def forward(ctx, logits_NV, targets_N):
        logs_NV = torch.log_softmax(logits_NV, -1, dtype=wide(logits_NV.dtype))
        ctx.save_for_backward(logs_NV, targets_N)
        ctx.dtype = logits_NV.dtype
        return -logs_NV.gather(1, targets_N.clamp(min=0)[:, None]).squeeze(1).masked_fill(targets_N == IGNORED, 0).sum()

    @staticmethod
    def backward(ctx, grad_of_output):
        logs_NV, targets_N = ctx.saved_tensors
        grad_NV = logs_NV.exp_()
        grad_NV[torch.arange(len(targets_N), device=grad_NV.device), targets_N] -= 1
        factor_N = grad_of_output * (targets_N != IGNORED)
        return grad_NV.mul_(factor_N[:, None]).to(ctx.dtype), None


class _Enter(torch.autograd.Function):
    """The input of a segment. It isn't a leaf, for a leaf would hold its memory until the backward; `leaf` is empty."""

    @staticmethod
    def forward(ctx, x, leaf):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("the gradient is taken before it gets here")


class Tape:
    """What the backward of one segment leaves behind: gradients of vectors, and the factors of those of matrices.

    selective: what norms, attention and the gated product make isn't kept, but made again. Then the functions of these return how.
    """

    def __init__(self, selective: bool = False):
        self.selective = selective
        self.small: list[tuple[Parameter, torch.Tensor]] = []
        self.deferred: list[Callable[[], None]] = []
        self.attended: Attended | None = None  # of a sequence that is cut into segments

    def linears(
        self, x: torch.Tensor, parameters: tuple[Parameter, ...], once_more: Again | None = None, narrow: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Return x @ parameter.T for each parameter; their gradients are deferred. once_more: makes x again, so that it needn't be kept.

        narrow: multiply in fp8.
        """
        products = fp8.Products if narrow else _Products
        return products.apply(x, parameters, self.deferred, once_more)

    def norm(self, x: torch.Tensor, parameter: Parameter, eps: float = 1e-5) -> torch.Tensor:
        """Return RMSNorm(x) with the weight `parameter`."""
        return again.Norm.apply(x, parameter, self.small, eps, False)

    def normed(self, x: torch.Tensor, parameter: Parameter | None, eps: float = 1e-5) -> tuple[torch.Tensor, Again | None]:
        """Return RMSNorm(x), and how to make it again; without a parameter, x."""
        if parameter is None:
            return x, None
        y = again.Norm.apply(x, parameter, self.small, eps, self.selective)
        return y, partial(again.Norm.again, y.grad_fn) if self.selective else None

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, Again | None]:
        """Return silu(gate) * up, and how to make it again."""
        if not self.selective:
            return functional.silu(gate) * up, None
        y = again.Gated.apply(gate, up)
        return y, partial(again.Gated.again, y.grad_fn)

    def attention(self, qkv: tuple[torch.Tensor, ...], visible: torch.Tensor | None) -> tuple[torch.Tensor, Again | None]:
        """Return attention, heads side by side [B, T, H C], and how to make it again."""
        if not self.selective:
            return _side_by_side(again.attention(*qkv, visible)), None
        y = again.Attend.apply(*qkv, visible)
        node = y.grad_fn
        return _side_by_side(y), lambda: _side_by_side(again.Attend.again(node))

    def add_vectors(self) -> None:
        """Add the gradients of vectors to their buffers and forget them: the graph and these lists hold each other, a cycle."""
        while self.small:
            parameter, grad = self.small.pop()
            parameter.grad += grad

    def add_products(self) -> None:
        """Add the gradients of matrices to their buffers and forget their factors."""
        while self.deferred:
            self.deferred.pop()()


class Segment(Local):
    """A local piece of a block, differentiated by autograd. Subclasses compute a tensor, or a tuple of some, from one or a tuple."""

    def compute(self, x: Tensors, context: Any, tape: Tape) -> Tensors:
        raise AssertionError("each segment computes")

    def forward(self, x: Tensors, context: Any) -> Walk:
        """Compute; without gradients enabled nothing is kept."""
        yield None
        if not torch.is_grad_enabled():
            return self.compute(x, context, Tape()), None
        keeping = keeping_of(context)
        tape, leaf = Tape(keeping.selective), torch.empty(0, requires_grad=True)
        with keeping.saving():
            x = _each(x, lambda part: _Enter.apply(part, leaf))
            y = self.compute(x, context, tape)
        return _each(y, torch.Tensor.detach), (_each(x, get_gradient_edge), _each(y, get_gradient_edge), tape)

    def backward(self, saved: tuple, grad_of_output: Tensors | None, later: Later) -> Walk:
        """Add the gradients of vectors to their buffers, hand over those of matrices, and return that of the input."""
        yield None
        x, y, tape = saved
        grad = self._differentiate(x, y, grad_of_output, tape.attended)
        tape.add_vectors()
        later(tape.add_products)
        return grad

    def _differentiate(self, x: Edges, y: Edges, grad_of_output: Tensors | None, attended: Attended | None) -> Tensors:
        inputs, made, grads = _list(x), _list(y), _list(grad_of_output)
        if attended is None:
            found = torch.autograd.grad(made, inputs, grads)
        else:
            outputs, left = attended.outputs_and_grads()
            found = torch.autograd.grad([*made, *outputs], [*inputs, *attended.leaves()], [*grads, *left])
            attended.leave(found[len(inputs) :])
        return found[0] if len(inputs) == 1 else found[: len(inputs)]


def _list(x: Any) -> list:
    """Return one or several as a list. An edge is a named tuple, but one."""
    return list(x) if isinstance(x, tuple) and not isinstance(x, GradientEdge) else [x]


def _each(x: Tensors, function: Callable) -> Any:
    """Return what `function` makes of a tensor, or of each of a tuple."""
    return tuple(map(function, x)) if isinstance(x, tuple) else function(x)


def _side_by_side(a_BHTC: torch.Tensor) -> torch.Tensor:
    return a_BHTC.transpose(1, 2).flatten(-2)


class Embedding(Local):
    """Token numbers to vectors. Written by hand: integers have no gradient."""

    def __init__(self, weight: Parameter):
        self.weight = weight

    def forward(self, x: None, context: Any) -> Walk:
        """Look up the tokens [B, T] of the context."""
        yield None
        tokens_BT = context.tokens
        return functional.embedding(tokens_BT, self.weight.data), tokens_BT if torch.is_grad_enabled() else None

    def backward(self, saved: torch.Tensor, grad_of_output: torch.Tensor, later: Later) -> Walk:
        yield None
        self.weight.grad.index_add_(0, saved.flatten(), grad_of_output.flatten(0, -2).to(self.weight.grad.dtype))


class Rotary:
    """Rotary position embedding (arXiv:2104.09864) of heads of `width`, halves rotated, tables for the positions [T] of this rank.

    Only distances show in the scores: positions needn't start anew with each document.
    """

    def __init__(self, width: int, positions: torch.Tensor, dtype: torch.dtype, device: torch.device, base: float = 10_000.0):
        self.width = width
        rates = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.outer(positions.to(torch.float64), rates)
        self.cos, self.sin = (table.to(device, wide(dtype)) for table in (angles.cos(), angles.sin()))

    def __call__(self, x_BHTC: torch.Tensor, start: int = 0) -> torch.Tensor:
        a, b = x_BHTC.chunk(2, -1)
        here = slice(start, start + a.shape[-2])
        cos, sin = self.cos[here], self.sin[here]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x_BHTC.dtype)


class Norm(Segment):
    """RMSNorm alone, where a communication follows it."""

    def __init__(self, norm: Parameter):
        self.norm = norm

    def compute(self, x: torch.Tensor, context: Any, tape: Tape) -> torch.Tensor:
        return tape.norm(x, self.norm)


class Projection(Segment):
    """Queries, keys and values of norm(x), turned by their positions. Without `norm`, x is normalised already.

    narrow: here and below, multiply in fp8.
    """

    def __init__(self, norm: Parameter | None, q: Parameter, k: Parameter, v: Parameter, rotary: Rotary, narrow: bool = False):
        self.norm, self.q, self.k, self.v, self.rotary, self.narrow = norm, q, k, v, rotary, narrow

    def compute(self, x_BTD: torch.Tensor, context: Any, tape: Tape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h_BTD, once_more = tape.normed(x_BTD, self.norm)
        q_BHTC, k_BKTC, v_BKTC = (
            x.unflatten(-1, (-1, self.rotary.width)).transpose(1, 2)
            for x in tape.linears(h_BTD, (self.q, self.k, self.v), once_more, self.narrow)
        )
        return self.rotary(q_BHTC, context.start), self.rotary(k_BKTC, context.start), v_BKTC


class Output(Segment):
    """Attention's result [B, H, T, C] back to the width of the model."""

    def __init__(self, output: Parameter, narrow: bool = False):
        self.output, self.narrow = output, narrow

    def compute(self, a_BHTC: torch.Tensor, context: Any, tape: Tape) -> torch.Tensor:
        return self.of(_side_by_side(a_BHTC), None, tape)

    def of(self, a_BTD: torch.Tensor, once_more: Again | None, tape: Tape) -> torch.Tensor:
        """Multiply heads that stand side by side."""
        return tape.linears(a_BTD, (self.output,), once_more, self.narrow)[0]


class Core(Segment):
    """Attention proper, of queries, keys and values: causal, grouped queries (arXiv:2305.13245). The whole sequence is here."""

    def compute(self, qkv: tuple[torch.Tensor, ...], context: Any, tape: Tape) -> torch.Tensor:
        return again.attention(*self.with_history(qkv, context, tape), context.visible)

    def with_history(self, qkv: tuple[torch.Tensor, ...], context: Any, tape: Tape) -> tuple[torch.Tensor, ...]:
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

    def compute(self, x_BTD: torch.Tensor, context: Any, tape: Tape) -> torch.Tensor:
        qkv = self.projection.compute(x_BTD, context, tape)
        a_BTD, once_more = tape.attention(self.core.with_history(qkv, context, tape), context.visible)
        return self.output.of(a_BTD, once_more, tape)


class SpreadAttention:
    """The same with the sequence spread over the context-parallel axis: a segment, what the ranks exchange, a segment."""

    def __init__(self, projection: Projection, core: ContextAttention, output: Output):
        self.projection, self.core, self.output = projection, core, output

    def forward(self, x: torch.Tensor, context: Any) -> Walk:
        qkv, projected = yield from self.projection.forward(x, context)
        a, attended = yield from self.core.forward(*qkv, context.documents)
        attended = keeping_of(context).put(attended)
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


class FeedForward(Segment):
    """down(silu(gate(norm(x))) * up(norm(x))): SwiGLU (arXiv:2002.05202). Without `norm`, x is normalised already.

    With tensor parallelism its weights are those of some hidden units, and the output is partial.
    """

    def __init__(self, norm: Parameter | None, gate: Parameter, up: Parameter, down: Parameter, narrow: bool = False):
        self.norm, self.gate, self.up, self.down, self.narrow = norm, gate, up, down, narrow

    def compute(self, x_BTD: torch.Tensor, context: Any, tape: Tape) -> torch.Tensor:
        h_BTD, once_more = tape.normed(x_BTD, self.norm)
        h_BTF, gated_once_more = tape.gated(*tape.linears(h_BTD, (self.gate, self.up), once_more, self.narrow))
        return tape.linears(h_BTF, (self.down,), gated_once_more, self.narrow)[0]


class Head(Segment):
    """Norm, logits and the summed cross-entropy of a microbatch; without targets, the logits."""

    def __init__(self, norm: Parameter, weight: Parameter):
        self.norm, self.weight = norm, weight

    def compute(self, x_BTD: torch.Tensor, context: Any, tape: Tape) -> torch.Tensor:
        (logits_BTV,) = tape.linears(tape.norm(x_BTD, self.norm), (self.weight,))
        if context.targets is None:
            return logits_BTV
        return _CrossEntropy.apply(logits_BTV.flatten(0, 1), context.targets.flatten())
