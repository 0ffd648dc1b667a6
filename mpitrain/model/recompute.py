"""Activation recomputation (activation checkpointing, arXiv:1604.06174): the forward of a block
runs again in its backward, instead of keeping what it left.

    forward   x --> [ block | block | block ] -->  only x is kept
    backward  x --> [ block | block | block ]      the same walk again, with the same messages
                <-- [ block | block | block ] <--  then the backward, as ever

With sequence parallelism x is divided along the sequence already, so each rank of tp keeps its part
of it and nothing twice: what ZeRO-R (arXiv:1910.02054, section 6.1) calls partitioned activation
checkpointing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mpitrain.model.offload import opened
from mpitrain.parallel.microbatch import Context, KeepAll, ignored
from mpitrain.parallel.walk import Item, Later, Walk, backward, forward


@dataclass(eq=False)
class Recomputed:
    """A group of blocks of which only the input is kept.

    Autograd records in both walks, and what the first leaves is dropped block by block: other walks
    run between the items of this one, so gradients can't be switched off meanwhile. Nobody asks the
    group what it sends: a rehearsal walks it, too.
    """

    blocks: Sequence[Sequence[Item]]

    def forward(self, x: torch.Tensor, context: Context) -> Walk:
        kept = context.keeping.put(x)
        context = replace(context, keeping=KeepAll())
        y = x
        for block in self.blocks:
            y, _ = yield from forward(block, y, context)
        return y, (kept, replace(context, record_metric=ignored)) if torch.is_grad_enabled() else None

    def backward(self, saved: tuple, grad_of_output: torch.Tensor, later: Later) -> Walk:
        """Walk forward again, then backward."""
        (kept, context), grad, again = saved, grad_of_output, []
        x = opened(kept)
        for block in self.blocks:
            x, left = yield from forward(block, x, context)
            again.append(left)
        del x, kept, saved
        for block in reversed(self.blocks):
            grad = yield from backward(block, again.pop(), grad, later)
        return grad
