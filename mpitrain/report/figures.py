"""Figures of a page: curves over steps, communication by axis, a step over all ranks.

Labels are this file's own words: a run's texts stand in the page around them, where they are quoted.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from bokeh.models import ColumnDataSource, HoverTool, Range1d
from bokeh.plotting import figure

from mpitrain.report.recorded_run import Instruction, RecordedRun
from mpitrain.report.series import thinned

# told apart by colour-blind readers (Okabe and Ito, 2008), on light and dark
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
DASHES = ("solid", "dashed", "dotted", "dotdash")
GREY = "#808080"
KINDS = {"F": 0, "B": 1, "I": 4, "W": 3, "SEND": 5, "RECV": 5, "GATHER": 2, "REDUCE": 2, "SUM": 2}
OTHER = 6


class Curve(NamedTuple):
    """title: with the unit. column: of metrics.jsonl. factor: to that unit."""

    title: str
    column: str
    factor: float = 1.0
    logarithmic: bool = False


CURVES = (
    Curve("training loss, nats a token", "loss"),
    Curve("validation loss, nats a token", "val_loss"),
    Curve("gradient norm", "grad_norm", logarithmic=True),
    Curve("learning rate", "lr"),
    Curve("tokens a second", "tokens_per_s"),
    Curve("model FLOPs utilisation, %", "mfu", 100),
    Curve("hardware FLOPs utilisation, %", "hfu", 100),
    Curve("seconds of a step", "step_s"),
    Curve("updates left out so far", "skipped"),
)


def label_of(number: int) -> str:
    """Return the short name of a run on a page: A, B, ... A2."""
    return chr(ord("A") + number % 26) + (str(number // 26 + 1) if number >= 26 else "")


def curves(runs: Sequence[RecordedRun], over: str) -> list[Any]:
    """Return the figures of all numbers that some run has. over: "step", "tokens" or "hours"."""
    return [plot for curve in CURVES if (plot := _curve(curve, runs, over)) is not None]


def _curve(curve: Curve, runs: Sequence[RecordedRun], over: str) -> Any:
    plot = None
    for number, run in enumerate(runs):
        columns = run.steps.columns
        if curve.column not in columns:
            continue
        x, y = thinned(_x(run, over), columns[curve.column] * curve.factor)
        if curve.logarithmic:
            x, y = x[y > 0], y[y > 0]
        if not len(x) or (curve.column == "skipped" and not y.any()):
            continue
        if plot is None:
            plot = _figure(curve.title, over, logarithmic=curve.logarithmic)
        dash = DASHES[number // len(COLOURS) % len(DASHES)]
        colour = COLOURS[number % len(COLOURS)]
        legend = {"legend_label": label_of(number)} if len(runs) > 1 else {}
        plot.line(x, y, line_width=1.6, color=colour, line_dash=dash, **legend)
        if len(x) < 40:
            plot.scatter(x, y, size=5, color=colour)
    if plot is not None:
        plot.add_tools(HoverTool(tooltips=[(over, "@x{0,0.[000]}"), ("value", "@y{0,0.[000000]}")]))
    return plot


def _x(run: RecordedRun, over: str) -> np.ndarray:
    if over == "hours":
        return np.nancumsum(run.steps.columns["step_s"]) / 3600
    return run.steps.columns[over]


def _figure(title: str, below: str, height: int = 260, **given: Any) -> Any:
    kind = "log" if given.pop("logarithmic", False) else "linear"
    plot = figure(
        title=title,
        height=height,
        sizing_mode="stretch_width",
        y_axis_type=kind,
        tools="xpan,xwheel_zoom,box_zoom,reset,save",
        output_backend="canvas",
        **given,
    )
    plot.toolbar.logo = None
    plot.background_fill_color = plot.border_fill_color = None
    plot.outline_line_color = None
    plot.title.text_color = GREY
    for axis in plot.axis:
        axis.axis_label_text_color = axis.major_label_text_color = GREY
        axis.axis_line_color = axis.major_tick_line_color = axis.minor_tick_line_color = GREY
    plot.xaxis.axis_label = below
    plot.grid.grid_line_color = GREY
    plot.grid.grid_line_alpha = 0.25
    return plot


def timeline(events: Sequence[Instruction]) -> Any:
    """Return a step over all ranks: a row each, a box an instruction."""
    rows = {place: row for row, place in enumerate(sorted({(e.pid, e.tid) for e in events}))}
    plot = _figure("", "milliseconds", height=min(900, 120 + 26 * len(rows)), y_range=Range1d(len(rows), -1))
    zero = min(event.ts for event in events)
    of_colours: dict[int, list[Instruction]] = {}
    for event in events:
        kind = event.name.rstrip("0123456789@/").partition("_")[0]
        of_colours.setdefault(KINDS.get(kind, OTHER), []).append(event)
    for colour, boxes in of_colours.items():
        begin = np.array([(event.ts - zero) / 1e3 for event in boxes], np.float32)
        length = np.array([max(event.dur, 0.0) / 1e3 for event in boxes], np.float32)
        columns = {
            "left": begin,
            "right": begin + length,
            "ms": length,
            "y": np.array([rows[event.pid, event.tid] for event in boxes], np.float32),
            "name": [event.name[:40] for event in boxes],
        }
        plot.hbar(
            "y",
            0.84,
            "right",
            "left",
            source=ColumnDataSource(columns),
            color=COLOURS[colour],
            line_color=None,
        )
    plot.yaxis.ticker = list(range(0, len(rows), max(1, len(rows) // 16)))
    plot.yaxis.axis_label = "rank of the trace"
    tips = [("", "@name"), ("row", "@y"), ("ms", "@ms{0,0.000}"), ("begins at", "@left{0,0.000}")]
    plot.add_tools(HoverTool(tooltips=tips))
    return plot
