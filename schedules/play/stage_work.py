"""Times of stages that differ: what blocks take by their work, and what embedding and head add.

A run measures the stages it has. Another schedule may divide the same blocks otherwise.
"""

from collections.abc import Iterable, Sequence
from statistics import mean, median
from typing import NamedTuple

from mpitrain.schedules.options import StageTimes, Times
from mpitrain.schedules.play.measured import Key, MeasuredTrace, costs, typical


class StageWork(NamedTuple):
    """Times of one microbatch: of blocks whose work is 1, of embedding, of head, and of a message."""

    block: StageTimes
    first: StageTimes
    last: StageTimes
    message: float

    def stage_times(self, works: Sequence[float]) -> tuple[StageTimes, ...]:
        """Return the times of stages. works: of the blocks of each."""
        last = len(works) - 1
        return tuple(
            StageTimes(
                *(
                    work * block + (stage == 0) * first + (stage == last) * head
                    for block, first, head in zip(self.block, self.first, self.last)
                )
            )
            for stage, work in enumerate(works)
        )


def stage_work(trace: MeasuredTrace) -> StageWork:
    """Return what a measured run says of blocks and ends.

    A stage whose backward wasn't split counts half of it for inputs and half for weights. With two
    stages the embedding counts as part of the first one's blocks.
    """
    measured = measured_stages(trace)
    works = trace.works or (1.0,) * len(measured)
    parts = [_divided(times, works) for times in zip(*measured)]
    message = median(costs(timeline).latency for timeline in trace.timelines)
    block, first, last = (StageTimes(*times) for times in zip(*parts))
    return StageWork(block, first, last, message)


def measured_stages(trace: MeasuredTrace) -> tuple[StageTimes, ...]:
    """Return the times of each stage of one copy, for a whole microbatch."""
    times = typical(trace.timelines)
    depth = (1 + max(stage for _, stage, _ in times if stage is not None)) // trace.copies
    return tuple(
        StageTimes(*(trace.segments * time for time in _times_of_stage(times, stage, depth)))
        for stage in range(depth)
    )


def _times_of_stage(times: dict[Key, float], stage: int, depth: int) -> tuple[float, float, float]:
    """Return F, I and W of a stage, a mean over its copies."""

    def time_of_kind(kind: str) -> float:
        stages = {number for found, number, _ in times if found == kind and number is not None}
        copies = [_whole(times, kind, number) for number in stages if number % depth == stage]
        return mean(copies) if copies else 0.0

    whole = time_of_kind("B")
    return time_of_kind("F"), time_of_kind("I") or whole / 2, time_of_kind("W") or whole / 2


def _whole(times: dict[Key, float], kind: str, stage: int) -> float:
    """Return the time of a whole computation, or the sum of its parts where none runs as a whole."""
    if (kind, stage, None) in times:
        return times[kind, stage, None]
    return sum(time for key, time in times.items() if key[:2] == (kind, stage))


def _divided(times: Sequence[float], works: Sequence[float]) -> tuple[float, float, float]:
    """Divide the times of stages into those of work 1, of the first end and of the last."""
    inner = range(1, len(times) - 1) or range(1)
    block = sum(times[stage] for stage in inner) / sum(works[stage] for stage in inner)
    ends = [max(0.0, times[stage] - block * works[stage]) for stage in (0, -1)]
    first = ends[0] if len(times) > 1 else 0.0
    return block, first, ends[1] if len(times) > 1 else 0.0


def share_of_rank(stage_times: Iterable[StageTimes], num_ranks: int, message: float) -> Times:
    """Return the times of a rank's share of layers, on average over ranks."""
    forward, grad, weight = (sum(times) / num_ranks for times in zip(*stage_times))
    return Times(forward, grad, weight, message)
