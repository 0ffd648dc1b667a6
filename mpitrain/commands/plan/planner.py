"""`mpitrain plan`: the best layout for a model, a number of ranks and a machine, by predictions.

What the user gave stays as it is, also where it is the default; the rest is searched.
"""

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain import config as settings
from mpitrain.cluster.progress_bar import ProgressBar
from mpitrain.commands.output_file import require_file, write
from mpitrain.commands.plan.candidates import FixedKeys, SearchSpace, fixed_keys
from mpitrain.commands.plan.explained import (
    balance,
    binding,
    idle_degrees,
    parts_of,
    rules,
    why_lost,
)
from mpitrain.commands.plan.goodput import NODE_HOURS, Goodput, SaveTimes, goodput, save_times
from mpitrain.commands.plan.of_config import expert_load_of, model_of
from mpitrain.commands.plan.plan_variants import ScalingPoint, WhatIf, layouts_csv, scaling_text
from mpitrain.commands.plan.search import REFUSED, SLACK, Candidate, SearchResult, search, searches
from mpitrain.commands.plan.timeline_file import write_timeline
from mpitrain.config import Config, LoadedConfig
from mpitrain.data.tokenizer import tokenizer_of
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.inputs import as_argument, shown
from mpitrain.model.families.catalog import plan_of
from mpitrain.origins import PLANNER, SET, KeyOrigin
from mpitrain.plan.declared.formatting import finite
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.memory_limit import MemoryLimit, held_by_ranks, limit_of_rank
from mpitrain.plan.predict.process_memory import BEFORE_A_MODEL
from mpitrain.plan.predict.step_time.advice import advice
from mpitrain.plan.predict.step_time.expert_load import load_of_fullest
from mpitrain.plan.predict.step_time.machine import ON_CPU, MachineRates, rates_of
from mpitrain.plan.predict.step_time.predicted_timeline import predict_timeline
from mpitrain.plan.predict.step_time.resolved_layout import compute_of, recompute_of
from mpitrain.plan.predict.step_time.stage_seconds import groups_of
from mpitrain.plan.predict.step_time.step import hfu, mfu
from mpitrain.plan.predict.step_time.step_model import StepModel
from mpitrain.training.run_plan import beginning

SAVED = 0.05  # of a rank's memory: what recomputation must save to be worth a line
CHECKED = 6  # of the best that are planned as a run would be
PLANNED = 3  # times as many as are wanted, where memory refuses what formulas let pass
EQUAL = 0.02  # of a step: layouts that differ by less are as fast
FULL = 0.95  # of the limit: memory that is nearly full
DOUBLED = 6  # times that ranks are doubled to see whether something fits
ALIKE = 0.95  # of memory over its formula: what layouts of a kind have alike
TOKENS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
# of what is chosen also with the value of its default, so that another default changes nothing
ALWAYS_WRITTEN = (
    "parallel.tp", "parallel.cp", "parallel.pp", "parallel.dp", "parallel.zero", "pipeline.schedule",
    "batch.global", "batch.micro", "memory.recompute",
)  # fmt: skip
GUESSED = "what its copies to the host and back, and an update there, take is a guess"
OFFLOADED = 'nothing fits without memory.offload = "optimizer"'


class PlanRequest(NamedTuple):
    """What was asked.

    machine, memory_gb: go before run.machine and memory.limit_gb; "" and 0: not given. tokens: of
    a training, as it was typed. node_ranks: that are on a node, 0 for the machine's. save_s: that
    a save stops training, 0: predicted. price: of a rank's hour, 0: not asked. all: a CSV of all
    layouts. changed: figures of the machine that are others.
    """

    config: str | None
    overrides: tuple[str, ...]
    ranks: int
    machine: str = ""
    memory_gb: float = 0.0
    top: int = 5
    explain: bool = False
    tokens: str = ""
    node_hours: float = NODE_HOURS
    out: str | None = None
    json: bool = False
    timeline: str | None = None
    node_ranks: int = 0
    save_s: float = 0.0
    price: float = 0.0
    all: str | None = None
    changed: tuple[WhatIf, ...] = ()

    def read(self) -> LoadedConfig:
        """Return the configuration with the model of model.init and the options. Raises ConfigError."""
        typed = {"run.machine": self.machine, "memory.limit_gb": self.memory_gb}
        given = settings.read(self.config, self.overrides)
        given = given.with_values({key: value for key, value in typed.items() if value}, KeyOrigin(SET))
        return beginning(given)[0]


