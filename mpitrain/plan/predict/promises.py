"""What settings that are there for memory save.

A stage of ZeRO or a mode of recomputation is compared with the one before it, an axis with fewer
ranks that don't divide along it, a schedule with those that it promises to hold less than, or no more.
"""

import json
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

import msgspec

from mpitrain.config import Parallel, Pipeline
from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.plan.division.domains import divided_experts
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.memory import MemoryUsage, predict
from mpitrain.plan.settings.resolve import with_reduce
from mpitrain.plan.settings.rule_table import can_regather
from mpitrain.schedules import catalog

ZERO, RECOMPUTE, REGATHER = "parallel.zero", "memory.recompute", "parallel.regather"
# keys whose values hold less and less
ORDERED: Mapping[str, tuple[Any, ...]] = {
    ZERO: (0, 1, 2, 3),
    RECOMPUTE: ("none", "selective", "full", "every-k"),
    REGATHER: (False, True),
}
COPIES = "both copies of a stage are summed first, once a step, and their gradients are whole until then"
# by axis, what a rank that isn't divided along it has no use for
UNDIVIDED: dict[str, Mapping[str, Any]] = {
    "tp": dict(tp=1, sequence=False, async_tp=False, regather=False),
    "cp": dict(cp=1, context=Parallel().context),
    "pp": dict(pp=1),
    "experts": dict(ep=1, etp=1),
}
# that another schedule has no use for
OF_A_SCHEDULE = dict(stages=None, segments=None, group=None, pairs="whole")


def fullest(plan: Plan) -> MemoryUsage:
    """Return what the pipeline rank that holds most on its device has."""
    return max(predict(plan), key=lambda usage: usage.on_device)


def most_bytes(plan: Plan) -> int:
    """Return what the pipeline rank that holds most has on its device."""
    return fullest(plan).on_device


def more_than(more: int) -> str:
    """Return words for holding so many bytes more than something else."""
    return f"holds {more / 1e6:,.2f} MB more than" if more else "holds as much as"


def _fullest_if(plan: Plan) -> MemoryUsage | None:
    """Return what fullest() does; None of a plan that can't be, such as pairs where nothing is in parts."""
    try:
        return fullest(plan)
    except (ConfigError, ScheduleError):
        return None


# ---------------------------------------------------------------- other values of a key


def with_value(plan: Plan, key: str, value: Any) -> Plan:
    """Return the plan of the same run with another value of a key, what belongs to it left open."""
    if key == REGATHER:
        return with_parallel(plan, regather=value)
    if key == ZERO:
        shared = {} if value else {"dp_shard": 0}
        return with_parallel(plan, zero=value, reduce="auto", gather="auto", ahead=1, **shared)
    changed = plan.with_values({"memory.recompute": value, "memory.every": 0})
    return changed if can_regather(changed.config) else with_parallel(changed, regather=False)


def with_parallel(plan: Plan, **keys: Any) -> Plan:
    """Return the plan of the same run with other keys of `parallel`."""
    parallel = msgspec.structs.replace(plan.config.parallel, **keys)
    return plan.changed(parallel=with_reduce(parallel, plan.changed(parallel=parallel).config))


def by_value(plan: Plan, key: str, values: Collection[Any] | None = None) -> dict[Any, int]:
    """Return what a rank holds with each value of a key, of those that this layout can have."""
    if key == REGATHER and not can_regather(plan.config):
        return {}
    held = {}
    for value in ORDERED[key] if values is None else values:
        other = with_value(plan, key, value)
        parallel, memory = other.config.parallel, other.config.memory
        is_allowed = parallel.zero < 3 or memory.recompute != "every-k" or memory.every == 1
        is_allowed = is_allowed and (key != ZERO or parallel.zero == value)
        if is_allowed and (usage := _fullest_if(other)) is not None:
            held[value] = usage.on_device
    return held


def idle_values(plan: Plan, key: str, bytes_by_value: Mapping[Any, int]) -> list[str]:
    """Say which values of a key hold no less than the one before, and why. bytes_by_value: by_value()."""
    lines = []
    for before, value in pairwise(value for value in ORDERED[key] if value in bytes_by_value):
        more = bytes_by_value[value] - bytes_by_value[before]
        if more > 0 or (more == 0 and value != "every-k"):
            statement = f"{key} = {json.dumps(value)} {more_than(more)} {json.dumps(before)} here"
            lines.append(f"{statement}{_why_no_less(plan, key, value)}")
    return lines


