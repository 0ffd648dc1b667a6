"""Choose layouts for a model, a number of ranks and a machine, by predictions.

What the user gave stays as it is, also where it is the default; the rest is searched.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from mpitrain import config as settings
from mpitrain.config import Config, LoadedConfig
from mpitrain.data.tokenizer import tokenizer_of
from mpitrain.errors import ConfigError, MpitrainError, counted
from mpitrain.model.families.catalog import plan_for, plan_of
from mpitrain.plan.declared.step_layout import MICROS
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.memory import predict_rank
from mpitrain.plan.predict.memory_limit import MemoryLimit, held_by_ranks, limit_of_rank
from mpitrain.plan.predict.process_memory import BEFORE_A_MODEL
from mpitrain.plan.predict.step_time.machine import ON_CPU, MachineRates, rates_of
from mpitrain.plan.predict.step_time.resolved_layout import compute_of, recompute_of
from mpitrain.plan.predict.step_time.stage_seconds import groups_of
from mpitrain.plan.predict.step_time.step_model import StepModel
from mpitrain.plan.program import LoweredPrograms
from mpitrain.plan.settings.job_ranks import JobRanks
from mpitrain.plan.settings.pipeline_table import holds_bounded
from mpitrain.planner.candidates import FixedKeys, SearchSpace, fixed_keys
from mpitrain.planner.explained import binding, idle_degrees
from mpitrain.planner.of_config import expert_load_of, model_of
from mpitrain.planner.search import REFUSED, SLOWER, Candidate, SearchResult, Tried, search
from mpitrain.planner.what_if import WhatIf
from mpitrain.schedules import catalog

SAVED = 0.05  # of a rank's memory: what recomputation must save to be worth a line
CHECKED = 6  # of the best that are planned as a run would be
PLANNED = 3  # times as many as are wanted, once one fits
EQUAL = 0.02  # of a step: layouts that differ by less are as fast
FULL = 0.95  # of the limit: memory that is nearly full
DOUBLED = 6  # times that ranks are doubled to see whether something fits
GUESSED = "what its copies to the host and back, and an update there, take is a guess"
OFFLOADED = 'nothing as fast fits without memory.offload = "optimizer"'


class Preference(NamedTuple):
    """What decides between layouts that are as fast, the first most; less is better.

    between_nodes: axes of single layers whose ranks are on several nodes.
    """

    is_nearly_full: bool
    between_nodes: int
    complexity: int

    def drawback(self, preferred: "Preference") -> str:
        """Say why another one comes first."""
        if self.is_nearly_full > preferred.is_nearly_full:
            return "its memory is nearly full"
        if self.between_nodes > preferred.between_nodes:
            return "more of its axes are between nodes"
        return "it adds axes or options"


class RunnableLayout(NamedTuple):
    """A layout that a run can have.

    held: bytes of the rank with most memory, by the run's own plan.
    """

    candidate: Candidate
    held: int

    @property
    def config(self) -> Config:
        return self.candidate.config

    def expected(self, rates: MachineRates) -> Candidate:
        """Return the layout with seconds in the median of a machine's steps."""
        return self.candidate._replace(found=self.candidate.found.times(rates.spread.middle))

    def preference(self, rates: MachineRates, limit: float) -> Preference:
        """Return by what it is chosen among layouts that are as fast. limit: bytes of a rank."""
        groups = groups_of(self.candidate.layout, rates)
        far = sum(groups[axis].nodes > 1 for axis in ("tp", "cp", "etp", "ep"))
        return Preference(self.held > FULL * limit, far, self.candidate.complexity)


@dataclass(frozen=True)
class PlannedLayouts:
    """The layouts that fit, best first, with all that they were chosen by.

    limit: bytes that a rank may hold. notes: what was assumed.
    """

    ranks: int
    model: StepModel
    rates: MachineRates
    found: SearchResult
    chosen: list[RunnableLayout]
    limit: float
    notes: list[str]
    fixed: FixedKeys