class RunnableLayout(NamedTuple):
    """A layout that a run can have.

    held: bytes that its fullest rank holds by the run's own plan.
    """

    candidate: Candidate
    held: int

    @property
    def config(self) -> Config:
        return self.candidate.config

    def expected(self, rates: MachineRates) -> Candidate:
        """Return the layout with the seconds that a machine's steps take in the median."""
        return self.candidate._replace(found=self.candidate.found.times(rates.spread.middle))


def make_plan(asked: PlanRequest) -> str:
    """Return the answer as text or JSON; write the best configuration. Raises as find_layouts() does."""
    answer = find_layouts(asked)
    if asked.json:
        return json.dumps(finite(answer.as_tree()), indent=1, allow_nan=False)
    if not asked.changed:
        return answer.as_text()
    return "\n".join([answer.as_text(), "", _against_unchanged(asked, answer)])


def _against_unchanged(asked: PlanRequest, answer: "PlanAnswer") -> str:
    """Say what a machine with other figures changes."""
    names = ", ".join(each.describe() for each in asked.changed)
    try:
        before = find_layouts(asked._replace(changed=(), out=None, all=None, timeline=None)).chosen[0]
    except ConfigError as error:
        return f"what if {names}: something fits. Without, {error.args[0]}"
    old, new = (each.expected(answer.rates) for each in (before, answer.chosen[0]))
    times = old.found.seconds / new.found.seconds
    same = "the same layout" if old.layout == new.layout else f"instead of {old.layout.describe()}"
    return (
        f"what if {names}: {new.found.seconds:.3g} s a step, not {old.found.seconds:.3g}, "
        f"{times:.2f} times as fast; {same}"
    )


def scaling(asked: PlanRequest, counts: Sequence[int]) -> str:
    """Return the best layout of each number of ranks, as lines or JSON. Raises ConfigError."""
    points = []
    for count in counts:
        try:
            answer = find_layouts(asked._replace(ranks=count, top=1))
        except ConfigError as error:
            points.append(ScalingPoint(count, None, why=error.args[0]))
            continue
        best = answer.chosen[0]
        layout, step, _ = best.expected(answer.rates)
        low, high = answer.between(best)
        used = mfu(answer.model, layout, answer.rates, step.seconds)
        points.append(ScalingPoint(count, layout, step.seconds, (low, high), used))
    if not asked.json:
        return scaling_text(points)
    tree = [
        {**each._asdict(), "layout": each.layout and each.layout._asdict(), "tokens_per_s": each.tokens_per_s}
        for each in points
    ]
    return json.dumps(finite({"scaling": tree}), indent=1, allow_nan=False)


