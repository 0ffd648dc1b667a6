"""Products of rows that stand in groups, each group with a matrix of its own: all experts of a rank at once.

N rows, of which the first sizes[0] belong to matrix 0, and so on. torch's grouped_mm is one kernel
on CUDA; on a CPU it is a loop of products within one call, MKL's in fp32.

oneDNN keeps a kernel of each shape it has multiplied, of 0.3 to 0.6 MB, and each microbatch brings
groups of other sizes: a thousand of them held 600 MB. So fp32 groups are MKL's whatever their size.
Of one shape again and again oneDNN's are 2 to 20 % faster; of new ones they aren't, for a kernel
takes a millisecond to make. Groups in 16 bits, which no other library multiplies as they are, are
filled up with rows of zeros, to one of a few numbers (plan/declared/expert_rows.py).

Weight gradients are a loop on all devices: each is added in place, and summed in the type of the
buffer. grouped_mm would make a second buffer of them, and round it to the type of its factors.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from mpitrain.kernels.pinned import on_device
from mpitrain.kernels.products import add_product, product
from mpitrain.plan.declared.expert_rows import padded

ALIGNED = 16  # bytes, of which grouped_mm wants all strides to be multiples, and on CUDA addresses


def grouped_product(x_NX: torch.Tensor, weights_EYX: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return x @ weight.T of each group, [N, Y]. weights: transposed views, too."""
    if _in_few_shapes(x_NX):
        return _padded_products(x_NX, weights_EYX, sizes)
    if _at_once(x_NX, weights_EYX):
        ends = on_device(np.cumsum(sizes, dtype=np.int32), x_NX.device)
        return functional.grouped_mm(x_NX, weights_EYX.transpose(1, 2), offs=ends)
    multiply = functional.linear if _by_mkl(x_NX) else product
    return torch.cat([multiply(rows, weight) for rows, weight in zip(x_NX.split(sizes), weights_EYX)])


def _padded_products(x_NX: torch.Tensor, weights_EYX: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    y_NY = x_NX.new_empty(len(x_NX), weights_EYX.shape[1])
    for rows, weight, out in zip(x_NX.split(sizes), weights_EYX, y_NY.split(sizes)):
        if len(rows):
            out.copy_(product(_filled(rows), weight)[: len(rows)])
    return y_NY


def _filled(rows: torch.Tensor) -> torch.Tensor:
    """Return rows with as many rows of zeros after them as padded() says."""
    return functional.pad(rows, (0, 0, 0, padded(len(rows)) - len(rows)))


def _in_few_shapes(x: torch.Tensor) -> bool:
    """Return whether oneDNN multiplies it, as it is or widened, and would keep a kernel of each shape."""
    return x.is_cpu and x.itemsize == 2


def _by_mkl(x: torch.Tensor) -> bool:
    return x.is_cpu and x.dtype == torch.float32


def _at_once(x_NX: torch.Tensor, weights_EYX: torch.Tensor) -> bool:
    """Return whether grouped_mm can multiply these, and is faster."""
    if x_NX.is_cpu:
        fit = _by_mkl(x_NX)
    else:  # for other types it copies sizes to the host, and loops
        fit = x_NX.is_cuda and x_NX.dtype == torch.bfloat16
        fit = fit and x_NX.data_ptr() % ALIGNED == 0 and weights_EYX.data_ptr() % ALIGNED == 0
    return fit and all(width * x_NX.itemsize % ALIGNED == 0 for width in weights_EYX.shape[1:])


def row_vectors(vectors_EY: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return the vector of each row's group, [N, Y]."""
    repeats = on_device(np.array(sizes, dtype=np.int64), vectors_EY.device)
    return vectors_EY.repeat_interleave(repeats, 0, output_size=sum(sizes))


def add_sums(totals_EY: torch.Tensor, x_NY: torch.Tensor, sizes: Sequence[int]) -> None:
    """Add the sum of the rows of each group."""
    for total, rows in zip(totals_EY, x_NY.split(sizes)):
        total += rows.sum(0)


def add_grouped(
    totals_EYX: torch.Tensor,
    a_NY: torch.Tensor,
    b_NX: torch.Tensor,
    sizes: Sequence[int],
    rounded: bool = False,
) -> None:
    """Add a.T @ b of each group to its total.

    rounded: each product to the type of its factors.
    """
    for total, a, b in zip(totals_EYX, a_NY.split(sizes), b_NX.split(sizes)):
        if len(b) and _by_mkl(b) and total.dtype == b.dtype:
            total.addmm_(a.t(), b)
        elif len(b) and _in_few_shapes(b):
            add_product(total, _filled(a), _filled(b), rounded)
        elif len(b):
            add_product(total, a, b, rounded)
