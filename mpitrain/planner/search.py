"""Prune the layouts of a search space, and rank what is left by predicted time.

First by formulas alone, then the best of them played; last the memory of those that remain as a run
would hold it (plan/predict/memory.py), by the plan of the very configuration that would be written.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from mpitrain.config import Config
from mpitrain.errors import InputError
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.step_time.footprint import footprint_of
from mpitrain.plan.predict.step_time.step import (
    Prediction,
    is_defined,
    predict_step,
    stashes_in_flight,
)
from mpitrain.plan.predict.step_time.step_model import StepModel
from mpitrain.planner.candidates import CONTEXT, GATHER, SearchSpace, candidates, regathering

PLAYED = 24  # of the best by formulas, at a time
MOST_BATCHES = 8  # of these: memory refuses what formulas let pass
BY_FORMULA = 0.97  # of a step as it is played, what formulas say at least, mostly
SLACK = 1.15  # formulas of memory may be too high by this much
FEW = 1.0  # microbatches over stages, at least
ENOUGH = 0.005  # what a more complex layout must gain
TIGHTER = (0.5, 0.25, 0.12)  # of the limit that formulas are held to, where what they let pass doesn't fit
REFUSED = "what a run refuses"
NO_FASTER = "a kind of cp or of gathers that is no faster"
SLOWER = "being slower, by formulas, than those that were played"


class Candidate(NamedTuple):
    """A layout as predictions take it, its step, and the configuration that has it."""

    layout: StepLayout
    found: Prediction
    config: Config

    @property
    def complexity(self) -> int:
        """Axes and options that a layout uses: what is simpler wins a tie."""
        layout = self.layout
        used = (
            layout.tp > 1, layout.pp > 1, layout.cp > 1, layout.zero == 3, layout.chunks > 1,
            layout.context != "zigzag", layout.gather == "step", layout.regathers,
            layout.recompute != "none", layout.schedule not in ("1f1b", "interleaved"),
        )  # fmt: skip
        return sum(used)


class Tried(NamedTuple):
    """A layout that was looked at. reason: why it is left out, "" for a candidate.

    seconds, held: of a step, and bytes, by formulas. layout: None for one that a run refuses.
    """

    config: Config
    layout: StepLayout | None
    reason: str
    seconds: float = math.nan
    held: int = 0


Batches = Iterator[tuple[list[Candidate], float]]


class SearchResult(NamedTuple):
    """What a search found.

    ranked: the first that are played, best first. refused: how many, by reason. tried: all.
    example: what a run says of the first one that it refuses. more: these and further ones,
    played in batches of as many, each with the least seconds of those after it. every: all
    layouts.
    """

    ranked: list[Candidate]
    refused: Counter[str]
    tried: int
    example: str = ""
    more: Batches = iter(())
    every: list[Tried] = []


def searches(
    model: StepModel, space: SearchSpace, limit: float, unfit: Collection[StepLayout]
) -> Iterator[SearchResult]:
    """Yield what search() finds, and then ever leaner layouts, for as long as memory left some out.

    A run holds buffers that formulas don't have, so all that they let pass may not fit. The caller
    puts into `unfit` what didn't. Last come the leanest by formulas, whatever time they take.
    """
    found = search(model, space, limit)
    yield found
    for share in TIGHTER:
        if not (found.refused["memory"] or unfit):
            return
        yield search(model, space, share * limit, unfit)
    if found.refused["memory"] or unfit:
        yield search(model, space, limit, unfit, leanest=True)


def search(
    model: StepModel,
    space: SearchSpace,
    limit: float,
    unfit: Collection[StepLayout] = (),
    leanest: bool = False,
) -> SearchResult:
    """Return the layouts that fit, best first.

    limit: bytes of a rank. unfit: layouts that are known not to fit. leanest: those that need least
    memory are played, not those that are fastest.
    """
    refused: Counter[str] = Counter()
    example = ""
    fitting: list[Candidate] = []
    seconds: dict[StepLayout, float] = {}
    every: list[Tried] = []
    for config, layout in _layouts(model, space, limit):
        if isinstance(layout, InputError):
            refused[REFUSED] += 1
            every.append(Tried(config, None, layout.args[0]))
            example = example or layout.args[0]
            continue
        reason = "memory" if layout in unfit else _reason_against(model, layout, limit)
        if reason:
            refused[reason] += 1
            every.append(Tried(config, layout, reason))
            continue
        found = predict_step(model, layout, space.machine, play=False)
        seconds[layout] = found.seconds
        reason = NO_FASTER if _gains_nothing(layout, seconds) else ""
        every.append(Tried(config, layout, reason, found.seconds, found.footprint.total))
        if reason:
            refused[reason] += 1
        else:
            fitting.append(Candidate(layout, found, config))
    fitting.sort(key=lambda each: each.found.footprint.total if leanest else each.found.seconds)
    batches = _played(model, space, fitting, refused)
    first = next(batches, ([], math.inf))
    return SearchResult(first[0], refused, len(every), example, chain([first], batches), every)


def _played(model: StepModel, space: SearchSpace, fitting: list[Candidate], refused: Counter[str]) -> Batches:
    """Yield batches of candidates, played, each with the least seconds of those after it.

    refused: is kept up with those that aren't played yet, and with what isn't defined.
    """
    at = 0
    for _ in range(MOST_BATCHES):
        played: list[Candidate] = []
        while at < len(fitting) and len(played) < PLAYED:
            each = fitting[at]
            at += 1
            if is_defined(each.layout):
                played.append(each._replace(found=predict_step(model, each.layout, space.machine)))
            else:
                refused["a schedule that isn't defined for so many stages and microbatches"] += 1
        refused[SLOWER] = len(fitting) - at
        if not refused[SLOWER]:
            del refused[SLOWER]
        if not played:
            return
        played.sort(key=lambda each: each.found.seconds * (1 + ENOUGH * each.complexity))
        after = min((each.found.seconds for each in fitting[at:]), default=math.inf)
        yield played, after * BY_FORMULA


def _layouts(
    model: StepModel, space: SearchSpace, limit: float
) -> Iterator[tuple[Config, StepLayout | InputError]]:
    """Yield configurations with their layouts, or why a run refuses one.

    After a layout that may not fit comes the same one that gathers tp's inputs again.
    """
    for config in candidates(space, model):
        try:
            resolved = space.resolved(config)
        except InputError as error:
            yield config, error
            continue
        layout = space.layout_of(resolved)
        yield config, layout
        leaner = regathering(config, resolved)
        is_open = "parallel.regather" not in space.fixed
        if leaner is not None and is_open and not _fits_easily(model, layout, limit):
            yield leaner, layout._replace(regathers=True)


def _fits_easily(model: StepModel, layout: StepLayout, limit: float) -> bool:
    """Return whether a layout fits by formulas that may be too low."""
    return footprint_of(model, layout, stashes_in_flight(layout)).total < limit / SLACK


def _gains_nothing(layout: StepLayout, seconds: Mapping[StepLayout, float]) -> bool:
    """Return whether a kind of cp or of gathers is no faster than the default one, which came before."""
    usual = {layout._replace(context=CONTEXT), layout._replace(gather=GATHER)} - {layout}
    most = seconds[layout] * (1 + ENOUGH)
    return any(seconds.get(each, math.inf) <= most for each in usual)


def _reason_against(model: StepModel, layout: StepLayout, limit: float) -> str:
    """Return the reason that a layout is left out for that a run would take, "" for none."""
    if layout.pp > 1 and layout.num_microbatches < FEW * layout.pp / layout.chunks:
        return "fewer microbatches than stages"
    if footprint_of(model, layout, stashes_in_flight(layout)).total > SLACK * limit:
        return "memory"
    return ""