def find_layouts(asked: PlanRequest) -> "PlanAnswer":
    """Return the layouts that fit, and write the best configuration if that is asked for.

    Raises ConfigError if none fits.
    """
    _require_files(asked)
    loaded = asked.read()
    given, origins = loaded
    limit = _limit(given, asked)
    rates = rates_of(given, asked.node_ranks)._replace(memory_bytes=limit.num_bytes)
    rates, limit = _changed(rates, limit, asked.changed)
    _refuse_type(given, rates)
    tokens = _tokens(asked.tokens)
    with ProgressBar("mpitrain plan"):
        model = model_of(given)
        _refuse_idle_degrees(given, model)
        space = _space(loaded, asked.ranks, rates)
        notes = _assumptions(given, space)
        if not origins.is_given("data.sequence"):
            notes.append(f"data.sequence is open: {given.data.sequence} tokens are assumed")
        if rates.doubt:
            notes.append(f"the figures of {rates.name} can't be trusted: {rates.doubt}; measure it again")
        found, chosen, refusal = _fitting(model, space, asked, limit)
        if not chosen and _may_offload(loaded, rates):
            offloaded, chosen, _ = _fitting(model, space.offloading(), asked, limit)
            found = offloaded if chosen else found
            notes += [OFFLOADED if rates.knows_offload else f"{OFFLOADED}: {GUESSED}"] * bool(chosen)
    if not chosen:
        fits = _what_fits(model, space, limit) if found.refused["memory"] else ""
        raise _nothing_fits(model, space, found, limit, refusal, fits)
    if asked.all is not None:
        write("--all", asked.all, layouts_csv(found.every, rates.spread.middle).encode())
    if asked.out is not None:
        write("--out", asked.out, _written(loaded, chosen[0], tokens, asked.out).encode())
    if asked.timeline is not None:
        layout = chosen[0].candidate.layout
        write_timeline(asked.timeline, predict_timeline(model, layout, rates), layout.describe())
    return PlanAnswer(asked, model, rates, found, chosen, limit.usable, notes, tokens, space.fixed)


def _changed(
    rates: MachineRates, limit: MemoryLimit, changed: tuple[WhatIf, ...]
) -> tuple[MachineRates, MemoryLimit]:
    """Return a machine with other figures, and what a rank of it may hold."""
    for each in changed:
        rates = each.on(rates)
    if rates.memory_bytes == limit.num_bytes:
        return rates, limit
    return rates, limit._replace(total_bytes=rates.memory_bytes * limit.ranks)


def _require_files(asked: PlanRequest) -> None:
    """Raise ConfigError for files that can't be written."""
    if asked.out is not None:
        require_file("--out", asked.out)
    if asked.all is not None:
        require_file("--all", asked.all, (".csv",))


def _refuse_type(given: Config, rates: MachineRates) -> None:
    """Raise ConfigError for a type of numbers that a GPU's products don't have.

    Those of 16 bits are as fast as each other where there is bf16.
    """
    compute = given.precision.compute
    if rates.on_gpu and compute in ("bf16", "fp8") and compute not in rates.products:
        raise ConfigError(
            f"precision.compute = {json.dumps(compute)}: found no products.{compute} of {rates.name}; needed "
            f"one of {', '.join(rates.products)}, or its rate in the machine's file"
        )


def _limit(given: Config, asked: PlanRequest) -> MemoryLimit:
    """Return what a rank may hold of memory.limit_gb, or of the machine that predicts."""
    named = settings.with_values(given, {"run.machine": given.run.machine or ON_CPU})
    found = limit_of_rank(named, asked.ranks, asked.node_ranks)
    assert found is not None  # a named machine has memory
    return found


def _written(given: LoadedConfig, best: RunnableLayout, tokens: float, out: str) -> str:
    """Return what the user gave and the planner chose, as TOML.

    Its run has a directory of its own, and with tokens the steps that these take.
    """
    before, chosen = settings.flatten(given.config), settings.flatten(best.config)
    keys = {key for key in chosen if key in ALWAYS_WRITTEN or chosen[key] != before[key]}
    values: dict[str, Any] = {}
    if tokens:
        values["run.steps"] = math.ceil(tokens / best.candidate.layout.tokens)
    if not given.origins.is_given("run.dir"):
        values["run.dir"] = _unused(f"runs/{Path(out).stem}")
    origins = given.origins.updated(keys, KeyOrigin(PLANNER))
    planned = LoadedConfig(best.config, origins).with_values(values, KeyOrigin(PLANNER))
    return settings.given_toml(planned)


