"""A local segment of a block: its forward builds an autograd graph, its backward differentiates it.

Weight gradients of matrix products don't go through autograd: the graph leaves (input, gradient of
output) pairs behind, and the products are added straight into the gradient buffer, then or later.
They run under no_grad, or the buffer would keep the history of every microbatch alive. Gradients of
vectors wait with them: until they are added, no buffer is needed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mpitrain.kernels.activation_functions import SILU, Activation
from mpitrain.kernels.attention import AttentionRequest
from mpitrain.kernels.engine import gradients
from mpitrain.kernels.functions import EAGER, Functions
from mpitrain.kernels.products import product
from mpitrain.model import attention_functions, linear, selective
from mpitrain.model.kv_history import Attended
from mpitrain.parallel.microbatch import Context, RegatheredInput
from mpitrain.parallel.walk import Addend, DeferredGradient, Later, Walk, WeightGradients
from mpitrain.parallel.zero.parameters import Parameter

Tensors = torch.Tensor | tuple[torch.Tensor, ...]
Again = Callable[[], torch.Tensor]  # makes a tensor once more that wasn't kept


class _Enter(torch.autograd.Function):
    """The input of a segment. A leaf would hold its memory until the backward; `leaf` is empty."""

    @staticmethod
    def forward(ctx, x, leaf):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("the gradient is taken before it gets here")


class _Plus(torch.autograd.Function):
    """x + bias, of which nothing is kept."""

    @staticmethod
    def forward(ctx, x, bias: Parameter, small: list):
        ctx.bias = bias
        ctx.small = small
        return x + bias.data

    @staticmethod
    def backward(ctx, grad_of_output):
        ctx.small.append((ctx.bias, grad_of_output.flatten(0, -2).sum(0)))
        return grad_of_output, None, None


class Tape:
    """What a segment's backward leaves: gradients of vectors, and factors of those of matrices.

    selective: what norms, attention and the gated product make isn't kept, but made again. Then the
    functions of these return how.
    functions: what is between products.
    regathered: the input of the segment, where the backward gathers it again.
    records: a backward follows; without one the same functions run, without what autograd costs.
    """

    def __init__(
        self,
        selective: bool = False,
        functions: Functions = EAGER,
        regathered: RegatheredInput | None = None,
        records: bool = True,
    ):
        self.records = records
        self.selective = selective
        self.functions = functions
        self.regathered = regathered
        self.small: list[tuple[Parameter, torch.Tensor]] = []
        self.deferred: list[DeferredGradient] = []
        self.attended: Attended | None = None  # of a sequence that is cut into segments

    def linears(
        self,
        x: torch.Tensor,
        parameters: tuple[Parameter, ...],
        recompute: Again | RegatheredInput | None = None,
        fp8_products: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Return x @ parameter.T for each parameter; their gradients are deferred.

        recompute: makes x again, or will have it, so that it needn't be kept.
        """
        if fp8_products:
            return linear.Fp8Products.apply(x, parameters, self.deferred, recompute, self.functions.quantise)
        if not self.records:
            return tuple(product(x, parameter.data) for parameter in parameters)
        return linear.Products.apply(x, parameters, self.deferred, recompute)

    def plus(self, x: torch.Tensor, bias: Parameter) -> torch.Tensor:
        """Return x + bias."""
        return _Plus.apply(x, bias, self.small) if self.records else x + bias.data

    def norm(
        self, x: torch.Tensor, parameter: Parameter, bias: Parameter | None = None, again: bool = False
    ) -> torch.Tensor:
        """Return RMSNorm(x), with a bias LayerNorm(x). again: keep x, to make the result again."""
        if not self.records:
            return selective.normed(x, parameter, bias, self.functions)[0]
        return selective.Norm.apply(x, parameter, bias, self.small, again, self.functions)

    def normed(
        self, x: torch.Tensor, parameter: Parameter | None, bias: Parameter | None = None
    ) -> tuple[torch.Tensor, Again | RegatheredInput | None]:
        """Return norm(x, ...), and how to make it again; without a parameter, x."""
        if parameter is None:
            return x, self.regathered
        y = self.norm(x, parameter, bias, self.selective)
        return y, partial(selective.Norm.again, y.grad_fn) if self.selective else None

    def normed_by(
        self, x: torch.Tensor, norm: "NormSegment | None"
    ) -> tuple[torch.Tensor, Again | RegatheredInput | None]:
        """Do the same with what a norm has; without one, x."""
        return self.normed(x, None) if norm is None else self.normed(x, norm.norm, norm.bias)

    def gated(
        self, gate: torch.Tensor, up: torch.Tensor, activation: Activation = SILU
    ) -> tuple[torch.Tensor, Again | None]:
        """Return activation(gate) times what is scaled by it, and how to make it again."""
        functions = self.functions.gated_by(activation)
        if not self.records or (not self.selective and functions.keep_activated):
            return functions.gated(gate, up)[0], None  # autograd keeps it
        y = selective.Gated.apply(gate, up, functions)
        return y, partial(selective.Gated.again, y.grad_fn) if self.selective else None

    def activated(self, x: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, Again | None]:
        """Return activation(x), and how to make it again."""
        y = selective.Activated.apply(x, activation)
        return y, partial(selective.Activated.again, y.grad_fn) if self.selective else None

    def attention(
        self, qkv: tuple[torch.Tensor, ...], request: AttentionRequest, sinks: Parameter | None, again: bool
    ) -> tuple[torch.Tensor, Again | None]:
        """Return attention [B, H, T, C], and, if asked, how to remake it. sinks: of `request`."""
        again = again and self.selective
        return attention_functions.attention(*qkv, request, again, self.selective, sinks, self.small)

    def weight_gradients(self) -> WeightGradients:
        """Return what is to be added, and forget it: the graph and these lists are a cycle."""
        addends = [*self.deferred, *(Addend(*product) for product in self.small)]
        self.deferred.clear()
        self.small.clear()
        return WeightGradients(addends)


