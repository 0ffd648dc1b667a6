"""Runs in a terminal: curves of dots, and what communication costs. Codes in a run's texts are left out."""

from collections.abc import Sequence

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from mpitrain.inputs import printable
from mpitrain.report.curves import BY_COLUMN, Curve, Points, axis_range, label_of, lines_of
from mpitrain.report.recorded_run import RecordedRun

ACROSS = 2
SHOWN = ("loss", "val_loss", "tokens_per_s", "grad_norm")
MOST_AXES = 6
LABEL = 9  # columns left of a curve
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a Braille character, by row and column
BRAILLE = 0x2800


def screen(runs: Sequence[RecordedRun], over: str, width: int, height: int, plain: bool) -> Group:
    """Return what fits. plain: without Braille."""
    drawn = lines_of([BY_COLUMN[name] for name in SHOWN], [run.steps for run in runs], over)
    tables = [_numbers(runs), _communication(runs[0])]
    rows = -(-len(drawn) // ACROSS)
    lines_used = sum(table.row_count + 1 for table in tables)
    each = max(3, (height - lines_used - 1) // max(1, rows) - 2)
    room = (width - 2 * (ACROSS - 1)) // ACROSS
    grid = Table.grid(padding=(0, 2, 0, 0))
    panels = [_panel(curve, lines, over, room, each, plain) for curve, lines in drawn.items()]
    for first in range(0, len(panels), ACROSS):
        grid.add_row(*panels[first : first + ACROSS])
    notes = [Text(printable(note)[:width]) for run in runs for note in run.notes[:1]]
    return Group(tables[0], grid, tables[1], *notes)


def _panel(curve: Curve, lines: Sequence[Points], over: str, width: int, height: int, plain: bool) -> Text:
    columns = max(1, width - LABEL - 1)
    ys = (_scaled(curve, line.y) for line in lines)
    frame = (*axis_range(*(line.x for line in lines)), *axis_range(*ys))
    cells = np.zeros((height, columns), int)
    colours = np.full((height, columns), "", object)
    for line in lines:
        dots = _dots(line.x, _scaled(curve, line.y), frame, columns, height)
        cells |= dots
        colours[dots > 0] = line.colour
    text = Text(f"{'':{LABEL}} {curve.title}"[:width] + "\n", no_wrap=True)
    least, most = (f"{10.0**y if curve.logarithmic else y:.4g}" for y in frame[2:])
    marks = {0: most, height - 1: least}
    for row in range(height):
        text.append(f"{marks.get(row, ''):>{LABEL}} ")
        for cell, colour in zip(cells[row], colours[row]):
            dots = "*" if plain else chr(BRAILLE + cell)
            text.append(dots if cell else " ", colour or None)
        text.append("\n")
    left, right = f"{frame[0]:,.4g}", f"{frame[1]:,.6g} {over}"
    text.append(f"{'':{LABEL}} {left}{right:>{max(1, columns - len(left))}}")
    return text


def _scaled(curve: Curve, y: np.ndarray) -> np.ndarray:
    return np.log10(y) if curve.logarithmic else y


def _dots(
    x: np.ndarray, y: np.ndarray, frame: tuple[float, float, float, float], columns: int, height: int
) -> np.ndarray:
    """Return the Braille dots of a line, [height, columns]: joined, and every point of its own there."""
    low_x, high_x, low_y, high_y = frame
    wide, tall = 2 * columns, 4 * height

    def row_of(values: np.ndarray) -> np.ndarray:
        return np.rint((high_y - values) / (high_y - low_y) * (tall - 1)).astype(int)

    at = np.linspace(low_x, high_x, wide)
    inside = (at >= x[0]) & (at <= x[-1])
    rows = row_of(np.interp(at, x, y))
    grid = np.zeros((tall, wide), bool)
    for column in np.flatnonzero(inside):
        before = rows[column - 1] if column and inside[column - 1] else rows[column]
        top, bottom = sorted((before, rows[column]))
        grid[top + (before < rows[column]) : max(bottom, top + 1) + (before > rows[column]), column] = True
        grid[rows[column], column] = True
    grid[row_of(y), np.rint((x - low_x) / (high_x - low_x) * (wide - 1)).astype(int)] = True
    return sum(grid[r::4, c::2] * DOTS[r][c] for r in range(4) for c in range(2))


def _numbers(runs: Sequence[RecordedRun]) -> Table:
    table = _table("", "run", "step", "loss", "val", "tokens/s", "MFU")
    whole, exact = "{:,.0f}", "{:.4f}"
    forms = {"step": whole, "loss": exact, "val_loss": exact, "tokens_per_s": whole, "mfu": "{:.1%}"}
    for number, run in enumerate(runs):
        numbers = {name: run.steps.last(name) for name in forms}
        shown = [forms[name].format(x) if np.isfinite(x) else "-" for name, x in numbers.items()]
        table.add_row(label_of(number), Text(printable(run.path)), *shown)
    return table


def _communication(run: RecordedRun) -> Table:
    table = _table("axis", "MB a step", "blocked ms", "hidden ms")
    count = max(1, run.steps.num_sampled)
    costs = sorted(run.steps.comm.items(), key=lambda item: -item[1].blocked_s)
    for name, cost in costs[:MOST_AXES]:
        times = (f"{1e3 * s / count:,.1f}" for s in (cost.blocked_s, cost.overlapped_s))
        table.add_row(Text(printable(name)[:20]), f"{cost.bytes / 1e6 / count:,.3f}", *times)
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        text = name in ("", "run", "axis")
        table.add_column(name, justify="left" if text else "right", no_wrap=True, overflow="ellipsis")
    return table