def choose_layouts(
    loaded: LoadedConfig, ranks: int, top: int, node_ranks: int = 0, changed: Sequence[WhatIf] = ()
) -> PlannedLayouts:
    """Return the layouts that fit.

    node_ranks: that are on a node, 0 for the machine's. changed: figures of the machine that are
    others. Raises ConfigError if none fits.
    """
    given, origins = loaded
    limit = _limit(given, ranks, node_ranks)
    rates = rates_of(given, node_ranks)._replace(memory_bytes=limit.num_bytes)
    for each in changed:
        rates = each.on(rates)
    if rates.memory_bytes != limit.num_bytes:
        limit = limit._replace(total_bytes=rates.memory_bytes * limit.ranks)
    _refuse_type(given, rates)
    model = model_of(given)
    space = _space(loaded, ranks, rates)
    notes = _assumptions(given, space)
    if not origins.is_given("data.sequence"):
        notes.append(
            f"data.sequence is open: {given.data.sequence} tokens are assumed, as a run does; "
            "set what is trained, such as --set data.sequence=8192"
        )
    if rates.on_gpu and not origins.is_given("precision.compute"):
        notes += _faster_type(given.precision.compute, rates)
    if rates.doubt:
        notes.append(f"the figures of {rates.name} can't be trusted: {rates.doubt}; measure it again")
    found = search(model, space, limit.of_tensors)
    held = partial(_held, space=space, limit=limit)
    chosen, refusal = best_of(found, top, rates, limit.usable, held)
    if not chosen:
        fits = _what_fits(model, space, found.every, limit) if found.refused["memory"] else ""
        raise _nothing_fits(model, space, found, limit, refusal, fits)
    _prove(_plan_of_few(each.config, space) for each in chosen)
    if space.may_offload and chosen[0].candidate.layout.offload_optimizer:
        notes.append(OFFLOADED if rates.knows_offload else f"{OFFLOADED}: {GUESSED}")
    return PlannedLayouts(ranks, model, rates, found, chosen, limit.usable, notes, space.fixed)


def _faster_type(compute: str, rates: MachineRates) -> list[str]:
    own = rates.products.get(compute)
    fastest = max(("bf16", "fp16"), key=lambda dtype: rates.products.get(dtype, 0.0))
    if own is None or rates.products.get(fastest, 0.0) <= own:
        return []
    times = few_digits(rates.products[fastest] / own)
    return [
        f"precision.compute is open: {compute} is assumed, as a run does; products in {fastest} are {times} "
        f"times as fast on {rates.name}: --set precision.compute={fastest}"
    ]


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


def _limit(given: Config, ranks: int, node_ranks: int) -> MemoryLimit:
    """Return what a rank may hold of memory.limit_gb, or of the machine that predicts."""
    named = settings.with_values(given, {"run.machine": given.run.machine or ON_CPU})
    found = limit_of_rank(named, ranks, node_ranks)
    assert found is not None  # a named machine has memory
    return found


def _space(given: LoadedConfig, ranks: int, rates: MachineRates) -> SearchSpace:
    config, origins = given
    batch = config.batch.global_ or _assumed_batch(config, ranks)
    tokenizer = tokenizer_of(config.data)
    is_open = config.memory.offload == "none" and not origins.is_given("memory.offload")
    return SearchSpace(
        settings.with_values(config, {"batch.global_": batch}), fixed_keys(config, origins), ranks, rates,
        tokenizer.vocab, tokenizer.needed, expert_load_of(config, batch), is_open and rates.on_gpu,
    )  # fmt: skip


def _assumptions(given: Config, space: SearchSpace) -> list[str]:
    rates = space.machine
    notes = []
    if not given.batch.global_:
        batch = space.given.batch.global_
        notes.append(f"batch.global is open: {batch} sequences of {given.data.sequence} are assumed")
    compute = compute_of(given, rates)
    if compute != given.precision.compute:
        notes.append(
            f"precision.compute = {given.precision.compute}: no rate of {rates.name}, its time is "
            f"that of {compute}"
        )
    recompute = given.memory.recompute
    if recompute_of(recompute) != recompute:
        notes.append(f'memory.recompute = "{recompute}": its time is that of "{recompute_of(recompute)}"')
    if given.memory.offload != "none" and not rates.knows_offload:
        notes.append(f'memory.offload = "{given.memory.offload}": {GUESSED}')
    return notes


