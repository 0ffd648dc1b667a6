"""Attention as functions that autograd calls, by each of its kernels.

Their result can be made again, as in selective.py. A request is kept for the backward without its
tensors: a mask is saved by autograd; sinks are read anew, for with ZeRO-3 weights are dropped and
fetched again.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks

from mpitrain.kernels import attention_cpu_16bit, attention_tiles
from mpitrain.kernels.attention import AttentionRequest, Kernel, choose
from mpitrain.kernels.attention_documents import (
    attend_by_documents,
    attend_by_documents_backward,
    attend_in_16_bits,
    attend_in_16_bits_backward,
)
from mpitrain.kernels.attention_torch import attend_by_torch
from mpitrain.kernels.attention_window import attend_in_window, attend_in_window_backward, grad_of_sinks
from mpitrain.kernels.engine import gradients
from mpitrain.parallel.zero.parameters import Parameter


class AttendByTiles(torch.autograd.Function):
    """Attention in blocks of a window (0: all), with sinks and soft-capped scores, document by
    document, as asked; where none of these is, in one tile: fp32 whose own kernel in torch is slow.

    small: takes the gradient of the sinks.
    again: keep queries, keys and values, and not the result.
    whole: in one tile.
    """

    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        request: AttentionRequest,
        sinks: Parameter | None,
        small: list,
        again: bool,
        whole: bool,
    ):
        ctx.request = request.given(spans=request.spans)
        ctx.sinks, ctx.small = sinks, small
        ctx.from_input = again
        ctx.whole = whole
        ctx.made = None
        out, lse = _attend(q, k, v, request, request.mask, whole)
        ctx.save_for_backward(q, k, v, request.mask, *(() if again else (out, lse)))
        return out

    @staticmethod
    def again(ctx):
        """Return the output."""
        q, k, v, mask = ctx.saved_tensors
        sinks = None if ctx.sinks is None else ctx.sinks.data
        request = ctx.request.given(sinks=sinks, spans=ctx.request.spans)
        ctx.made = _attend(q, k, v, request, mask, ctx.whole)
        return ctx.made[0]

    @staticmethod
    def backward(ctx, grad_of_output):
        q, k, v, mask, *kept = ctx.saved_tensors
        (out, lse), ctx.made = ctx.made if ctx.from_input else kept, None
        if ctx.sinks is not None:
            ctx.small.append((ctx.sinks, grad_of_sinks(grad_of_output, out, lse, ctx.sinks.data)))
        made = grad_of_output, q, k, v, out, lse
        if ctx.whole:
            grads = attention_tiles.attend_backward(*made, causal=True, request=ctx.request)
        elif ctx.request.spans is None:
            grads = attend_in_window_backward(*made, ctx.request, _seen(mask))
        else:
            grads = attend_by_documents_backward(*made, ctx.request, ctx.request.spans)
        return *grads, *5 * [None]


def _attend(q, k, v, request: AttentionRequest, mask: torch.Tensor | None, whole: bool):
    if whole:
        return attention_tiles.attend(q, k, v, causal=True, request=request)
    if request.spans is None:
        return attend_in_window(q, k, v, request, _seen(mask))
    return attend_by_documents(q, k, v, request, request.spans)


def _seen(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Turn what is added to scores, 0 or -inf, into what may be seen."""
    return None if mask is None else mask == 0


class AttendIn16Bits(torch.autograd.Function):
    """Attention in 16 bits on a CPU, of which queries, keys and values are kept, and not the result.
    selective: nor are the probabilities of short sequences.
    """

    @staticmethod
    def forward(ctx, q, k, v, request: AttentionRequest, selective: bool):
        mask = request.mask
        ctx.scale, ctx.spans = request.scale, request.spans
        ctx.made = None
        keep = ctx.needs_input_grad[0] and not selective
        out, kept = AttendIn16Bits._attend(ctx, q, k, v, mask, keep)
        ctx.save_for_backward(q, k, v, mask, *(kept or ()))
        return out

    @staticmethod
    def again(ctx):
        """Return the output. Probabilities of long sequences are large: the backward makes them anew."""
        out, ctx.made = AttendIn16Bits._attend(ctx, *ctx.saved_tensors, True)
        return out

    @staticmethod
    def backward(ctx, grad_of_output):
        (q, k, v, mask, *kept), made, ctx.made = ctx.saved_tensors, ctx.made, None
        given = grad_of_output, q, k, v
        if ctx.spans is None:
            grads = attention_cpu_16bit.attend_backward(*given, mask, kept or made, ctx.scale)
        else:
            grads = attend_in_16_bits_backward(*given, ctx.scale, ctx.spans)
        return *grads, None, None

    @staticmethod
    def _attend(ctx, q, k, v, mask, keep: bool):
        """Return the result, and what is kept of short sequences if `keep`."""
        if ctx.spans is not None:
            return attend_in_16_bits(q, k, v, ctx.scale, ctx.spans), None
        return attention_cpu_16bit.attend(
            q, k, v, mask, keep and attention_cpu_16bit.keeps(q, mask), ctx.scale
        )


class AttendByTorch(torch.autograd.Function):
    """Attention by torch's own, for a result that is asked for again before the backward."""

    @staticmethod
    def forward(ctx, q, k, v, request: AttentionRequest):
        ctx.save_for_backward(q, k, v, request.mask)
        ctx.request = request.given()
        ctx.made = None
        return _recorded(q, k, v, request)[0].detach()

    @staticmethod
    def again(ctx):
        """Return the output."""
        q, k, v, mask = ctx.saved_tensors
        ctx.made = _recorded(q, k, v, ctx.request.given(mask=mask))
        return ctx.made[0].detach()

    @staticmethod
    def backward(ctx, grad_of_output):
        (out, leaves), ctx.made = ctx.made, None
        return *gradients([out], leaves, [grad_of_output]), None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    request: AttentionRequest,
    again: bool,
    selective: bool,
    sinks: Parameter | None = None,
    small: list | None = None,
) -> tuple[torch.Tensor, Callable[[], torch.Tensor] | None]:
    """Return causal attention with grouped queries (arXiv:2305.13245), and, if asked, how to remake it.

    selective: what is cheap to make again isn't kept.
    sinks: whose data `request` has. small: takes their gradient.
    """
    kernel = choose(request, q, k, masked=request.mask is not None)
    if request.by_tiles or (request.spans is not None and kernel is not Kernel.CPU_16BIT):
        function, further = AttendByTiles, (request, sinks, small, again, False)
    elif kernel is Kernel.CPU_16BIT:
        function, further = AttendIn16Bits, (request, selective)
    elif kernel is Kernel.CPU_ONEDNN:
        function, further = AttendByTiles, (request, None, small, again, True)
    elif again:
        function, further = AttendByTorch, (request,)
    else:
        return attend_by_torch(q, k, v, request), None
    y = function.apply(q, k, v, *further)
    return y, partial(function.again, y.grad_fn) if again else None


def _recorded(q, k, v, request: AttentionRequest):
    """Attend in a graph of its own, in both directions: without a graph, torch may choose another kernel.

    It keeps its tensors detached: a result that its graph keeps as it is would hold the graph,
    which a forward drops, and neither ended.
    """
    with torch.enable_grad(), saved_tensors_hooks(torch.Tensor.detach, lambda x: x):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return attend_by_torch(*leaves, request), leaves
