"""Predict published steps and their memory, and report the errors.

    sheets      the data sheet's rates, nothing fitted
    sustained   rates of the machine's file, times the middle that `plan` prints
    gpu         constants of other systems' rows on the same machine
    calibrated  constants of the half of its own rows that the CSV names, reported on the other half

    held back   as gpu, of systems that other papers and repositories published

Two yardsticks: one FLOP rate, the median of the fitted half; and the data sheet times one factor.
Errors are (predicted - published) / published of the seconds of a step.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mpitrain.plan.predict.step_time.machine import MachineFile, MachineRates, machine_of
from mpitrain.plan.predict.step_time.step import Prediction, model_flops, predict_step
from mpitrain.planner.fitted import (
    NOTHING,
    Constants,
    Sample,
    fit,
    quantile,
    rank_correlation,
    shares_of,
)
from mpitrain.planner.published_rows import Refused, Row, read_rows

LEAST = 8  # rows of a system that the bars speak of
QUANTILES = (0.1, 0.9)  # 80 % lie between
FEWEST = 4  # rows that a line of memory, or an interval, is made from
WORST = 8
MODES = ("sheets", "sustained", "gpu", "calibrated")
YARDSTICKS = ("flop rate", "sheet x factor", "held back")
SWEEP = 8  # layouts at least


class Predicted(NamedTuple):
    """A row with what is predicted of it, by the file's rates and by the data sheet's.

    bounds: of its layouts, where something unknown decides. shares: of each term of a step.
    """

    row: Row
    found: Prediction
    sheet: float
    bounds: tuple[float, float]
    shares: tuple[float, ...]

    @property
    def sample(self) -> Sample:
        row = self.row
        measured = row.measured.seconds or math.nan
        return Sample(self.found.seconds, self.shares, measured, row.model.name, row.regime)

    @property
    def measured(self) -> float:
        return self.row.measured.seconds or math.nan

    @property
    def counts(self) -> bool:
        """Whether its error counts: it has a time, and nothing that decides is unknown."""
        return self.row.measured.seconds is not None and not self.row.is_interval


class BacktestOutcome(NamedTuple):
    """All rows, predicted in every mode.

    seconds: by mode or yardstick, then by row, what is predicted.
    """

    rows: list[Predicted]
    refused: list[Refused]
    seconds: Mapping[str, dict[int, float]]
    constants: Mapping[str, Constants]


def by_row(outcome: BacktestOutcome) -> list[dict[str, Any]]:
    """Return what is known and predicted of each row, in seconds and bytes."""
    found = []
    for at, each in enumerate(outcome.rows):
        row = each.row
        found.append(
            {
                "id": row.id,
                "system": row.whole_system,
                "model": row.model.name,
                "layout": row.layout.describe(),
                "regime": row.regime,
                "half": {True: "fit", False: "test", None: ""}[row.fitted],
                "measured_s": row.measured.seconds,
                **{f"{mode}_s": outcome.seconds[mode][at] for mode in MODES},
                "low_s": each.bounds[0],
                "high_s": each.bounds[1],
                "between_bounds": row.is_interval,
                "measured_bytes": row.measured.memory_bytes,
                "predicted_bytes": each.found.footprint.total,
                "assumed": ", ".join(f"{key} = {value}" for key, value in row.assumed.items()),
            }
        )
    return found


def predict_rows(path: str, machine: str = "") -> BacktestOutcome:
    """Return the rows of a CSV of published steps, predicted. machine: a file for those that name it."""
    rows, refused = read_rows(path, machine)
    cached: dict[tuple[str, bool, str], MachineRates] = {}

    def rates(row: Row, sheet: bool) -> MachineRates:
        key = (row.machine.name, sheet, row.convention.kernel)
        if key not in cached:
            cached[key] = machine_of(row.machine, sheet, row.convention.kernel)
        return cached[key]

    predicted = []
    for row in rows:
        every = [predict_step(row.model, layout, rates(row, False)) for layout in row.layouts]
        sheet = predict_step(row.model, row.layout, rates(row, True)).seconds
        bounds = (min(each.seconds for each in every), max(each.seconds for each in every))
        shares = shares_of(row.model, row.layout, rates(row, False))
        predicted.append(Predicted(row, every[0], sheet, bounds, shares))
    seconds, constants = _modes(predicted)
    return BacktestOutcome(predicted, refused, seconds, constants)


def _modes(rows: Sequence[Predicted]) -> tuple[dict[str, dict[int, float]], dict[str, Constants]]:
    """Return the seconds of every row in every mode, and the constants of each system."""
    found: dict[str, dict[int, float]] = {mode: {} for mode in (*MODES, *YARDSTICKS)}
    constants: dict[str, Constants] = {}
    for system, own in _by(range(len(rows)), lambda at: rows[at].row.whole_system).items():
        others = [
            each for each in rows
            if each.counts and each.row.machine.name == rows[own[0]].row.machine.name
            and each.row.whole_system != system
        ]  # fmt: skip
        fitted = [rows[at] for at in own if rows[at].counts and rows[at].row.fitted]
        rate, factor = _yardsticks(fitted or others)
        for regime, alike in _by(own, lambda at: rows[at].row.regime).items():
            of_gpu = _of_systems(others, regime, rows[own[0]].row.machine)
            apart = [each for each in others if each.row.source != rows[own[0]].row.source]
            held_back = _of_systems(apart, regime, rows[own[0]].row.machine)
            here = fit([each.sample for each in fitted], of_gpu, regime)
            constants.setdefault(system, here)
            for at in alike:
                each = rows[at]
                found["sheets"][at] = each.sheet
                found["sustained"][at] = each.found.seconds * each.row.machine.expected().middle
                found["gpu"][at] = each.sample.at(of_gpu)
                found["calibrated"][at] = each.sample.at(here)
                found["held back"][at] = each.sample.at(held_back)
                work = model_flops(each.row.model, each.row.layout) / each.row.layout.ranks
                found["flop rate"][at] = work / rate if rate else math.nan
                found["sheet x factor"][at] = factor * each.sheet if factor else math.nan
    return found, constants


def _of_systems(others: Sequence[Predicted], regime: str, machine: MachineFile) -> Constants:
    """Return the constants of a GPU type: the median over frameworks of each one's factor.

    Of the same regime, if there are any. k frameworks count as k / (k + 1) of what they say, and
    the rest is the middle that `plan` prints.
    """
    middle = math.log(machine.expected().middle)
    alike = [each for each in others if each.row.regime == regime]
    frameworks = _by(alike or others, lambda each: each.row.framework)
    factors = [
        statistics.median(math.log(each.measured / each.found.seconds) for each in own)
        for own in frameworks.values()
    ]
    if not factors:
        return NOTHING._replace(level=middle)
    trust = len(factors) / (len(factors) + 1)
    level = trust * statistics.median(factors) + (1 - trust) * middle
    return NOTHING._replace(level=level, num_rows=len(others))


def _yardsticks(rows: Sequence[Predicted]) -> tuple[float, float]:
    """Return FLOP/s of a rank, and the factor of the data sheet, in the median of some rows."""
    if not rows:
        return 0.0, 0.0
    rates = [model_flops(e.row.model, e.row.layout) / (e.row.layout.ranks * e.measured) for e in rows]
    return statistics.median(rates), statistics.median(each.measured / each.sheet for each in rows)


def _by(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return dict(found)


# ---------------------------------------------------------------- what is reported


def report(outcome: BacktestOutcome) -> dict[str, Any]:
    """Return the errors of all modes, by system, regime and machine, and what else is printed."""
    rows = outcome.rows
    counted = [at for at, each in enumerate(rows) if each.counts]
    held_out = [at for at in counted if rows[at].row.fitted is not True]
    complete = len(rows) + sum(not each.incomplete for each in outcome.refused)
    return {
        "rows": len(rows) + len(outcome.refused),
        "predicted": len(counted),
        "interval": sum(each.row.is_interval for each in rows),
        "refused": [each._asdict() for each in outcome.refused],
        "share_of_complete_rows_predicted": len(rows) / complete if complete else math.nan,
        "names_a_half": any(each.row.fitted is not None for each in rows),
        "systems": _systems(outcome, held_out),
        "regimes": {
            name: _errors(outcome, "calibrated", own)
            for name, own in _by(held_out, lambda at: rows[at].row.regime).items()
        },
        "bars": _bars(outcome, held_out),
        "machines": _machines(outcome, counted),
        "by_row": by_row(outcome),
        "interval_holds": _held(outcome, held_out),
        "sustained_holds": _sustained_held(outcome, counted),
        "unknown_held": _unknown_held(outcome),
        "sweeps": _sweeps(outcome, counted),
        "memory": _memory(rows),
        "assumed": _assumed(rows),
        "worst": _worst(outcome, held_out),
    }


def _error(outcome: BacktestOutcome, mode: str, at: int) -> float:
    return outcome.seconds[mode][at] / outcome.rows[at].measured - 1


def _errors(outcome: BacktestOutcome, mode: str, own: Sequence[int]) -> dict[str, float]:
    found = [error for at in own if not math.isnan(error := _error(outcome, mode, at))]
    absolute = [abs(error) for error in found]
    return {
        "rows": len(found),
        "median": quantile(absolute, 0.5),
        "p90": quantile(absolute, 0.9),
        **{f"q{share}": quantile(found, share / 100) for share in (10, 50, 90)},
    }


def _systems(outcome: BacktestOutcome, held_out: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for system, own in sorted(_by(held_out, lambda at: outcome.rows[at].row.whole_system).items()):
        constants = outcome.constants[system]
        measured = [outcome.rows[at].measured for at in own]
        predicted = [outcome.seconds["calibrated"][at] for at in own]
        found.append(
            {
                "system": system,
                "regime": outcome.rows[own[0]].row.regime,
                "fitted_rows": sum(
                    each.counts and bool(each.row.fitted) and each.row.whole_system == system
                    for each in outcome.rows
                ),
                "constants": constants._asdict(),
                "rank_correlation": rank_correlation(predicted, measured) if len(own) > 2 else math.nan,
                **{mode: _errors(outcome, mode, own) for mode in (*MODES, *YARDSTICKS)},
            }
        )
    return found


def _bars(outcome: BacktestOutcome, held_out: Sequence[int]) -> dict[str, Any]:
    """Return the median over systems of their medians, by kind, of all and of larger ones."""
    found = {}
    by_system = _by(held_out, lambda at: outcome.rows[at].row.whole_system)
    for kind, is_kind in (("dense bf16", True), ("experts and fp8", False)):
        for least in (LEAST, 1):
            own = [
                ats for ats in by_system.values()
                if len(ats) >= least and (outcome.rows[ats[0]].row.regime == "dense bf16") == is_kind
            ]  # fmt: skip
            medians = {
                mode: quantile([_errors(outcome, mode, ats)["median"] for ats in own], 0.5)
                for mode in (*MODES, *YARDSTICKS)
            }
            name = f"{kind}, systems of {least} rows or more" if least > 1 else f"{kind}, all systems"
            found[name] = {"systems": len(own), **medians}
    return found


def _machines(outcome: BacktestOutcome, counted: Sequence[int]) -> dict[str, Any]:
    """Return what is never calibrated, of all rows of a machine: the median over systems."""
    found: dict[str, dict[str, float]] = {}
    for machine, ats in _by(counted, lambda at: outcome.rows[at].row.machine.name).items():
        by_system = _by(ats, lambda at: outcome.rows[at].row.whole_system)
        found[machine] = {"rows": len(ats), "systems": len(by_system)}
        for mode in ("sheets", "sustained", "gpu"):
            every = [_errors(outcome, mode, own) for own in by_system.values()]
            found[machine][mode] = quantile([each["median"] for each in every], 0.5)
            found[machine][f"{mode} signed"] = quantile([each["q50"] for each in every], 0.5)
    return found


def _held(outcome: BacktestOutcome, held_out: Sequence[int]) -> dict[str, Any]:
    """Return how many rows lie in the 80 % interval that other systems' residuals make."""
    inside = []
    widths = []
    for at in held_out:
        row = outcome.rows[at].row
        low, high = _interval(outcome, row, held_out)
        if math.isnan(low):
            continue
        ratio = outcome.rows[at].measured / outcome.seconds["calibrated"][at]
        inside.append(low <= ratio <= high)
        widths.append(high / low - 1)
    share = sum(inside) / len(inside) if inside else math.nan
    return {"rows": len(inside), "share": share, "median_width": quantile(widths, 0.5)}


