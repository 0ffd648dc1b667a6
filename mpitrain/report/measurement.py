"""`mpitrain schedule compare --trace`: what a run measured, under what the simulator makes of its times."""

import json
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from mpitrain.schedules.actions import COMPUTE, RECEIVES
from mpitrain.schedules.measured import Costs, Trace, costs, predict
from mpitrain.schedules.scale import to_scale
from mpitrain.schedules.simulate import Timeline

MARGIN = len("rank 000 simulated ")


@dataclass(frozen=True)
class Measurement:
    """The steps of a trace, and their prediction from their own times, in milliseconds."""

    trace: Trace

    @cached_property
    def costs(self) -> Costs:
        return costs(self.trace.timelines)

    @cached_property
    def simulated(self) -> Timeline:
        return predict(self.trace.timelines[0], self.costs)

    @cached_property
    def typical(self) -> Timeline:
        """The measured step whose makespan is the median: the one that is drawn."""
        ordered = sorted(self.trace.timelines, key=lambda timeline: timeline.makespan)
        return ordered[(len(ordered) - 1) // 2]

    @cached_property
    def makespan(self) -> float:
        """The median over steps, measured."""
        return median(timeline.makespan for timeline in self.trace.timelines)

    @property
    def difference(self) -> float:
        """By which share of it the simulated makespan is longer than the measured one."""
        return self.simulated.makespan / self.makespan - 1 if self.makespan else 0.0

    def ranks(self) -> list[dict[str, float]]:
        """Return computing, waiting, and the end of every rank: the median over steps, and as simulated."""
        return [self._rank(rank) for rank in range(len(self.simulated.programs))]

    def _rank(self, rank: int) -> dict[str, float]:
        numbers = {}
        for name, figure in (("computing", Timeline.busy), ("waiting", waiting), ("end", _end)):
            numbers[name] = median(figure(timeline, rank) for timeline in self.trace.timelines)
            numbers[f"simulated_{name}"] = figure(self.simulated, rank)
        return numbers

    def computations(self) -> list[tuple[str, float]]:
        """Return the typical time of each kind of computation on each stage, as `B@1` or `B@1/0`."""
        kept = [key for key in self.costs.times if key[0] in COMPUTE]
        kept.sort(key=lambda key: (key[1], COMPUTE.index(key[0]), -1 if key[2] is None else key[2]))
        return [(f"{k}@{stage}" + ("" if part is None else f"/{part}"), self.costs.times[k, stage, part]) for k, stage, part in kept]


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
    steps = f"step {trace.steps[0]}" if len(trace.steps) == 1 else f"{len(trace.steps)} steps, {trace.steps[0]} to {trace.steps[-1]}"
    copies = f", {replicas} data-parallel replicas" if replicas > 1 else ""
    return f"{trace.schedule}: {len(measurement.simulated.programs)} ranks, {steps}{copies}; milliseconds, up to the update"


def drawn(measurement: Measurement, width: int) -> str:
    """Draw, rank by rank, the measured timeline under the simulated one, both in one scale."""
    end = max(measurement.simulated.makespan, measurement.typical.makespan)
    segments = measurement.trace.segments
    rows = [to_scale(timeline, max(20, width - MARGIN), end, segments) for timeline in (measurement.simulated, measurement.typical)]
    lines = []
    for rank, (simulated, measured) in enumerate(zip(*rows)):
        lines += [f"rank {rank}".ljust(9) + "simulated " + simulated, " " * 9 + "measured  " + measured]
    return "\n".join(line.rstrip() for line in lines)


def _makespan(measurement: Measurement) -> str:
    spans = [timeline.makespan for timeline in measurement.trace.timelines]
    among = "" if len(spans) == 1 else f" (median of {len(spans)}, {min(spans):.3f} to {max(spans):.3f})"
    return (
        f"makespan     measured {measurement.makespan:.3f}{among}, simulated {measurement.simulated.makespan:.3f}: "
        f"{measurement.difference:+.1%}"
    )


def _ranks(measurement: Measurement) -> str:
    rows = [("", "computing", "", "waiting", "", "end", "", ""), ("rank", *("measured", "simulated") * 3, "difference")]
    for rank, numbers in enumerate(measurement.ranks()):
        share = numbers["simulated_end"] / numbers["end"] - 1 if numbers["end"] else 0.0
        rows.append((str(rank), *(f"{value:.3f}" for value in numbers.values()), f"{share:+.1%}"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _times(measurement: Measurement) -> str:
    times = [f"{name} {value:.3f}" for name, value in measurement.computations()]
    lines = [", ".join(times[left : left + 8]) for left in range(0, len(times), 8)]
    latency, taking = measurement.costs.latency, measurement.costs.taking
    message = f"a message    {latency:.3f} to a rank that waits for it; {taking:.3f} if it was there before"
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
            "simulated_makespan": measurement.simulated.makespan,
            "difference": measurement.difference,
            "ranks": measurement.ranks(),
            "times": dict(measurement.computations()),
            "message": measurement.costs.latency,
        }
    )
