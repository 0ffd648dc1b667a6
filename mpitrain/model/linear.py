"""Products of activations and weights in the graph of a segment; gradients of weights are left for later.

Products, Fp8Products    x @ weight.T as autograd calls it
WeightGradient, Fp8WeightGradient, GroupedProduct    the factors of weight gradients, which add() multiplies

What they multiply by is in mpitrain/kernels/: products.py, fp8.py, grouped.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpitrain.kernels import fp8
from mpitrain.kernels.fp8 import MatrixOrder
from mpitrain.kernels.grouped import add_grouped
from mpitrain.kernels.products import add_product, product
from mpitrain.parallel.microbatch import RegatheredInput
from mpitrain.parallel.zero.parameters import Parameter

Recompute = Callable[[], torch.Tensor] | RegatheredInput | None


@dataclass
class WeightGradient:
    """Weight gradients to be added: all of the input x [N, K]. grads: [N, outputs], one for each."""

    parameters: tuple[Parameter, ...]
    x: torch.Tensor | RegatheredInput
    grads: Sequence[torch.Tensor]

    def add(self) -> None:
        for parameter, grad in zip(self.parameters, self.grads):
            total, first = parameter.sum_and_first()
            add_product(total, grad, arrived(self.x), parameter.rounded, first)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield arrived(self.x)
        yield from self.grads


def arrived(x: Any) -> Any:
    """Return a factor of a weight gradient that is gathered again, or is here."""
    return x.factor if isinstance(x, RegatheredInput) else x


class Products(torch.autograd.Function):
    """x @ weight.T for each of some weights, whose backward gives the gradient of x and leaves
    those of the weights for later.

    The weights themselves aren't saved: with ZeRO-3 they are dropped and fetched again. `recompute`
    makes x, if it isn't kept, or will have it.
    """

    @staticmethod
    def forward(ctx, x, parameters: tuple[Parameter, ...], deferred: list, recompute: Recompute):
        if recompute is None:
            ctx.save_for_backward(x)
        ctx.parameters = parameters
        ctx.deferred = deferred
        ctx.recompute = recompute
        return tuple(product(x, parameter.data) for parameter in parameters)

    @staticmethod
    def backward(ctx, *grads_of_outputs):
        x = ctx.recompute
        if not isinstance(x, RegatheredInput):
            x = (x() if x else ctx.saved_tensors[0]).flatten(0, -2)
        grads = [grad.flatten(0, -2) for grad in grads_of_outputs]
        ctx.deferred.append(WeightGradient(ctx.parameters, x, grads))
        grad_of_x = _sum_of_products(grads, ctx.parameters)
        return grad_of_x.unflatten(0, grads_of_outputs[0].shape[:-1]), None, None, None


def _sum_of_products(grads: Sequence[torch.Tensor], parameters: Sequence[Parameter]) -> torch.Tensor:
    """Return the sum of grad @ weight. Only a GPU's product adds to what is there."""
    total = product(grads[0], parameters[0].data.t())
    for grad, parameter in zip(grads[1:], parameters[1:]):
        if total.is_cuda:
            total.addmm_(grad, parameter.data)
        else:
            total += product(grad, parameter.data.t())
    return total


@dataclass
class Fp8WeightGradient:
    """A weight gradient that is still to be added: the product of its two factors."""

    parameter: Parameter
    x: fp8.Quantised | RegatheredInput
    grad_of_output: fp8.Quantised

    def add(self) -> None:
        dtype = self.parameter.grad.dtype
        self.parameter.grad += fp8.multiply(self.grad_of_output.t(), arrived(self.x), dtype)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (*arrived(self.x), *self.grad_of_output)


class Fp8Products(torch.autograd.Function):
    """The same in fp8. x is kept in it, once for all weights, unless `recompute` makes or has it.

    Weights are rounded again in the backward. By columns is what the products of weight gradients
    take, and weights where a gradient is multiplied by them.
    """

    @staticmethod
    def forward(
        ctx,
        x,
        parameters: tuple[Parameter, ...],
        deferred: list,
        recompute: Recompute,
        quantise: fp8.Quantise = fp8.quantise_in,
    ):
        keeps = recompute is None and ctx.needs_input_grad[0]
        orders = (MatrixOrder.ROWS, MatrixOrder.COLUMNS) if keeps else (MatrixOrder.ROWS,)
        quantised, *kept = quantise(x.flatten(0, -2), fp8.E4M3, *orders)
        if keeps:
            ctx.save_for_backward(kept[0].values)
            ctx.scale = quantised.scale
        ctx.parameters = parameters
        ctx.deferred = deferred
        ctx.recompute = recompute
        ctx.quantise = quantise
        weights = (quantise(parameter.data, fp8.E4M3, MatrixOrder.ROWS)[0].t() for parameter in parameters)
        return tuple(fp8.multiply(quantised, w, x.dtype).unflatten(0, x.shape[:-1]) for w in weights)

    @staticmethod
    def backward(ctx, *grads_of_outputs):
        x = Fp8Products._input(ctx)
        grad_of_x = None
        for parameter, grad_of_output in reversed(list(zip(ctx.parameters, grads_of_outputs))):
            rows, columns = ctx.quantise(
                grad_of_output.flatten(0, -2), fp8.E5M2, MatrixOrder.ROWS, MatrixOrder.COLUMNS
            )
            ctx.deferred.append(Fp8WeightGradient(parameter, x, columns))
            (weight,) = ctx.quantise(parameter.data, fp8.E4M3, MatrixOrder.COLUMNS)
            product = fp8.multiply(rows, weight, grad_of_output.dtype)
            grad_of_x = product if grad_of_x is None else grad_of_x + product
        return grad_of_x.unflatten(0, grad_of_output.shape[:-1]), None, None, None, None

    @staticmethod
    def _input(ctx) -> fp8.Quantised | RegatheredInput:
        x = ctx.recompute
        if x is None:
            return fp8.Quantised(*ctx.saved_tensors, ctx.scale)
        if isinstance(x, RegatheredInput):
            x.quantise = ctx.quantise
            return x
        return ctx.quantise(x().flatten(0, -2), fp8.E4M3, MatrixOrder.COLUMNS)[0]


@dataclass
class GroupedProduct:
    """Weight gradients of experts to be added: [E, Y, X], of the input x [N, X] and grad [N, Y]."""

    parameter: Parameter
    x: torch.Tensor
    grad: torch.Tensor
    sizes: Sequence[int]

    def add(self) -> None:
        add_grouped(self.parameter.grad, self.grad, self.x, self.sizes, self.parameter.rounded)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.x
        yield self.grad
