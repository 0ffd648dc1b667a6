"""Curves of runs as a picture for a paper. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from mpitrain.inputs import printable, rendered
from mpitrain.report.curves import Curve, Points, lines_of
from mpitrain.report.recorded_run import RecordedRun

PANEL = (3.4, 2.5)  # inches: a column of a paper
ACROSS = 3
SMALL = 8.0  # points
LONGEST_NAME = 40


def draw(runs: Sequence[RecordedRun], curves: Sequence[Curve], over: str, kind: str) -> bytes:
    """Return the picture, a panel a curve, as svg or png. Raises ValueError if there is none."""
    drawn = lines_of(curves, [run.steps for run in runs], over)
    if not drawn:
        raise ValueError(f"no run has {' or '.join(curve.column for curve in curves)}")
    columns = min(ACROSS, len(drawn))
    rows = -(-len(drawn) // columns)
    size = columns * PANEL[0], rows * PANEL[1]
    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for panel, (curve, of_runs) in zip(panels, drawn.items()):
        _panel(panel, curve, of_runs, over)
    for panel in list(panels):
        panel.set_axis_off()
    if len(runs) > 1:
        _legend(figure, runs, drawn)
    return rendered(figure, kind, dpi=300)


def _panel(panel: Axes, curve: Curve, of_runs: Sequence[Points], over: str) -> None:
    for line in of_runs:
        style = {"color": line.colour, "linestyle": line.dash, "marker": "o" if len(line.x) < 40 else ""}
        panel.plot(line.x, line.y, linewidth=1.2, markersize=3, **style)
    if curve.logarithmic:
        panel.set_yscale("log")
        low, high = panel.get_ylim()
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("{x:g}" if high < 10 * low else NullFormatter())
    panel.set_title(curve.title, fontsize=SMALL, loc="left")
    panel.set_xlabel(over, fontsize=SMALL)
    panel.tick_params(which="both", labelsize=SMALL)
    panel.xaxis.set_major_locator(MaxNLocator(5))
    panel.grid(which="both", color="#E4E4E4", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, runs: Sequence[RecordedRun], drawn: dict[Curve, list[Points]]) -> None:
    """Name the runs by their folders, as text: markup in a name stays what it is."""
    panel = figure.axes[0]
    lines = {line.number: line for of_runs in drawn.values() for line in of_runs}
    handles, names = [], []
    for number, line in sorted(lines.items()):
        handles += panel.plot([], [], color=line.colour, linestyle=line.dash)
        names.append(printable(Path(runs[number].path).resolve().name)[:LONGEST_NAME])
    legend = figure.legend(handles, names, loc="outside lower left", ncols=3, fontsize=SMALL, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
