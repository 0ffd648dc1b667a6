"""Bound the layouts of a search space by time and memory, and yield them by their played steps.

A layout's least seconds are a true bound of what the played step takes. So the best layout of all
is found, however few are played: more memory and faster links never make it slower. Last comes the
memory of those that are yielded as a run would hold it (plan/predict/memory.py).
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from mpitrain.config import Config, with_values
from mpitrain.errors import InputError
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.step_time.footprint import footprint_of
from mpitrain.plan.predict.step_time.machine import MachineRates
from mpitrain.plan.predict.step_time.step import (
    Prediction,
    is_defined,
    least_seconds,
    predict_step,
    stashes_in_flight,
)
from mpitrain.plan.predict.step_time.step_model import StepModel
from mpitrain.plan.settings.rule_table import can_regather
from mpitrain.planner.candidates import SearchSpace, candidates
from mpitrain.schedules.catalog import FAMILIES, PROPOSED

SIMPLE = tuple(name for name in PROPOSED if FAMILIES[name].proposed == "always")
SLACK = 1.15  # formulas of memory may be too high by this much
FEW = 1.0  # microbatches over stages, at least
REFUSED = "refused by a run"
UNDEFINED = "a schedule that isn't defined for so many stages and microbatches"
SLOWER = "slower"


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
            layout.offload_optimizer,
        )  # fmt: skip
        return sum(used)


class Tried(NamedTuple):
    """A layout that was looked at. reason: why it is left out, "" for a candidate.

    held: bytes by formulas. layout: None for one that a run refuses.
    """

    config: Config
    layout: StepLayout | None
    reason: str
    held: int = 0


class SearchResult(NamedTuple):
    """What a search found.

    ranked: fastest first, predicted as they are asked for. example: what a run says of the first
    one that it refuses. every: all layouts that were looked at. left_out: after formulas, and why.
    least: returns the seconds that a step of a layout takes at least.
    """

    ranked: Iterator[Candidate]
    example: str
    every: list[Tried]
    left_out: dict[StepLayout, str]
    least: Callable[[StepLayout], float]

    @property
    def tried(self) -> int:
        return len(self.every)

    @property
    def refused(self) -> Counter[str]:
        """How many layouts are left out, by reason."""
        return Counter(filter(None, map(self.reason_of, self.every)))

    def bounded(self) -> Iterator[tuple[Tried, float | None]]:
        """Yield all layouts, each with its least seconds; None: one that doesn't fit by formulas."""
        for tried in self.every:
            yield tried, self.least(tried.layout) if tried.layout and not tried.reason else None

    def reason_of(self, tried: Tried) -> str:
        """Return why a layout is left out, "" for one that isn't."""
        return tried.reason or (self.left_out.get(tried.layout, "") if tried.layout else "")


def search(model: StepModel, space: SearchSpace, limit: float) -> SearchResult:
    """Return layouts that may fit, fastest first.

    limit: bytes of a rank. A run holds buffers that formulas don't have: the caller goes down the
    list to those that fit.
    """
    example = ""
    every: list[Tried] = []
    for config, layout in _layouts(model, space):
        if isinstance(layout, InputError):
            every.append(Tried(config, None, REFUSED))
            example = example or layout.args[0]
            continue
        held = footprint_of(model, layout, stashes_in_flight(layout)).total
        every.append(Tried(config, layout, _reason_against(layout, held, limit), held))
    left_out: dict[StepLayout, str] = {}
    least = partial(least_seconds, model, machine=space.machine)
    return SearchResult(_ranked(model, space.machine, every, left_out), example, every, left_out, least)


def _ranked(
    model: StepModel, machine: MachineRates, every: list[Tried], left_out: dict[StepLayout, str]
) -> Iterator[Candidate]:
    """Yield layouts by the time of their played steps: none is played before it is its turn.

    One that gathers inputs again or offloads takes at least what its plain one takes: until its
    turn comes that bounds it.
    """
    fitting = [(tried.config, tried.layout) for tried in every if tried.layout and not tried.reason]
    layouts = dict.fromkeys(layout for _, layout in fitting)  # in their order: neighbours share what is kept
    least = {
        layout: least_seconds(model, layout, machine)
        for layout in layouts
        if layout == _plain(layout) or _plain(layout) not in layouts
    }
    bounds = [
        (least[layout], True, number) if layout in least else (least[_plain(layout)], False, number)
        for number, (_, layout) in enumerate(fitting)
    ]
    heapq.heapify(bounds)
    played: list[tuple[float, int, Candidate]] = []
    order = itertools.count()
    while bounds:
        seconds, is_own, number = heapq.heappop(bounds)
        while played and played[0][0] <= seconds:
            yield heapq.heappop(played)[-1]
        config, layout = fitting[number]
        if not is_own:
            heapq.heappush(bounds, (least_seconds(model, layout, machine), True, number))
        elif not is_defined(layout):
            left_out[layout] = UNDEFINED
        else:
            step = predict_step(model, layout, machine)
            heapq.heappush(played, (step.seconds, next(order), Candidate(layout, step, config)))
    while played:
        yield heapq.heappop(played)[-1]


def _plain(layout: StepLayout) -> StepLayout:
    return layout._replace(regathers=False, offload_optimizer=False)


def _layouts(model: StepModel, space: SearchSpace) -> Iterator[tuple[Config, StepLayout | InputError]]:
    """Yield configurations with their layouts, or why a run refuses one.

    After a layout come the one that gathers tp's inputs again, and both with an offloaded optimizer.
    """
    is_open = "parallel.regather" not in space.fixed
    for config in candidates(space, model):
        try:
            resolved = space.resolved(config)
        except InputError as error:
            yield config, error
            continue
        layout = space.layout_of(resolved)
        alike = [(config, layout)]
        if is_open and not config.parallel.regather and can_regather(resolved):
            leaner = with_values(config, {"parallel.regather": True})
            alike.append((leaner, layout._replace(regathers=True)))
        yield from alike
        if space.may_offload:
            for own, each in alike:
                yield with_values(own, {"memory.offload": "optimizer"}), each._replace(offload_optimizer=True)


def _reason_against(layout: StepLayout, held: int, limit: float) -> str:
    if layout.pp > 1 and layout.num_microbatches < FEW * layout.pp / layout.chunks:
        return "fewer microbatches than stages"
    return "memory" if held > SLACK * limit else ""