def _interval(outcome: BacktestOutcome, row: Row, held_out: Sequence[int]) -> tuple[float, float]:
    """Return between which factors of a prediction 80 % of other systems' rows lie."""
    ratios = [
        outcome.rows[at].measured / outcome.seconds["calibrated"][at]
        for at in held_out
        if outcome.rows[at].row.whole_system != row.whole_system and outcome.rows[at].row.regime == row.regime
    ]
    if len(ratios) < FEWEST:
        return math.nan, math.nan
    return quantile(ratios, QUANTILES[0]), quantile(ratios, QUANTILES[1])


def _sustained_held(outcome: BacktestOutcome, counted: Sequence[int]) -> dict[str, Any]:
    """Return how far off predictions are without a fit, and how many `plan`'s interval holds."""
    ratios = [outcome.rows[at].measured / outcome.rows[at].found.seconds for at in counted]
    spreads = [outcome.rows[at].row.machine.expected() for at in counted]
    inside = sum(spread.low <= ratio <= spread.high for ratio, spread in zip(ratios, spreads))
    return {
        "rows": len(ratios),
        "q10": quantile(ratios, QUANTILES[0]),
        "q50": quantile(ratios, 0.5),
        "q90": quantile(ratios, QUANTILES[1]),
        "share": inside / len(ratios) if ratios else math.nan,
    }


