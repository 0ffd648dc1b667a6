"""RMSNorm of queries and of keys over all heads together, which tensor parallelism divides (OLMo 2,
arXiv:2501.00656, section 3).

    forward   squares of each position, of the heads here | sum over tp | scale, turn, head by head
    backward  turn back | gradient along the vector, of the heads here | sum over tp | gradient

Both sums are two numbers a position, of queries and of keys. A rank that repeats the keys of
another has them in the sum of squares, too; its gradient is that of its own queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mpitrain.comm.axis import Axis
from mpitrain.comm.collectives import all_reduce
from mpitrain.kernels.precision import wide
from mpitrain.model.offload import restored
from mpitrain.model.rotary import Rotary
from mpitrain.parallel.microbatch import Context
from mpitrain.parallel.walk import Addend, Later, Walk, WeightGradients
from mpitrain.parallel.zero.parameters import Parameter


class SavedNorms(NamedTuple):
    """Of queries and of keys: what has the norm 1 [B, T, F], its factors [B, T, 1]; positions."""

    units: tuple[torch.Tensor, ...]
    scales: tuple[torch.Tensor, ...]
    start: int
    order: torch.Tensor | None


@dataclass(eq=False)
class WidthNorms:
    """norm(q), norm(k) and v, head by head and turned by their positions. Collective over tp.
    norms: weights of the features here.
    """

    norms: Sequence[Parameter]
    axis: Axis
    rotary: Rotary | None
    head_width: int

    def forward(self, x: tuple[torch.Tensor, ...], context: Context) -> Walk:
        *inputs, v_BTF = x
        exact = [x.to(wide(x.dtype)) for x in inputs]
        squares = torch.stack([x.square().sum(-1) / norm.spec.copies for x, norm in zip(exact, self.norms)])
        totals = (yield all_reduce(squares, self.axis)).unsqueeze(-1)
        units, scales, heads = [], [], []
        order = context.microbatch.order
        for wide_x, total, norm, given in zip(exact, totals, self.norms, inputs):
            scale = torch.rsqrt(total / norm.spec.whole[0] + norm.spec.eps)
            unit = (wide_x * scale).to(given.dtype)
            units.append(unit)
            scales.append(scale)
            heads.append(self._turned(self._heads(unit * norm.data), context.start, 1, order))
        saved = SavedNorms(tuple(units), tuple(scales), context.start, order)
        return (*heads, self._heads(v_BTF)), context.keeping.put(saved) if torch.is_grad_enabled() else None

    def backward(self, saved: SavedNorms, grad_of_output: tuple[torch.Tensor, ...], later: Later) -> Walk:
        units, scales, start, order = restored(saved)
        *grads, of_v = grad_of_output
        flat = [self._turned(grad, start, -1, order).transpose(1, 2).flatten(-2) for grad in grads]
        products = [grad * unit for grad, unit in zip(flat, units)]
        kind = scales[0].dtype
        along = torch.stack([x.to(kind) @ norm.data.to(kind) for x, norm in zip(products, self.norms)])
        totals = (yield all_reduce(along, self.axis)).unsqueeze(-1)
        input_grads = []
        for grad, unit, scale, total, norm in zip(flat, units, scales, totals, self.norms):
            share = total / (norm.spec.whole[0] * norm.spec.copies)
            input_grads.append(((grad * norm.data - unit * share) * scale).to(grad.dtype))
        sums = [product.flatten(0, -2).sum(0) for product in products]
        later(WeightGradients(list(map(Addend, self.norms, sums))))

        return (*input_grads, of_v.transpose(1, 2).flatten(-2))

    def _heads(self, x_BTF: torch.Tensor) -> torch.Tensor:
        return x_BTF.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def _turned(self, x_BHTC: torch.Tensor, *at: int | torch.Tensor | None) -> torch.Tensor:
        return x_BHTC if self.rotary is None else self.rotary.turned(x_BHTC, *at)