def idle_here(plan: Plan) -> list[str]:
    """Say which of ZeRO's stage, recomputation, parallel.regather and schedule hold no less than without.

    A stage and a mode are compared with the one before them.
    """
    zero, mode = plan.config.parallel.zero, plan.config.memory.recompute
    before = {"none": (), "full": ("selective",)}.get(mode, ("none",))
    by_zero, by_mode = by_value(plan, ZERO, range(zero)[-1:]), by_value(plan, RECOMPUTE, before)
    mine = most_bytes(plan) if by_zero or by_mode else 0
    lines = idle_values(plan, ZERO, {**by_zero, zero: mine})
    lines += idle_values(plan, RECOMPUTE, {**by_mode, mode: mine})
    if plan.config.parallel.regather:
        lines += idle_values(plan, REGATHER, by_value(plan, REGATHER))
    # of the default schedule `mpitrain memory` says it, if anybody asks
    if plan.config.pipeline.schedule != Pipeline().schedule:
        lines += idle_schedule(plan)
    return lines


def _splits_backwards(plan: Plan) -> bool:
    return any(action.kind == "I" for program in plan.shortest.training.ranks for action in program)


def _why_no_less(plan: Plan, key: str, value: Any) -> str:
    """Return the end of a line: why a value holds no less than the one before."""
    if key == REGATHER:
        if plan.config.memory.offload in ("activations", "all"):
            return (
                ", and sends more: kept inputs are in host memory, where it saves; the device has the input "
                "of one block either way"
            )
        return ", and sends more: memory peaks where no block's input is kept, such as in the head"
    if key == ZERO:
        return f": {_why_divided(plan, value)}"
    if _splits_backwards(plan):
        return (
            ": most memory is kept for weight gradients, and is not recomputed; a schedule such as 1f1b "
            "keeps less of it"
        )
    return ": recomputing one block needs more than the stage's few blocks keep without"


def _why_divided(plan: Plan, stage: int) -> str:
    """Return why a stage of ZeRO holds no less than the one before."""
    offload, experts = plan.config.memory.offload, plan.config.experts
    if stage == 1 and offload in ("optimizer", "all"):
        return f'the state it divides is in host memory (memory.offload = "{offload}"), where it saves'
    if plan.table.copies > 1:
        return COPIES
    if experts.count and _splits_backwards(plan):
        return (
            "experts' rows can come in rounds, so that their gradients are whole from the backward for "
            "inputs to that for weights; a schedule that doesn't split backwards, such as 1f1b, needs less"
        )
    if experts.count and not divided_experts(plan.config):
        return (
            f"no two ranks have the same experts (parallel.ep = {plan.config.parallel.ep}), so nothing of "
            "them is divided, and a microbatch's gradients are kept besides their sums; a smaller "
            "parallel.ep lets ranks divide them"
        )
    if stage == 3:
        return (
            "the weights gathered at the same time, of up to two neighbours, such as embedding and "
            "head on one rank, are more than what is divided; more data-parallel ranks divide more"
        )
    return (
        "the whole gradient buckets, up to two neighbours, are more than what is divided; more "
        f"data-parallel ranks divide more, and a smaller comm.bucket_mb (here "
        f"{plan.config.comm.bucket_mb:g}) needs less, down to one block"
    )


# ---------------------------------------------------------------- axes


