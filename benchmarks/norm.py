"""Time of the exact sum that a gradient norm is of.

Of floats in Python, as it was, and of integers on the device.

    python benchmarks/norm.py [--repeats 15] [--threads 1] [--device cpu]

Milliseconds of the processor for so many blocks of 1,024 elements, the two taking turns, medians;
of the clock on other devices. The norms of the blocks, which both need, are not in it. Prints a
Markdown table.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from mpitrain.optim.norm import exact_sum, summed

BLOCKS = (100, 1000, 10_000, 100_000, 1_000_000)


def floats(squares: torch.Tensor) -> list[float]:
    return exact_sum(squares.tolist())


def integers(squares: torch.Tensor) -> list[float]:
    return exact_sum(summed(squares))


def measure(ways: tuple[Callable, ...], squares: torch.Tensor, repeats: int) -> list[float]:
    """Return the median milliseconds of each way."""
    clock = time.process_time if squares.is_cpu else time.perf_counter
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(repeats):
        for found, way in zip(times, ways):
            begin = clock()
            way(squares)
            found.append((clock() - begin) * 1e3)
    return [statistics.median(found) for found in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| blocks | floats in Python, ms | integers, ms |\n|---|---|---|")
    for count in BLOCKS:
        squares = (
            (torch.rand(count, generator=torch.Generator().manual_seed(1)) * 4 + 30)
            .double()
            .square_()
            .to(options.device)
        )
        assert floats(squares) == integers(squares)
        before, now = measure((floats, integers), squares, options.repeats)
        print(f"| {count:,} | {before:.2f} | {now:.2f} |")


if __name__ == "__main__":
    main()
