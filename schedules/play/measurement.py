"""What a run measured, beside what the simulator makes of its times."""

from dataclasses import dataclass
from functools import cached_property
from statistics import median

from mpitrain.schedules.actions import COMPUTE, RECEIVES
from mpitrain.schedules.play.measured import MeasuredTrace, costs, predict, typical
from mpitrain.schedules.play.timeline import Timeline


@dataclass(frozen=True)
class Measurement:
    """The steps of a trace, and their prediction from their own times, in milliseconds."""

    trace: MeasuredTrace

    @cached_property
    def simulations(self) -> list[Timeline]:
        """Every step, played with its own times."""
        return [predict(timeline, costs(timeline)) for timeline in self.trace.timelines]

    @cached_property
    def _typical(self) -> int:
        spans = [timeline.makespan for timeline in self.trace.timelines]
        return spans.index(sorted(spans)[(len(spans) - 1) // 2])

    @property
    def typical(self) -> Timeline:
        """The measured step whose makespan is the median: the one that is drawn."""
        return self.trace.timelines[self._typical]

    @property
    def simulated(self) -> Timeline:
        """The same step, simulated."""
        return self.simulations[self._typical]

    @cached_property
    def makespan(self) -> float:
        """The median over steps, measured."""
        return median(timeline.makespan for timeline in self.trace.timelines)

    @cached_property
    def simulated_makespan(self) -> float:
        """The median over steps, simulated."""
        return median(timeline.makespan for timeline in self.simulations)

    @cached_property
    def message(self) -> float:
        """From the end of a send until a rank that was waiting for it continues: the median over steps."""
        return median(costs(timeline).latency for timeline in self.trace.timelines)

    @property
    def difference(self) -> float:
        """By which share of it the simulated makespan is longer than the measured one."""
        return self.simulated_makespan / self.makespan - 1 if self.makespan else 0.0

    def ranks(self) -> list[dict[str, float]]:
        """Return each rank's computing, waiting and end, measured and simulated: medians."""
        return [self._rank(rank) for rank in range(len(self.simulated.programs))]

    def _rank(self, rank: int) -> dict[str, float]:
        numbers = {}
        for name, figure in (("computing", Timeline.busy), ("waiting", waiting), ("end", _end)):
            numbers[name] = median(figure(timeline, rank) for timeline in self.trace.timelines)
            numbers[f"simulated_{name}"] = median(figure(timeline, rank) for timeline in self.simulations)
        return numbers

    def computations(self) -> list[tuple[str, float]]:
        """Return the typical time of each kind of computation on each stage, as `B@1` or `B@1/0`."""
        times = typical(self.trace.timelines)
        ordered = sorted(
            times, key=lambda key: (key[1], COMPUTE.index(key[0]), -1 if key[2] is None else key[2])
        )
        return [
            (f"{k}@{stage}" + ("" if part is None else f"/{part}"), times[k, stage, part])
            for k, stage, part in ordered
        ]


def waiting(timeline: Timeline, rank: int) -> float:
    """Return the time a rank waits in its receives."""
    row = zip(timeline.programs[rank], timeline.starts[rank], timeline.ends[rank])
    return sum(end - start for action, start, end in row if action.kind in RECEIVES)


def _end(timeline: Timeline, rank: int) -> float:
    return timeline.ends[rank][-1] if timeline.ends[rank] else 0.0
