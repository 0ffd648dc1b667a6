"""Attention in a window, with sinks and with soft-capped scores, as a function whose result can be made
again (see model/selective.py).
"""

import torch

from mpitrain.kernels.attention_window import attend_in_window, attend_in_window_backward, grad_of_sinks
from mpitrain.parallel.zero.parameters import Parameter


class Windowed(torch.autograd.Function):
    """Causal attention in a window of positions (0: all), with the sinks of its heads if there are some.

    soft_cap: of scores; 0: none.
    again: keep queries, keys and values, and not the result.
    """

    @staticmethod
    def forward(
        ctx, q, k, v, visible, window: int, sinks: Parameter | None, small: list, again: bool, soft_cap: float
    ):
        ctx.window = window
        ctx.soft_cap = soft_cap
        ctx.sinks = sinks
        ctx.small = small
        ctx.from_input = again
        ctx.made = None
        out, lse = Windowed._attend(ctx, q, k, v, visible)
        ctx.save_for_backward(q, k, v, visible, *(() if again else (out, lse)))
        return out

    @staticmethod
    def _attend(ctx, q, k, v, visible):
        sinks = None if ctx.sinks is None else ctx.sinks.data
        return attend_in_window(q, k, v, ctx.window, sinks, _seen(visible), ctx.soft_cap)

    @staticmethod
    def again(ctx):
        """Return the output."""
        ctx.made = Windowed._attend(ctx, *ctx.saved_tensors)
        return ctx.made[0]

    @staticmethod
    def backward(ctx, grad_of_output):
        q, k, v, visible, *kept = ctx.saved_tensors
        (out, lse), ctx.made = ctx.made if ctx.from_input else kept, None
        if ctx.sinks is not None:
            ctx.small.append((ctx.sinks, grad_of_sinks(grad_of_output, out, lse, ctx.sinks.data)))
        return *attend_in_window_backward(
            grad_of_output, q, k, v, out, lse, ctx.window, _seen(visible), ctx.soft_cap
        ), *6 * [None]


def _seen(visible: torch.Tensor | None) -> torch.Tensor | None:
    """Turn what is added to scores, 0 or -inf, into what may be seen."""
    return None if visible is None else visible == 0
