"""The picture of a measured step under its simulation. Needs matplotlib."""

from matplotlib.ticker import MaxNLocator

from mpitrain.commands.schedule.cells import Look
from mpitrain.commands.schedule.frame import Frame, row_height
from mpitrain.commands.schedule.picture import tints
from mpitrain.schedules.actions import COMPUTE
from mpitrain.schedules.play.measurement import Measurement
from mpitrain.schedules.play.simulate import Timeline


def draw(measurement: Measurement, kind: str) -> bytes:
    """Return the picture as an .svg or .png file."""
    simulated = measurement.simulated
    measured = measurement.typical
    trace = measurement.trace
    look = Look(_chunks(simulated), trace.segments)
    num_ranks = len(simulated.programs)
    row = row_height(2 * num_ranks)
    longest = max(simulated, measured, key=lambda timeline: timeline.makespan)
    frame = Frame(longest, look, [row * num_ranks, row * num_ranks], titled=True)
    frame.write_head(f"{trace.schedule}:  {num_ranks} ranks, measured and simulated", _lines(measurement))
    frame.add_legend(simulated, tints(look.chunks, trace.copies, trace.segments))
    frame.rows(simulated, row, f"the same step, simulated with its own times: {simulated.makespan:.3f} ms")
    axes = frame.rows(measured, row, f"measured, the step of median length: {measured.makespan:.3f} ms")
    axes.xaxis.set_major_locator(MaxNLocator(12))
    axes.set_xlabel("milliseconds", fontsize=frame.small)
    return frame.render(kind)


def _lines(measurement: Measurement) -> list[str]:
    ends = [numbers["simulated_end"] - numbers["end"] for numbers in measurement.ranks()]
    worst = max(range(len(ends)), key=lambda rank: abs(ends[rank]))
    return [
        f"makespan: measured {measurement.makespan:.3f} ms (median of {len(measurement.trace.timelines)}), "
        f"simulated {measurement.simulated_makespan:.3f} ms, {measurement.difference:+.1%}",
        f"largest difference of a rank's end: rank {worst}, {ends[worst]:+.3f} ms; a message takes "
        f"{measurement.message:.3f} ms",
    ]


def _chunks(timeline: Timeline) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank."""
    return tuple(
        tuple(sorted({action.stage for action in program if action.kind in COMPUTE}))
        for program in timeline.programs
    )
