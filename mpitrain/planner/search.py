"""Prune the layouts of a search space, and rank what is left by predicted time.

First by formulas alone, then a short list of them is played; last the memory of those that remain as
a run would hold it (plan/predict/memory.py), by the plan of the very configuration that would be
written. What is on the list doesn't depend on the memory limit: more memory takes no layout away.
"""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from mpitrain.config import Config
from mpitrain.errors import InputError
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.step_time.footprint import footprint_of
from mpitrain.plan.predict.step_time.machine import MachineRates
from mpitrain.plan.predict.step_time.step import (
    Prediction,
    is_defined,
    predict_step,
    stashes_in_flight,
)
from mpitrain.plan.predict.step_time.step_model import StepModel
from mpitrain.planner.candidates import CONTEXT, GATHER, SearchSpace, candidates, regathering
from mpitrain.schedules.catalog import FAMILIES, PROPOSED

FASTEST = 6  # layouts by formulas, of a schedule and of an amount of memory, besides those wanted
LEVELS = 4  # amounts of memory in a doubling
BY_FORMULA = 0.97  # of a step as it is played, what formulas say at least, mostly
SIMPLE = tuple(name for name in PROPOSED if FAMILIES[name].proposed == "always")
SLACK = 1.15  # formulas of memory may be too high by this much
FEW = 1.0  # microbatches over stages, at least
ENOUGH = 0.005  # what a more complex layout must gain
REFUSED = "what a run refuses"
UNDEFINED = "a schedule that isn't defined for so many stages and microbatches"
NO_FASTER = "a kind of cp or of gathers that is no faster"
SLOWER = "being slower, by formulas, than several others of their schedule that need no more memory"


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
            layout.recompute != "none", layout.schedule not in SIMPLE,
        )  # fmt: skip
        return sum(used)

    @property
    def rank(self) -> float:
        """Seconds of a step, with what a more complex layout must gain: the least is best."""
        return self.found.seconds * (1 + ENOUGH * self.complexity)


class Tried(NamedTuple):
    """A layout that was looked at. reason: why it is left out, "" for a candidate.

    seconds, held: of a step, and bytes, by formulas. layout: None for one that a run refuses.
    """

    config: Config
    layout: StepLayout | None
    reason: str
    seconds: float = math.nan
    held: int = 0


class SearchResult(NamedTuple):
    """What a search found.

    ranked: best first, predicted as they are asked for. example: what a run says of the first one that
    it refuses. every: all layouts that were looked at. left_out: after formulas, and why.
    """

    ranked: Iterator[Candidate]
    example: str
    every: list[Tried]
    left_out: dict[StepLayout, str]

    @property
    def tried(self) -> int:
        return len(self.every)

    @property
    def refused(self) -> Counter[str]:
        """How many layouts are left out, by reason."""
        return Counter(filter(None, map(self.reason_of, self.every)))

    def reason_of(self, tried: Tried) -> str:
        """Return why a layout is left out, "" for one that isn't."""
        return tried.reason or (self.left_out.get(tried.layout, "") if tried.layout else "")


def search(model: StepModel, space: SearchSpace, limit: float, top: int = 0) -> SearchResult:
    """Return layouts that may fit, best first.

    limit: bytes of a rank. top: layouts that are wanted. A run holds buffers that formulas don't
    have: the caller goes down the list to those that fit, among them ever leaner ones.
    """
    example = ""
    fitting: list[Candidate] = []
    seconds: dict[StepLayout, float] = {}
    every: list[Tried] = []
    for config, layout in _layouts(model, space):
        if isinstance(layout, InputError):
            every.append(Tried(config, None, REFUSED))
            example = example or layout.args[0]
            continue
        held = footprint_of(model, layout, stashes_in_flight(layout)).total
        reason = _reason_against(layout, held, limit)
        if reason:
            every.append(Tried(config, layout, reason, held=held))
            continue
        found = predict_step(model, layout, space.machine, play=False)
        seconds[layout] = found.seconds
        reason = NO_FASTER if _gains_nothing(layout, seconds) else ""
        every.append(Tried(config, layout, reason, found.seconds, held))
        if not reason:
            fitting.append(Candidate(layout, found, config))
    left_out: dict[StepLayout, str] = {}
    ranked = _ranked(model, space.machine, _short_list(fitting, FASTEST + top, left_out))
    return SearchResult(ranked, example, every, left_out)


def _ranked(model: StepModel, machine: MachineRates, listed: list[Candidate]) -> Iterator[Candidate]:
    """Yield layouts by the time of their played steps: none is played before it is its turn.

    listed: by the time of formulas, which have hardly more bubble than what is played.
    """
    played: list[tuple[float, int, Candidate]] = []
    for number, each in enumerate(listed):
        while played and played[0][0] <= BY_FORMULA * each.found.seconds:
            yield heapq.heappop(played)[-1]
        step = each._replace(found=predict_step(model, each.layout, machine))
        heapq.heappush(played, (step.rank, number, step))
    while played:
        yield heapq.heappop(played)[-1]


def _short_list(fitting: list[Candidate], most: int, left_out: dict[StepLayout, str]) -> list[Candidate]:
    """Return the fastest layouts by formulas of each schedule, for each amount of memory.

    Formulas of time are off by a schedule's bubble, formulas of memory by buffers. Layouts that differ
    in recomputation alone count as one.
    """
    listed = []
    by_level: dict[tuple[str, float], set[StepLayout]] = defaultdict(set)
    for each in sorted(fitting, key=lambda each: each.found.seconds):
        schedule, level = each.layout.schedule, _level(each.found.footprint.total)
        alike = each.layout._replace(recompute="none", regathers=False)
        faster = set().union(
            *(own for (name, at), own in by_level.items() if name == schedule and at <= level)
        )
        if len(faster - {alike}) >= most:
            left_out[each.layout] = SLOWER
        elif not is_defined(each.layout):
            left_out[each.layout] = UNDEFINED
        else:
            by_level[schedule, level].add(alike)
            listed.append(each)
    return listed


def _level(num_bytes: float) -> float:
    """Return the number of the first amount of memory that isn't less."""
    return math.ceil(LEVELS * math.log2(max(1.0, num_bytes))) if num_bytes < math.inf else math.inf


def _layouts(model: StepModel, space: SearchSpace) -> Iterator[tuple[Config, StepLayout | InputError]]:
    """Yield configurations with their layouts, or why a run refuses one.

    After a layout comes the same one that gathers tp's inputs again.
    """
    is_open = "parallel.regather" not in space.fixed
    for config in candidates(space, model):
        try:
            resolved = space.resolved(config)
        except InputError as error:
            yield config, error
            continue
        layout = space.layout_of(resolved)
        yield config, layout
        leaner = regathering(config, resolved) if is_open else None
        if leaner is not None:
            yield leaner, layout._replace(regathers=True)


def _gains_nothing(layout: StepLayout, seconds: Mapping[StepLayout, float]) -> bool:
    """Return whether a kind of cp or of gathers is no faster than the default one, which came before."""
    usual = {layout._replace(context=CONTEXT), layout._replace(gather=GATHER)} - {layout}
    most = seconds[layout] * (1 + ENOUGH)
    return any(seconds.get(each, math.inf) <= most for each in usual)


def _reason_against(layout: StepLayout, held: int, limit: float) -> str:
    """Return the reason that a layout is left out for that a run would take, "" for none."""
    if layout.pp > 1 and layout.num_microbatches < FEW * layout.pp / layout.chunks:
        return "fewer microbatches than stages"
    return "memory" if _level(held) > _level(SLACK * limit) else ""
