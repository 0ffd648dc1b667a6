"""Speed of fp32 matrix products on a CPU: torch's own (MKL), oneDNN's, and which of them mpitrain.model.linear takes.

    python benchmarks/products.py [--rows 256] [--repeats 60] [--threads 1]

GFLOP/s, the libraries taking turns, medians. Shapes: the weights of the reference model and of wider and narrower ones. "forward" is
x @ weight.T, "backward" is grad @ weight. Prints a Markdown table.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from mpitrain.model.linear import ONEDNN, product

WEIGHTS = ((128, 384), (384, 384), (1024, 384), (384, 1024), (4096, 384), (2048, 2048), (128, 128), (64, 64))


def onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weight.T by oneDNN, whatever the shape."""
    return ONEDNN(x, weight, None, "none", [], "")


def measure(functions: tuple[Callable, ...], x: torch.Tensor, weight: torch.Tensor, repeats: int) -> list[float]:
    """Return the median seconds of each function."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for found, function in zip(times, functions):
            begin = time.perf_counter()
            function(x, weight)
            found.append(time.perf_counter() - begin)
    return [statistics.median(found) for found in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.rows} rows, {options.threads} thread(s), GFLOP/s\n")
    print("| weight | direction | MKL | oneDNN | mpitrain | mpitrain / MKL |\n|---|---|---|---|---|---|")
    for height, width in WEIGHTS:
        weight = torch.randn(height, width)
        for direction, x, of in (
            ("forward", torch.randn(options.rows, width), weight),
            ("backward", torch.randn(options.rows, height), weight.t()),
        ):
            seconds = measure((functional.linear, onednn, product), x, of, options.repeats)
            speeds = " | ".join(f"{2e-9 * options.rows * height * width / each:.1f}" for each in seconds)
            print(f"| {height} x {width} | {direction} | {speeds} | {seconds[0] / seconds[2]:.2f} |")


if __name__ == "__main__":
    main()
