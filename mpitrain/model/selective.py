"""Selective activation recomputation: functions whose result is computed again instead of being kept.

Norm, attention, and the gated product of the feed-forward.

Each has `again(node)`: the result once more, from what its node in the graph saved. The product
that follows asks for it in the backward, before the node's own turn comes; what was made is held
from the one to the other. Both ways the same operations run, so that the bits are the same.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from mpitrain.kernels import attention_cpu_16bit, attention_cpu_fp32, attention_tiles
from mpitrain.kernels.engine import gradients
from mpitrain.kernels.functions import EAGER, Functions
from mpitrain.kernels.gates import Gate
from mpitrain.parallel.zero.parameters import Parameter


class Norm(torch.autograd.Function):
    """RMSNorm (arXiv:1910.07467) with a backward of its own.

    again: keep the input, not what has the norm 1; if the input is kept by nobody else, nothing is
    won.
    """

    @staticmethod
    def forward(
        ctx, x, parameter: Parameter, small: list, eps: float, again: bool, functions: Functions = EAGER
    ):
        y, unit, scale = functions.norm(x, parameter.data, eps)
        ctx.save_for_backward(x if again else unit, scale)
        ctx.parameter = parameter
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
            ctx.made = ctx.functions.norm_again(x, ctx.parameter.data, scale)
        return ctx.made[0]

    @staticmethod
    def backward(ctx, grad_of_output):
        unit, scale = ctx.saved_tensors
        if ctx.from_input:
            Norm.again(ctx)
            (_, unit), ctx.made = ctx.made, None
        grad, of_weight = ctx.functions.norm_backward(grad_of_output, ctx.parameter.data, unit, scale)
        ctx.small.append((ctx.parameter, of_weight))
        return grad, None, None, None, None, None


@dataclass(frozen=True)
class GateFunctions:
    """The gated product, there and back, of an activation that a family brings along (kernels/gates.py)."""

    kind: Gate

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return activation(gate) * scale(up), and activation(gate)."""
        activated = self.kind.activation(gate)
        return activated * self.kind.scale(up), activated

    def gated_backward(
        self, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activated: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of gate and up. activated: activation(gate), if it is there."""
        activated = self.kind.activation(gate) if activated is None else activated
        of_gate = self.kind.grad_of_gate(grad * self.kind.scale(up), gate)
        return of_gate, self.kind.grad_of_up(grad * activated, up)


class Gated(torch.autograd.Function):
    """silu(gate) * up, or what `functions` make of them. Gate and up are kept."""

    @staticmethod
    def forward(ctx, gate, up, functions: Functions | GateFunctions):
        ctx.save_for_backward(gate, up)
        ctx.opened = None
        ctx.functions = functions
        return functions.gated(gate, up)[0]

    @staticmethod
    def again(ctx):
        """Return the output."""
        y, ctx.opened = ctx.functions.gated(*ctx.saved_tensors)
        return y

    @staticmethod
    def backward(ctx, grad_of_output):
        (gate, up), opened, ctx.opened = ctx.saved_tensors, ctx.opened, None
        return *ctx.functions.gated_backward(grad_of_output, gate, up, opened), None


class Attend(torch.autograd.Function):
    """Causal attention in 16 bits on a CPU, of which queries, keys and values are kept, and not the result.

    selective: nor are the probabilities of short sequences.
    """

    @staticmethod
    def forward(ctx, q, k, v, visible, selective: bool):
        keep = ctx.needs_input_grad[0] and not selective and attention_cpu_16bit.keeps(q, visible)
        out, kept = attention_cpu_16bit.attend(q, k, v, visible, keep)
        ctx.save_for_backward(q, k, v, visible, *(kept or ()))
        ctx.made = None
        return out

    @staticmethod
    def again(ctx):
        """Return the output.

        Probabilities of long sequences are made once more in the backward: those of all heads are
        most memory.
        """
        q, _, _, visible = ctx.saved_tensors
        out, ctx.made = attention_cpu_16bit.attend(
            *ctx.saved_tensors, keep=attention_cpu_16bit.keeps(q, visible)
        )
        return out

    @staticmethod
    def backward(ctx, grad_of_output):
        (q, k, v, visible, *kept), made, ctx.made = ctx.saved_tensors, ctx.made, None
        return (
            *attention_cpu_16bit.attend_backward(grad_of_output, q, k, v, visible, kept or made),
            None,
            None,
        )


class AttendByTiles(torch.autograd.Function):
    """The same in fp32 where torch's own attention is slow.

    Kept are the result and the log-sum-exp, too, unless `again`.
    """

    @staticmethod
    def forward(ctx, q, k, v, again: bool):
        out, lse = attention_tiles.attend(q, k, v, causal=True)
        ctx.save_for_backward(q, k, v, *(() if again else (out, lse)))
        ctx.made = None
        return out

    @staticmethod
    def again(ctx):
        """Return the output."""
        ctx.made = attention_tiles.attend(*ctx.saved_tensors, causal=True)
        return ctx.made[0]

    @staticmethod
    def backward(ctx, grad_of_output):
        made = ctx.made
        ctx.made = None
        return *attention_tiles.attend_backward(
            grad_of_output, *ctx.saved_tensors, *(made or ()), causal=True
        ), None


class AttendByTorch(torch.autograd.Function):
    """The same by torch's own attention, for a result that is asked for again before the backward."""

    @staticmethod
    def forward(ctx, q, k, v, visible):
        ctx.save_for_backward(q, k, v, visible)
        ctx.made = None
        return _recorded(q, k, v, visible)[0].detach()

    @staticmethod
    def again(ctx):
        """Return the output."""
        ctx.made = _recorded(*ctx.saved_tensors)
        return ctx.made[0].detach()

    @staticmethod
    def backward(ctx, grad_of_output):
        (out, leaves), ctx.made = ctx.made, None
        return *gradients([out], leaves, [grad_of_output]), None


def attention(q, k, v, visible, again: bool, selective: bool):
    """Return causal attention with grouped queries (arXiv:2305.13245), and how to make it again if
    asked for that.

    visible: what is added to the scores instead of causality.
    selective: what is cheap to make again isn't kept.
    """
    if attention_cpu_16bit.fits(q):
        function = Attend
        choice = (visible, selective)
    elif visible is None and attention_cpu_fp32.fits(q, k):
        function = AttendByTiles
        choice = (again,)
    elif again:
        function = AttendByTorch
        choice = (visible,)
    else:
        return _attention(q, k, v, visible), None
    y = function.apply(q, k, v, *choice)
    return y, partial(function.again, y.grad_fn) if again else None


def _attention(q, k, v, visible):
    if q.is_cuda and k.shape[1] < q.shape[1] and (visible is not None or q.dtype.itemsize > 2):
        # Of CUDA's kernels only flash attention knows groups; without it torch would multiply whole
        # matrices, and keep all probabilities.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=visible is None, enable_gqa=True
    )


def _recorded(q, k, v, visible):
    """Attend in a graph of its own, in both directions: without a graph, torch may choose another kernel.

    It keeps its tensors detached: a result that its graph keeps as it is would hold the graph,
    which a forward drops, and neither ended.
    """
    with torch.enable_grad(), saved_tensors_hooks(torch.Tensor.detach, _itself):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return _attention(*leaves, visible), leaves


def _itself(x):
    return x
