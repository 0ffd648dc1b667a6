"""Predict published steps and their memory, and report the errors.

    sheets      the data sheet's rates, nothing fitted
    sustained   rates of the machine's file, times the middle that `plan` prints
    gpu         the constant of other systems' rows on the same machine (fitted.py)
    calibrated  that of the half of its own rows that the CSV names, reported on the other half

    held back   as gpu, of systems that other papers and repositories published

Two yardsticks: one FLOP rate, the median of the fitted half; and the data sheet times one factor.
Errors are (predicted - published) / published of the seconds of a step.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from mpitrain.plan.predict.step_time.machine import MachineFile, machine_of
from mpitrain.plan.predict.step_time.step import Prediction, model_flops, predict_step
from mpitrain.planner.fitted import Sample, fit, quantile, rank_correlation
from mpitrain.planner.published_rows import Refused, Row, read_rows

LEAST = 8  # rows of a system that the bars speak of
QUANTILES = (0.1, 0.9)  # 80 % lie between
FEWEST = 4  # rows that a line of memory, or an interval, is made from
ROWS_OF_ONE = 4  # of a framework, from which its factor counts as one that is known
WORST = 8
UNFITTED = ("sheets", "sustained", "gpu")  # to a system's own rows
MODES = (*UNFITTED, "calibrated")
YARDSTICKS = ("flop rate", "sheet x factor", "held back")
SWEEP = 8  # layouts at least
T = TypeVar("T")
_system = attrgetter("row.whole_system")
_regime = attrgetter("row.regime")


class PredictedRow(NamedTuple):
    """A row with what is predicted of it, by the file's rates and by the data sheet's.

    bounds: of its layouts, where something unknown decides. seconds: what is predicted, by mode or
    yardstick.
    """

    row: Row
    found: Prediction
    sheet: float
    bounds: tuple[float, float]
    seconds: dict[str, float]

    @property
    def sample(self) -> Sample:
        return Sample(self.found.seconds, self.measured, self.row.model.name, self.row.regime)

    @property
    def measured(self) -> float:
        return self.row.measured.seconds or math.nan

    @property
    def counts(self) -> bool:
        """Whether its error counts: it has a time, and nothing that decides is unknown."""
        return self.row.measured.seconds is not None and not self.row.is_interval

    def error(self, mode: str) -> float:
        return self.seconds[mode] / self.measured - 1

    def names(self) -> dict[str, str]:
        """Return which row it is, of what."""
        row = self.row
        model, layout = row.model.name, row.layout.describe()
        return {"id": row.id, "system": row.whole_system, "model": model, "layout": layout}


class BacktestOutcome(NamedTuple):
    """All rows, predicted in every mode; the constant of each system."""

    rows: list[PredictedRow]
    refused: list[Refused]
    constants: Mapping[str, float]


def by_row(outcome: BacktestOutcome) -> list[dict[str, Any]]:
    """Return what is known and predicted of each row, in seconds and bytes."""
    return [
        {
            **each.names(),
            "regime": each.row.regime,
            "half": {True: "fit", False: "test", None: ""}[each.row.fitted],
            "measured_s": each.row.measured.seconds,
            **{f"{mode}_s": each.seconds[mode] for mode in MODES},
            "low_s": each.bounds[0],
            "high_s": each.bounds[1],
            "between_bounds": each.row.is_interval,
            "measured_bytes": each.row.measured.memory_bytes,
            "predicted_bytes": each.found.footprint.total,
            "assumed": ", ".join(f"{key} = {value}" for key, value in each.row.assumed.items()),
        }
        for each in outcome.rows
    ]


def predict_rows(path: str, machine: str = "") -> BacktestOutcome:
    """Return the rows of a CSV of published steps, predicted. machine: a file for those that name it."""
    found, refused = read_rows(path, machine)
    rows = list(map(_predicted, found))
    constants: dict[str, float] = {}
    for own in _by(rows, _system).values():
        constants |= _predict_in_modes(own, rows)
    return BacktestOutcome(rows, refused, constants)


def _predicted(row: Row) -> PredictedRow:
    rates, sheet = (machine_of(row.machine, is_sheet, row.convention.kernel) for is_sheet in (False, True))
    every = [predict_step(row.model, layout, rates) for layout in row.layouts]
    bounds = (min(each.seconds for each in every), max(each.seconds for each in every))
    of_sheet = predict_step(row.model, row.layout, sheet).seconds
    return PredictedRow(row, every[0], of_sheet, bounds, {})


def _predict_in_modes(own: Sequence[PredictedRow], rows: Sequence[PredictedRow]) -> dict[str, float]:
    """Predict the rows of a system in every mode; return its constant in the first one's regime."""
    first = own[0].row
    others = [
        each for each in rows
        if each.counts and each.row.machine.name == first.machine.name and _system(each) != _system(own[0])
    ]  # fmt: skip
    apart = [each for each in others if each.row.source != first.source]
    fitted = [each for each in own if each.counts and each.row.fitted]
    rate, factor = _yardsticks(fitted or others)
    constants: dict[str, float] = {}
    for regime, alike in _by(own, _regime).items():
        of_gpu, held_back = (_of_systems(some, regime, first.machine) for some in (others, apart))
        here = fit([each.sample for each in fitted], of_gpu, regime)
        constants.setdefault(first.whole_system, here)
        for each in alike:
            work = model_flops(each.row.model, each.row.layout) / each.row.layout.ranks
            each.seconds.update({
                "sheets": each.sheet,
                "sustained": each.found.seconds * each.row.machine.expected().middle,
                "gpu": each.found.seconds * math.exp(of_gpu),
                "calibrated": each.found.seconds * math.exp(here),
                "held back": each.found.seconds * math.exp(held_back),
                "flop rate": work / rate if rate else math.nan,
                "sheet x factor": factor * each.sheet if factor else math.nan,
            })  # fmt: skip
    return constants


