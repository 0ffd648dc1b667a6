"""Curves of runs: one description for the page, pictures, and the terminal. Draws nothing itself."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpitrain.report.series import LoadsLine, StepSeries, thinned

# colour-blind readers distinguish them (Okabe and Ito, 2008), on light and dark
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
DASHES = ("solid", "dashed", "dotted", "dashdot")


class Curve(NamedTuple):
    """A number of runs over their steps. A column of evaluations is a text of the run."""

    title: str  # with the unit
    column: str  # of metrics.jsonl
    factor: float = 1.0  # to that unit
    logarithmic: bool = False
    name: str = ""  # of its figure on a page; "": the column's

    @property
    def figure(self) -> str:
        """Return the name of its figure."""
        return self.name or self.column


CURVES = (
    Curve("training loss, nats per token", "loss"),
    Curve("validation loss, nats per token", "val_loss"),
    Curve("gradient norm", "grad_norm", logarithmic=True),
    Curve("learning rate", "lr"),
    Curve("tokens per second", "tokens_per_s"),
    Curve("model FLOPs utilisation, %", "mfu", 100),
    Curve("hardware FLOPs utilisation, %", "hfu", 100),
    Curve("seconds per step", "step_s"),
    Curve("expert loads, coefficient of variation", "load_cv"),
    Curve("gradient noise scale, tokens", "noise_scale", logarithmic=True),
    Curve("skipped updates", "skipped"),
    Curve("rollbacks", "rollbacks"),
)
BY_COLUMN = {curve.column: curve for curve in CURVES}
MOST_BLOCKS, MOST_EXPERTS = 200, 1024  # of a map of loads
MOST_EVALUATED = 24  # curves, of all runs
COUNTED = ("skipped", "rollbacks")  # shown where they count something


class Points(NamedTuple):
    """A curve of one run. number: of the run."""

    number: int
    x: np.ndarray
    y: np.ndarray

    @property
    def colour(self) -> str:
        """The run's colour, the same in all curves."""
        return COLOURS[self.number % len(COLOURS)]

    @property
    def dash(self) -> str:
        """The run's dashes: they distinguish runs of one colour."""
        return DASHES[self.number // len(COLOURS) % len(DASHES)]


def evaluated(runs: Sequence[StepSeries]) -> list[Curve]:
    """Return the curves of what sources and tasks were evaluated to, in some of the runs."""
    names = sorted({name for run in runs for name in run.columns if "/" in name})[:MOST_EVALUATED]
    return [Curve("", name, name=f"evaluated-{number}") for number, name in enumerate(names)]


def label_of(number: int) -> str:
    """Return the short name of a run: A, B, ... A2."""
    return chr(ord("A") + number % 26) + (str(number // 26 + 1) if number >= 26 else "")


def lines_of(curves: Iterable[Curve], runs: Sequence[StepSeries], over: str) -> dict[Curve, list[Points]]:
    """Return those curves that some runs have, each of all these. over: "step", "tokens" or "hours"."""
    lines = {curve: list(_points(curve, runs, over)) for curve in curves}
    return {curve: of_runs for curve, of_runs in lines.items() if of_runs}


def _points(curve: Curve, runs: Sequence[StepSeries], over: str) -> Iterator[Points]:
    for number, run in enumerate(runs):
        columns = run.columns
        if curve.column not in columns:
            continue
        x = np.nancumsum(columns["step_s"]) / 3600 if over == "hours" else columns[over]
        x, y = thinned(x, columns[curve.column] * curve.factor)
        if curve.logarithmic:
            x, y = x[y > 0], y[y > 0]
        if len(x) and (curve.column not in COUNTED or y.any()):
            yield Points(number, x, y)


def axis_range(*of_lines: np.ndarray) -> tuple[float, float]:
    """Return the lowest and the highest number of some lines, far enough apart to divide by."""
    low = float(min(numbers.min() for numbers in of_lines))
    high = float(max(numbers.max() for numbers in of_lines))
    size = max(abs(low), abs(high))
    if high - low > 1e-9 * size:
        return low, high
    margin = max(0.5, 1e-3 * size)
    return low - margin, high + margin


def load_cells(line: LoadsLine) -> dict[str, np.ndarray]:
    """Return the columns of a map of loads: a row a block, and how often the mean an expert has."""
    blocks = [shares[:MOST_EXPERTS] for shares in line.expert_loads.values() if shares][:MOST_BLOCKS]
    cells = [(x, y, share * len(row)) for y, row in enumerate(blocks) for x, share in enumerate(row)]
    x, y, load = np.array(cells, np.float32).reshape(-1, 3).T
    # light to dark, the mean half of it
    return {"x": x, "y": y, "load": load, "alpha": np.clip(load / 2, 0.02, 1)}
