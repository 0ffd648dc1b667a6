"""The layout of a run whose configuration leaves it open: the default, or the planner's first choice.

The default stays where it fits. It gives way if it doesn't, if a measured machine (run.machine) is
predicted to be faster by GAIN with another one, or if run.layout = "planned" asks for that. What
the run directory has recorded is taken again by as many ranks.
"""

import math
from contextlib import suppress
from typing import NamedTuple

import msgspec

from mpitrain import config as settings
from mpitrain.cluster.rundir import RunDir, read_config
from mpitrain.config import Config
from mpitrain.errors import ConfigError, MpitrainError, counted
from mpitrain.inputs import kind_of
from mpitrain.model.families.catalog import plan_for
from mpitrain.origins import Origins
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.memory_limit import computes_on_gpu, held_by_ranks, limit_of_rank
from mpitrain.plan.predict.step_time.expert_load import expert_load
from mpitrain.plan.predict.step_time.machine import (
    MEASURED,
    ON_CPU,
    ON_GPU,
    MachineRates,
    find_machine,
    like_gpu,
    machine_of,
)
from mpitrain.plan.predict.step_time.resolved_layout import layout_of
from mpitrain.plan.predict.step_time.step import predict_step
from mpitrain.planner.candidates import KEYS, SearchSpace, fixed_keys
from mpitrain.planner.choice import best_of
from mpitrain.planner.layout_request import AnsweredLayout, LayoutRequest
from mpitrain.planner.of_config import model_of
from mpitrain.planner.search import search
from mpitrain.schedules import catalog

GAIN = 0.1  # of a step's time, that another layout must save on a measured machine
OF_A_LAYOUT = ("parallel", "pipeline")  # tables: a key of theirs fixes the layout
KEEPS = 'run.layout = "default" keeps the default'


class PlannedLayout(NamedTuple):
    """A layout that a run can have, its plan's bytes that count, and seconds of a step by prediction."""

    config: Config
    held: int
    seconds: float
    words: str


def choose_layout(request: LayoutRequest) -> AnsweredLayout:
    """Return the configuration with the layout that a run takes, and why if that isn't the default.

    Raises ConfigError for a configuration that can't work, and with run.layout = "planned" if
    nothing fits.
    """
    mode = request.config.run.layout
    if mode == "default" or (mode == "auto" and is_given(request.origins)):
        return AnsweredLayout(request.config, [])
    return _Choice(request).answer()


def is_given(origins: Origins) -> bool:
    """Return whether the user gave a key that fixes the layout."""
    return any(origins.is_given(key) for key in origins.by_key if key.partition(".")[0] in OF_A_LAYOUT)


