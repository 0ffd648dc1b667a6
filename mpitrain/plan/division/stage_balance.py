"""Divide the layers of a model over pipeline stages: each rank has as much work, and each of its stages.

A pipeline takes the slowest rank's work for each microbatch, and fills as fast as the slowest stage.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate


@lru_cache
def balanced_split(costs: tuple[float, ...], ranks: tuple[int, ...], head: float) -> list[int]:
    """Return how many of a row of layers each stage has, at least one; the last stage has the head besides.

    costs: of each layer. ranks: the rank of each stage. head: the cost of the head.

    Starts even and moves single layers between neighbouring stages as long as that makes the slowest rank
    and the slowest stage together faster, or, where they stay as slow, all of them more equal.
    """
    counts = _even(len(costs), len(ranks))
    best = _unevenness(counts, costs, ranks, head)
    while True:
        moves = [moved for stage in range(len(ranks)) for moved in _moves(counts, stage)]
        rated = [(_unevenness(moved, costs, ranks, head), moved) for moved in moves]
        if not rated or min(rated)[0] >= best:
            return counts
        best, counts = min(rated)


def _even(num_layers: int, num_stages: int) -> list[int]:
    return [num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages)]


def _moves(counts: list[int], stage: int) -> list[list[int]]:
    """Return the divisions in which a neighbour of a stage has one of its layers."""
    moves = []
    for neighbour in (stage - 1, stage + 1):
        if 0 <= neighbour < len(counts) and counts[stage] > 1:
            moved = list(counts)
            moved[stage] -= 1
            moved[neighbour] += 1
            moves.append(moved)
    return moves


def _unevenness(
    counts: list[int], costs: Sequence[float], ranks: Sequence[int], head: float
) -> tuple[float, float]:
    """Return the load of the slowest rank and that of the slowest stage, and the squares of all loads.

    Rounded, so that order of addition doesn't decide.
    """
    sums = [0.0, *accumulate(costs)]
    stages = [sums[end] - sums[end - count] for count, end in zip(counts, accumulate(counts))]
    stages[-1] += head
    loads = [0.0] * (max(ranks) + 1)
    for rank, load in zip(ranks, stages):
        loads[rank] += load
    return round(max(loads) + max(stages), 9), round(sum(load * load for load in (*loads, *stages)), 9)
