"""Sequence parallelism that keeps no gathered input (parallel.regather).

A layer that tp divides computes on all positions of the sequence. A rank keeps its own slice of
them (arXiv:2205.05198, section 4.2.2):

    forward   norm of the slice | gather | products ...       the gathered input is dropped
    backward  slice once more   | gather started
                                | gradients of what the layer made and of its input, meanwhile
                                | gathered input arrives: weight gradients are handed over
                                | scatter | norm of the slice

A norm's input is kept, and its output computed again by the same operations. So the gathered
values, and the bits of all gradients, are the same. A backward sends one all-gather more. In a
backward for inputs (I) the gathered input stays until the one for weights (W).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from mpitrain.comm.axis import Axis
from mpitrain.model.offload import opened
from mpitrain.model.segment import NormSegment
from mpitrain.parallel.communication import Communication
from mpitrain.parallel.microbatch import Context, RegatheredInput
from mpitrain.parallel.walk import Begun, Item, Later, Walk, WeightGradients, backward, forward


class Regather:
    """norm | gather | inner, whose backward gathers the output of the norm again.

    norm: None: the input of the item is gathered.
    inner: the first of it computes products of what is gathered, along `dim`.
    """

    def __init__(self, norm: NormSegment | None, inner: Sequence[Item], axis: Axis, dim: int):
        self.norm = norm
        self.inner = inner
        self.gather = Communication("gather", axis, dim)

    def forward(self, x: torch.Tensor, context: Context) -> Walk:
        """Return (output, what the backward needs)."""
        records = torch.is_grad_enabled()
        context = replace(context, regathered=RegatheredInput() if records else None)
        if self.norm is None:
            kept = context.keeping.put(x) if records else None
        else:
            x, kept = yield from self.norm.forward(x, context)
        x, _ = yield from self.gather.forward(x, context)
        y, saved = yield from forward(self.inner, x, context)
        return y, (kept, saved, context.regathered) if records else None

    def backward(self, saved: tuple, grad_of_output: torch.Tensor, later: Later) -> Walk:
        """Return the gradient of the input. Weight gradients are handed over with their input."""
        kept, of_inner, regathered = saved
        held: list[WeightGradients] = []
        own = opened(kept) if self.norm is None else self.norm.repeat(kept)  # as it was gathered
        gathering = Begun(self.gather.forward(own, Context()))
        del own
        grad = yield from backward(self.inner, of_inner, grad_of_output, held.append)
        whole, _ = yield from gathering.rest()
        regathered.arrive(whole)
        del whole, gathering
        for gradients in held:
            later(gradients)
        grad = yield from self.gather.backward(None, grad, later)
        return grad if self.norm is None else (yield from self.norm.backward(kept, grad, later))
