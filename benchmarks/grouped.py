"""Products of rows in groups on a CPU.

torch's grouped_mm against a loop, and which of them mpitrain.kernels.grouped takes.

    python benchmarks/grouped.py [--repeats 20] [--threads 1]

Seconds of the processor, the candidates taking turns, medians; in the table, speeds as multiples of
the loop's. The loop multiplies group by group as mpitrain.kernels.products does. "forward" is x @
weight.T, "backward" is grad @ weight, "weights" is what is added to the weights'
gradients: with grouped_mm a second buffer of them, added to the first; it makes bf16 only of bf16,
and is given wider copies here. Prints a Markdown table.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch.nn import functional

from mpitrain.kernels.grouped import grouped_product
from mpitrain.kernels.products import product
from mpitrain.model.linear import GroupedProduct

SHAPES = (  # experts, rows of each, width, hidden units
    (8, 4, 384, 512), (8, 32, 384, 512), (8, 128, 384, 512), (8, 512, 384, 512), (8, 32, 1024, 2048),
    (8, 128, 1024, 2048),
    (32, 128, 512, 256), (64, 8, 256, 128), (128, 4, 256, 64), (128, 32, 256, 128),
)  # fmt: skip


class Total:
    """A weight whose gradient is added to."""

    rounded = False

    def __init__(self, like: torch.Tensor):
        self.grad = torch.zeros(like.shape)


def loop(x: torch.Tensor, weights: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    return torch.cat([product(rows, weight) for rows, weight in zip(x.split(sizes), weights)])


def ends(sizes: list[int]) -> torch.Tensor:
    return torch.tensor(list(accumulate(sizes)), dtype=torch.int32)


def grouped_mm(x: torch.Tensor, weights: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    return functional.grouped_mm(x, weights.transpose(1, 2), offs=ends(sizes))


def added(total: Total, grad: torch.Tensor, x: torch.Tensor, sizes: list[int]) -> None:
    total.grad += functional.grouped_mm(grad.float().t(), x.float(), offs=ends(sizes))


def measure(functions: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Return the median seconds of each function."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for found, function in zip(times, functions):
            begin = time.process_time()
            function()
            found.append(time.process_time() - begin)
    return [statistics.median(found) for found in times]


def candidates(shape: tuple[int, ...], kind: torch.dtype) -> dict[str, list[Callable[[], object]]]:
    """Return what makes each product: the loop, grouped_mm, and ours, which for the weights is the loop."""
    count, rows, width, hidden = shape
    sizes = [rows] * count
    weight = torch.randn(count, hidden, width).to(kind)
    x, grad = (torch.randn(count * rows, each).to(kind) for each in (width, hidden))
    ways = (loop, grouped_mm, grouped_product)
    total = Total(weight)
    return {
        "forward": [partial(way, x, weight, sizes) for way in ways],
        "backward": [partial(way, grad, weight.transpose(1, 2), sizes) for way in ways],
        "weights": [GroupedProduct(total, x, grad, sizes).add, partial(added, total, grad, x, sizes)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.threads} thread(s)\n")
    print(
        "| type | experts x rows, weight | product | loop, ms | grouped_mm | mpitrain |\n"
        "|---|---|---|---|---|---|"
    )
    for kind in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            count, rows, width, hidden = shape
            name = f"{str(kind).removeprefix('torch.')} | {count} x {rows}, {hidden} x {width}"
            for what, functions in candidates(shape, kind).items():
                seconds = measure(functions, options.repeats)
                speeds = [f"{seconds[0] / each:.2f}" for each in seconds[1:]]
                print(
                    f"| {name} | {what} | {seconds[0] * 1e3:.2f} | {speeds[0]} | "
                    f"{(*speeds[1:], 'the loop')[0]} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