def _unknown_held(outcome: BacktestOutcome) -> dict[str, Any]:
    """Return how many rows with an unknown field that decides lie between their layouts, 10 % beyond each."""
    inside = []
    for at, each in enumerate(outcome.rows):
        if each.row.is_interval and each.row.measured.seconds is not None:
            factor = outcome.seconds["gpu"][at] / each.found.seconds
            low, high = (factor * bound for bound in each.bounds)
            inside.append(0.9 * low <= each.measured <= 1.1 * high)
    return {"rows": len(inside), "share": sum(inside) / len(inside) if inside else math.nan}


def _sweeps(outcome: BacktestOutcome, counted: Sequence[int]) -> list[dict[str, Any]]:
    """Return of each sweep of one model and batch what the first choice and a random pick lose."""
    found = []
    for name, own in _by(counted, lambda at: outcome.rows[at].row.sweep).items():
        if len({outcome.rows[at].row.layout for at in own}) < SWEEP:
            continue
        # of a token, since a column may name a sweep over batches
        tokens = [outcome.rows[at].row.layout.tokens for at in own]
        measured = [outcome.rows[at].measured / count for at, count in zip(own, tokens)]
        predicted = [outcome.seconds["calibrated"][at] / count for at, count in zip(own, tokens)]
        best = min(measured)
        chosen = measured[min(range(len(own)), key=predicted.__getitem__)]
        row = outcome.rows[own[0]].row
        found.append(
            {
                "sweep": name,
                "layouts": len(own),
                "several_nodes": row.layout.ranks > row.machine.ranks_per_node,
                "spread": max(measured) / best - 1,
                "loss": 1 - best / chosen,
                "random_loss": statistics.mean(1 - best / each for each in measured),
                "rank_correlation": rank_correlation(predicted, measured),
            }
        )
    return found


