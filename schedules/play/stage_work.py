"""Times of stages that differ: what blocks take by their work, and what embedding and head add.

A run measures the stages it has; another schedule may divide the same blocks otherwise.
"""

from collections.abc import Iterable, Sequence
from statistics import mean, median
from typing import NamedTuple

from mpitrain.schedules.actions import COMPUTE, RECEIVES, SENDS
from mpitrain.schedules.options import StageTimes, Times
from mpitrain.schedules.play.measured import Costs, Key, MeasuredTrace, costs, predict, typical
from mpitrain.schedules.play.timeline import Timeline

# other orders touch memory at other times: some take 2 % more where a trace meets its own.
LEAST_ERROR = 0.02
# a trace that misses by more tells of a disturbed machine, not of equal schedules
MOST_ERROR = 0.05


class StageWork(NamedTuple):
    """Times of one microbatch: of blocks whose work is 1, of embedding, of head, and of a message.

    send, receive: how long a message keeps its ranks from computing.  error: by which share of a
    makespan these times miss the run they were measured in.
    """

    block: StageTimes
    first: StageTimes
    last: StageTimes
    message: float
    send: float = 0
    receive: float = 0
    error: float = 0

    def stage_times(self, works: Sequence[float], rank_of: Sequence[int]) -> tuple[StageTimes, ...]:
        """Return the times of stages, with what their messages to other ranks take.

        works: of the blocks of each.  rank_of: the rank of each.
        """
        last = len(works) - 1
        times = []
        for stage, work in enumerate(works):
            forward, grad, weight = (
                work * block + (stage == 0) * first + (stage == last) * head
                for block, first, head in zip(self.block, self.first, self.last)
            )
            before = stage > 0 and rank_of[stage - 1] != rank_of[stage]
            after = stage < last and rank_of[stage + 1] != rank_of[stage]
            forward += before * self.receive + after * self.send
            grad += after * self.receive + before * self.send
            times.append(StageTimes(forward, grad, weight))
        return tuple(times)


def stage_work(trace: MeasuredTrace) -> StageWork:
    """Return what a measured run says of blocks and ends.

    A stage whose backward wasn't split counts half of it for I and half for W. With two stages the
    embedding counts as part of the first one's blocks.
    """
    measured = measured_stages(trace)
    works = trace.works or (1.0,) * len(measured)
    parts = [_divided(times, works) for times in zip(*measured)]
    block, first, last = (StageTimes(*times) for times in zip(*parts))
    step = _typical_costs(trace)
    send, receive = (
        median([time for action, time in step.times.items() if action.kind in kinds] or [0])
        for kinds in (SENDS, RECEIVES)
    )
    message = step.latency - step.taking
    return StageWork(block, first, last, message, send, receive + step.taking, _error(trace, step))


def _typical_costs(trace: MeasuredTrace) -> Costs:
    steps = [costs(timeline) for timeline in trace.timelines]
    by_kind = typical(trace.timelines)
    times = {
        action: by_kind[action.kind, action.stage, action.part]
        if action.kind in COMPUTE
        else median(step.times[action] for step in steps)
        for action in steps[0].times
    }
    latency, taking = median(step.latency for step in steps), median(step.taking for step in steps)
    return Costs(times, latency, min(taking, latency), steps[0].lead)


def _error(trace: MeasuredTrace, step: Costs) -> float:
    """Return the most by which a typical step misses a rank's end, or steps differ, as a share.

    Within LEAST_ERROR and MOST_ERROR.
    """
    makespans = [timeline.makespan for timeline in trace.timelines]
    typical_makespan = median(makespans)
    played = predict(trace.timelines[0], step)
    missed = [
        abs(predicted - median(measured))
        for predicted, *measured in zip(_ends(played), *map(_ends, trace.timelines))
    ]
    spread = median(abs(makespan - typical_makespan) for makespan in makespans)
    error = max(*missed, spread) / typical_makespan if typical_makespan else 0.0
    return min(max(error, LEAST_ERROR), MOST_ERROR)


def _ends(timeline: Timeline) -> list[float]:
    return [ends[-1] if ends else 0.0 for ends in timeline.ends]


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
    """Return the time of a whole computation, or its parts' sum where none runs as a whole."""
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
