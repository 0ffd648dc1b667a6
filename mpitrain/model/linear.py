"""Matrix products of weights, each by the fastest library that torch carries for it.

On a CPU torch multiplies fp32 matrices by MKL. oneDNN, which torch has too but calls for 16-bit types only, is faster from a few million
multiplications on, MKL below (benchmarks/products.py). Which one is a function of the shape alone, so bits don't depend on anything else.
"""

import torch
from torch.nn import functional

FEW_ROWS, FEW = 32, 2**23  # rows of x, multiplications: up to these a call of oneDNN costs more than it gains
ONEDNN = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None  # what torch.compile calls, too


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weight.T. x: [..., K].  weight: [N, K], of any strides: the gradient of x is product(grad, weight.t()).

    Not differentiable: callers are the forward and backward of functions of their own.
    """
    height, width = weight.shape
    many = x.numel() * height > FEW and x.numel() > FEW_ROWS * width
    if many and x.dtype == torch.float32 and x.is_cpu and ONEDNN is not None:
        return ONEDNN(x, weight, None, "none", [], "")
    return functional.linear(x, weight)


@torch.no_grad()
def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a.T @ b to `total` [A, B]. a: [N, A].  b: [N, B], of a narrower type than `total`, or of the same."""
    if a.dtype == total.dtype:
        total.addmm_(a.t(), b)
    elif a.is_cuda:
        total += torch.mm(a.t(), b, out_dtype=total.dtype)
    else:
        total.addmm_(a.to(total.dtype).t(), b.to(total.dtype))