def _assumed_batch(config: Config, ranks: int) -> int:
    """Return a step's sequences, which data ranks divide: 32, and one a rank, at least."""
    parallel = config.parallel
    dp = parallel.dp or max(1, ranks // (parallel.tp * parallel.cp * max(1, parallel.pp)))
    each = dp * config.batch.micro
    return each * math.ceil(max(32, ranks) / each)


def planned(config: Config, ranks: int, rates: MachineRates) -> Plan:
    """Return the plan of a layout that was found, as a run on a machine makes it."""
    return plan_for(config, JobRanks.filling(ranks, rates.ranks_per_node), tokenizer_of(config.data))


def best_of(
    found: SearchResult, top: int, rates: MachineRates, limit: float, held_by: Callable[[Candidate], int]
) -> tuple[list[RunnableLayout], str]:
    """Return the best layouts that a run accepts and that fit, by the run's own plan.

    Of those within EQUAL of the fastest the simplest comes first. Further layouts are planned until
    enough fit; those that don't are counted. With them comes what a run says of the first that it
    refuses, if it refuses any.

    held_by: bytes that a run's plan has on the rank with most. Raises MpitrainError if a run refuses it.
    """
    chosen: list[RunnableLayout] = []
    refusal = ""
    planned = 0  # since one fits
    for each in found.ranked:
        if chosen and _is_enough(chosen, top, planned, each):
            break
        planned += bool(chosen)
        try:
            held = held_by(each)
        except MpitrainError as error:
            found.left_out[each.layout] = REFUSED
            refusal = refusal or error.args[0]
            continue
        if held > limit:
            found.left_out[each.layout] = "memory"
        elif any(_saves_little(each, other, other.held - held, limit) for other in chosen):
            found.left_out[each.layout] = "slower, with little memory saved"
        else:
            chosen.append(RunnableLayout(each, held))
    accepted = {each.candidate.layout for each in chosen}
    for tried in found.every:
        if tried.layout is not None and tried.layout not in accepted and not found.reason_of(tried):
            found.left_out[tried.layout] = SLOWER
    return _first(_ordered(chosen, rates, limit), top), refusal


def _is_enough(chosen: Sequence[RunnableLayout], top: int, planned: int, following: Candidate) -> bool:
    """Return whether enough are planned: of those as fast as the best a few more than `top`."""
    most = max(top, CHECKED)
    best = min(each.candidate.found.seconds for each in chosen)
    equal = following.found.seconds <= (1 + EQUAL) * best
    return planned >= PLANNED * most or len(chosen) >= (most if equal else top)


def _ordered(chosen: list[RunnableLayout], rates: MachineRates, limit: float) -> list[RunnableLayout]:
    """Return layouts by time; those that are as fast as the first, by preference."""
    best = min((each.candidate.found.seconds for each in chosen), default=0.0)

    def order(each: RunnableLayout) -> tuple[Any, ...]:
        seconds = each.candidate.found.seconds
        if seconds > (1 + EQUAL) * best:
            return (True, seconds)
        return (False, *each.preference(rates, limit), seconds)

    return sorted(chosen, key=order)


def _first(ordered: list[RunnableLayout], top: int) -> list[RunnableLayout]:
    """Return the first `top` layouts; of several the fastest is one, last if need be."""
    fastest = min(ordered, key=lambda each: each.candidate.found.seconds, default=None)
    if top == 1 or fastest is None or fastest in ordered[:top]:
        return ordered[:top]
    return [*ordered[: top - 1], fastest]


def _saves_little(each: Candidate, other: RunnableLayout, saved: float, limit: float) -> bool:
    """Return whether a layout is a faster one that saves memory for which nobody asks.

    It has another recomputation, or kind of cp or of gathers; or offloads an optimizer that fits.
    """
    faster = other.candidate.layout
    mine = each.layout._replace(
        recompute=faster.recompute, regathers=faster.regathers, context=faster.context, gather=faster.gather
    )
    if mine == faster:
        return saved < SAVED * limit
    return each.layout.offload_optimizer and mine._replace(offload_optimizer=False) == faster


def _held(candidate: Candidate, space: SearchSpace, limit: MemoryLimit) -> int:
    """Return the bytes of the rank with most memory, by the plan that a run makes.

    The rank with most memory by formulas is asked first: where it has too much, the others need not be.
    """
    plan = _plan_of_few(candidate.config, space)
    usage = predict_rank(plan, candidate.found.footprint.stage, on_gpu=limit.on_gpu)
    held = (usage.on_device if limit.on_gpu else sum(usage)) + int(limit.usable - limit.of_tensors)
    if held > limit.usable:
        return held
    held = limit.needed(held_by_ranks(plan, limit.on_gpu))
    if held <= limit.usable and candidate.layout.schedule not in catalog.FAMILIES:
        plan.training  # noqa: B018  # a schedule of the user's own may be wrong, and is refused
    return held


def _plan_of_few(config: Config, space: SearchSpace) -> Plan:
    """Return the plan of a run, of as few microbatches as show what it holds.

    Where a rank holds no more with each of them, its peak comes before three rounds of the pipeline.
    """
    plan = plan_of(space.resolved(config))
    if not holds_bounded(plan.config):
        return plan
    pipeline = plan.config.pipeline
    few = max(3 * max(config.parallel.pp, pipeline.group or 1), 2 * pipeline.tail)
    return plan.with_microbatches(min(plan.num_microbatches, few))


def _prove(plans: Iterable[Plan]) -> None:
    """Prove the programs of what is printed, those that several layouts have once."""
    proved: list[LoweredPrograms] = []
    for plan in plans:
        if plan.lowered_training not in proved:
            plan.training  # noqa: B018
            proved.append(plan.lowered_training)


def _nothing_fits(
    model: StepModel, space: SearchSpace, found: SearchResult, limit: MemoryLimit, refusal: str, fits: str
) -> ConfigError:
    """Return the error. refusal: what a run says of the first one. fits: what would, in words."""
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
        f"{model.name} on {counted(space.ranks, 'ranks')} of {space.machine.name}: {why}; fixed: "
        f"{named(space.fixed) or 'nothing'}; "
        f"{fits or 'change what is fixed, --ranks, --memory or batch.global'}"
    )


