"""What settings that are there for memory save in a layout, and what those cost that are there for speed."""

import msgspec

from mpitrain.config import Config
from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.layout.memory import predict
from mpitrain.layout.parameters import itemsizes_of
from mpitrain.layout.plan import Plan
from mpitrain.layout.pool_sizes import needed_by
from mpitrain.layout.program import gather_of
from mpitrain.layout.resolve import with_reduce

STAGES = (0, 1, 2, 3)
COPIES = "both copies of a stage are summed first, once a step, and their gradients are whole until then"
MODES = ("none", "selective", "every-k", "full")


def most_bytes(plan: Plan) -> int:
    """Return what the pipeline rank that holds most has on its device."""
    return max(usage.on_device for usage in predict(plan))


def with_zero(plan: Plan, stage: int) -> Plan:
    """Return the plan of the same run with another stage of ZeRO, and all that belongs to it left open."""
    parallel = msgspec.structs.replace(
        plan.config.parallel, zero=stage, reduce="auto", gather="auto", ahead=1
    )
    if not stage:
        parallel = msgspec.structs.replace(parallel, dp_shard=0)
    config = msgspec.structs.replace(plan.config, parallel=parallel)
    return Plan(msgspec.structs.replace(config, parallel=with_reduce(parallel, config)), plan.family)


def with_recompute(plan: Plan, mode: str) -> Plan:
    """Return the plan of the same run with another memory.recompute."""
    memory = msgspec.structs.replace(plan.config.memory, recompute=mode, every=0)
    return Plan(msgspec.structs.replace(plan.config, memory=memory), plan.family)


def by_stage(plan: Plan) -> dict[int, int]:
    """Return what a rank holds with each stage of ZeRO, of those that this layout can have."""
    found = {}
    for stage in STAGES:
        other = with_zero(plan, stage)
        if other.config.parallel.zero == stage and _allowed(other.config):
            try:
                found[stage] = most_bytes(other)
            except (ConfigError, ScheduleError):
                # such as pairs in parts, where nothing is walked in parts
                continue
    return found


def by_recompute(plan: Plan) -> dict[str, int]:
    """Return what a rank holds with each mode of recomputation, of those that this layout can have."""
    plans = {mode: with_recompute(plan, mode) for mode in MODES}
    return {mode: most_bytes(other) for mode, other in plans.items() if _allowed(other.config)}


def _allowed(config: Config) -> bool:
    return config.parallel.zero < 3 or config.memory.recompute != "every-k" or config.memory.every == 1


# ---------------------------------------------------------------- what is said


def told_of_zero(given: Config, resolved: Config) -> str:
    """Say so if ZeRO was asked for, and there is one data rank, over which nothing is divided."""
    if not given.parallel.zero or resolved.parallel.zero:
        return ""
    ranks = f"parallel.dp = {resolved.parallel.dp} and parallel.cp = {resolved.parallel.cp}"
    return (
        f"parallel.zero = {given.parallel.zero} divides nothing with {ranks}, so the run takes parallel.zero "
        "= 0"
    )


def costs(plan: Plan) -> list[str]:
    """Say what settings cost that hold more for speed or bits than the stage of ZeRO needs.

    Of one plan alone: no other is made.
    """
    parallel = plan.config.parallel
    lines = []
    if parallel.zero >= 2 and parallel.reduce == "step" and plan.num_microbatches > 1:
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
        weights = max(_lent(plan, rank, weights=True) for rank in range(parallel.pp))
        lines.append(
            f'parallel.gather = "step" keeps {weights / 1e6:,.2f} MB of whole weights over a step; "use" '
            "drops each after its use"
        )
    if parallel.zero < 2 and parallel.reduce == "microbatch":
        more = (
            "in buffers beside their sums, which are whole"
            if not parallel.zero
            else "as parallel.zero = 2 has them"
        )
        lines.append(
            f'parallel.reduce = "microbatch" with parallel.zero = {parallel.zero} has gradients {more}'
        )
    if parallel.reduce == "microbatch" and plan.table.copies > 1:
        lines.append(
            f'parallel.reduce = "microbatch" does nothing with {plan.config.pipeline.schedule}: {COPIES}'
        )
    return lines


def _lent(plan: Plan, rank: int, *, weights: bool = False) -> int:
    needed, (narrow, wide) = needed_by(plan, rank), itemsizes_of(plan.config)
    return sum(arena.length for arena in (needed.weights if weights else needed.gradients).values()) * (
        narrow if weights else wide
    )


def out_of_order(plan: Plan, found: dict[int, int]) -> list[str]:
    """Say which stages of ZeRO hold more than the one before, and why. found: by_stage()."""
    lines = []
    stages = list(found)
    for before, stage in zip(stages, stages[1:]):
        if found[stage] > found[before]:
            more = (found[stage] - found[before]) / 1e6
            lines.append(
                f"parallel.zero = {stage} holds {more:,.2f} MB more than {before} here: {_reason(plan)}"
            )
    return lines


def idle_recompute(plan: Plan, found: dict[str, int]) -> list[str]:
    """Say which modes of recomputation hold no less than one that recomputes less, and why.

    found: by_recompute().
    """
    lines = []
    order = [mode for mode in ("none", "selective", "full", "every-k") if mode in found]
    for before, mode in zip(order, order[1:]):
        if found[mode] > found[before] or (found[mode] == found[before] and mode != "every-k"):
            more = (found[mode] - found[before]) / 1e6
            lines.append(
                f'memory.recompute = "{mode}" holds {more:,.2f} MB more than "{before}" here: '
                f"{_reason_to_keep(plan)}"
            )
    return lines


def _reason_to_keep(plan: Plan) -> str:
    if any(action.kind == "I" for program in plan.training.ranks for action in program):
        return (
            "what waits for its weight gradients isn't recomputed, and most memory is that; a schedule such "
            "as 1f1b waits less"
        )
    return (
        "one block with all that it keeps is more than the stage's blocks keep without; its stages are short"
    )


def _reason(plan: Plan) -> str:
    """Return why gradients, or weights, are lent for longer than one computation, or more of them
    than is divided.
    """
    if plan.table.copies > 1:
        return COPIES
    if plan.config.experts.count and any(
        action.kind == "I" for program in plan.training.ranks for action in program
    ):
        return (
            "rows of experts can come in rounds, and a backward for inputs adds those after the first; so "
            "their gradients are whole from it to the backward for weights; a schedule that doesn't divide "
            "backwards, such as 1f1b, lends less"
        )
    return (
        "the buckets that are lent, two neighbours at most, are more than what is divided; more data ranks "
        f"divide more, and a smaller comm.bucket_mb (here {plan.config.comm.bucket_mb:g}) lends less, down "
        "to one block"
    )
