"""What settings that are there for memory save in a layout, and what those cost that are there for speed."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from mpitrain.config import Config, Pipeline
from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.plan.declared.parameters import itemsizes_of
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.division.domains import divided_experts, domains_of, drops_weights, gather_of
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.bucket_buffers import held_by
from mpitrain.plan.predict.pool_sizes import needed_by
from mpitrain.plan.predict.schedule_promises import idle_schedule, more_than, most_bytes
from mpitrain.plan.settings.resolve import with_reduce
from mpitrain.plan.settings.rule_table import can_regather

STAGES = (0, 1, 2, 3)
COPIES = "both copies of a stage are summed first, once a step, and their gradients are whole until then"
MODES = ("none", "selective", "every-k", "full")


def with_zero(plan: Plan, stage: int) -> Plan:
    """Return the plan of the same run with another stage of ZeRO, and all that belongs to it left open."""
    open_keys = dict(zero=stage, reduce="auto", gather="auto", ahead=1)
    return _with_parallel(plan, **open_keys, **({} if stage else {"dp_shard": 0}))


def _with_parallel(plan: Plan, **keys: Any) -> Plan:
    """Return the plan of the same run with other keys of `parallel`."""
    parallel = msgspec.structs.replace(plan.config.parallel, **keys)
    config = msgspec.structs.replace(plan.config, parallel=parallel)
    return Plan(msgspec.structs.replace(config, parallel=with_reduce(parallel, config)), plan.model)


def with_recompute(plan: Plan, mode: str) -> Plan:
    """Return the plan of the same run with another memory.recompute, without parallel.regather
    where that doesn't go with it.
    """
    memory = msgspec.structs.replace(plan.config.memory, recompute=mode, every=0)
    changed = Plan(msgspec.structs.replace(plan.config, memory=memory), plan.model)
    return changed if can_regather(changed.config) else _with_parallel(changed, regather=False)


def by_stage(plan: Plan, stages: Iterable[int] = STAGES) -> dict[int, int]:
    """Return what a rank holds with each stage of ZeRO, of those that this layout can have."""
    bytes_by_stage = {}
    for stage in stages:
        other = with_zero(plan, stage)
        if other.config.parallel.zero == stage and _allowed(other.config):
            try:
                bytes_by_stage[stage] = most_bytes(other)
            except (ConfigError, ScheduleError):
                # such as pairs in parts, where nothing is walked in parts
                continue
    return bytes_by_stage


def by_recompute(plan: Plan, modes: Iterable[str] = MODES) -> dict[str, int]:
    """Return what a rank holds with each mode of recomputation, of those that this layout can have."""
    plans = {mode: with_recompute(plan, mode) for mode in modes}
    return {mode: most_bytes(other) for mode, other in plans.items() if _allowed(other.config)}


def by_regather(plan: Plan) -> dict[str, int]:
    """Return what a rank holds without and with parallel.regather, if that does something."""
    if not can_regather(plan.config):
        return {}
    plans = {word: _with_parallel(plan, regather=word == "true") for word in ("false", "true")}
    return {word: most_bytes(other) for word, other in plans.items()}


def _allowed(config: ResolvedConfig) -> bool:
    return config.parallel.zero < 3 or config.memory.recompute != "every-k" or config.memory.every == 1


# ---------------------------------------------------------------- what is said


def zero_line(given: Config, resolved: ResolvedConfig) -> str:
    """Say so if ZeRO was asked for, and there is one data rank, over which nothing is divided."""
    if not given.parallel.zero or resolved.parallel.zero:
        return ""
    ranks = f"parallel.dp = {resolved.parallel.dp} and parallel.cp = {resolved.parallel.cp}"
    return (
        f"parallel.zero = {given.parallel.zero} divides nothing with {ranks}; the run uses parallel.zero = 0"
    )


def costs(plan: Plan) -> list[str]:
    """Say what settings cost that hold more for speed or bits than the stage of ZeRO needs."""
    parallel = plan.config.parallel
    lines = []
    if parallel.reduce == "microbatch":
        lines += _costs_of_each(plan)
    elif parallel.zero >= 2 and plan.num_microbatches > 1:
        lent = max(_lent(plan, rank) for rank in range(parallel.pp))
        instead = (
            'numerics.reproducible = "layout" needs it'
            if plan.config.numerics.reproducible == "layout"
            else f'"microbatch" keeps none, and sends gradients {plan.num_microbatches} times a step'
        )
        lines.append(
            f'parallel.reduce = "step" keeps {lent / 1e6:,.2f} MB of whole gradients until the last '
            f"microbatch; {instead}"
        )
    if parallel.zero == 3 and gather_of(parallel) == "step":
        more = most_bytes(plan) - most_bytes(_with_parallel(plan, gather="use"))
        held = f"holds {more / 1e6:,.2f} MB more" if more > 0 else "holds no more"
        lines.append(f'parallel.gather = "step" {held} than "use", which drops weights after each use')
    elif drops_any(plan):
        lines += _costs_of_use(plan)
    return lines


def drops_any(plan: Plan) -> bool:
    """Return whether weights of any domain are dropped after each use."""
    return any(drops_weights(plan.config, domain) for domain in domains_of(plan.config))


def _costs_of_use(plan: Plan) -> list[str]:
    """Say so if weights that are dropped after each use take no less than those kept over a step."""
    more = most_bytes(plan) - most_bytes(_with_parallel(plan, gather="step"))
    if more < 0:
        return []
    return [
        f'parallel.gather = "use" {more_than(more)} "step" here, although "step" sends less: two blocks are '
        "whole at the same time, such as embedding and head, and they are most of a rank's weights"
    ]


def _costs_of_each(plan: Plan) -> list[str]:
    """Say what a sum after each microbatch costs, where it holds no less than a sum once a step."""
    parallel = plan.config.parallel
    if plan.table.copies > 1:
        return [f'parallel.reduce = "microbatch" does nothing with {plan.config.pipeline.schedule}: {COPIES}']
    saved = max(_whole_gradients(plan, rank) - _lent(plan, rank) for rank in range(parallel.pp))
    if saved > 0 or (parallel.zero >= 2 and plan.num_microbatches == 1):
        return []
    why = "it has several whole buckets at the same time; a smaller comm.bucket_mb needs less"
    if not parallel.zero:
        why = "the sums of gradients are also whole"
    more = f"holds {-saved / 1e6:,.2f} MB more" if saved else "saves nothing"
    statement = f'parallel.reduce = "microbatch" with parallel.zero = {parallel.zero} {more} than "step" here'
    return [f"{statement}, and sends gradients {plan.num_microbatches} times a step: {why}"]


def _whole_gradients(plan: Plan, rank: int) -> int:
    """Return the bytes of gradients that only a sum once a step has whole.

    With ZeRO-1 a rank has its shard's in either way, and with ZeRO-0 all of them.
    """
    _, wide = itemsizes_of(plan.config)
    buckets = [bucket for stage in held_by(plan, rank).values() for bucket in stage.buckets]
    gradients = [gradient for bucket in buckets for gradient in bucket.gradients]
    shards = sum(held.kept(divided=True) for held in gradients) if plan.config.parallel.zero < 2 else 0
    return (sum(held.length for held in gradients) - shards) * wide


def _lent(plan: Plan, rank: int) -> int:
    """Return the bytes of the gradients that are lent."""
    _, wide = itemsizes_of(plan.config)
    return sum(arena.length for arena in needed_by(plan, rank).gradients.values()) * wide


def idle_here(plan: Plan) -> list[str]:
    """Say so if this run's stage of ZeRO, or its recomputation, holds no less than the one before it.

    And so of its schedule and of parallel.regather.
    """
    zero = plan.config.parallel.zero
    mode = plan.config.memory.recompute
    before = {"none": (), "full": ("selective",)}.get(mode, ("none",))
    stages = by_stage(plan, range(zero)[-1:])
    modes = by_recompute(plan, before)
    regathers = by_regather(plan) if plan.config.parallel.regather else {}
    # of the default schedule `mpitrain memory` says it, if anybody asks
    schedule = [] if plan.config.pipeline.schedule == Pipeline().schedule else idle_schedule(plan)
    others = [*idle_regather(plan, regathers), *schedule]
    if not (stages or modes):
        return others
    mine = most_bytes(plan)
    return [
        *out_of_order(plan, stages | {zero: mine}),
        *idle_recompute(plan, modes | {mode: mine}),
        *others,
    ]


def out_of_order(plan: Plan, bytes_by_stage: dict[int, int]) -> list[str]:
    """Say which stages of ZeRO hold no less than the one before, and why. bytes_by_stage: by_stage()."""
    lines = []
    stages = list(bytes_by_stage)
    for before, stage in zip(stages, stages[1:]):
        if bytes_by_stage[stage] >= bytes_by_stage[before]:
            held = more_than(bytes_by_stage[stage] - bytes_by_stage[before])
            lines.append(f"parallel.zero = {stage} {held} {before} here: {_reason(plan, stage)}")
    return lines


def idle_regather(plan: Plan, bytes_by_value: Mapping[str, int]) -> list[str]:
    """Say so if parallel.regather = true holds no less, and why. bytes_by_value: by_regather()."""
    if not bytes_by_value or bytes_by_value["true"] < bytes_by_value["false"]:
        return []
    held = more_than(bytes_by_value["true"] - bytes_by_value["false"])
    why = "memory peaks where no block's input is kept, such as in the head"
    if plan.config.memory.offload in ("activations", "all"):
        why = (
            "kept inputs are in host memory, where it saves; the device has the input of one block either way"
        )
    return [f"parallel.regather = true {held} false here, and sends more: {why}"]


def idle_recompute(plan: Plan, bytes_by_mode: dict[str, int]) -> list[str]:
    """Say which modes of recomputation hold no less than one that recomputes less, and why.

    bytes_by_mode: by_recompute().
    """
    lines = []
    order = [mode for mode in ("none", "selective", "full", "every-k") if mode in bytes_by_mode]
    for before, mode in zip(order, order[1:]):
        if bytes_by_mode[mode] > bytes_by_mode[before] or (
            bytes_by_mode[mode] == bytes_by_mode[before] and mode != "every-k"
        ):
            held = more_than(bytes_by_mode[mode] - bytes_by_mode[before])
            lines.append(f'memory.recompute = "{mode}" {held} "{before}" here: {_reason_to_keep(plan)}')
    return lines


def _reason_to_keep(plan: Plan) -> str:
    if any(action.kind == "I" for program in plan.shortest.training.ranks for action in program):
        return (
            "most memory is kept for weight gradients, and is not recomputed; a schedule such as 1f1b keeps "
            "less of it"
        )
    return "recomputing one block needs more than the stage's few blocks keep without"


def _reason(plan: Plan, stage: int) -> str:
    """Return why a stage of ZeRO holds no less than the one before.

    What it divides isn't there; or gradients, or weights, are lent for longer than one computation,
    or more of them than is divided.
    """
    if stage == 1 and plan.config.memory.offload in ("optimizer", "all"):
        offload = plan.config.memory.offload
        return f'the state it divides is in host memory (memory.offload = "{offload}"), where it saves'
    if plan.table.copies > 1:
        return COPIES
    if plan.config.experts.count and any(
        action.kind == "I" for program in plan.shortest.training.ranks for action in program
    ):
        return (
            "experts' rows can come in rounds, so that their gradients are whole from the backward for "
            "inputs to that for weights; a schedule that doesn't split backwards, such as 1f1b, needs less"
        )
    if plan.config.experts.count and not divided_experts(plan.config):
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
