"""Enumerate the layouts of a model on a number of ranks, prune what can't be, rank by predicted time.

First by formulas alone, then the best of them played; last the memory of those that remain as a run
would hold it (plan/predict/memory.py), by the plan of the very configuration that would be written.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.plan.declared.step_layout import MICROS, StepLayout
from mpitrain.plan.predict.step_time.footprint import footprint_of
from mpitrain.plan.predict.step_time.layout import can_go_by_node, require_possible
from mpitrain.plan.predict.step_time.machine import MachineRates
from mpitrain.plan.predict.step_time.step import (
    Prediction,
    is_defined,
    predict_step,
    stashes_in_flight,
)
from mpitrain.plan.predict.step_time.step_model import StepModel
from mpitrain.schedules import catalog

PLAYED = 24  # of the best by formulas
LONG = 16384  # positions from which cp is tried
SLACK = 1.15  # formulas of memory may be too high by this much
FEW = 1.0  # microbatches over stages, at least
ENOUGH = 0.005  # what a more complex layout must gain
TIGHTER = (0.5, 0.25, 0.12)  # of the limit that formulas are held to, where what they let pass doesn't fit
DOESNT_DIVIDE = "doesn't divide"
SLOWER = f"being slower, by formulas, than the first {PLAYED}"
CONTEXT, GATHER = "zigzag", "auto"  # kinds that others must be faster than


class Candidate(NamedTuple):
    layout: StepLayout
    found: Prediction

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


class SearchResult(NamedTuple):
    """What a search found.

    ranked: best first. refused: how many, by reason. tried: all. example: why the first of those
    can't be that don't divide.
    """

    ranked: list[Candidate]
    refused: Counter[str]
    tried: int
    example: str = ""


def searches(
    model: StepModel,
    base: StepLayout,
    machine: MachineRates,
    fixed: Mapping[str, Any],
    limit: float,
    unfit: Collection[StepLayout],
) -> Iterator[SearchResult]:
    """Yield what search() finds, and then ever leaner layouts, for as long as memory left some out.

    A run holds buffers that formulas don't have, so all that they let pass may not fit. The caller
    puts into `unfit` what didn't. Last come the leanest by formulas, whatever time they take.
    """
    found = search(model, base, machine, fixed, limit)
    yield found
    for share in TIGHTER:
        if not (found.refused["memory"] or unfit):
            return
        yield search(model, base, machine, fixed, share * limit, unfit)
    if found.refused["memory"] or unfit:
        yield search(model, base, machine, fixed, limit, unfit, leanest=True)


def search(
    model: StepModel,
    base: StepLayout,
    machine: MachineRates,
    fixed: Mapping[str, Any],
    limit: float,
    unfit: Collection[StepLayout] = (),
    leanest: bool = False,
) -> SearchResult:
    """Return the layouts that fit, best first.

    base: ranks, sequence, batch and type of numbers. fixed: fields of a layout that are fixed.
    limit: bytes of a rank. unfit: layouts that are known not to fit. leanest: those that need least
    memory are played, not those that are fastest.
    """
    refused: Counter[str] = Counter()
    example = ""
    fitting: list[Candidate] = []
    seconds: dict[StepLayout, float] = {}
    tried = 0
    for layout in _every(model, base, machine, fixed):
        if layout.regathers and "regathers" not in fixed and _fits_easily(model, layout, limit):
            continue
        tried += 1
        reason, why = ("memory", "") if layout in unfit else _refusal(model, layout, machine, limit)
        if reason:
            refused[reason] += 1
            example = example or why
            continue
        found = predict_step(model, layout, machine, play=False)
        seconds[layout] = found.seconds
        if _gains_nothing(layout, seconds):
            refused["a kind of cp or of gathers that is no faster"] += 1
            continue
        fitting.append(Candidate(layout, found))
    fitting.sort(key=lambda each: each.found.footprint.total if leanest else each.found.seconds)
    played: list[Candidate] = []
    for number, (layout, _) in enumerate(fitting):
        if len(played) == PLAYED:
            refused[SLOWER] = len(fitting) - number
            break
        if is_defined(layout):
            played.append(Candidate(layout, predict_step(model, layout, machine)))
        else:
            refused["a schedule that isn't defined for so many stages and microbatches"] += 1
    played.sort(key=lambda each: each.found.seconds * (1 + ENOUGH * each.complexity))
    return SearchResult(played, refused, tried, example)


def _fits_easily(model: StepModel, layout: StepLayout, limit: float) -> bool:
    """Return whether a layout that keeps what it gathers fits, by formulas that may be too low."""
    kept = layout._replace(regathers=False)
    return footprint_of(model, kept, stashes_in_flight(kept)).total < limit / SLACK


def _gains_nothing(layout: StepLayout, seconds: Mapping[StepLayout, float]) -> bool:
    """Return whether a kind of cp or of gathers is no faster than the default one, which came before."""
    usual = {layout._replace(context=CONTEXT), layout._replace(gather=GATHER)} - {layout}
    most = seconds[layout] * (1 + ENOUGH)
    return any(seconds.get(each, math.inf) <= most for each in usual)


def _refusal(model: StepModel, layout: StepLayout, machine: MachineRates, limit: float) -> tuple[str, str]:
    """Return the reason that a layout is left out for, "" for none, and of what doesn't divide, what."""
    try:
        require_possible(layout, model)
    except ConfigError as error:
        return DOESNT_DIVIDE, error.args[0]
    count = layout.num_microbatches
    if layout.pp > 1 and count < FEW * layout.pp / layout.chunks:
        return "fewer microbatches than stages", ""
    if layout.schedule == "interleaved" and count % layout.pp:
        return DOESNT_DIVIDE, f"interleaved: {count} microbatches aren't a multiple of pp {layout.pp}"
    if layout.sharded and layout.dp % layout.sharded:
        return DOESNT_DIVIDE, f"dp_shard {layout.sharded} doesn't divide dp {layout.dp}"
    by_node = layout.ep > 1 and layout.dispatch == "hierarchical"
    if by_node and not can_go_by_node(layout, machine.ranks_per_node):
        return "rows can't go to nodes first", ""
    if footprint_of(model, layout, stashes_in_flight(layout)).total > SLACK * limit:
        return "memory", ""
    return "", ""


