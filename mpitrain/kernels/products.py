"""Matrix products of weights, each by the fastest library that torch carries for it.

On a CPU torch multiplies fp32 matrices by MKL. oneDNN, which torch has too but calls for 16-bit
types only, is faster from a few million multiplications on, or from one where MKL is slow; MKL
below (benchmarks/products.py). Which one is a function of processor and shape alone, so bits don't
depend on anything else. Only MKL adds to what is there, as a weight gradient is; where it is slow,
oneDNN's product is added by a pass of its own. 16-bit matrices are multiplied in fp32 by processors
that are slower otherwise (kernels/processor.py): sums are fp32 either way.
"""

import torch
from torch.nn import functional

from mpitrain.kernels.processor import ONEDNN, mkl_is_slow, multiplied_as, onednn_product

# numbers of a weight that are widened at a time: they stay in the cache, and need little memory
AT_ONCE = 2**20
ADDED_AT_ONCE = 2**22  # numbers of a weight's gradient that are made beside their sum
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
    """Return the same, multiplied in fp32, some rows of the weight at a time."""
    kind = multiplied_as(x.dtype)
    rows = max(1, AT_ONCE // max(1, weight.shape[1]))
    wide = x.to(kind)
    if len(weight) <= rows:
        return product(wide, weight.to(kind)).to(x.dtype)
    y = x.new_empty(*x.shape[:-1], len(weight))
    for some, out in zip(weight.split(rows), y.split(rows, -1)):
        out.copy_(product(wide, some.to(kind)))
    return y


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
        add_product(total, a.to(total.dtype), b.to(total.dtype), first=first)


def _add(total: torch.Tensor, x: torch.Tensor, first: bool) -> None:
    if first:
        total.copy_(x)
    else:
        total += x
