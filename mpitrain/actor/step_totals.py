"""What all ranks have to know at the end of a step: one exchange over data, one over the model.

Losses and squares of gradients travel as exact sums (optim/norm.py), so that they are the same bits
however microbatches and parameters are divided over ranks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from mpitrain.actor.step_work import Work, number_in_step
from mpitrain.comm.axis import Axis
from mpitrain.comm.collectives import all_gather
from mpitrain.comm.mesh import Mesh
from mpitrain.data.documents import num_counted
from mpitrain.optim import norm
from mpitrain.plan.plan import NOISE, Plan


class Measure:
    """How the numbers of a step are read from its tensors."""

    def numbers(self, tensors: Iterable[torch.Tensor]) -> list[float]:
        """Return losses, and the metrics of layers."""
        scalars = list(tensors)
        return torch.stack(scalars).tolist() if scalars else []

    def squares(self, grads: Iterable[torch.Tensor]) -> list[float]:
        """Return squares of gradients, block by block."""
        return norm.squares(grads)

    def count(self, targets: Iterable[torch.Tensor]) -> int:
        """Return how many targets carry loss."""
        return int(sum(map(num_counted, targets)))

    def total(self, parts: list["Totals"]) -> "Totals":
        """Return the totals of all ranks."""
        return together(parts)


class Totals(NamedTuple):
    """Of one rank, of some, or of all.

    loss, squares, metrics: exact sums.
    count: targets that carry loss.
    stop: how urgently a rank was asked to stop, 0: not at all.
    peak: the most stashes a rank held at once.
    save_progress: the highest of the numbers that ranks tell of what they do beside the step
    (training/saving/saver.py).
    """

    loss: list[float]
    squares: list[float]
    metrics: tuple[list[float], ...] = ()
    count: float = 0.0
    stop: int = 0
    peak: int = 0
    save_progress: int = 0


def exchange(mine: Totals, axis: Axis) -> list[Totals]:
    """Return the totals of all ranks of `axis`, in their order. Collective over it."""
    sums = (mine.loss, mine.squares, *mine.metrics)
    others = mine[3:]
    numbers = np.array([*chain(*sums), *others], np.float64)
    gathered = all_gather(numbers, axis, np.empty(axis.size * len(numbers))).wait()
    return [
        _read(row[: -len(others)].reshape(len(sums), -1).tolist(), *row[-len(others) :].tolist())
        for row in gathered.reshape(axis.size, -1)
    ]


def _read(sums: list[list[float]], count: float, stop: float, peak: float, save_progress: float) -> Totals:
    loss, squares, *metrics = sums
    return Totals(loss, squares, tuple(metrics), count, int(stop), int(peak), int(save_progress))


def together(several: list[Totals]) -> Totals:
    """Return the totals of several ranks."""
    loss, squares, metrics, count, stop, peak, save_progress = zip(*several)
    metrics = tuple(norm.exact_sum([*chain(*sums)]) for sums in zip(*metrics))
    loss = norm.exact_sum([*chain(*loss)])
    squares = norm.exact_sum([*chain(*squares)])
    return Totals(loss, squares, metrics, sum(count), max(stop), max(peak), max(save_progress))


@dataclass
class StepTotals:
    """What the ranks of a step have measured, added up. measure: reads the numbers."""

    _plan: Plan
    _mesh: Mesh
    measure: Measure

    def of(self, work: Work, squares: list[float]) -> list[Totals]:
        """Return the totals of each part of the model. Collective. squares: of gradients here."""
        # the ranks of tp have the same, but for squares of gradients
        first = self._mesh["tp"].rank == 0
        losses = work.losses if first else {}
        metrics = {name: made for name, made in work.metrics.items() if first or name in NOISE}
        numbers = self.measure.numbers
        counted = (work.microbatches[number_in_step(self._plan.table, *key)].targets for key in losses)
        mine = Totals(
            norm.exact_sum(numbers(losses[key] for key in sorted(losses))),
            norm.exact_sum(squares),
            tuple(norm.exact_sum(numbers(metrics.get(name, ()))) for name in self._plan.metrics),
            self.measure.count(counted),
            work.asked.stop(),
            work.peak_in_flight,
            work.asked.save_progress,
        )
        return exchange(together(exchange(mine, self._mesh["data"])), self._mesh["model"])
