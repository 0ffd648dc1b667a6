"""Products of fp8 matrices: the linears of a block with `precision.compute = "fp8"`.

    forward   Y  = X W^T   e4m3 x e4m3, to bf16
    backward  dX = dY W    e5m2 x e4m3, to bf16
              dW = dY^T X  e5m2 x e4m3, added in fp32

The formats are those of Micikevicius et al. 2022, "FP8 formats for deep learning"
(arXiv:2209.05433): e4m3 has more digits, up to 448, e5m2 more range, up to 57344.

A tensor is multiplied by the power of two that brings its largest number just below the format's,
and rounded once. Why a power of two: scaling rounds nothing, there and back; fp8 numbers have the
same digits whatever the power, so that ranks of tp, which see shards and scale them otherwise,
differ only in numbers below about 2**-14 (e4m3) or 2**-30 (e5m2) of the largest. It costs at most a
bit of range.

Scales are those of this very tensor, without a history: what is made is a function of the tensor,
and is made again with the same bits. A tensor with an infinity or a NaN has the scale NaN, and so
have its products: a cast alone would make an infinity the largest number.

On a GPU that is torch._scaled_mm. Elsewhere the same numbers are multiplied in fp32: exact but for
the order of sums, and slow.

A GPU sums along what lies side by side in the memory of both factors, so that each tensor is
wanted by rows for one product and by columns for another; who rounds it says which (MatrixOrder).
"""

import math
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import torch

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


class Quantised(NamedTuple):
    """A matrix in fp8: values * scale. scale: an fp32 number on the same device, a power of two or NaN."""

    values: torch.Tensor
    scale: torch.Tensor

    def t(self) -> "Quantised":
        """Return the transpose, a view."""
        return Quantised(self.values.t(), self.scale)


class MatrixOrder(Enum):
    """What lies side by side in the memory of a matrix in fp8."""

    ROWS = "rows"
    COLUMNS = "columns"


Quantise = Callable[..., tuple[Quantised, ...]]


@torch.no_grad()
def quantise(x: torch.Tensor, dtype: torch.dtype) -> Quantised:
    """Round x * 2**power to fp8, with the largest power that makes nothing larger than the format's
    largest number.
    """
    return Quantised(*scaled(x, dtype))


def quantise_in(x: torch.Tensor, dtype: torch.dtype, *orders: MatrixOrder) -> tuple[Quantised, ...]:
    """Return quantise(x) in each order. x: [N, K]. On a CPU, which multiplies by any, it is one for all."""
    quantised = quantise(x, dtype)
    return tuple(
        quantised if x.is_cpu or order is MatrixOrder.ROWS else _by_columns(quantised) for order in orders
    )


def quantise_by(to_orders: Callable[..., tuple[torch.Tensor, ...]]) -> Quantise:
    """Return quantise_in() by a compiled in_orders()."""

    def quantise_in_one(x: torch.Tensor, dtype: torch.dtype, *orders: MatrixOrder) -> tuple[Quantised, ...]:
        scale, *values = to_orders(x, dtype, *(order is MatrixOrder.COLUMNS for order in orders))
        turned = (
            matrix.t() if order is MatrixOrder.COLUMNS else matrix for matrix, order in zip(values, orders)
        )
        return tuple(Quantised(matrix, scale) for matrix in turned)

    return quantise_in_one


def in_orders(x: torch.Tensor, dtype: torch.dtype, *transposed: bool) -> tuple[torch.Tensor, ...]:
    """Return the scale of x, and its values by rows, or those of its transpose, for each of `transposed`."""
    values, scale = scaled(x, dtype)
    return scale, *(values.t().contiguous() if each else values.contiguous() for each in transposed)


def _by_columns(quantised: Quantised) -> Quantised:
    return quantised._replace(values=quantised.values.t().contiguous().t())


def scaled(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x in fp8 and its scale."""
    largest, top = math.frexp(torch.finfo(dtype).max)
    amax = x.abs().amax().float()
    fraction, exponent = torch.frexp(amax)
    power = (top - exponent - (fraction > largest).int()).clamp(-126, 126)  # of 0, any will do
    values = (x * _two_to(power)).to(dtype)
    return values, torch.where(amax.isfinite(), _two_to(-power), math.nan)


def _two_to(power: torch.Tensor) -> torch.Tensor:
    """Return 2**power by its bits: pow of a GPU may be a rounding off."""
    return (power + 127 << 23).view(torch.float32)


@torch.no_grad()
def multiply(a: Quantised, b: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """Return a @ b, summed in fp32.

    a: [M, K].
    b: [K, N].

    M is any number; on a GPU, K and N are multiples of 16.
    """
    if not a.values.is_cuda:
        product = a.values.float() @ b.values.float()
        return product.mul_(a.scale * b.scale).to(dtype)
    # cuBLAS wants the first by rows and the second by columns (pytorch:
    # ATen/native/cuda/ScaledBlas.cpp); its fast sums aren't fp32's
    rows = a.values.contiguous()
    columns = b.values.t().contiguous().t()
    return torch._scaled_mm(rows, columns, a.scale, b.scale, out_dtype=dtype, use_fast_accum=False)
