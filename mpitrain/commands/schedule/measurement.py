"""`mpitrain schedule compare --trace`: what a run measured, under what the simulator makes of its times."""

import json
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from mpitrain.schedules.actions import COMPUTE, RECEIVES
from mpitrain.schedules.play.measured import MeasuredTrace, costs, predict, typical
from mpitrain.schedules.play.scale import to_scale
from mpitrain.schedules.play.simulate import Timeline

MARGIN = len("rank 000 simulated ")


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
        """From the end of a send until a rank that was waiting for it goes on: the median over steps."""
        return median(costs(timeline).latency for timeline in self.trace.timelines)

    @property
    def difference(self) -> float:
        """By which share of it the simulated makespan is longer than the measured one."""
        return self.simulated_makespan / self.makespan - 1 if self.makespan else 0.0

    def ranks(self) -> list[dict[str, float]]:
        """Return computing, waiting, and the end of every rank, measured and simulated: medians
        over steps.
        """
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


# ---------------------------------------------------------------- text


def as_text(measurement: Measurement, width: int) -> str:
    """Return both timelines to scale, and the numbers."""
    numbers = [_makespan(measurement), _ranks(measurement), _times(measurement)]
    return "\n\n".join([_headline(measurement), drawn(measurement, width), *numbers])


def _headline(measurement: Measurement) -> str:
    trace = measurement.trace
    replicas = len(trace.timelines) // len(trace.steps)
    steps = (
        f"step {trace.steps[0]}"
        if len(trace.steps) == 1
        else f"{len(trace.steps)} steps, {trace.steps[0]} to {trace.steps[-1]}"
    )
    copies = f", {replicas} data-parallel replicas" if replicas > 1 else ""
    return (
        f"{trace.schedule}: {len(measurement.simulated.programs)} ranks, {steps}{copies}; milliseconds, up "
        "to the update"
    )


def drawn(measurement: Measurement, width: int) -> str:
    """Draw, rank by rank, the measured timeline under the simulated one, both in one scale."""
    end = max(measurement.simulated.makespan, measurement.typical.makespan)
    segments = measurement.trace.segments
    rows = [
        to_scale(timeline, max(20, width - MARGIN), end, segments)
        for timeline in (measurement.simulated, measurement.typical)
    ]
    lines = []
    for rank, (simulated, measured) in enumerate(zip(*rows)):
        lines += [f"rank {rank}".ljust(9) + "simulated " + simulated, " " * 9 + "measured  " + measured]
    return "\n".join(line.rstrip() for line in lines)


def _makespan(measurement: Measurement) -> str:
    spans = [timeline.makespan for timeline in measurement.trace.timelines]
    among = "" if len(spans) == 1 else f" (median of {len(spans)}, {min(spans):.3f} to {max(spans):.3f})"
    return (
        f"makespan     measured {measurement.makespan:.3f}{among}, simulated "
        f"{measurement.simulated_makespan:.3f}: {measurement.difference:+.1%}"
    )


def _ranks(measurement: Measurement) -> str:
    rows = [
        ("", "computing", "", "waiting", "", "end", "", ""),
        ("rank", *("measured", "simulated") * 3, "difference"),
    ]
    for rank, numbers in enumerate(measurement.ranks()):
        share = numbers["simulated_end"] / numbers["end"] - 1 if numbers["end"] else 0.0
        rows.append((str(rank), *(f"{value:.3f}" for value in numbers.values()), f"{share:+.1%}"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )


def _times(measurement: Measurement) -> str:
    times = [f"{name} {value:.3f}" for name, value in measurement.computations()]
    lines = [", ".join(times[left : left + 8]) for left in range(0, len(times), 8)]
    message = f"a message    {measurement.message:.3f} to a rank that waits for it"
    return "on average   " + ",\n             ".join(lines) + "\n" + message


def as_json(measurement: Measurement) -> str:
    """Return one JSON object, times in milliseconds."""
    trace = measurement.trace
    return json.dumps(
        {
            "schedule": trace.schedule,
            "steps": list(trace.steps),
            "makespan": measurement.makespan,
            "makespans": [timeline.makespan for timeline in trace.timelines],
            "simulated_makespan": measurement.simulated_makespan,
            "difference": measurement.difference,
            "ranks": measurement.ranks(),
            "times": dict(measurement.computations()),
            "message": measurement.message,
        }
    )
