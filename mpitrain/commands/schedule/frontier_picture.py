"""The picture of time against memory. Only pictures import this, and with it matplotlib."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mpitrain.commands.schedule.cells import COLOURS, GREY, SMALL, finish
from mpitrain.commands.schedule.text import size_in_words
from mpitrain.inputs import rendered
from mpitrain.schedules.time_and_memory import Frontier, Point, StepSize

SLOWEST = 2.5  # times the shortest makespan: what takes longer isn't drawn


def draw(found: Frontier, size: StepSize, kind: str) -> bytes:
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
