"""`mpitrain plan` for several numbers of ranks, for another machine, for all layouts."""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpitrain.commands.declared_options import MOST_RANKS
from mpitrain.config import flatten
from mpitrain.errors import ConfigError, nearest
from mpitrain.inputs import shown
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.planner.candidates import KEYS
from mpitrain.planner.search import SearchResult
from mpitrain.planner.what_if import CHANGED, WhatIf

MOST_COUNTS = 16


def changes(texts: Sequence[str]) -> tuple[WhatIf, ...]:
    """Return what all --what-if say. Raises ConfigError, also for a figure that two of them change."""
    changed = tuple(map(what_if, texts))
    figures = [each.figure for each in changed]
    twice = next((figure for figure in figures if figures.count(figure) > 1), None)
    if twice:
        raise ConfigError(f"--what-if {twice}: found {figures.count(twice)} factors; give one")
    return changed


def what_if(text: str) -> WhatIf:
    """Return what `links.between=2x` says. Raises ConfigError."""
    figure, _, factor = text.partition("=")
    if figure not in CHANGED:
        near = nearest(figure, CHANGED)
        hint = f"did you mean {near}? " if near else ""
        raise ConfigError(
            f"--what-if {shown(text)}: there is no figure {shown(figure)}; {hint}needed one of "
            f"{', '.join(CHANGED)}, as links.between=2x"
        )
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)x?", factor)
    if match is None or not 1e-3 <= float(match[1]) <= 1e3:
        raise ConfigError(f"--what-if {shown(text)}: needed a factor of 0.001 to 1000, as links.between=2x")
    return WhatIf(figure, float(match[1]))


def counts_of(text: str) -> tuple[int, ...]:
    """Return the numbers of ranks that `64,128,256` says, each once. Raises ConfigError."""
    parts = text.split(",")
    numbers = [int(part) for part in parts if re.fullmatch(r"[0-9]{1,7}", part)]
    good = [number for number in numbers if 1 <= number <= MOST_RANKS]
    if len(good) < len(parts) or len(parts) > MOST_COUNTS:
        raise ConfigError(
            f"--ranks {shown(text)}: needed 1 to {MOST_COUNTS} numbers from 1 to {MOST_RANKS:,}, such as "
            "64 or 64,128"
        )
    return tuple(dict.fromkeys(good))


class ScalingPoint(NamedTuple):
    """The best layout of a number of ranks, or why there is none."""

    ranks: int
    layout: StepLayout | None
    seconds: float = math.nan
    between: tuple[float, float] = (math.nan, math.nan)
    mfu: float = math.nan
    why: str = ""

    @property
    def tokens_per_s(self) -> float:
        return self.layout.tokens / self.seconds if self.layout else math.nan


def scaling_text(points: Sequence[ScalingPoint]) -> str:
    """Return a line for each number of ranks: step, tokens, share of the first one's speed."""
    first = next((each for each in points if each.layout), None)
    lines = ["  ranks   s/step    p10-p90      tokens/s   efficiency MFU %  layout"]
    for each in points:
        if each.layout is None or first is None:
            lines.append(f"{each.ranks:>7}  none: {each.why}")
            continue
        share = (each.tokens_per_s / each.ranks) / (first.tokens_per_s / first.ranks)
        low, high = each.between
        lines.append(
            f"{each.ranks:>7}{each.seconds:>9.3g}  {low:>5.3g}-{high:<6.3g}{each.tokens_per_s:>11,.0f}"
            f"{100 * share:>11.1f} %{100 * each.mfu:>6.1f}  {each.layout.describe()}"
        )
    return "\n".join(lines)


def layout_rows(found: SearchResult, chosen: Sequence[StepLayout], middle: float) -> list[dict[str, Any]]:
    """Return all layouts that were looked at, as rows of a CSV.

    chosen: those of the answer, in its order. middle: what steps take over what is predicted.
    least_seconds: a bound of what the simulated schedule takes; a layout that is left out for its
    memory has none.
    """
    places = {layout: number for number, layout in enumerate(chosen, start=1)}
    rows = []
    for each, seconds in found.bounded():
        flat = flatten(each.config)
        rows.append({
            "place": places.get(each.layout, "") if each.layout else "",
            "layout": each.layout.describe() if each.layout else "",
            "left_out_by": found.reason_of(each),
            "least_seconds": "" if seconds is None else f"{middle * seconds:.6g}",
            "bytes_by_formula": each.held or "",
            **{key: flat[key] for key in KEYS},
        })  # fmt: skip
    return rows
