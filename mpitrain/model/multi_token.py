"""What computes the end of a model that predicts further tokens (model/layers/multi_token.py).

A depth looks up the tokens that the depth before it predicts, whether these carry loss or not. A
position has none where its row ends, or its document: its target is IGNORED, and its input any
token, which no position with a loss sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from mpitrain.kernels.precision import wide
from mpitrain.model.build_context import BuildContext
from mpitrain.model.segment import Segment, Tape
from mpitrain.parallel.microbatch import Context
from mpitrain.parallel.walk import Item, Later, Walk, backward, forward
from mpitrain.parallel.zero.parameters import Parameter


@dataclass(eq=False)
class Join(Segment):
    """projection [ norm(hidden) | norm(token) ]. With tensor parallelism every rank has all of it."""

    hidden_norm: Parameter
    token_norm: Parameter
    projection: Parameter

    def compute(self, x: tuple[torch.Tensor, ...], context: Context, tape: Tape) -> torch.Tensor:
        hidden_BTD, token_BTD = x
        both = torch.cat((tape.norm(hidden_BTD, self.hidden_norm), tape.norm(token_BTD, self.token_norm)), -1)
        return tape.linears(both, (self.projection,))[0]


class Depth(NamedTuple):
    """What predicts one token further."""

    lookup: Sequence[Item]
    join: Join
    block: Sequence[Item]
    head: Sequence[Item]


@dataclass(eq=False)
class MultiTokenHead:
    """The head, and depth after depth; without gradients, the head alone. weight: of a depth's loss."""

    main: Sequence[Item]
    depths: Sequence[Depth]
    weight: float
    site: BuildContext

    def forward(self, x: torch.Tensor, context: Context) -> Walk:
        """Return the loss of the next token, and tell the mean over depths of the others'."""
        y, of_main = yield from forward(self.main, x, context)
        if not torch.is_grad_enabled():
            return y, None
        microbatch = context.microbatch
        of_depths = []
        for depth, tokens, targets in zip(self.depths, microbatch.ahead, microbatch.further, strict=True):
            further = replace(microbatch, tokens=tokens.clamp(min=0), targets=targets)
            there = replace(context, microbatch=further)
            token, of_lookup = yield from forward(depth.lookup, None, there)
            x, of_join = yield from depth.join.forward((x, token), there)
            x, of_block = yield from forward(depth.block, x, there)
            loss, of_head = yield from forward(depth.head, x, there)
            context.record_metric("mtp_loss", loss / len(self.depths))
            of_depths.append((of_lookup, of_join, of_block, of_head))
        return y, (of_main, of_depths)

    def backward(self, saved: tuple, grad_of_output: torch.Tensor | None, later: Later) -> Walk:
        """Walk the depths from the last, then the head."""
        of_main, of_depths = saved
        scale = torch.full((), self.weight, dtype=wide(self.site.dtype), device=self.site.device)
        scale = scale if grad_of_output is None else scale * grad_of_output
        grad = None
        for depth in reversed(self.depths):
            of_lookup, of_join, of_block, of_head = of_depths.pop()
            of_loss = yield from backward(depth.head, of_head, scale, later)
            grad = of_loss if grad is None else grad + of_loss
            grad = yield from backward(depth.block, of_block, grad, later)
            grad, of_token = yield from depth.join.backward(of_join, grad, later)
            yield from backward(depth.lookup, of_lookup, of_token, later)
        return (yield from backward(self.main, of_main, grad_of_output, later)) + grad
