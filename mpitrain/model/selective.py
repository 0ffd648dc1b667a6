"""Selective activation recomputation: functions whose result is computed again, not kept: norm and
the gated product of the feed-forward; attention is in attention_functions.py.

Each has `again(node)`: the result once more, from what its node in the graph saved. The product
that follows asks for it in the backward, before the node's own turn comes; what was made is held
from the one to the other. Both ways the same operations run, so that the bits are the same.
"""

import torch

from mpitrain.kernels.activation_functions import Activation
from mpitrain.kernels.functions import Functions, layer_norm, layer_norm_again, layer_norm_backward
from mpitrain.kernels.precision import wide
from mpitrain.parallel.zero.parameters import Parameter


class Norm(torch.autograd.Function):
    """RMSNorm (arXiv:1910.07467), with a bias LayerNorm (arXiv:1607.06450); a backward of its own.

    again: keep the input, not what has the norm 1: of use where another keeps the input, too.
    """

    @staticmethod
    def forward(
        ctx, x, weight: Parameter, bias: Parameter | None, small: list, again: bool, functions: Functions
    ):
        y, unit, scale = normed(x, weight, bias, functions)
        ctx.save_for_backward(x if again else unit, scale)
        ctx.parameters = weight, bias
        ctx.small = small
        ctx.from_input = again
        ctx.made = None
        ctx.functions = functions
        return y

    @staticmethod
    def again(ctx):
        """Return the output, made once."""
        if ctx.made is None:
            x, scale = ctx.saved_tensors
            weight, bias = ctx.parameters
            if bias is None:
                ctx.made = ctx.functions.norm_again(x, factor(weight), scale)
            else:
                ctx.made = layer_norm_again(x, weight.data, bias.data, scale)
        return ctx.made[0]

    @staticmethod
    def backward(ctx, grad_of_output):
        unit, scale = ctx.saved_tensors
        if ctx.from_input:
            Norm.again(ctx)
            (_, unit), ctx.made = ctx.made, None
        weight, bias = ctx.parameters
        if bias is None:
            grads = ctx.functions.norm_backward(grad_of_output, factor(weight), unit, scale)
        else:
            grads = layer_norm_backward(grad_of_output, weight.data, unit, scale)
        grad, *of_vectors = grads
        ctx.small += zip(ctx.parameters, of_vectors)
        return grad, *5 * [None]


def normed(
    x: torch.Tensor, weight: Parameter, bias: Parameter | None, functions: Functions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return norm(x), x with the norm 1, and its factor: of RMSNorm, with a bias of LayerNorm."""
    if bias is None:
        return functions.norm(x, factor(weight), weight.spec.eps)
    return layer_norm(x, weight.data, bias.data, weight.spec.eps)


def factor(parameter: Parameter) -> torch.Tensor:
    """Return what a norm multiplies by: its weight, or 1 + weight, in fp32 at least (Gemma)."""
    weight = parameter.data
    return weight.to(wide(weight.dtype)) + 1 if parameter.spec.plus_one else weight


class Gated(torch.autograd.Function):
    """What `functions` make of gate and up, which are kept: silu(gate) * up, say."""

    @staticmethod
    def forward(ctx, gate, up, functions: Functions):
        ctx.save_for_backward(gate, up)
        ctx.activated = None
        ctx.functions = functions
        return functions.gated(gate, up)[0]

    @staticmethod
    def again(ctx):
        """Return the output."""
        y, ctx.activated = ctx.functions.gated(*ctx.saved_tensors)
        return y

    @staticmethod
    def backward(ctx, grad_of_output):
        (gate, up), activated, ctx.activated = ctx.saved_tensors, ctx.activated, None
        return *ctx.functions.gated_backward(grad_of_output, gate, up, activated), None


class Activated(torch.autograd.Function):
    """activation(x), of which x is kept."""

    @staticmethod
    def forward(ctx, x, activation: Activation):
        ctx.save_for_backward(x)
        ctx.activation = activation
        return activation.activation(x)

    @staticmethod
    def again(ctx):
        """Return the output."""
        return ctx.activation.activation(*ctx.saved_tensors)

    @staticmethod
    def backward(ctx, grad_of_output):
        return ctx.activation.grad_of_gate(grad_of_output, *ctx.saved_tensors), None