def _of_systems(others: Sequence[PredictedRow], regime: str, machine: MachineFile) -> float:
    """Return the constant of a GPU type: the median over frameworks of each one's.

    In one regime. k frameworks count as k / (k + 1) of what they say, one with few rows as part of
    one, and the rest is the middle that `plan` prints.
    """
    middle = math.log(machine.expected().middle)
    alike = [each for each in others if each.row.regime == regime]
    frameworks = _by(alike, attrgetter("row.framework")).values()
    if not frameworks:
        return middle
    found = [statistics.median(each.sample.longer for each in own) for own in frameworks]
    count = sum(min(1.0, len(own) / ROWS_OF_ONE) for own in frameworks)
    trust = count / (count + 1)
    return trust * statistics.median(found) + (1 - trust) * middle


def _yardsticks(rows: Sequence[PredictedRow]) -> tuple[float, float]:
    """Return FLOP/s of a rank, and the factor of the data sheet, each the median."""
    if not rows:
        return 0.0, 0.0
    rates = [model_flops(e.row.model, e.row.layout) / (e.row.layout.ranks * e.measured) for e in rows]
    return statistics.median(rates), statistics.median(each.measured / each.sheet for each in rows)


def _by(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    found: dict[Any, list[T]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return dict(found)


# ---------------------------------------------------------------- what is reported


def report(outcome: BacktestOutcome) -> dict[str, Any]:
    """Return the errors of all modes, by system, regime and machine, and what else is printed."""
    rows = outcome.rows
    counted = [each for each in rows if each.counts]
    held_out = [each for each in counted if each.row.fitted is not True]
    complete = len(rows) + sum(not each.incomplete for each in outcome.refused)
    return {
        "rows": len(rows) + len(outcome.refused),
        "predicted": len(counted),
        "interval": sum(each.row.is_interval for each in rows),
        "refused": [each._asdict() for each in outcome.refused],
        "share_of_complete_rows_predicted": len(rows) / complete if complete else math.nan,
        "names_a_half": any(each.row.fitted is not None for each in rows),
        "systems": list(_systems(outcome, held_out)),
        "bars": _bars(held_out),
        "machines": _machines(counted),
        "by_row": by_row(outcome),
        "interval_holds": _held(held_out),
        "sustained_holds": _sustained_held(counted),
        "unknown_held": _unknown_held(rows),
        "sweeps": list(_sweeps(counted)),
        "memory": list(_memory(rows)),
        "assumed": _assumed(rows),
        "worst": _worst(held_out),
    }


def _errors(rows: Sequence[PredictedRow], mode: str) -> dict[str, float]:
    found = [error for each in rows if not math.isnan(error := each.error(mode))]
    absolute = [abs(error) for error in found]
    return {
        "rows": len(found),
        "median": quantile(absolute, 0.5),
        "p90": quantile(absolute, 0.9),
        **{f"q{share}": quantile(found, share / 100) for share in (10, 50, 90)},
    }


def _systems(outcome: BacktestOutcome, held_out: Sequence[PredictedRow]) -> Iterator[dict[str, Any]]:
    fitted = Counter(_system(each) for each in outcome.rows if each.counts and each.row.fitted)
    for system, own in sorted(_by(held_out, _system).items()):
        measured = [each.measured for each in own]
        predicted = [each.seconds["calibrated"] for each in own]
        yield {
            "system": system,
            "regime": own[0].row.regime,
            "fitted_rows": fitted[system],
            "factor": math.exp(outcome.constants[system]),
            "rank_correlation": rank_correlation(predicted, measured) if len(own) > 2 else math.nan,
            **{mode: _errors(own, mode) for mode in (*MODES, *YARDSTICKS)},
        }


def _bars(held_out: Sequence[PredictedRow]) -> dict[str, Any]:
    """Return the median over systems of their medians, by kind, of all and of larger ones."""
    found = {}
    systems = _by(held_out, _system).values()
    for kind, is_kind in (("dense bf16", True), ("experts and fp8", False)):
        for least in (LEAST, 1):
            own = [
                rows for rows in systems
                if len(rows) >= least and (rows[0].row.regime == "dense bf16") == is_kind
            ]  # fmt: skip
            name = f"{kind}, systems of {least} rows or more" if least > 1 else f"{kind}, all systems"
            found[name] = {"systems": len(own), **_medians(own, (*MODES, *YARDSTICKS))}
    return found


def _medians(
    systems: Sequence[Sequence[PredictedRow]], modes: Sequence[str], which: str = "median"
) -> dict[str, float]:
    return {mode: quantile([_errors(rows, mode)[which] for rows in systems], 0.5) for mode in modes}


def _machines(counted: Sequence[PredictedRow]) -> dict[str, Any]:
    """Return what is never calibrated, of all rows of a machine: the median over systems."""
    found: dict[str, dict[str, float]] = {}
    for machine, rows in _by(counted, attrgetter("row.machine.name")).items():
        systems = list(_by(rows, _system).values())
        signed = {f"{mode} signed": error for mode, error in _medians(systems, UNFITTED, "q50").items()}
        counts = {"rows": len(rows), "systems": len(systems)}
        found[machine] = {**counts, **_medians(systems, UNFITTED), **signed}
    return found


def _held(held_out: Sequence[PredictedRow]) -> dict[str, Any]:
    """Return how many rows lie in the 80 % interval that other systems' residuals make."""
    inside, widths = [], []
    for each in held_out:
        alike = [other for other in held_out if _regime(other) == _regime(each)]
        others = [other for other in alike if _system(other) != _system(each)]
        ratios = [other.measured / other.seconds["calibrated"] for other in others]
        if len(ratios) >= FEWEST:
            low, high = (quantile(ratios, share) for share in QUANTILES)
            inside.append(low <= each.measured / each.seconds["calibrated"] <= high)
            widths.append(high / low - 1)
    return {"rows": len(inside), "share": _share(inside), "median_width": quantile(widths, 0.5)}


def _share(inside: Sequence[bool]) -> float:
    return sum(inside) / len(inside) if inside else math.nan


def _sustained_held(counted: Sequence[PredictedRow]) -> dict[str, Any]:
    """Return how far off predictions are without a fit, and how many `plan`'s interval holds."""
    ratios = [each.measured / each.found.seconds for each in counted]
    spreads = [each.row.machine.expected() for each in counted]
    return {
        "rows": len(ratios),
        "q10": quantile(ratios, QUANTILES[0]),
        "q50": quantile(ratios, 0.5),
        "q90": quantile(ratios, QUANTILES[1]),
        "share": _share([spread.low <= ratio <= spread.high for ratio, spread in zip(ratios, spreads)]),
    }


def _unknown_held(rows: Sequence[PredictedRow]) -> dict[str, Any]:
    """Return how many rows with an unknown field that decides lie between their layouts, 10 % beyond each."""
    inside = []
    for each in rows:
        if each.row.is_interval and each.row.measured.seconds is not None:
            factor = each.seconds["gpu"] / each.found.seconds
            low, high = (factor * bound for bound in each.bounds)
            inside.append(0.9 * low <= each.measured <= 1.1 * high)
    return {"rows": len(inside), "share": _share(inside)}


def _sweeps(counted: Sequence[PredictedRow]) -> Iterator[dict[str, Any]]:
    """Yield of each sweep of one model and batch what the first choice and a random pick lose."""
    for name, own in _by(counted, attrgetter("row.sweep")).items():
        if len({each.row.layout for each in own}) < SWEEP:
            continue
        # of a token, since a column may name a sweep over batches
        measured = [each.measured / each.row.layout.tokens for each in own]
        predicted = [each.seconds["calibrated"] / each.row.layout.tokens for each in own]
        best = min(measured)
        chosen = measured[min(range(len(own)), key=predicted.__getitem__)]
        row = own[0].row
        yield {
            "sweep": name,
            "layouts": len(own),
            "several_nodes": row.layout.ranks > row.machine.ranks_per_node,
            "spread": max(measured) / best - 1,
            "loss": 1 - best / chosen,
            "random_loss": statistics.mean(1 - best / each for each in measured),
            "rank_correlation": rank_correlation(predicted, measured),
        }


def _memory(rows: Sequence[PredictedRow]) -> Iterator[dict[str, Any]]:
    """Yield the errors of memory by formula, and with two constants where more is reserved."""
    having = [each for each in rows if each.row.measured.memory_bytes and not each.row.is_interval]
    for allocated, own in _by(having, attrgetter("row.convention.max_allocated")).items():
        for system, here in _by(own, attrgetter("row.system")).items():
            fitted = [each for each in here if each.row.fitted]
            held_out = [each for each in here if not each.row.fitted]
            line = _line(fitted) if not allocated and len(fitted) >= FEWEST else (1.0, 0.0)
            errors, after = _errors_of_memory(here), _errors_of_memory(held_out, *line)
            absolute = [abs(error) for error in errors]
            yield {
                "system": system,
                "definition": "max allocated" if allocated else "reserved or unknown",
                "rows": len(here),
                "median": quantile(absolute, 0.5),
                "p90": quantile(absolute, 0.9),
                "signed": quantile(errors, 0.5),
                "after_fit_rows": len(after),
                "after_fit_median": quantile([abs(error) for error in after], 0.5),
            }


def _errors_of_memory(rows: Sequence[PredictedRow], scale: float = 1.0, more: float = 0.0) -> list[float]:
    return [
        (scale * each.found.footprint.total + more) / (each.row.measured.memory_bytes or math.nan) - 1
        for each in rows
    ]


def _line(rows: Sequence[PredictedRow]) -> tuple[float, float]:
    """Return slope and offset of published over predicted bytes, by least squares."""
    x = [float(each.found.footprint.total) for each in rows]
    y = [float(each.row.measured.memory_bytes or 0) for each in rows]
    if len(set(x)) < 2:
        return 1.0, statistics.mean(y) - statistics.mean(x)
    slope, more = statistics.linear_regression(x, y)
    return slope, more


def _assumed(rows: Sequence[PredictedRow]) -> list[dict[str, Any]]:
    counts = Counter(key for each in rows for key in each.row.assumed)
    return [{"field": key, "rows": count} for key, count in counts.items()]


def _worst(held_out: Sequence[PredictedRow]) -> list[dict[str, Any]]:
    return [
        {
            **each.names(),
            "published_s": each.measured,
            "predicted_s": each.seconds["calibrated"],
            "error": each.error("calibrated"),
            "exposed": {
                axis: took / each.found.seconds for axis, took in each.found.exposed.items() if took > 0
            },
            "bubble": each.found.bubble / each.found.seconds,
            "nearly_full": each.found.footprint.total > 0.9 * each.row.machine.memory_bytes,
            "assumed": dict(each.row.assumed),
        }
        for each in sorted(held_out, key=lambda each: -abs(each.error("calibrated")))[:WORST]
    ]