def _memory(rows: Sequence[Predicted]) -> list[dict[str, Any]]:
    """Return the errors of memory by formula, and with two constants where more is reserved."""
    found = []
    having = [each for each in rows if each.row.measured.memory_bytes and not each.row.is_interval]
    for allocated, own in _by(having, lambda each: each.row.convention.max_allocated).items():
        for system, here in _by(own, lambda each: each.row.system).items():
            errors = [each.found.footprint.total / each.row.measured.memory_bytes - 1 for each in here]
            fitted = [each for each in here if each.row.fitted]
            held_out = [each for each in here if not each.row.fitted]
            scale, more = _line(fitted) if not allocated and len(fitted) >= FEWEST else (1.0, 0.0)
            after = [
                (scale * each.found.footprint.total + more) / each.row.measured.memory_bytes - 1
                for each in held_out
            ]
            found.append(
                {
                    "system": system,
                    "definition": "max allocated" if allocated else "reserved or unknown",
                    "rows": len(here),
                    "median": quantile([abs(error) for error in errors], 0.5),
                    "p90": quantile([abs(error) for error in errors], 0.9),
                    "signed": quantile(errors, 0.5),
                    "after_fit_rows": len(after),
                    "after_fit_median": quantile([abs(error) for error in after], 0.5),
                }
            )
    return found


def _line(rows: Sequence[Predicted]) -> tuple[float, float]:
    """Return the line of published over predicted bytes, by least squares."""
    x = [float(each.found.footprint.total) for each in rows]
    y = [float(each.row.measured.memory_bytes or 0) for each in rows]
    mean_x, mean_y = statistics.mean(x), statistics.mean(y)
    spread = sum((each - mean_x) ** 2 for each in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / spread if spread else 1.0
    return slope, mean_y - slope * mean_x


def _assumed(rows: Sequence[Predicted]) -> list[dict[str, Any]]:
    """Return the fields that were assumed, and of how many rows."""
    by_field = _by(((key, each) for each in rows for key in each.row.assumed), lambda pair: pair[0])
    return [{"field": key, "rows": len(own)} for key, own in by_field.items()]


def _worst(outcome: BacktestOutcome, held_out: Sequence[int]) -> list[dict[str, Any]]:
    """Return the rows with the largest errors, and what their prediction was made of."""
    ordered = sorted(held_out, key=lambda at: -abs(_error(outcome, "calibrated", at)))[:WORST]
    found = []
    for at in ordered:
        each = outcome.rows[at]
        shares = {axis: took / each.found.seconds for axis, took in each.found.exposed.items() if took > 0}
        found.append(
            {
                "id": each.row.id,
                "system": each.row.whole_system,
                "model": each.row.model.name,
                "layout": each.row.layout.describe(),
                "published_s": each.measured,
                "predicted_s": outcome.seconds["calibrated"][at],
                "error": _error(outcome, "calibrated", at),
                "exposed": shares,
                "bubble": each.found.bubble / each.found.seconds,
                "nearly_full": each.found.footprint.total > 0.9 * each.row.machine.memory_bytes,
                "assumed": dict(each.row.assumed),
            }
        )
    return found