def _what_fits(model: StepModel, space: SearchSpace, every: Iterable[Tried], limit: MemoryLimit) -> str:
    """Say by formulas with how much memory, and on how many ranks, something that was tried would fit."""
    leanest = _leanest(every)
    if leanest is None:
        return ""
    needed = 1.1 * leanest.held + limit.usable - limit.of_tensors
    with suppress(MpitrainError):  # a run may refuse it
        needed = max(needed, limit.needed(held_by_ranks(_plan_of_few(leanest.config, space), limit.on_gpu)))
    words = [f"ranks of about {few_digits(1.02 * needed / limit.share / 1e9)} GB"]
    batch = space.given.batch.global_
    for doublings in range(1, DOUBLED + 1):
        ranks = space.ranks << doublings
        larger = batch * max(1, -(-ranks // max(batch, space.ranks)))
        given = settings.with_values(space.given, {"batch.global_": larger})
        # no larger microbatch needs less memory
        fixed = {"batch.micro": MICROS[0], **space.fixed}
        wider = space._replace(ranks=ranks, given=given, fixed=fixed, may_offload=False)
        leanest = _leanest(search(model, wider, 0.0).every)
        if leanest is not None and leanest.held < limit.of_tensors:
            words.append(
                f"about {counted(ranks, 'ranks', ',')}" + f" with batch.global = {larger}" * (larger != batch)
            )
            break
    return f"estimate: it would fit with {', or '.join(words)}"


def _leanest(every: Iterable[Tried]) -> Tried | None:
    """Return the layout with least memory by formulas that isn't offloaded; None if there is none."""
    in_device_memory = (each for each in every if each.layout and not each.layout.offload_optimizer)
    fitting = (each for each in in_device_memory if each.reason in ("", "memory"))
    return min(fitting, key=lambda each: each.held, default=None)


def named(fixed: FixedKeys) -> str:
    return ", ".join(f"{key} = {value}" for key, value in fixed.items())


def few_digits(value: float) -> str:
    """Return a number as text: from 10 on with one digit after the point, from 10,000 on with none."""
    if value < 10:
        return f"{value:.3g}"
    return f"{value:.1f}" if value < 1e4 else f"{value:,.0f}"
