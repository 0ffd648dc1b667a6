"""Products of rows that stand in groups, each group with a matrix of its own: all experts of a rank at once.

N rows, of which the first sizes[0] belong to matrix 0, and so on. torch's grouped_mm is one kernel on CUDA; on a CPU it is a loop of
MKL's products within one call, faster than ours up to groups of some size, from which on oneDNN's products are (benchmarks/grouped.py).
Which one is a function of processor, types, shapes and alignment alone, as in model/linear.py.

Weight gradients are a loop on all devices: each is added in place, and summed in the type of the buffer. grouped_mm would make a second
buffer of them, and round it to the type of its factors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn import functional

from mpitrain.model.linear import add_product, product
from mpitrain.parallel.processor import mkl_is_slow, multiplied_as
from mpitrain.parallel.zero.parameters import Parameter

LARGE, LARGE_BY_SLOW_MKL = 2**24, 2**21  # multiplications for the mean group: from here on oneDNN makes up for what the loop costs
ALIGNED = 16  # bytes, of which grouped_mm wants all strides to be multiples, and on CUDA addresses


def grouped_product(x_NX: torch.Tensor, weights_EYX: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return x @ weight.T of each group, [N, Y]. weights: transposed views, too."""
    if _at_once(x_NX, weights_EYX):
        ends = torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=x_NX.device)
        return functional.grouped_mm(x_NX, weights_EYX.transpose(1, 2), offs=ends)
    return torch.cat([product(rows, weight) for rows, weight in zip(x_NX.split(sizes), weights_EYX)])


def _at_once(x_NX: torch.Tensor, weights_EYX: torch.Tensor) -> bool:
    """Return whether grouped_mm can multiply these, and is faster."""
    large = x_NX.numel() * weights_EYX.shape[1] >= (LARGE_BY_SLOW_MKL if mkl_is_slow() else LARGE) * len(weights_EYX)
    if x_NX.is_cpu:
        fit = x_NX.dtype == torch.bfloat16 == multiplied_as(x_NX.dtype) or (x_NX.dtype == torch.float32 and not large)
    else:  # for other types it copies sizes to the host, and loops
        fit = x_NX.is_cuda and x_NX.dtype == torch.bfloat16
        fit = fit and x_NX.data_ptr() % ALIGNED == 0 and weights_EYX.data_ptr() % ALIGNED == 0
    return fit and all(width * x_NX.itemsize % ALIGNED == 0 for width in weights_EYX.shape[1:])


def of_rows(vectors_EY: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return the vector of each row's group, [N, Y]."""
    return vectors_EY.repeat_interleave(torch.tensor(sizes, device=vectors_EY.device), 0, output_size=sum(sizes))


def add_sums(totals_EY: torch.Tensor, x_NY: torch.Tensor, sizes: Sequence[int]) -> None:
    """Add the sum of the rows of each group."""
    for total, rows in zip(totals_EY, x_NY.split(sizes)):
        total += rows.sum(0)


@dataclass
class GroupedProduct:
    """Weight gradients that are still to be added: of `parameter` [E, Y, X], with the input x [N, X] and grad [N, Y] of the output."""

    parameter: Parameter
    x: torch.Tensor
    grad: torch.Tensor
    sizes: Sequence[int]

    def add(self) -> None:
        """Add them to their buffers."""
        for total, grad, x in zip(self.parameter.grad, self.grad.split(self.sizes), self.x.split(self.sizes)):
            if len(x):
                add_product(total, grad, x, self.parameter.rounded)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield what is held for it."""
        yield self.x
        yield self.grad
