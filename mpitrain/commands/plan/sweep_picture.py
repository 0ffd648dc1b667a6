"""Pictures of `mpitrain sweep`: scaling as curves, layouts that differ in two keys as a heat map. And of
`mpitrain plan --all`: time against memory.

Only pictures import this, and with it matplotlib. Colours are those of schedules' pictures, which
colour-blind readers tell apart; what is measured is drawn through, what is predicted dashed.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from mpitrain.commands.plan.sweep_layouts import ScaledStep
from mpitrain.commands.schedule.cells import COLOURS, GREY, SMALL, finish
from mpitrain.inputs import rendered

Cells = Mapping[tuple[str, str], float | None]
MEASURED: Mapping[str, Any] = {"marker": "o", "markersize": 4}
PREDICTED: Mapping[str, Any] = {"linestyle": "--"}


def scaling_curves(curves: Mapping[str, Sequence[ScaledStep]], scaling: str) -> bytes:
    """Return tokens/s and efficiency over ranks as an .svg file. curves: rows by layout."""
    figure = Figure(figsize=(10, 4.2), facecolor="white", layout="constrained")
    speed, efficiency = figure.subplots(1, 2)
    entries = []
    for (typed, rows), colour in zip(curves.items(), cycle(COLOURS.values())):
        ranks = [row.ranks for row in rows]
        for axes, key in ((speed, "tokens_per_s"), (efficiency, "efficiency")):
            for name, style in ((key, MEASURED), (f"predicted_{key}", PREDICTED)):
                values = [getattr(row, name) for row in rows]
                axes.plot(ranks, values, color=colour, linewidth=1.4, **style)
        entries.append(Line2D([], [], color=colour, label=typed or "the default layout"))
    every = sorted({row.ranks for rows in curves.values() for row in rows})
    first = next(iter(curves.values()))[0]
    ideal = [first.tokens_per_s * ranks / first.ranks for ranks in every]
    speed.plot(every, ideal, color=GREY, linewidth=0.8, linestyle=":")
    efficiency.axhline(1.0, color=GREY, linewidth=0.8, linestyle=":")
    speed.set(xscale="log", yscale="log")
    efficiency.set(xscale="log")
    efficiency.set_ylim(bottom=0)
    _finish(speed, every, "tokens/s")
    _finish(efficiency, every, "efficiency: tokens/s of a rank, over the smallest number's")
    _write_numbers(speed.yaxis, ",.0f")
    entries += [
        Line2D([], [], color="black", label="measured", **MEASURED),
        Line2D([], [], color="black", label="predicted", **PREDICTED),
        Line2D([], [], color=GREY, linewidth=0.8, linestyle=":", label="ideal"),
    ]
    figure.suptitle(f"{scaling} scaling", fontsize=13, fontweight="bold", x=0.01, ha="left")
    figure.legend(handles=entries, loc="outside lower left", ncols=4, fontsize=SMALL, frameon=False)
    return rendered(figure, "svg")


def _write_numbers(axis: Axis, form: str) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:{form}}"))
    axis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:{form}}"))


def _finish(axes: Axes, ranks: Sequence[int], title: str) -> None:
    axes.set_title(title, fontsize=SMALL, loc="left")
    axes.set_xlabel("ranks", fontsize=SMALL)
    axes.set_xticks(ranks, [str(each) for each in ranks])
    axes.xaxis.set_minor_locator(NullLocator())
    finish(axes)


def heat_map(keys: tuple[str, str], measured: Cells, predicted: Cells, title: str) -> bytes:
    """Return tokens/s of layouts by the values of two keys as an .svg file, measured and predicted.

    A cell that is None was refused, or isn't predicted; one that isn't there wasn't asked for.
    """
    across = _values([column for _, column in measured])
    down = _values([row for row, _ in measured])
    width, height = max(7.0, 2 * (1.6 + 0.9 * len(across))), 1.7 + 0.55 * len(down)
    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    known = [value for value in (*measured.values(), *predicted.values()) if value is not None]
    most = max(known, default=1.0)
    names = ("measured (-: can't run)", "predicted")
    for axes, cells, name in zip(figure.subplots(1, 2), (measured, predicted), names):
        grid = [[cells.get((row, column)) or float("nan") for column in across] for row in down]
        axes.imshow(grid, cmap="cividis", vmin=0, vmax=most, aspect="auto")
        for y, row in enumerate(down):
            for x, column in enumerate(across):
                _label(axes, x, y, cells, (row, column), most)
        axes.set_xticks(range(len(across)), across, fontsize=SMALL)
        axes.set_yticks(range(len(down)), down, fontsize=SMALL)
        axes.set_xlabel(keys[1], fontsize=SMALL)
        axes.set_ylabel(keys[0], fontsize=SMALL)
        axes.set_title(name, fontsize=SMALL, loc="left")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    return rendered(figure, "svg")


def _values(found: Sequence[str]) -> list[str]:
    numbers = {text for text in found if text.isascii() and text.isdecimal()}
    return [*sorted(numbers, key=int), *sorted(set(found) - numbers)]


def _label(axes: Axes, x: int, y: int, cells: Cells, at: tuple[str, str], most: float) -> None:
    value = cells.get(at)
    text = f"{value:,.0f}" if value is not None else ("-" if at in cells else "")
    colour = "white" if value is not None and value < 0.55 * most else "black"
    axes.text(x, y, text, ha="center", va="center", fontsize=SMALL, color=colour)


def time_against_memory(layouts: Sequence[tuple[float, float]], limit: float, kind: str) -> bytes:
    """Draw the least seconds of a step over bytes of a rank, and the line of those that none beats in both.

    layouts: bytes and seconds. limit: bytes that a rank may hold. kind: of the file, such as "svg".
    """
    figure = Figure(figsize=(7, 4.2), facecolor="white", layout="constrained")
    axes = figure.subplots()
    axes.scatter([held / 1e9 for held, _ in layouts], [took for _, took in layouts], s=6, color=GREY)
    front: list[tuple[float, float]] = []
    for held, took in sorted(layouts):
        if not front or took < front[-1][1]:
            front.append((held, took))
    colour = next(iter(COLOURS.values()))
    places = [held / 1e9 for held, _ in front], [took for _, took in front]
    axes.plot(*places, color=colour, marker="o", markersize=4, drawstyle="steps-post")
    axes.axvline(limit / 1e9, color="black", linewidth=0.8, linestyle=":")
    axes.grid(color="#E4E4E4", linewidth=0.6)
    axes.set(xscale="log", yscale="log", xlabel="GB of a rank, by formulas; dotted: the limit")
    axes.set_ylabel("least seconds of a step")
    for axis in (axes.xaxis, axes.yaxis):
        _write_numbers(axis, "g")
    axes.tick_params(which="both", labelsize=SMALL)
    return rendered(figure, kind)
