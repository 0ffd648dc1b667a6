"""Time against memory: all schedules at one size, and searched orders under several limits.

On the front stands what no other schedule is as short as with as little memory.
"""

from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

from mpitrain.errors import ScheduleError
from mpitrain.schedules import catalog
from mpitrain.schedules.auto_choice import StageTimesOf
from mpitrain.schedules.options import Options
from mpitrain.schedules.played import PROVED_AT_ONCE, Played, played
from mpitrain.schedules.search.problem import ROUNDING, problem_of
from mpitrain.schedules.search_progress import SearchProgress

MOST_LIMITS = 8  # that searches are asked with
SEARCHED = tuple(name for name, family in catalog.FAMILIES.items() if "stage_times" in family.takes)


class StepSize(NamedTuple):
    """What is to be scheduled. stage_times_of: times of stages by their ranks, not equal shares.

    options: chunks of schedules that leave a choice, times, and what of a stash is held when.
    """

    num_ranks: int
    num_microbatches: int
    options: Options
    stage_times_of: StageTimesOf | None = None

    def built(self, name: str, limit: float | None) -> Played:
        """Build and play a schedule. Raises ScheduleError if it isn't defined for this size."""
        _, asked = self._asked(name, limit)
        options = asked.only(catalog.FAMILIES[name].takes)
        table = catalog.build(name, self.num_ranks, self.num_microbatches, options)
        return played(table, asked._replace(memory_limit=None), PROVED_AT_ONCE // len(catalog.NAMES))

    def bound(self, name: str, limit: float) -> float:
        """Return what no order of a schedule's placement is shorter than within a limit."""
        rank_of, asked = self._asked(name, limit)
        return problem_of(rank_of, self.num_microbatches, asked).bound

    def _asked(self, name: str, limit: float | None) -> tuple[tuple[int, ...], Options]:
        chunks = self.options.chunks if name in catalog.LOOPED else None
        rank_of = catalog.placement(name, self.num_ranks, catalog.chunks_of(name, chunks))
        stage_times = self.stage_times_of(rank_of) if self.stage_times_of else None
        late = 1.0 if self.options.weight_memory is None else self.options.weight_memory
        given = self.options._replace(chunks=chunks, stage_times=stage_times, notify=None)
        return rank_of, given._replace(memory_limit=limit, weight_memory=late)


class Point(NamedTuple):
    """A schedule on the plane of time and memory. bound: for its peak, over all placements.

    limit: with which an order was searched; None: a fixed one.
    """

    played: Played
    limit: float | None
    bound: float

    @property
    def makespan(self) -> float:
        return self.played.timeline.makespan

    @property
    def peak(self) -> float:
        return max(self.played.peak_stashes)

    @property
    def name(self) -> str:
        name = self.played.table.name
        return name if self.limit is None else f"{name} --memory-limit {self.limit:g}"


class Frontier(NamedTuple):
    """The Pareto front, from least memory to least time, and the other schedules by their time."""

    front: list[Point]
    others: list[Point]


def frontier(size: StepSize) -> Frontier:
    """Play all schedules, and search with limits from one stash to twice the ranks."""
    limits = _limits(size)
    progress = SearchProgress(size.options.notify)
    progress.expect(1 + len(limits) * len(SEARCHED))
    points = list(_fixed(size))
    progress.step()
    for limit in limits:
        for name in SEARCHED:
            best = min((one.makespan for one in points if one.peak <= limit * (1 + ROUNDING)), default=None)
            if best is None or size.bound(name, limit) < best * (1 - ROUNDING):
                points.append(_point(size, size.built(name, limit), limit))
            progress.step()
    return _divided(points)


def _fixed(size: StepSize) -> Iterator[Point]:
    for name in catalog.NAMES:
        if name not in SEARCHED:
            try:
                yield _point(size, size.built(name, None), None)
            except ScheduleError:
                continue  # not defined for this size


def _point(size: StepSize, one: Played, limit: float | None) -> Point:
    peak = max(one.peak_stashes)
    bounds = [size.bound(name, max(1, peak)) for name in SEARCHED]
    return Point(one, limit, min(one.bound, *bounds))


def _limits(size: StepSize) -> list[float]:
    """Return limits in whole or half stashes, from one to all that a step can hold, or 2p."""
    most = min(2 * size.num_ranks, size.num_microbatches)
    halves = max(0, 2 * (most - 1))
    step = max(1, ceil(halves / (MOST_LIMITS - 1)))
    return [1 + number / 2 for number in range(0, halves, step)] + [most]


def _divided(points: Sequence[Point]) -> Frontier:
    """Divide points into those that no other is as good as, and the rest.

    A second copy is memory too, and segments are shorter than microbatches: neither is on the
    front.
    """
    front: list[Point] = []
    others: list[Point] = []
    for point in sorted(points, key=_order):
        best = front[-1].makespan if front else None
        table = point.played.table
        is_longer = best is not None and point.makespan >= best * (1 - ROUNDING)
        if is_longer or table.copies * table.segments > 1:
            others.append(point)
        else:
            front.append(point)
    return Frontier(front, sorted(others, key=lambda point: point.makespan))


def _order(point: Point) -> tuple[float, float, bool]:
    """Of equal points a fixed schedule comes before a searched order."""
    return round(point.peak, 9), float(f"{point.makespan:.9g}"), point.limit is not None
