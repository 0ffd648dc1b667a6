"""Pictures to scale of a schedule, a measured and a predicted step; and time against memory.

Needs matplotlib, and with it numpy.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mpitrain.commands.schedule.cells import COLOURS, GREY, SMALL, Look, finish
from mpitrain.commands.schedule.frame import Frame, row_height
from mpitrain.commands.schedule.text import number, size_in_words
from mpitrain.inputs import rendered
from mpitrain.plan.predict.step_time.predicted_timeline import PredictedTimeline
from mpitrain.schedules.actions import COMPUTE
from mpitrain.schedules.play.measurement import Measurement
from mpitrain.schedules.play.simulate import Timeline
from mpitrain.schedules.played import Played
from mpitrain.schedules.time_and_memory import Frontier, Point, StepSize

Curve = list[tuple[float, float]]  # (time, held from then on)
SINGLE_CURVES = 8  # ranks with a memory area each; of more ranks an envelope is drawn
AREA = 0.86  # of a row
BLUE = "#5B7FA6"
PALE = "#C9D7E6"
BLACK = "#1A1A1A"
RED = "#B00020"
DASHES = (0, (4, 3))
SLOWEST = 2.5  # times the shortest makespan: what takes longer isn't drawn
BUBBLES = (
    "bubble: idle share of all ranks from 0 to the makespan's end;  bubble rate: of the span, a "
    "rank's longest time from first to last computation"
)


def draw(played: Played, kind: str) -> bytes:
    """Return the picture as an .svg or .png file."""
    timeline = played.timeline
    look = Look(played.chunks, played.table.segments, played.table.copies)
    row = row_height(played.num_ranks)
    memory = 0.3 * played.num_ranks if played.num_ranks <= SINGLE_CURVES else 2.0
    title = f"{played.table.name}:  {size_in_words(played)}"
    frame = Frame(timeline, look, [row * played.num_ranks, memory], title, _lines(played))
    frame.rows(timeline, row)
    axes = frame.axes(memory)
    curves = [_settled(played.memory(rank), played.timeline.makespan) for rank in range(played.num_ranks)]
    if played.num_ranks <= SINGLE_CURVES:
        _each_rank(frame, axes, curves, played)
    else:
        _envelope(frame, axes, curves, played)
    axes.set_xlabel("time", fontsize=frame.small)
    return frame.render(kind)


def _lines(played: Played) -> list[str]:
    forward, grad, weight, message = map(number, played.times)
    return [
        f"makespan {number(played.timeline.makespan)}, bubble {played.timeline.bubble:.1%};  span "
        f"{number(played.span)}, bubble rate {played.bubble_rate:.1%};  peak "
        f"{number(max(played.peak_stashes))} stashes",
        BUBBLES,
        f"times of a rank's share of layers: F {forward}, I {grad}, W {weight}, B "
        f"{number(played.times.input + played.times.weight)}; message {message}",
    ]


# ---------------------------------------------------------------- memory


def _settled(curve: Curve, end: float) -> Curve:
    """Keep the last value of each moment, up to the end: a stash freed and taken at once is no dip."""
    return [*dict(curve).items(), (end, curve[-1][1])]


def _each_rank(frame: Frame, axes: Axes, curves: list[Curve], played: Played) -> None:
    """Draw an area per rank, in one scale, in the order of the rows above; at its right its peak."""
    limit = played.memory_limit
    most = max(*played.peak_stashes, limit or 0)
    for rank, (curve, peak) in enumerate(zip(curves, played.peak_stashes)):
        times, held = zip(*curve)
        floor = rank + 0.5
        areas = [floor - AREA * value / most for value in held]
        axes.fill_between(times, floor, areas, step="post", color=BLUE, linewidth=0)
        axes.axhline(floor, color="#BBBBBB", linewidth=0.6)
        place, within = (1.006, rank + 0.15), ("axes fraction", "data")
        axes.annotate(number(peak), place, xycoords=within, fontsize=frame.small, va="center")
        if limit is not None:
            axes.axhline(floor - AREA * limit / most, color=RED, linewidth=0.8, linestyle=DASHES)
    axes.set_ylim(played.num_ranks - 0.4, -0.5)
    ranks = range(played.num_ranks)
    axes.set_yticks([rank + 0.15 for rank in ranks], [f"rank {rank}" for rank in ranks])
    axes.spines["bottom"].set_visible(False)
    dashed = f"; dashed: the limit of {number(limit)}" if limit else ""
    frame.name(axes, f"stashes in flight, and each rank's peak{dashed}")


def _envelope(frame: Frame, axes: Axes, curves: list[Curve], played: Played) -> None:
    """Fill between the least and the most that any rank holds, and draw the worst rank and the median."""
    times = np.unique([time for curve in curves for time, _ in curve])
    held = np.array([_sample(curve, times) for curve in curves])
    worst = played.peak_stashes.index(max(played.peak_stashes))
    axes.fill_between(
        times, held.min(axis=0), held.max(axis=0), step="post", color=PALE, linewidth=0, label="all ranks"
    )
    axes.step(times, np.median(held, axis=0), where="post", color=BLUE, linewidth=1.2, label="median")
    axes.step(times, held[worst], where="post", color=BLACK, linewidth=1.2, label=f"rank {worst}")
    if played.memory_limit is not None:
        axes.axhline(played.memory_limit, color=RED, linewidth=1, linestyle=DASHES, label="limit")
    axes.legend(
        loc="center left", bbox_to_anchor=(1.004, 0.5), fontsize=frame.small, frameon=False, handlelength=1,
        borderaxespad=0,
    )  # fmt: skip
    axes.set_ylim(0, 1.08 * max(*played.peak_stashes, played.memory_limit or 0))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.6)
    axes.set_axisbelow(True)
    frame.name(axes, "stashes in flight")


def _sample(curve: Curve, times: np.ndarray) -> np.ndarray:
    at, held = map(np.array, zip(*curve))
    return held[np.searchsorted(at, times, side="right") - 1]


# ---------------------------------------------------------------- of a measured, and of a predicted step


def draw_measured(measurement: Measurement, kind: str) -> bytes:
    """Return the picture of a measured step under its simulation as an .svg or .png file."""
    simulated = measurement.simulated
    measured = measurement.typical
    trace = measurement.trace
    look = Look(_chunks(simulated), trace.segments, trace.copies)
    num_ranks = len(simulated.programs)
    row = row_height(2 * num_ranks)
    longest = max(simulated, measured, key=lambda timeline: timeline.makespan)
    title = f"{trace.schedule}:  {num_ranks} ranks, measured and simulated"
    lines = _measured_lines(measurement)
    frame = Frame(longest, look, [row * num_ranks, row * num_ranks], title, lines, titled=True)
    frame.rows(simulated, row, f"the same step, simulated with its own times: {simulated.makespan:.3f} ms")
    axes = frame.rows(measured, row, f"measured, the step of median length: {measured.makespan:.3f} ms")
    frame.in_milliseconds(axes)
    return frame.render(kind)


def _measured_lines(measurement: Measurement) -> list[str]:
    ends = [numbers["simulated_end"] - numbers["end"] for numbers in measurement.ranks()]
    worst = max(range(len(ends)), key=lambda rank: abs(ends[rank]))
    return [
        f"makespan: measured {measurement.makespan:.3f} ms (median of {len(measurement.trace.timelines)}), "
        f"simulated {measurement.simulated_makespan:.3f} ms, {measurement.difference:+.1%}",
        f"largest difference of a rank's end: rank {worst}, {ends[worst]:+.3f} ms; a message takes "
        f"{measurement.message:.3f} ms",
    ]


def _chunks(timeline: Timeline) -> tuple[tuple[int, ...], ...]:
    computed = ([action for action in row if action.kind in COMPUTE] for row in timeline.programs)
    return tuple(tuple(sorted({action.stage for action in row})) for row in computed)


def draw_predicted(predicted: PredictedTimeline, title: str) -> bytes:
    """Return the picture of a predicted step as an .svg file."""
    table, timeline = predicted.table, predicted.timeline
    num_ranks = len(timeline.programs)
    row = row_height(num_ranks)
    lines = [
        f"{predicted.played}: {1e3 * timeline.makespan:,.1f} ms, bubble {timeline.bubble:.1%}",
        f"after them, not drawn: exposed dp {1e3 * predicted.state_s:,.1f} ms, update "
        f"{1e3 * predicted.update_s:,.1f} ms",
    ]
    look = Look(table.chunks, table.segments, table.copies)
    frame = Frame(timeline, look, [row * num_ranks], f"predicted:  {title}", lines)
    frame.in_milliseconds(frame.rows(timeline, row), lambda seconds, _: f"{1e3 * seconds:g}")
    return frame.render("svg")


# ---------------------------------------------------------------- time against memory


def draw_frontier(found: Frontier, size: StepSize, kind: str) -> bytes:
    """Return the picture as an .svg or .png file."""
    figure = Figure(figsize=(10, 6), facecolor="white", layout="constrained")
    axes = figure.subplots()
    front = found.front
    highest = SLOWEST * front[-1].makespan
    peaks, makespans = [point.peak for point in front], [point.makespan for point in front]
    axes.step(peaks, makespans, where="post", color=COLOURS["F"], linewidth=1.4, label="front")
    bounds = [point.bound for point in front]
    axes.step(peaks, bounds, "--", where="post", color=GREY, linewidth=1, label="lower bound")
    others = [point for point in found.others if point.makespan <= highest]
    _scatter(axes, others, GREY, "dominated")
    _scatter(axes, front, COLOURS["F"], "on the front")
    axes.set_ylim(top=highest * 1.02)
    axes.set_xlabel("peak: stashes of a rank's whole share of layers", fontsize=SMALL)
    axes.set_ylabel("makespan", fontsize=SMALL)
    finish(axes)
    axes.legend(fontsize=SMALL, frameon=False)
    figure.suptitle(size_in_words(size), fontsize=13, x=0.01, ha="left")
    return rendered(figure, kind)


def _scatter(axes: Axes, points: Sequence[Point], colour: str, label: str) -> None:
    """Draw points, and names of the front and of fixed schedules, of points in one place of the first."""
    axes.scatter(
        [one.peak for one in points], [one.makespan for one in points], s=16, color=colour, label=label
    )
    named: set[tuple[float, float]] = set()
    for point in points:
        place = round(point.peak, 2), round(point.makespan, 2)
        if place not in named and (colour != GREY or point.limit is None):
            named.add(place)
            axes.annotate(
                point.played.table.name, (point.peak, point.makespan), (3, 3), textcoords="offset points",
                fontsize=SMALL - 2, color=colour,
            )  # fmt: skip
