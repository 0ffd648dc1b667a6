"""`mpitrain schedule compare --trace`: what a run measured, under what the simulator makes of its times."""

import json

from mpitrain.commands.schedule.text import right_aligned
from mpitrain.errors import counted
from mpitrain.schedules.play.measurement import Measurement
from mpitrain.schedules.play.scale import to_scale

MARGIN = len("rank 000 simulated ")


def as_text(measurement: Measurement, width: int) -> str:
    """Return both timelines to scale, and the numbers."""
    numbers = [_makespan(measurement), _ranks(measurement), _times(measurement)]
    return "\n\n".join([_headline(measurement), drawn(measurement, width), *numbers])


def _headline(measurement: Measurement) -> str:
    trace = measurement.trace
    replicas = len(trace.timelines) // len(trace.steps)
    first, last = trace.steps[0], trace.steps[-1]
    several = len(trace.steps) > 1
    number = counted(len(trace.steps), "steps")
    steps = f"{number}, {first} to {last}" if several else f"step {first}"
    copies = f", {replicas} data-parallel replicas" if replicas > 1 else ""
    ranks = counted(len(measurement.simulated.programs), "ranks")
    return f"{trace.schedule}: {ranks}, {steps}{copies}; milliseconds, up to the update"


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
    return right_aligned(rows)


def _times(measurement: Measurement) -> str:
    times = [f"{name} {value:.3f}" for name, value in measurement.computations()]
    lines = [", ".join(times[left : left + 8]) for left in range(0, len(times), 8)]
    message = f"a message    {measurement.message:.3f} to a rank that waits for it"
    return "on average   " + ",\n             ".join(lines) + "\n" + message


def as_json(measurement: Measurement) -> str:
    """Return one JSON object, times in milliseconds."""
    trace = measurement.trace
    found = {
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
    return json.dumps(found)
