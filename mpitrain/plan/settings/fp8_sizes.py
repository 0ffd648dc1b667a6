"""The sides of the matrices that a rank multiplies in fp8.

Multiples of 16, or the GPU's instructions have no such product.

width            of the residual stream
query heads      their features on one rank of tp: rows of q, columns of the output
key-value heads  the same
hidden units     of the feed-forward, on one rank of tp
positions        of a microbatch, over which a weight gradient is summed: on one rank of cp, of a
                 segment; with parallel.async_tp, of a piece of the sequence that is computed while
                 others travel (parallel/async_tp.py)
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.plan.declared.resolved import ResolvedConfig, ResolvedModel, ResolvedParallel
from mpitrain.plan.settings.attention import head_width

MULTIPLE = 16  # of fp8 numbers: pytorch, ATen/native/cuda/ScaledBlas.cpp


class Side(NamedTuple):
    """A side's length, and the keys and the numbers that it comes from."""

    length: int
    words: str
    numbers: str


def refuse_odd_sides(config: ResolvedConfig, segments: int = 1) -> None:
    """Raise ConfigError for the first side in fp8 that isn't a multiple of 16. segments: of a sequence."""
    if config.precision.compute != "fp8":
        return
    sequence, micro, parallel = config.data.sequence, config.batch.micro, config.parallel
    weights = _of_weights(config.model, head_width(config), parallel.tp)
    for side in (*weights, *_positions(sequence, micro, parallel, segments)):
        if side.length % MULTIPLE:
            length = f" = {side.length}" if side.numbers != str(side.length) else ""
            raise ConfigError(
                f'precision.compute = "fp8": found {side.words} = {side.numbers}{length}; needed a multiple '
                f"of {MULTIPLE}, as every side of a matrix multiplied in fp8 is; change one of these, or use "
                'precision.compute = "bf16"'
            )


def _of_weights(model: ResolvedModel, width: int, tp: int) -> Iterator[Side]:
    """Yield the sides of weights. width: of a head."""
    stream, over_tp = [("model.width", model.width)], [("parallel.tp", tp)]
    yield _side(stream)
    apart = width * model.heads != model.width
    head = ("attention.head_width" if apart else "model.width / model.heads", width)
    yield _side([("model.heads", model.heads), head] if apart else stream, over_tp)
    divided = model.kv_heads >= tp  # else each rank has one
    yield _side([("model.kv_heads", model.kv_heads), head], over_tp) if divided else _side([head])
    yield _side([("model.ffn", model.ffn)], over_tp)


def _positions(sequence: int, micro: int, parallel: ResolvedParallel, segments: int) -> Iterator[Side]:
    """Yield the positions that a product sums over.

    With async_tp these are chunks and the two parts of the own chunk.
    """
    factors = [("batch.micro", micro), ("data.sequence", sequence)]
    divisors = [("parallel.cp", parallel.cp), ("segments", segments)]
    in_chunks = parallel.tp > 1 and parallel.async_tp
    divisors += [("parallel.tp", parallel.tp)] * in_chunks
    yield _side(factors, divisors)
    if in_chunks:
        chunk = sequence // parallel.cp // segments // parallel.tp
        halves = _side(factors, [*divisors, ("2 (parallel.async_tp)", 2)])
        yield halves._replace(length=micro * (chunk // 2))


def _side(factors: list[tuple[str, int]], divisors: Sequence[tuple[str, int]] = ()) -> Side:
    """Return a product divided by some numbers; ones go without saying."""
    shown = [(name, number) for name, number in divisors if number > 1]
    words = " / ".join((" x ".join(name for name, _ in factors), *(name for name, _ in shown)))
    numbers = " / ".join((" x ".join(str(n) for _, n in factors), *(str(n) for _, n in shown)))
    return Side(math.prod(n for _, n in factors) // math.prod(n for _, n in divisors), words, numbers)
