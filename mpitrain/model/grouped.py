"""Products of rows that stand in groups, each group with a matrix of its own: all experts of a rank at once.

N rows, of which the first sizes[0] belong to matrix 0, and so on. On a CPU these are single products, group by group: torch's grouped_mm
is a loop there, too, and knows no fp64 (benchmarks/grouped.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from mpitrain.model.linear import add_product, product
from mpitrain.parallel.zero.parameters import Parameter


def grouped_product(x_NX: torch.Tensor, weights_EYX: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return x @ weight.T of each group, [N, Y]."""
    y_NY = x_NX.new_empty(len(x_NX), weights_EYX.shape[1])
    for weight, (begin, end) in zip(weights_EYX, _bounds(sizes)):
        if begin < end:
            y_NY[begin:end] = product(x_NX[begin:end], weight)
    return y_NY


def of_rows(vectors_EY: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return the vector of each row's group, [N, Y]."""
    return vectors_EY.repeat_interleave(torch.tensor(sizes, device=vectors_EY.device), 0, output_size=sum(sizes))


def add_sums(totals_EY: torch.Tensor, x_NY: torch.Tensor, sizes: Sequence[int]) -> None:
    """Add the sum of the rows of each group."""
    for total, (begin, end) in zip(totals_EY, _bounds(sizes)):
        total += x_NY[begin:end].sum(0)


@dataclass
class GroupedProduct:
    """Weight gradients that are still to be added: of `parameter` [E, Y, X], with the input x [N, X] and grad [N, Y] of the output."""

    parameter: Parameter
    x: torch.Tensor
    grad: torch.Tensor
    sizes: Sequence[int]

    def add(self) -> None:
        """Add them to their buffers."""
        for total, (begin, end) in zip(self.parameter.grad, _bounds(self.sizes)):
            if begin < end:
                add_product(total, self.grad[begin:end], self.x[begin:end])

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield what is held for it."""
        yield self.x
        yield self.grad


def _bounds(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    return pairwise(accumulate(sizes, initial=0))