def _unused(folder: str) -> str:
    """Return a name of a folder that isn't there: this one, or with a number after it."""
    names = (folder, *(f"{folder}-{number}" for number in range(2, 1000)))
    return next((name for name in names if not os.path.lexists(name)), folder)


def _fitting(
    model: StepModel, space: SearchSpace, asked: PlanRequest, limit: MemoryLimit
) -> tuple[SearchResult, list[RunnableLayout], str]:
    """Return the first search of which something fits, and that; of the first one where nothing does.

    With them comes what a run says of the first layout that it refuses.
    """
    unfit: set[StepLayout] = set()
    tried = []
    for found in searches(model, space, limit.of_tensors, unfit):
        chosen, refusal = _chosen(found, asked, space, limit, unfit)
        if chosen:
            return found, chosen, refusal
        tried.append((found, refusal))
    found, refusal = tried[0]
    return found, [], refusal


def _may_offload(given: LoadedConfig, rates: MachineRates) -> bool:
    """Return whether memory.offload is open, and of a GPU whose host has memory of its own."""
    is_open = given.config.memory.offload == "none" and not given.origins.is_given("memory.offload")
    return is_open and rates.on_gpu


def _nothing_fits(
    model: StepModel,
    space: SearchSpace,
    found: SearchResult,
    limit: MemoryLimit,
    refusal: str,
    fits: str,
) -> ConfigError:
    """Return the error of a search that left nothing.

    refusal: what a run's plan says of the first one. fits: what would fit, in words.
    """
    why = binding(found.refused, found.tried, limit.usable, is_empty=True)
    if found.refused["memory"] and not limit.on_gpu:
        why += f" as a process, which takes {BEFORE_A_MODEL / 1e9:.2g} GB before it has a model"
    if not found.tried:
        idle = idle_degrees(model, space.ranks, space.fixed)
        why += f": {idle}" if idle else ""
    elif refusal:
        why += f" (of the first: {refusal})"
    elif found.refused.most_common(1)[0][0] == REFUSED:
        why += f" (of the first: {found.example})"
    return ConfigError(
        f"{model.name} on {space.ranks} ranks of {space.machine.name}: {why}; fixed: "
        f"{_named(space.fixed) or 'nothing'}; "
        f"{fits or 'change what is fixed, --ranks, --memory or batch.global'}"
    )