class Segment:
    """A local piece of a block, differentiated by autograd: of a tensor or a tuple, one or some."""

    def compute(self, x: Tensors, context: Context, tape: Tape) -> Tensors:
        raise AssertionError("each segment computes")

    def forward(self, x: Tensors, context: Context) -> Walk:
        """Compute; without gradients enabled nothing is kept."""
        yield None
        if not torch.is_grad_enabled():
            return self.compute(x, context, Tape(functions=context.functions, records=False)), None
        tape = Tape(context.keeping.selective, context.functions, context.regathered)
        leaf = torch.empty(0, requires_grad=True)
        with context.keeping.saving():
            x = _each(x, lambda part: _Enter.apply(part, leaf))
            y = self.compute(x, context, tape)
        return _each(y, torch.Tensor.detach), (_each(x, get_gradient_edge), _each(y, get_gradient_edge), tape)

    def backward(self, saved: tuple, grad_of_output: Tensors | None, later: Later) -> Walk:
        """Hand over the gradients of weights, and return that of the input."""
        yield None
        x, y, tape = saved
        inputs, made, grads = map(_list, (x, y, grad_of_output))
        if tape.attended is None:
            leaf_grads = gradients(made, inputs, grads)
        else:
            outputs, left = tape.attended.outputs_and_grads()
            leaf_grads = gradients([*made, *outputs], [*inputs, *tape.attended.leaves()], [*grads, *left])
            tape.attended.leave(leaf_grads[len(inputs) :])
        later(tape.weight_gradients())
        return leaf_grads[0] if len(inputs) == 1 else leaf_grads[: len(inputs)]


def _list(x: Any) -> list:
    """Return one or several as a list. An edge, a named tuple, is one."""
    return list(x) if isinstance(x, tuple) and not isinstance(x, GradientEdge) else [x]


def _each(x: Tensors, function: Callable) -> Any:
    """Return what `function` makes of a tensor, or of each of a tuple."""
    return tuple(map(function, x)) if isinstance(x, tuple) else function(x)


@dataclass(eq=False)
class NormSegment(Segment):
    """A norm alone, where a communication follows it."""

    norm: Parameter
    bias: Parameter | None = None

    def compute(self, x: torch.Tensor, context: Context, tape: Tape) -> torch.Tensor:
        return tape.norm(x, self.norm, self.bias, again=context.regathered is not None)

    def repeat(self, saved: tuple) -> torch.Tensor:
        """Return the output again. saved: what a forward left whose context had `regathered`."""
        _, edge, _ = saved
        return selective.Norm.again(edge.node)


def norm_segment(own: Mapping[str, Parameter], name: str) -> list[NormSegment]:
    """Return the norm of a name, of its weight and bias in `own`; nothing where the layer has none."""
    weight = own.get(f"{name}.weight")
    return [] if weight is None else [NormSegment(weight, own.get(f"{name}.bias"))]


@dataclass(eq=False)
class Bias(Segment):
    """A bias alone, after the communication that sums what it is added to: once, not by every rank."""

    bias: Parameter

    def compute(self, x: torch.Tensor, context: Context, tape: Tape) -> torch.Tensor:
        return tape.plus(x, self.bias)
