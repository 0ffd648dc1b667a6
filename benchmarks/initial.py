"""Time to make initial weights.

By the definition, as they were until each rank made its own by vectors, and as they are.

    python benchmarks/initial.py [--elements 1048576] [--repeats 21] [--threads 1] [--layers 16
        --width 2048]

Nanoseconds an element, the ways taking turns: medians by the clock and of the processor, and the
least of the processor, which is what to compare on a machine that others use, too. Then what they
are made of, and the weights of a whole model of one rank, bucket by bucket (0
layers: not at all). Prints Markdown tables.
"""

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from mpitrain import config as settings
from mpitrain.model.families.catalog import plan_of
from mpitrain.parallel.zero.initial import Uniform, initialise
from mpitrain.parallel.zero.inverse_normal import CHUNK, Rounded, exact, table
from mpitrain.parallel.zero.shards import Weights, ZeroGroup
from mpitrain.plan.declared.parameters import WHOLE, Spec
from mpitrain.plan.division.buckets import map_bucket
from mpitrain.plan.settings.resolve import resolve

STD = 0.02


def by_definition(length: int) -> torch.Tensor:
    """Return weights as they are defined.

    bits, uniform numbers, the inverse distribution, each for the whole parameter in fp64.
    """
    key = np.frombuffer(hashlib.sha256(b"1/w").digest()[:16], np.uint64)
    bits = np.random.Philox(key=key).random_raw(length)
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return (torch.special.ndtri(torch.from_numpy(uniform)) * STD).float()


def made(length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return weights as a rank makes them."""
    out = torch.zeros(length, dtype=dtype)
    spec = Spec("w", (length,), std=STD, whole=(length,), offset=(0,))
    initialise(map_bucket((spec,), 1), 0, length, 1, out, torch.get_num_threads())
    return out


def columns(length: int) -> torch.Tensor:
    """Return a slice of an eighth of the columns of a matrix, as a rank of 8 has it."""
    spec = Spec("w", (length // 1024, 1024), std=STD, whole=(length // 1024, 8192), offset=(0, 2048))
    out = torch.zeros(spec.numel)
    initialise(map_bucket((spec,), 1), 0, spec.numel, 1, out, torch.get_num_threads())
    return out


def parts() -> dict[str, tuple[Callable, int]]:
    """Return what weights are made of, and of how many elements."""
    stream = Uniform(1, "w")
    u = np.empty(CHUNK)
    out = np.empty(CHUNK, np.float32)
    rounded = Rounded(table())
    stream.fill(u, 0)
    return {
        "uniform numbers from Philox": (lambda: stream.fill(np.empty_like(u), 0), CHUNK),
        "to fp32 normal ones, by vectors": (lambda: rounded(u, out, STD), CHUNK),
        "to normal ones, exact": (lambda: exact(u, STD), CHUNK),
    }


def measure(ways: dict[str, tuple[Callable, int]], repeats: int) -> None:
    """Print the times of each way."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, (way, length) in ways.items():
            clock = time.perf_counter()
            processor = time.process_time()
            way()
            times[name].append(
                (
                    (time.perf_counter() - clock) / length * 1e9,
                    (time.process_time() - processor) / length * 1e9,
                )
            )
    print("| ns an element | clock, median | processor, median | least |\n|---|---|---|---|")
    for name, found in times.items():
        clock, processor = zip(*found)
        print(
            f"| {name} | {statistics.median(clock):.1f} | {statistics.median(processor):.1f} | "
            f"{min(processor):.1f} |"
        )


def model(layers: int, width: int) -> None:
    """Print how long a rank takes that holds a whole model."""
    sizes = (
        f"model.layers={layers}",
        f"model.width={width}",
        f"model.heads={width // 64}",
        f"model.ffn={width * 4}",
        "model.vocab=32768",
    )
    (stage,) = plan_of(resolve(settings.load(None, sizes), 1, 32768)).stages
    clock = time.perf_counter()
    processor = time.process_time()
    elements = 0
    for bucket in stage.buckets(WHOLE):
        elements += Weights(
            map_bucket(bucket.specs, 1), torch.float32, torch.device("cpu"), ZeroGroup(), 1
        ).map.length
    clock = time.perf_counter() - clock
    processor = time.process_time() - processor
    print(
        f"\n{elements / 1e9:.2f}e9 elements of a model: {clock:.1f} s by the clock, {processor:.1f} s of the "
        "processor"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=2**20)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    length = options.elements // 1024 * 1024
    assert made(length, torch.float32).equal(by_definition(length)), "other values"
    ways = {
        "by the definition": (lambda: by_definition(length), length),
        "as made, fp32": (lambda: made(length, torch.float32), length),
        "as made, bf16": (lambda: made(length, torch.bfloat16), length),
        "as made, fp64": (lambda: made(length, torch.float64), length),
        "as made, fp32, 1,024 columns of 8,192": (lambda: columns(length), length),
    }
    print(f"{length:,} elements, {options.threads} thread(s)\n")
    measure(ways, options.repeats)
    print()
    measure(parts(), 10 * options.repeats)
    if options.layers:
        model(options.layers, options.width)


if __name__ == "__main__":
    main()
