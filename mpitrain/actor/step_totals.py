"""What all ranks have to know at the end of a step: one small exchange over the data axis, and one over the parts of the model.

Losses and squares of gradients travel as exact sums (optim/norm.py), so that they are the same bits however microbatches and
parameters are divided over ranks.
"""

from itertools import chain
from typing import NamedTuple

import numpy as np

from mpitrain.comm.collectives import all_gather
from mpitrain.comm.mesh import Axis
from mpitrain.optim.norm import PARTS, exact_sum


class Totals(NamedTuple):
    """Of one rank, of some, or of all.

    loss, squares: exact sums.  count: targets that carry loss.  stop: whether a rank was asked to stop.  peak: the most stashes a rank
    held at once.
    """

    loss: list[float]
    squares: list[float]
    count: float = 0.0
    stop: bool = False
    peak: int = 0


def exchange(mine: Totals, axis: Axis) -> list[Totals]:
    """Return the totals of all ranks of `axis`, in their order. Collective over it."""
    numbers = np.array([*mine.loss, *mine.squares, mine.count, mine.stop, mine.peak], np.float64)
    every = all_gather(numbers, axis, np.empty(axis.size * len(numbers))).wait().reshape(axis.size, -1).tolist()
    return [Totals(row[:PARTS], row[PARTS : 2 * PARTS], row[-3], bool(row[-2]), int(row[-1])) for row in every]


def together(several: list[Totals]) -> Totals:
    """Return the totals of several ranks."""
    loss, squares, count, stop, peak = zip(*several)
    return Totals(exact_sum([*chain(*loss)]), exact_sum([*chain(*squares)]), sum(count), any(stop), max(peak))
