"""`mpitrain plan backtest ROWS.csv`: predicted against published steps and memory, as text and files."""

import math
from pathlib import Path
from typing import Any

from mpitrain.commands.output_file import PICTURES, as_csv, require_file, write
from mpitrain.commands.plan.backtest_text import as_text
from mpitrain.errors import ConfigError, counted
from mpitrain.inputs import rendered, shown
from mpitrain.plan.declared import formatting
from mpitrain.planner.backtest_errors import BacktestOutcome, by_row, predict_rows, report
from mpitrain.planner.fitted import machine_text

SIZE = (8, 5)  # inches
KINDS_OF_FILES = (*PICTURES, ".csv", ".toml")


def backtest(path: str, as_json: bool = False, out: str | None = None, machine: str = "") -> str:
    """Return the report of a CSV of published steps.

    out: a picture, a CSV of all rows as predicted, or the file of the machine whose rows they
    are, with constants fitted to them. machine: a file for the rows that name it, or none. Raises
    ConfigError.
    """
    if out is not None:
        require_file("--out", out, KINDS_OF_FILES, (path, machine))
    outcome = predict_rows(path, machine)
    if not outcome.rows:
        first = f" (of the first: {outcome.refused[0].why})" if outcome.refused else ""
        raise ConfigError(
            f"{shown(path)}: {counted(len(outcome.refused), 'rows')}, none of which can be predicted{first}; "
            "needed a model, a layout, a GPU and what a step took (docs/guides/planning.md)"
        )
    if out is not None:
        _write(outcome, out, Path(path).name)
    found = report(outcome)
    return formatting.as_json(found) if as_json else as_text(found, Path(path).name)


def _write(outcome: BacktestOutcome, out: str, source: str) -> None:
    """Write a picture of all rows, their numbers, or their machine's file. Raises ConfigError."""
    if out.endswith(".csv"):
        rows = [{key: _text(value) for key, value in row.items()} for row in by_row(outcome)]
        write("--out", out, as_csv(rows))
    elif out.endswith(".toml"):
        own = [each for each in outcome.rows if each.counts]
        text = machine_text([each.row for each in own], [each.sample for each in own], source)
        write("--out", out, text.encode())
    else:
        write("--out", out, _picture(outcome, Path(out).suffix[1:]))


def _text(value: Any) -> Any:
    """Return a number with six digits; what isn't known is empty."""
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else ""
    return value


def _picture(outcome: BacktestOutcome, kind: str) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE)
    axes = figure.subplots()
    points = _points(outcome)
    if not points:
        raise ConfigError("--out of a picture: found no row with a time that is predicted; leave --out out")
    every = [number for x, y in points.values() for number in (*x, *y)] or [1.0]
    ends = [min(every), max(every)]
    axes.plot(ends, ends, color="0.5", linewidth=1)
    for name, (x, y) in sorted(points.items()):
        axes.scatter(x, y, s=14, label=name)
    axes.set(xscale="log", yscale="log", xlabel="published, s a step", ylabel="predicted, s a step")
    axes.legend(fontsize=8)
    return rendered(figure, kind)


def _points(outcome: BacktestOutcome) -> dict[str, tuple[list[float], list[float]]]:
    found: dict[str, tuple[list[float], list[float]]] = {}
    for each in outcome.rows:
        if each.counts:
            x, y = found.setdefault(each.row.machine.name, ([], []))
            x.append(each.measured)
            y.append(each.seconds["calibrated"])
    return found
