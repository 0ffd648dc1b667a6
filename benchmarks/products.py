"""Speed of matrix products on a CPU.

torch's own (MKL), oneDNN's, and which of them mpitrain.kernels.products takes.

    python benchmarks/products.py [--rows 256] [--repeats 60] [--threads 1] [--type fp32]
    ONEDNN_MAX_CPU_ISA=AVX512_CORE python benchmarks/products.py --type bf16      of a processor
        with less

GFLOP/s, the libraries taking turns, medians. Shapes: the weights of the reference model and of
wider and narrower ones. "forward" is x @ weight.T, "backward" is grad @ weight. Of 16-bit types
torch's are oneDNN's as well, and the table has fp32 beside them. Prints a Markdown table.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.nn import functional

from mpitrain.kernels.precision import TYPES
from mpitrain.kernels.processor import onednn_product
from mpitrain.kernels.products import product

WEIGHTS = ((128, 384), (384, 384), (1024, 384), (384, 1024), (4096, 384), (2048, 2048), (128, 128), (64, 64))


def ways(dtype: torch.dtype) -> dict[str, tuple[Callable, torch.dtype]]:
    """Return what is compared: the function, and of which type its factors are.

    The first is what the last is divided by.
    """
    if dtype.itemsize > 2:
        return {
            "MKL": (functional.linear, dtype),
            "oneDNN": (onednn_product, dtype),
            "mpitrain": (product, dtype),
        }
    return {
        "torch": (functional.linear, dtype),
        "mpitrain in fp32": (product, torch.float32),
        "mpitrain": (product, dtype),
    }


def measure(
    functions: Iterable[tuple[Callable, torch.dtype]], x: torch.Tensor, weight: torch.Tensor, repeats: int
) -> list[float]:
    """Return the median seconds of each function."""
    calls = [partial(function, x.to(dtype), weight.to(dtype)) for function, dtype in functions]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for found, call in zip(times, calls):
            begin = time.perf_counter()
            call()
            found.append(time.perf_counter() - begin)
    return [statistics.median(found) for found in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--type", default="fp32", choices=("fp32", "fp64", "bf16", "fp16"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    compared = ways(TYPES[options.type])
    print(f"{options.type}, {options.rows} rows, {options.threads} thread(s), GFLOP/s\n")
    print(
        f"| weight | direction | {' | '.join(compared)} | mpitrain / {next(iter(compared))} |\n"
        "|---|---|---|---|---|---|"
    )
    for height, width in WEIGHTS:
        weight = torch.randn(height, width)
        for direction, x, of in (
            ("forward", torch.randn(options.rows, width), weight),
            ("backward", torch.randn(options.rows, height), weight.t()),
        ):
            seconds = measure(compared.values(), x, of, options.repeats)
            speeds = " | ".join(f"{2e-9 * options.rows * height * width / each:.1f}" for each in seconds)
            print(f"| {height} x {width} | {direction} | {speeds} | {seconds[0] / seconds[-1]:.2f} |")


if __name__ == "__main__":
    main()