class _Choice:
    """What is known before the layout is chosen."""

    def __init__(self, request: LayoutRequest):
        self._request = request
        given = request.config
        self._default = self._plan(given)  # or raise ConfigError, as a run does
        # part of what a run computes: it stays as the default layout has it
        self._given = msgspec.structs.replace(given, batch=self._default.config.batch)
        self._machine = find_machine(given.run.machine) if given.run.machine else None
        self._node_ranks = given.comm.node_ranks or request.ranks.largest_node
        self._limit = limit_of_rank(given, request.ranks.size, self._node_ranks, request.gpu)
        self._on_gpu = self._limit.on_gpu if self._limit else computes_on_gpu(given)

    def answer(self) -> AnsweredLayout:
        given = self._request.config
        recorded = self._recorded()
        if recorded is not None:
            return self._taken(recorded, ["layout: the planned one recorded in the run directory"])
        held = self._held(self._default)
        fits = self._limit is None or held <= self._limit.num_bytes
        if given.run.layout == "auto" and fits and not self._is_measured():
            return AnsweredLayout(given, [])
        found = self._planned()
        if given.run.layout == "planned":
            if found is None:
                raise ConfigError(
                    f'run.layout = "planned" on {counted(self._request.ranks.size, "ranks")}: found no '
                    f"layout that fits{self._of_limit()}; start more ranks, or use a smaller model"
                )
            return self._chosen(found, 'run.layout = "planned"')
        if not fits:
            why = f"the default needs {_gb(held)} a rank{self._of_limit()}"
            if found is None:
                return AnsweredLayout(given, [f"the layout is the default: {why}, and no other fits either"])
            return self._chosen(found, why)
        return self._faster(found)

    def _faster(self, found: PlannedLayout | None) -> AnsweredLayout:
        """Return the planner's choice if it saves GAIN on a measured machine, else the default."""
        given, rates = self._request.config, self._rates()
        layout = layout_of(self._default.config, rates, self._default.routing)
        step = predict_step(model_of(given, self._request.vocabulary), layout, rates)
        if found is None:
            return AnsweredLayout(given, ["layout: the default; no other layout fits"])
        seconds = step.seconds * rates.spread.middle
        gain = 1 - found.seconds / seconds
        by = f"by figures of {rates.name}"
        if gain < GAIN:
            said = f"the layout is the default: the planner's first, {found.words}, saves {gain:.0%} {by}"
            return AnsweredLayout(given, [said])
        return self._chosen(found, f"it saves {gain:.0%} of the default's {seconds:.3g} s a step {by}")

    def _chosen(self, found: PlannedLayout, why: str) -> AnsweredLayout:
        step = f"{found.seconds:.3g} s a step by figures of {self._rates().name}"
        lines = [
            f"the layout is planned, {found.words}: {why}",
            f"predicted {_gb(found.held)} a rank, {step}; {KEEPS}",
        ]
        return self._taken(found.config, lines)

    def _taken(self, config: Config, lines: list[str]) -> AnsweredLayout:
        """Return a configuration that says, also in a run directory, that its layout was planned."""
        return AnsweredLayout(settings.with_values(config, {"run.layout": "planned"}), lines)

    # ------------------------------------------------------------ what was recorded

    def _recorded(self) -> Config | None:
        """Return the planned layout that the run directory has, for as many ranks, if it fits."""
        rundir = RunDir(self._request.config.run.dir)
        with suppress(MpitrainError, OSError):  # what is wrong there is said when the directory is taken
            if kind_of(rundir.config) != "a file":
                return None
            before = read_config(rundir.config, settings.plugins_of(self._request.config))
            parallel = before.parallel
            ranks = parallel.dp * parallel.pp * parallel.tp * parallel.cp
            if before.run.layout != "planned" or ranks != self._request.ranks.size:
                return None
            config = _with_recorded(self._given, before)
            taken, fixed = settings.flatten(config), fixed_keys(self._given, self._request.origins)
            if any(taken[key] != value for key, value in fixed.items()):  # that was set since
                return None
            fits = self._limit is None or self._held(self._plan(config)) <= self._limit.usable
            return config if fits else None
        return None

    # ------------------------------------------------------------ what is planned

    def _planned(self) -> PlannedLayout | None:
        request, rates = self._request, self._rates()
        micro = {"batch.micro": self._given.batch.micro}
        space = SearchSpace(
            self._given, {**fixed_keys(request.config, request.origins), **micro}, request.ranks.size, rates,
            request.vocabulary.vocab, request.vocabulary.needed,
            expert_load(self._default.config, self._default.routing),
        )  # fmt: skip
        most = self._limit.of_tensors if self._limit else rates.memory_bytes
        model = model_of(request.config, request.vocabulary)
        limit = self._limit.usable if self._limit else math.inf
        found = search(model, space, most)
        chosen, _ = best_of(found, 1, rates, limit, lambda each: self._held(self._plan(each.config)))
        if not chosen:
            return None
        layout, step, config = chosen[0].expected(rates)
        return PlannedLayout(config, chosen[0].held, step.seconds, layout.describe())

    def _plan(self, config: Config) -> Plan:
        return plan_for(config, self._request.ranks, self._request.vocabulary)

    # ------------------------------------------------------------ the machine

    def _rates(self) -> MachineRates:
        """Return figures of the machine, or of one of its kind, with its nodes and memory."""
        alike = like_gpu(self._request.gpu.name) if self._request.gpu else None
        rates = machine_of(self._machine or alike or find_machine(ON_GPU if self._on_gpu else ON_CPU))
        memory = self._limit.num_bytes if self._limit else rates.memory_bytes
        return rates._replace(ranks_per_node=self._node_ranks, memory_bytes=memory)

    def _is_measured(self) -> bool:
        """Return whether the figures of run.machine were measured on it, and nothing disturbed that."""
        if self._machine is None or self._machine.disturbed:
            return False
        figures = self._machine.products.values()
        return any(each.sustained_source.startswith(MEASURED) for each in figures)

    def _held(self, plan: Plan) -> int:
        held = held_by_ranks(plan, self._on_gpu)
        return self._limit.needed(held) // self._limit.ranks if self._limit else max(held)

    def _of_limit(self) -> str:
        return f", of {self._limit.source}" if self._limit else ""


def _with_recorded(given: Config, before: Config) -> Config:
    values = settings.flatten(before)
    keys = set(KEYS) - {"batch.micro"}
    if before.pipeline.schedule not in catalog.LOOPED:
        keys -= {"pipeline.chunks"}
    if before.parallel.gather != "step":  # "use" may be what links have chosen
        keys -= {"parallel.gather"}
    return settings.with_values(given, {key: values[key] for key in sorted(keys)})


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
