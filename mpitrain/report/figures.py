"""Figures of a page (bokeh): curves over steps, a step over all ranks, its memory, loads of experts.

Labels are this file's own words: a run's texts stand in the page around them, where they are quoted.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from bokeh.models import (
    ColumnDataSource,
    HoverTool,
    LinearColorMapper,
    NoOverlap,
    NumeralTickFormatter,
    Range1d,
    WheelZoomTool,
)
from bokeh.plotting import figure
from bokeh.transform import transform

from mpitrain.report.curves import COLOURS, CURVES, Curve, Points, evaluated, label_of, lines_of, load_cells
from mpitrain.report.recorded_run import Instruction, RecordedRun
from mpitrain.report.series import LoadsLine

GREY = "#808080"
KINDS = {"F": 0, "B": 1, "I": 4, "W": 3, "R": 0, "SEND": 5, "RECV": 5, "GATHER": 2, "REDUCE": 2, "SUM": 2}
OTHER, WAIT = 6, 7
STAGE = re.compile(r"([FBIWR])\d{1,9}@(\d{1,9})")
MOST_NAMED = 8  # runs in a legend
MOST_DRAWN_WAITS = 5000  # the longest
MOST_BOXES = 4000  # that are drawn at a time
# Draws the boxes in view, or if they are too many, the one around the middle of each pixel.
DETAILS = """
const showDetails = (plot) => {
  const [picture, image, ...sources] = plot.tags;
  const range = plot.x_range, half = sources.length / 2;
  const whole = sources.slice(0, half), shown = sources.slice(half);
  let due = false;
  const show = () => {
    due = false;
    const first = Math.min(range.start, range.end), last = Math.max(range.start, range.end);
    const places = whole.map(({data: {left, right}}) => {
      const seen = [];
      for (let i = 0; i < left.length; i++) if (right[i] >= first && left[i] <= last) seen.push(i);
      return seen;
    });
    const few = places[0].length <= MOST;
    image.visible = !few;
    shown.forEach((source, n) => {
      if (!few && source.data.left.length === 0) return;
      const columns = Object.entries(whole[n].data);
      source.data = Object.fromEntries(
        columns.map(([name, column]) => [name, few ? places[n].map((i) => column[i]) : []]));
    });
    if (few) return;
    const {left, right, y, kind} = whole[0].data, {image: pixels, x, dw} = picture.data;
    const scale = pixels[0].length / (last - first);
    const column = (at) => Math.max(0, Math.ceil((at - first) * scale - 0.5));
    for (const row of pixels) row.fill(0);
    for (const i of places[0]) pixels[y[i]].fill(COLOURS[kind[i]], column(left[i]), column(right[i]));
    x.fill(first);
    dw.fill(last - first);
    picture.change.emit();
  };
  const ask = () => {
    if (!due) requestAnimationFrame(show);
    due = true;
  };
  range.properties.start.change.connect(ask);
  range.properties.end.change.connect(ask);
  show();
};
"""
MOST_CURVES = 64  # of memory, a rank each


def curves(runs: Sequence[RecordedRun], over: str) -> dict[str, Any]:
    """Return the figures of all numbers that some run has, by name. over: as lines_of() has it."""
    steps = [run.steps for run in runs]
    drawn = lines_of((*CURVES, *evaluated(steps)), steps, over)
    return {curve.figure: _curve(curve, lines, len(runs), over) for curve, lines in drawn.items()}


def _curve(curve: Curve, lines: Sequence[Points], num_runs: int, over: str) -> Any:
    plot = _figure(curve.title, over, y_axis_type="log" if curve.logarithmic else "linear")
    for line in lines:
        # `watch` finds it by its name
        source = ColumnDataSource({"x": line.x, "y": line.y}, name=f"{curve.figure} {line.number}")
        legend = {"legend_label": label_of(line.number)} if 1 < num_runs <= MOST_NAMED else {}
        dash = line.dash.replace("dashdot", "dotdash")
        plot.line("x", "y", source=source, line_width=1.6, color=line.colour, line_dash=dash, **legend)
        if len(line.x) < 40:
            plot.scatter("x", "y", source=source, size=5, color=line.colour)
    plot.xaxis.formatter = NumeralTickFormatter(format="0.[000]a")  # 200k: a phone is narrow
    if curve.logarithmic:  # minor ticks would be a black bar, and labels lie on one another
        plot.yaxis.minor_tick_line_color = None
        plot.yaxis.major_label_policy = NoOverlap(min_distance=2)
    # of a curve that is flat: its number is readable
    largest = max(abs(line.y).max() for line in lines)
    plot.y_range.default_span = 1 if curve.logarithmic else largest / 2 or 1
    if plot.legend:
        legend = plot.legend[0]
        legend.update(orientation="horizontal", background_fill_alpha=0, border_line_alpha=0, padding=0)
        legend.label_text_color = GREY
        plot.add_layout(legend, "above")
    plot.add_tools(HoverTool(tooltips=[(over, "@x{0,0.[000]}"), ("value", "@y{0,0.[000000]}")]))
    return plot


def _figure(title: str, below: str, height: int = 260, **given: Any) -> Any:
    look = {"sizing_mode": "stretch_width", "output_backend": "canvas"}
    plot = figure(title=title, height=height, tools="xpan,box_zoom,reset,save", **look, **given)
    plot.toolbar.update(logo=None, autohide=True)  # on paper there is none
    zoom = WheelZoomTool(dimensions="width", modifiers="ctrl")  # the wheel alone scrolls the page
    plot.add_tools(zoom)
    plot.toolbar.active_scroll = zoom
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


def timeline(events: Sequence[Instruction], stages: Sequence[Mapping[str, float]]) -> Any:
    """Return a step over all ranks: a row each, a box an instruction, below it what it waited for by axis.

    stages: predicted seconds of each stage by kind of instruction, if they are known. Where more
    than MOST_BOXES instructions are in view, a picture stands for them.
    """
    rows = {place: row for row, place in enumerate(sorted({(e.pid, e.tid) for e in events}))}
    height = min(900, 120 + 26 * len(rows))
    zero = min(event.ts for event in events)
    last_ms = max(1e-3, max(event.ts + max(0.0, event.dur) for event in events) / 1e3 - zero / 1e3)
    ranges = {"x_range": Range1d(0, last_ms), "y_range": Range1d(len(rows), -1)}
    plot = _figure("", "milliseconds", height=height, **ranges)
    spans = [Span(e.name, rows[e.pid, e.tid], e.ts - zero, e.dur, _kind(e.name)) for e in events]
    more = {
        "mb": _numbers(event.megabytes for event in events),
        "waited": _numbers(sum(event.blocked_ms.values()) for event in events),
        "predicted": _numbers(_predicted_ms(event.name, stages) for event in events),
    }
    waits = [wait for event in events for wait in _waits(event, rows[event.pid, event.tid], zero)]
    waits = sorted(waits, key=lambda wait: wait.length)[-MOST_DRAWN_WAITS:]
    unknown = dict.fromkeys(more, np.full(len(waits), np.nan, np.float32))
    sources = [ColumnDataSource(_columns(*kind)) for kind in ((spans, more), (waits, unknown))]
    if len(events) > MOST_BOXES:
        sources = _details(plot, sources, len(rows))
    kinds = LinearColorMapper(palette=[*COLOURS, "#000000"], low=-0.5, high=WAIT + 0.5)
    look = {"color": transform("kind", kinds), "line_color": None}
    boxes = [
        plot.hbar("y", height, "right", "left", source=source, **look)
        for source, height in zip(sources, (0.84, 0.24))
    ]
    plot.yaxis.ticker = list(range(0, len(rows), max(1, len(rows) // 16)))
    plot.yaxis.axis_label = "rank of the trace"
    tips = [("", "@name"), ("row", "@y{0}"), ("ms", "@ms{0,0.000}"), ("begins at", "@left{0,0.000}")]
    tips += [("MB sent", "@mb{0,0.000}"), ("of it waiting, ms", "@waited{0,0.000}")]
    tips.append(("predicted, ms", "@predicted{0,0.000}"))
    plot.add_tools(HoverTool(tooltips=tips, renderers=boxes))
    return plot


def details() -> str:
    """Return the script of a page that has such timelines."""
    colours = [int(f"ff{colour[5:]}{colour[3:5]}{colour[1:3]}", 16) for colour in COLOURS]
    return DETAILS.replace("MOST", str(MOST_BOXES)).replace("COLOURS", str(colours))


def _details(plot: Any, whole: Sequence[ColumnDataSource], num_rows: int) -> list[ColumnDataSource]:
    """Add a picture of all boxes; return what is drawn in its place where few enough are in view."""
    shown = [ColumnDataSource({name: [] for name in source.data}) for source in whole]
    width = max(64, min(1024, 131_072 // num_rows))  # columns of the picture
    pixels = [np.zeros((1, width), np.uint32) for _ in range(num_rows)]
    x, dw = np.zeros(num_rows, np.float32), np.ones(num_rows, np.float32)
    y = np.arange(num_rows, dtype=np.float32) - 0.42
    picture = ColumnDataSource({"image": pixels, "x": x, "dw": dw, "y": y})
    image = plot.image_rgba("image", "x", "y", "dw", 0.84, source=picture)
    plot.tags = [picture, image, *whole, *shown]  # for the page's script: its policy runs no text of a model
    return shown


class Span(NamedTuple):
    """A box: times in microseconds."""

    name: str
    row: float
    begin: float
    length: float
    kind: int


def _waits(event: Instruction, row: int, zero: float) -> Iterator[Span]:
    """Yield the waits within a computation, one an axis: only how long they were is known."""
    end = event.ts - zero + event.dur
    for axis, waited_ms in event.blocked_ms.items() if event.cat == "compute" else ():
        end -= 1e3 * waited_ms
        yield Span(f"{event.name} waits, {axis[:20]}", row + 0.3, end, 1e3 * waited_ms, WAIT)


def _numbers(values: Iterable[float]) -> np.ndarray:
    return np.array(list(values), np.float32)


def _kind(name: str) -> int:
    return KINDS.get(name.rstrip("0123456789@/").partition("_")[0], OTHER)


def _columns(spans: Sequence[Span], more: Mapping[str, np.ndarray]) -> dict[str, Any]:
    begins = _numbers(span.begin for span in spans) / 1e3
    lengths = np.maximum(_numbers(span.length for span in spans), 0) / 1e3
    return {
        "left": begins,
        "right": begins + lengths,
        "ms": lengths,
        "y": _numbers(span.row for span in spans),
        "kind": np.array([span.kind for span in spans], np.uint8),
        "name": [span.name[:60] for span in spans],
        **more,
    }


def _predicted_ms(name: str, stages: Sequence[Mapping[str, float]]) -> float:
    match = STAGE.fullmatch(name.partition("/")[0])
    is_known = match is not None and int(match[2]) < len(stages)
    return 1e3 * stages[int(match[2])].get(match[1], np.nan) if is_known else np.nan


def memory(events: Sequence[Instruction]) -> Any:
    """Return the memory of ranks over a step; None of a trace without it."""
    by_rank: dict[tuple[int, int], list[Instruction]] = {}
    for event in sorted(events, key=lambda event: event.ts):
        if event.held_mb is not None:
            by_rank.setdefault((event.pid, event.tid), []).append(event)
    if not by_rank:
        return None
    zero = min(event.ts for event in events)
    plot = _figure("memory of each rank, MB", "milliseconds")
    for number, (place, of_rank) in enumerate(sorted(by_rank.items())[:MOST_CURVES]):
        columns = {
            "x": _numbers(event.ts + event.dur - zero for event in of_rank) / 1e3,
            "y": _numbers(event.held_mb for event in of_rank),
            "name": [event.name[:40] for event in of_rank],
            "rank": [f"{place[0]}, {place[1]}"] * len(of_rank),
        }
        colour = COLOURS[number % len(COLOURS)]
        plot.step("x", "y", source=ColumnDataSource(columns), mode="after", color=colour, line_width=1.4)
    tips = [("replica, pipeline rank", "@rank"), ("after", "@name"), ("ms", "@x"), ("MB", "@y{0,0.00}")]
    plot.add_tools(HoverTool(tooltips=tips))
    return plot


def loads(line: LoadsLine, name: str) -> Any:
    """Return a map of the loads of experts; None if there are none. name: of the run."""
    cells = load_cells(line)
    if not len(cells["x"]):
        return None
    num_blocks = int(cells["y"].max()) + 1
    title = f"loads of experts in step {line.step:,}; 1: the mean"
    plot = _figure(title, "expert", min(700, 100 + 18 * num_blocks), y_range=Range1d(num_blocks - 0.4, -0.6))
    source = ColumnDataSource(cells, name=f"loads-{name} 0")
    plot.rect("x", "y", 0.94, 0.9, source=source, color=COLOURS[0], fill_alpha="alpha", line_color=None)
    plot.yaxis.ticker = list(range(0, num_blocks, max(1, num_blocks // 16)))
    plot.yaxis.axis_label = "block"
    plot.add_tools(HoverTool(tooltips=[("expert", "@x"), ("block", "@y"), ("load", "@load{0.00}")]))
    return plot
