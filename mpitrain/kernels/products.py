"""Matrix products of weights, each by the fastest library that torch carries for it.

On a CPU torch multiplies fp32 matrices by MKL. oneDNN, which torch has too but calls for 16-bit
types only, is faster from a few million multiplications on, or from one where MKL is slow; MKL
below (benchmarks/products.py). Which one is a function of processor and shape alone, so bits don't
depend on anything else. Only MKL adds to what is there, as a weight gradient is; where it is slow,
oneDNN's product is added by a pass of its own. 16-bit matrices are multiplied in fp32 by processors
that are slower otherwise (kernels/processor.py): sums are fp32 either way.
"""

from collections.abc import Iterable

import torch
from torch.nn import functional

from mpitrain.kernels.processor import ONEDNN, mkl_is_slow, multiplied_as, onednn_product
from mpitrain.plan.declared.probabilities import ADDED_AT_ONCE

# side of the tiles in which matrices are widened: they stay in the cache, and need little memory
TILE = 2**10
# rows of x, multiplications: up to these a call of oneDNN costs more than it gains
FEW = (32, 2**23)
FEW_BY_SLOW_MKL = (4, 2**20)
ONE_ROW = 2**18  # numbers of a weight up to which MKL is faster at one row of x, where it is slow else
FEW_ADDED = 2**21  # multiplications: up to these the pass that adds does


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weight.T.

    x: [..., K].
    weight: [N, K], of any strides: the gradient of x is product(grad, weight.t()).

    Not differentiable: callers are the forward and backward of functions of their own.
    """
    if x.is_cpu and multiplied_as(x.dtype) != x.dtype and not _by_dots(x, weight):
        return _widened_product(x, weight)
    return onednn_product(x, weight) if _by_onednn(x, weight) else functional.linear(x, weight)


def _by_dots(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether torch widens bf16 as it reads it, and adds in fp32: one row, times rows of a weight.

    To widen the weight first takes twice as long, of each token that is generated.
    """
    return x.dtype == torch.bfloat16 and x.numel() == weight.shape[1] and weight.is_contiguous()


def _by_onednn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether oneDNN makes x @ weight.T, which torch would have MKL make."""
    if (
        x.dtype != torch.float32
        or not x.is_cpu
        or ONEDNN is None
        or not (weight.is_contiguous() or weight.t().is_contiguous())
    ):
        return False
    height, width = weight.shape
    if x.numel() == width:  # a matrix and a vector: by how fast the weight is read
        return mkl_is_slow() and weight.numel() > ONE_ROW and weight.is_contiguous()
    rows, multiplications = FEW_BY_SLOW_MKL if mkl_is_slow() else FEW
    return x.numel() * height > multiplications and x.numel() > rows * width


def _added_apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether oneDNN makes a.T @ b, which MKL would add to what is there."""
    return mkl_is_slow() and a.numel() * b.shape[1] > FEW_ADDED and _by_onednn(a.t(), b.t())


def _widened_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the same, multiplied and summed in fp32, a tile of each at a time."""
    height, width = weight.shape
    y = x.new_empty(*x.shape[:-1], height)
    x_NK, y_NM = x.flatten(0, -2), y.flatten(0, -2)
    rows, outputs, inputs = map(_side, (len(x_NK), height, width))
    for some_x, some_y in zip(x_NK.split(rows), y_NM.split(rows)):
        for some, out in zip(weight.split(outputs), some_y.split(outputs, -1)):
            out.copy_(_sum_of_tiles(some_x.split(inputs, 1), some.split(inputs, 1)))
    return y


def _sum_of_tiles(of_x: Iterable[torch.Tensor], of_weight: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of x @ weight.T of some tiles, in the type in which they are multiplied."""
    parts = (_multiplied_wide(*tiles) for tiles in zip(of_x, of_weight))
    total = next(parts)
    for part in parts:
        total += part
    return total


def _multiplied_wide(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    kind = multiplied_as(x.dtype)
    return product(x.to(kind), weight.to(kind))


def _side(size: int) -> int:
    """Return into pieces of which size a side is cut: about the same, as it decides on the library."""
    times = max(1, -(-size // TILE))
    return max(1, -(-size // times))


@torch.no_grad()
def add_product(
    total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rounded: bool = False, first: bool = False
) -> None:
    """Add a.T @ b to `total` [A, B]. a: [N, A].  b: [N, B], of a narrower type than `total`, or of the same.

    rounded: the product to the type of its factors.
    first: `total` is zero, whatever is in its memory.
    """
    exact = a.dtype == total.dtype
    if _added_apart(a, b) if exact else rounded:
        rows = max(1, ADDED_AT_ONCE // max(1, b.shape[1]))
        for some, part in zip(total.split(rows), a.split(rows, 1)):
            _add(some, product(part.t(), b.t()), first)
    elif exact:
        total.addmm_(a.t(), b, beta=0 if first else 1)
    elif a.is_cuda:
        torch.addmm(total, a.t(), b, out_dtype=total.dtype, beta=0 if first else 1, out=total)
    else:
        _add_widened(total, a, b, first)


def _add_widened(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, first: bool) -> None:
    """Add a.T @ b, multiplied in the type of `total`, a tile of each at a time."""
    rows, outputs, inputs = map(_side, (len(a), *total.shape))
    for number, (some_a, some_b) in enumerate(zip(a.split(rows), b.split(rows))):
        for across, part_b in zip(total.split(inputs, 1), some_b.split(inputs, 1)):
            wide = part_b.to(total.dtype)
            for tile, part_a in zip(across.split(outputs), some_a.split(outputs, 1)):
                add_product(tile, part_a.to(total.dtype), wide, first=first and number == 0)


def _add(total: torch.Tensor, x: torch.Tensor, first: bool) -> None:
    if first:
        total.copy_(x)
    else:
        total += x