def idle_axes(plan: Plan) -> list[str]:
    """Say which axes hold no less than a rank without them, with as many data ranks, and why."""
    parallel = plan.config.parallel
    degrees = {"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp, "experts": parallel.ep * parallel.etp}
    divided = [axis for axis, degree in degrees.items() if degree > 1]
    others = {axis: other for axis in divided if (other := _without(plan, axis))}
    if not others:
        return []
    mine = fullest(plan)
    lines = []
    for axis, other in others.items():
        if (more := mine.on_device - other.on_device) >= 0:
            said, one = f"parallel.{axis} = {getattr(parallel, axis, '')}", "1"
            if axis == "experts":
                said, one = f"parallel.ep = {parallel.ep} and parallel.etp = {parallel.etp}", "1 and 1"
            lines.append(f"{said} {more_than(more)} {one} here: {_why_axis(plan, axis, mine, other)}")
    return lines


def _without(plan: Plan, axis: str) -> MemoryUsage | None:
    """Return what a rank holds that isn't divided along an axis, if there is such a layout."""
    one_stage = dict(schedule=catalog.SIMPLEST, chunks=1, tail=1, **OF_A_SCHEDULE) if axis == "pp" else {}
    pipeline = msgspec.structs.replace(plan.config.pipeline, **one_stage)
    parallel = msgspec.structs.replace(plan.config.parallel, **UNDIVIDED[axis])
    if (parallel.dp * parallel.tp * parallel.cp) % (parallel.ep * parallel.etp):
        return None  # experts are divided over ranks of this axis
    return _fullest_if(plan.changed(parallel=parallel, pipeline=pipeline))


def _why_axis(plan: Plan, axis: str, mine: MemoryUsage, without: MemoryUsage) -> str:
    """Return why a rank that is divided along an axis holds no less, by what it holds more of."""
    messages = mine.messages - without.messages
    lent = mine.lent - without.lent
    computed = mine.computed - without.computed
    if axis == "experts" and computed > 0:
        return (
            "its buffer holds experts.buffer = "
            f"{plan.config.experts.buffer:g} times the rows of equal loads; a smaller one needs less"
        )
    if axis == "pp" and plan.table.copies > 1:
        return (
            f"{plan.config.pipeline.schedule} has two stages on each rank, one for each direction, "
            "so that weights are divided by half of parallel.pp"
        )
    if axis == "pp" and computed >= max(lent, messages):
        flight = max(plan.shortest.training.report.peak_in_flight)
        return (
            f"up to {flight} microbatches are in flight on a rank, and their activations take more "
            "than dividing the weights saves"
        )
    if messages >= lent:
        return (
            f"communication buffers take {messages / 1e6:,.2f} MB more, which is more than "
            "dividing saves; it saves more with a larger model or longer sequences"
        )
    return (
        f"weights and gradients that are whole for one computation take {lent / 1e6:,.2f} MB more, "
        "which is more than dividing saves"
    )


# ---------------------------------------------------------------- schedules


def promises(schedule: str) -> list[tuple[str, bool]]:
    """Return schedules with whether this one is to hold less than they do; else no more."""
    family = catalog.FAMILIES.get(schedule)
    if family is None:  # a table of the user's own
        return []
    less = [(other.name, True) for other in family.less_than]
    return less + [(other.name, False) for other in family.no_more_than]


def idle_schedule(plan: Plan) -> list[str]:
    """Say so if a schedule holds more than one that it promises not to, and why."""
    pipeline = plan.config.pipeline
    others = promises(pipeline.schedule)
    if plan.config.parallel.pp == 1 or not others:
        return []
    mine = fullest(plan)
    for name, less in others:
        chunks = catalog.chunks_of(name, None)
        other = msgspec.structs.replace(pipeline, schedule=name, chunks=chunks, **OF_A_SCHEDULE)
        usage = _fullest_if(plan.changed(pipeline=other))
        if usage is None:
            continue  # such as a setting that the other doesn't take
        more = mine.on_device - usage.on_device
        if more > 0 or (less and more == 0):
            statement = f'pipeline.schedule = "{pipeline.schedule}" {more_than(more)} "{name}" here'
            return [f"{statement}: {_why_schedule(plan, mine, usage)}"]
    return []


def _why_schedule(plan: Plan, mine: MemoryUsage, other: MemoryUsage) -> str:
    """Return why a schedule holds no less than another one, by the rows in which it holds more."""
    if plan.config.pipeline.schedule == catalog.SIMPLEST:
        return "a step has so few microbatches that all are in flight either way"
    state = sum(mine[:5]) - sum(other[:5])  # weights, gradients, moments and what is lent of them
    kept = mine.activations - other.activations
    computed = mine.recomputed + mine.working - other.recomputed - other.working
    if kept >= max(state, computed) and kept > 0:
        if plan.table.segments > 1:
            return (
                "keys and values of a sequence's segments, masks and pending gradients are kept "
                "until its last segment; fewer pipeline.segments keep less of them"
            )
        return (
            "a split backward keeps both factors of each weight gradient until that is computed; "
            f"{catalog.SIMPLEST} frees them at once"
        )
    both_ends = plan.table.rank_of[0] == plan.table.rank_of[plan.table.depth - 1]
    if state >= computed and both_ends:
        return (
            "one rank has both ends of the model, embedding and head, and halving activations "
            "saves less than these take; it saves more with longer sequences or larger microbatches"
        )
    if state >= computed:
        return "its stages, or their whole buckets, are larger"
    return (
        "the temporaries of one computation, such as the loss over the vocabulary, are most of the "
        "memory, and more is kept at that time"
    )