def _every(
    model: StepModel, base: StepLayout, machine: MachineRates, fixed: Mapping[str, Any]
) -> Iterator[StepLayout]:
    """Yield the layouts that the rules of the field leave, those alone that have what is fixed.

    dispatch of the base: "auto", or what the configuration says.
    """
    for layout in _generated(model, base, machine, fixed):
        if all(getattr(layout, key) == value for key, value in fixed.items()):
            if layout.dispatch == "auto":
                by_node = can_go_by_node(layout, machine.ranks_per_node)
                layout = layout._replace(dispatch="hierarchical" if by_node else "alltoall")
            yield layout


def _generated(
    model: StepModel, base: StepLayout, machine: MachineRates, fixed: Mapping[str, Any]
) -> Iterator[StepLayout]:
    """Yield layouts by the rules of the field: tp and etp within a node, ZeRO-1 always."""
    for tp, cp, pp in _degrees(model, base, machine, fixed):
        rest = base.ranks // (tp * cp * pp)
        for zero, sharded in _zeros(rest * cp, pp, tp, machine, fixed):
            for ep, etp in _experts(model, base.ranks // pp, tp, fixed):
                for schedule, chunks in _schedules(model, pp, fixed):
                    for micro in _picked(fixed, "micro", MICROS):
                        modes = _picked(fixed, "recompute", ("none", "selective", "full"))
                        divides = base.batch % (rest * micro) == 0
                        for recompute in modes if divides else modes[:1]:  # one is refused for all
                            layout = base._replace(
                                tp=tp, cp=cp, pp=pp, zero=zero, sharded=sharded, ep=ep, schedule=schedule,
                                chunks=chunks, micro=micro, recompute=recompute, etp=etp,
                            )  # fmt: skip
                            yield from _by_kind(model, layout, fixed)


def _by_kind(model: StepModel, layout: StepLayout, fixed: Mapping[str, Any]) -> Iterator[StepLayout]:
    """Yield a layout with each kind of cp, of ZeRO-3's gathers and of tp's inputs that can matter.

    ring isn't tried: it sends what zigzag does, and leaves causal attention unbalanced.
    """
    contexts = [CONTEXT]
    if layout.cp > 1:
        contexts += ["gather"] + ["ulysses"] * _can_spread_heads(model, layout)
    fetches = layout.zero == 3 and layout.pp == 1 and layout.num_microbatches > 1
    gathers = (GATHER, "step") if fetches else (GATHER,)
    for context in _picked(fixed, "context", tuple(contexts)):
        for gather in _picked(fixed, "gather", gathers):
            for regathers in (False, True)[: 1 + (layout.can_regather and not model.has_latents)]:
                yield layout._replace(context=context, gather=gather, regathers=regathers)


def _can_spread_heads(model: StepModel, layout: StepLayout) -> bool:
    """Return whether Ulysses gives each rank whole key-value heads: beyond them it sends copies."""
    heads, kv_heads = model.sizes.heads // layout.tp, model.sizes.kv_heads // layout.tp
    return layout.cp <= kv_heads and heads % layout.cp == 0 and kv_heads % layout.cp == 0


def _picked(fixed: Mapping[str, Any], key: str, choices: tuple) -> tuple:
    return (fixed[key],) if key in fixed else choices


def _degrees(
    model: StepModel, base: StepLayout, machine: MachineRates, fixed: Mapping[str, Any]
) -> Iterator[tuple[int, int, int]]:
    node = min(machine.ranks_per_node, base.ranks)
    tps = [each for each in _divisors(node) if model.sizes.heads % each == 0 and model.sizes.ffn % each == 0]
    longest = base.sequence // (LONG // 2) if base.sequence >= LONG else 1
    cps = [each for each in (1, 2, 4, 8, 16, 32) if each <= longest]
    for tp in _picked(fixed, "tp", tuple(tps)):
        for cp in _picked(fixed, "cp", tuple(cps)):
            if base.ranks % (tp * cp):
                continue
            rest = base.ranks // (tp * cp)
            pps = [each for each in _divisors(rest) if each <= min(model.sizes.layers, 64)]
            for pp in _picked(fixed, "pp", tuple(pps)):
                if rest % pp == 0 and fixed.get("dp", rest // pp) == rest // pp:
                    yield tp, cp, pp


def _zeros(
    data: int, pp: int, tp: int, machine: MachineRates, fixed: Mapping[str, Any]
) -> list[tuple[int, int]]:
    """Return ZeRO's stages with the ranks that share state; stage 3 alone where its gathers are fixed."""
    found = _stages_of_zero(data, pp, tp, machine, fixed)
    gathers = fixed.get("gather", GATHER) != GATHER
    return [(zero, sharded) for zero, sharded in found if zero == 3 or not gathers]


def _stages_of_zero(
    data: int, pp: int, tp: int, machine: MachineRates, fixed: Mapping[str, Any]
) -> list[tuple[int, int]]:
    if "zero" in fixed or "sharded" in fixed:
        return [(zero, fixed.get("sharded", 0)) for zero in _picked(fixed, "zero", (1, 3)[: 1 + (pp == 1)])]
    if data == 1:
        return [(0, 0)]
    found = [(1, 0)]
    if pp == 1:
        found.append((3, 0))
        node = machine.ranks_per_node // tp
        found += [(3, node)] * (1 < node < data and data % node == 0)
    return found


def _experts(model: StepModel, ranks: int, tp: int, fixed: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return degrees of ep with those of etp: experts are whole, or divided as the dense layers are."""
    if model.experts is None:
        return [(1, fixed.get("etp", 1))]
    eps = tuple(each for each in _divisors(model.experts.count) if ranks % each == 0 and each <= 128)
    etps = (1, tp) if tp > 1 and model.experts.width % tp == 0 else (1,)
    return [
        (ep, etp)
        for ep in _picked(fixed, "ep", eps)
        for etp in _picked(fixed, "etp", etps)
        if etp == 1 or "etp" in fixed or ranks % (ep * etp) == 0
    ]


def _schedules(model: StepModel, pp: int, fixed: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return schedules with their chunks: nothing more complex than is needed."""
    names = ("1f1b",) if pp == 1 else ("1f1b", "interleaved", "zbv")
    if pp == 1 and fixed.get("chunks", 1) > 1:
        names = ("interleaved", "zbv")
    found = [(name, chunks) for name in _picked(fixed, "schedule", names) for chunks in _chunks(name, fixed)]
    return [(name, chunks) for name, chunks in found if pp * chunks <= model.sizes.layers]


def _chunks(name: str, fixed: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the stages a rank that a schedule can have."""
    placed = catalog.FAMILIES[name].placed if name in catalog.FAMILIES else "plain"
    if placed == "looped":
        return _picked(fixed, "chunks", (2, 4))
    return (2,) if placed == "v" else (1,)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, min(number, 4096) + 1) if number % each == 0]
