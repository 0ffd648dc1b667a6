"""The picture of a predicted step. Needs matplotlib."""

from matplotlib.ticker import FuncFormatter, MaxNLocator

from mpitrain.commands.schedule.cells import Look
from mpitrain.commands.schedule.frame import Frame, row_height
from mpitrain.commands.schedule.picture import tints
from mpitrain.plan.predict.step_time.predicted_timeline import PredictedTimeline


def draw(predicted: PredictedTimeline, title: str) -> bytes:
    """Return the picture as an .svg file."""
    table, timeline = predicted.table, predicted.timeline
    look = Look(table.chunks, table.segments)
    num_ranks = len(timeline.programs)
    row = row_height(num_ranks)
    frame = Frame(timeline, look, [row * num_ranks])
    lines = [
        f"{predicted.played}: {1e3 * timeline.makespan:,.1f} ms, bubble {timeline.bubble:.1%}",
        f"after them, not drawn: exposed dp {1e3 * predicted.state_s:,.1f} ms, update "
        f"{1e3 * predicted.update_s:,.1f} ms",
    ]
    frame.write_head(f"predicted:  {title}", lines)
    frame.add_legend(timeline, tints(table.chunks, table.copies, table.segments))
    axes = frame.rows(timeline, row)
    axes.xaxis.set_major_locator(MaxNLocator(12))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{1e3 * seconds:g}"))
    axes.set_xlabel("milliseconds", fontsize=frame.small)
    return frame.render("svg")