def _what_fits(model: StepModel, space: SearchSpace, limit: MemoryLimit) -> str:
    """Say with how much memory, and on how many ranks, something would fit, by formulas."""
    every = search(model, space, math.inf, leanest=True).every
    least = min((each.held for each in every if each.held), default=0)
    if not least:
        return ""
    words = [f"ranks of about {_few_digits(1.1 * least / 1e9)} GB"]
    batch = space.given.batch.global_
    for doublings in range(1, DOUBLED + 1):
        ranks = space.ranks << doublings
        larger = batch * max(1, -(-ranks // max(batch, space.ranks)))
        given = settings.with_values(space.given, {"batch.global_": larger})
        wider = space._replace(ranks=ranks, given=given)
        if search(model, wider, limit.of_tensors / SLACK, leanest=True).ranked:
            words.append(f"about {ranks:,} ranks" + f" with batch.global = {larger}" * (larger != batch))
            break
    return f"by formulas it would fit with {', or '.join(words)}"


def _named(fixed: FixedKeys) -> str:
    return ", ".join(f"{key} = {value}" for key, value in fixed.items())


def _space(given: LoadedConfig, ranks: int, rates: MachineRates) -> SearchSpace:
    """Return what is searched: the configuration, with a batch that is assumed where it is open."""
    config, origins = given
    batch = config.batch.global_ or _assumed_batch(config, ranks)
    tokenizer = tokenizer_of(config.data)
    return SearchSpace(
        settings.with_values(config, {"batch.global_": batch}), fixed_keys(config, origins), ranks, rates,
        tokenizer.vocab, tokenizer.needed, expert_load_of(config, batch),
    )  # fmt: skip


def _assumptions(given: Config, space: SearchSpace) -> list[str]:
    """Say what is assumed of a configuration, and where times are those of something else."""
    rates = space.machine
    notes = []
    if not given.batch.global_:
        batch = space.given.batch.global_
        notes.append(f"batch.global is open: {batch} sequences of {given.data.sequence} are assumed")
    compute = compute_of(given, rates)
    if compute != given.precision.compute:
        notes.append(
            f"precision.compute = {given.precision.compute}: no rate of {rates.name}, its time is that of "
            f"{compute}"
        )
    recompute = given.memory.recompute
    if recompute_of(recompute) != recompute:
        notes.append(f'memory.recompute = "{recompute}": its time is that of "{recompute_of(recompute)}"')
    if given.memory.offload != "none" and not rates.knows_offload:
        notes.append(f'memory.offload = "{given.memory.offload}": {GUESSED}')
    return notes


def _assumed_batch(config: Config, ranks: int) -> int:
    """Return sequences of a step that all data ranks can divide: 32 and a sequence a rank at least."""
    parallel = config.parallel
    dp = parallel.dp or max(1, ranks // (parallel.tp * parallel.cp * max(1, parallel.pp)))
    each = dp * config.batch.micro
    return each * math.ceil(max(32, ranks) / each)


def _refuse_idle_degrees(config: Config, model: StepModel) -> None:
    """Raise ConfigError, as a run does, for experts' degrees of a model that has none."""
    for key, degree in (("ep", config.parallel.ep), ("etp", config.parallel.etp)):
        if model.experts is None and degree > 1:
            raise ConfigError(f"parallel.{key} = {degree}: {model.name} has no experts; leave it out")


def planned(config: Config, ranks: int, rates: MachineRates) -> Plan:
    """Return the plan of a layout that was found, as a run on a machine makes it."""
    tokenizer = tokenizer_of(config.data)
    return plan_of(SearchSpace(config, {}, ranks, rates, tokenizer.vocab, tokenizer.needed).resolved(config))


def _chosen(
    found: SearchResult,
    asked: PlanRequest,
    space: SearchSpace,
    limit: MemoryLimit,
    unfit: set[StepLayout],
) -> tuple[list[RunnableLayout], str]:
    """Return the best layouts that a run accepts and that fit, by the run's own plan.

    Further layouts are planned until some fit; those that don't are counted, and put into `unfit`.
    With them comes what a run says of the first that it refuses, if it refuses any.
    """
    choice = _FittingLayouts(found, asked.top, space, limit, unfit)
    for batch, after in found.more:
        for each in batch:
            choice.add(each)
        if choice.is_enough and choice.best <= after:
            break
    return _ordered(choice.chosen, space.machine, limit.usable)[: asked.top], choice.refusal


class _FittingLayouts:
    """Layouts that fit, by the run's own plan. refusal: what a run says of the first that it refuses."""

    def __init__(
        self, found: SearchResult, top: int, space: SearchSpace, limit: MemoryLimit, unfit: set[StepLayout]
    ):
        self.chosen: list[RunnableLayout] = []
        self.refusal = ""
        self._refused, self._unfit = found.refused, unfit
        self._top, self._space, self._limit = top, space, limit
        self._larger: dict[Any, float] = {}  # than formulas say, by kind of layout
        self._num_planned = 0

    @property
    def best(self) -> float:
        return min((each.candidate.found.seconds for each in self.chosen), default=math.inf)

    @property
    def is_enough(self) -> bool:
        """Whether further layouts count only if they are as fast as the best."""
        most = PLANNED * max(self._top, CHECKED)
        return len(self.chosen) >= self._top or bool(self.chosen and self._num_planned >= most)

    def add(self, each: Candidate) -> None:
        """Plan a layout as a run would, unless enough are as fast; count it as refused, or choose it."""
        equal = each.found.seconds <= (1 + EQUAL) * self.best
        several = len(self.chosen) >= max(self._top, CHECKED)
        if self.is_enough and (several or not equal) and each.found.seconds >= self.best:
            return
        held = self._held(each)
        if held is None:
            return
        layout, usable = each.layout, self._limit.usable
        if held > usable:
            self._refused["memory"] += 1
            self._unfit.add(layout)
        elif any(_saves_little(each, other, other.held - held, usable) for other in self.chosen):
            self._refused["what is slower and saves little memory"] += 1
        else:
            self.chosen.append(RunnableLayout(each, int(held)))

    def _held(self, each: Candidate) -> float | None:
        """Return the bytes of a layout's fullest rank, None if a run refuses it.

        Where its formula, times what others of its kind hold over theirs, is too much, that is told.
        """
        layout = each.layout
        kind = layout.schedule, layout.recompute, layout.regathers, layout.zero
        by_formula = each.found.footprint.total
        if by_formula * self._larger.get(kind, 0.0) > self._limit.usable:
            return by_formula * self._larger[kind]
        self._num_planned += 1
        try:
            held = _held(each, self._space, self._limit)
        except MpitrainError as error:
            self._refused[REFUSED] += 1
            self.refusal = self.refusal or error.args[0]
            return None
        if held > self._limit.usable:
            self._larger[kind] = min(ALIKE * held / by_formula, self._larger.get(kind, math.inf))
        return held


def _ordered(chosen: list[RunnableLayout], rates: MachineRates, limit: float) -> list[RunnableLayout]:
    """Return layouts by time; of those that are as fast as the first, the simplest first.

    Before it comes what leaves memory, and what keeps its axes inside nodes.
    """
    best = min((each.candidate.found.seconds for each in chosen), default=0.0)

    def order(each: RunnableLayout) -> tuple[Any, ...]:
        layout, step = each.candidate.layout, each.candidate.found
        if step.seconds > (1 + EQUAL) * best:
            return (True, step.seconds)
        groups = groups_of(layout, rates)
        far = sum(groups[axis].nodes > 1 for axis in ("tp", "cp", "etp", "ep"))
        return (False, each.held > FULL * limit, far, each.candidate.complexity, step.seconds)

    return sorted(chosen, key=order)


def _saves_little(each: Candidate, other: RunnableLayout, saved: float, limit: float) -> bool:
    """Return whether a layout is a faster one with more or less recomputation, for which no memory asks."""
    faster = other.candidate.layout
    alike = each.layout._replace(recompute=faster.recompute, regathers=faster.regathers) == faster
    return alike and saved < SAVED * limit


def _held(candidate: Candidate, space: SearchSpace, limit: MemoryLimit) -> int:
    """Return the bytes of the rank with most memory, by the plan that a run makes.

    Of many microbatches some are planned: a pipeline's peak comes before three rounds of it.
    """
    layout = candidate.layout
    few = min(layout.num_microbatches, 3 * layout.pp)
    config = settings.with_values(candidate.config, {"batch.global_": few * layout.dp * layout.micro})
    plan = plan_of(space.resolved(config))
    return limit.needed(held_by_ranks(plan, limit.on_gpu))


def _tokens(text: str) -> float:
    """Return a number of tokens. Raises ConfigError if it is none."""
    if not text:
        return 0.0
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)([kmbt]?)", text.lower())
    if match is None or not float(match[1]):
        raise ConfigError(f"--tokens {shown(text)}: needed a number of tokens, such as 300B or 15T")
    return float(match[1]) * TOKENS.get(match[2], 1.0)


class PlanAnswer(NamedTuple):
    """All that was found, to be shown."""

    asked: PlanRequest
    model: StepModel
    rates: MachineRates
    found: SearchResult
    chosen: list[RunnableLayout]
    limit: float
    notes: list[str]
    tokens: float
    fixed: FixedKeys

    def as_tree(self) -> dict[str, Any]:
        return {
            "machine": self.rates.name,
            "ranks": self.asked.ranks,
            "parameters": self.model.num_parameters,
            "active_parameters": self.model.num_active,
            "layouts_tried": self.found.tried,
            "left_out": dict(self.found.refused),
            "notes": self.notes,
            "best": [self._tree_of(each) for each in self.chosen],
            "advice": self._advice(),
            **({"training": self._training()._asdict()} if self.tokens else {}),
        }

    def _tree_of(self, each: RunnableLayout) -> dict[str, Any]:
        layout, step, _ = each.expected(self.rates)
        between = self.between(each)
        return {
            "layout": {
                **layout._asdict(),
                "dp": layout.dp,
                "num_microbatches": layout.num_microbatches,
                "expert_load": load_of_fullest(layout, self.rates),
            },
            "seconds": step.seconds,
            "interval_s": between,
            "tokens_per_s": layout.tokens / step.seconds,
            "mfu": mfu(self.model, layout, self.rates, step.seconds),
            "mfu_interval": [mfu(self.model, layout, self.rates, bound) for bound in reversed(between)],
            "hfu": hfu(self.model, layout, self.rates, step.seconds),
            "parts_s": parts_of(step),
            "held_bytes": each.held,
            "memory_limit_bytes": self.limit,
        }

    def between(self, each: RunnableLayout) -> list[float]:
        """Return between which seconds four steps of five are expected."""
        spread = self.rates.spread
        return [bound * each.candidate.found.seconds for bound in (spread.low, spread.high)]

    def _advice(self) -> list[str]:
        best = self.chosen[0]
        layout, found = best.candidate.layout, best.candidate.found
        return advice(self.model, layout, self.rates, found, held=best.held)

    def _save(self) -> SaveTimes:
        best = self.chosen[0]
        blocking = best.config.run.save == "blocking"
        return save_times(self.model, best.candidate.layout, self.rates, blocking, self.asked.save_s)

    def _training(self) -> Goodput:
        best = self.chosen[0].expected(self.rates)
        hours = self.asked.node_hours
        return goodput(best.layout, self.rates, best.found.seconds, self.tokens, hours, self._save())

    def as_text(self) -> str:
        best = self.chosen[0].expected(self.rates)
        lines = [
            f"{self.model.name}: {self.model.num_parameters / 1e9:.4g} billion parameters, "
            f"{self.model.num_active / 1e9:.4g} active; {self.asked.ranks} ranks of "
            f"{self.rates.name}, {self.limit / 1e9:.3g} GB each; {best.layout.batch} x "
            f"{best.layout.sequence} tokens a step",
            *self.notes,
            binding(self.found.refused, self.found.tried, self.limit, is_empty=False),
            "",
            "      s/step   4 of 5 in     MFU   4 of 5   HFU  GB/rank  layout",
            *(self._line(number, each) for number, each in enumerate(self.chosen, start=1)),
            "",
            self._parts(best),
            *self._load(best.layout),
            *(
                f"{number}. {why_lost(best, each.expected(self.rates))}"
                for number, each in enumerate(self.chosen[1:], start=2)
            ),
            *self._rules(best),
            *(f"advice: {line}" for line in self._advice()),
        ]
        if self.asked.explain:
            lines += ["", *balance(self.model, best.layout, self.rates)]
        if self.tokens:
            lines += ["", self._text_of_training()]
        if self.asked.out is not None:
            command = f"mpirun -n {self.asked.ranks} mpitrain run {as_argument(self.asked.out)}"
            lines += ["", f"written to {shown(self.asked.out)}: {command}"]
        if self.asked.all is not None:
            lines += ["", f"all {self.found.tried} layouts are written to {shown(self.asked.all)}"]
        if self.asked.timeline is not None:
            lines += ["", f"the first one's step is written to {shown(self.asked.timeline)}"]
        return "\n".join(lines)

    def _line(self, number: int, each: RunnableLayout) -> str:
        layout, step, _ = each.expected(self.rates)
        low, high = self.between(each)
        used = [100 * of(self.model, layout, self.rates, step.seconds) for of in (mfu, hfu)]
        least, most = (100 * mfu(self.model, layout, self.rates, bound) for bound in (high, low))
        held = each.held / 1e9
        memory = f"{held:.1f}" if held >= 1 else f"{held:.2g}"
        full = "  nearly full" if each.held > FULL * self.limit else ""
        return (
            f"{number:>2}.{step.seconds:>9.3g}  {low:>5.3g}-{high:<6.3g}{used[0]:>6.1f}  "
            f"{least:>3.0f}-{most:<3.0f}{used[1]:>6.1f} {memory:>7}   {layout.describe()}{full}"
        )

    def _rules(self, best: Candidate) -> list[str]:
        others = [each.candidate for each in self.chosen[1:]]
        found = rules(best, others, self.rates, self.fixed)
        return [
            *["rules that decided: " + "; ".join(found)] * bool(found),
            *["as given: " + _named(self.fixed)] * bool(self.fixed),
        ]

    def _parts(self, best: Candidate) -> str:
        parts = parts_of(best.found)
        words = ", ".join(
            f"{name} {100 * took / best.found.seconds:.1f} %" for name, took in parts.items() if took > 0
        )
        daily = 86400 * best.layout.tokens / best.found.seconds
        return (
            f"the first one's step, slowest pipeline rank: {words} (axes: time waiting for their messages); "
            f"{_short(daily)} tokens a day"
        )

    def _load(self, layout: StepLayout) -> list[str]:
        """Say with which load of experts the first one is predicted."""
        if layout.ep == 1 or (layout.expert_load is None and self.rates.on_gpu):  # theirs have it in them
            return []
        source = "an estimate" if layout.expert_load is None else layout.expert_load.source
        load = load_of_fullest(layout, self.rates)
        return [f"the most loaded ep rank gets {load:.3g} times the mean of tokens: {source}"]

    def _text_of_training(self) -> str:
        found = self._training()
        hours = "GPU-hours" if self.rates.on_gpu else "rank-hours"
        spread = self.rates.spread
        bounds = spread.low / spread.middle, spread.high / spread.middle

        def within(value: float) -> str:
            low, high = (_few_digits(bound * value) for bound in bounds)
            return f"{_few_digits(value)} ({low} to {high})"

        words = (
            f"{self.asked.tokens} tokens: {found.steps:,} steps, {within(found.days)} days, "
            f"{within(found.gpu_hours)} {hours} without failures"
        )
        if self.asked.price:
            words += f", {within(self.asked.price * found.gpu_hours)} at {self.asked.price:g} an hour"
        words += f"; with one of a node each {self.asked.node_hours:,.0f} h "
        if not found.share:
            return words + "no time is left between failures and saves"
        return (
            f"{words}and {self._save().describe()} every {found.save_every_s / 60:,.0f} minutes "
            f"{100 * found.share:.1f} % of the time trains: {within(found.days / found.share)} days"
        )


def _short(number: float) -> str:
    """Return a number with three digits and its thousands as a letter or word."""
    for size, word in ((1e12, " trillion"), (1e9, " billion"), (1e6, " million")):
        if number >= size:
            return f"{number / size:.3g}{word}"
    return f"{number:,.0f}"


def _few_digits(value: float) -> str:
    """Return a number as text: from 10 on with one digit behind the point, from 10,000 on with none."""
    if value < 10:
        return f"{value:.3g}"
    return f"{value:.1f}" if value < 1e4 else f"{value:,.0f}"
