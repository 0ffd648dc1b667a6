"""What schedules promise to hold, compared with others in a layout."""

import msgspec

from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.memory import MemoryUsage, predict
from mpitrain.schedules import catalog


def promises(schedule: str) -> list[tuple[str, bool]]:
    """Return schedules with whether this one is to hold less than they do; else it is to hold no more."""
    family = catalog.FAMILIES.get(schedule)
    if family is None:  # a table of the user's own
        return []
    less, no_more = ([other.name for other in others] for others in (family.less_than, family.no_more_than))
    return [*((name, True) for name in less), *((name, False) for name in no_more)]


def fullest(plan: Plan) -> MemoryUsage:
    """Return what the pipeline rank that holds most on its device has."""
    return max(predict(plan), key=lambda usage: usage.on_device)


def most_bytes(plan: Plan) -> int:
    """Return what the pipeline rank that holds most has on its device."""
    return fullest(plan).on_device


def more_than(more: int) -> str:
    """Return words for holding so many bytes more than something else."""
    return f"holds {more / 1e6:,.2f} MB more than" if more else "holds as much as"


def idle_schedule(plan: Plan) -> list[str]:
    """Say so if a schedule holds more than one that it promises not to, and why."""
    pipeline = plan.config.pipeline
    others = promises(pipeline.schedule)
    if plan.config.parallel.pp == 1 or not others:
        return []
    mine = fullest(plan)
    for name, less in others:
        chunks = catalog.chunks_of(name, None)
        # what another schedule has no use for
        own = dict(segments=None, group=None, pairs="whole")
        other = msgspec.structs.replace(pipeline, schedule=name, chunks=chunks, stages=None, **own)
        try:
            usage = fullest(Plan(msgspec.structs.replace(plan.config, pipeline=other), plan.model))
        except (ConfigError, ScheduleError):
            continue  # such as a setting that the other doesn't take
        more = mine.on_device - usage.on_device
        if more > 0 or (less and more == 0):
            statement = f'pipeline.schedule = "{pipeline.schedule}" {more_than(more)} "{name}" here'
            return [f"{statement}: {_reason(plan, mine, usage)}"]
    return []


def _reason(plan: Plan, mine: MemoryUsage, other: MemoryUsage) -> str:
    """Return why a schedule holds no less than another one, by the rows in which it holds more."""
    if plan.config.pipeline.schedule == catalog.SIMPLEST:
        return "a step has so few microbatches that all are in flight either way"
    state = sum(mine[:5]) - sum(other[:5])  # weights, gradients, moments and what is lent of them
    kept = mine.activations - other.activations
    computed = mine.recomputed + mine.working - other.recomputed - other.working
    if kept >= max(state, computed) and kept > 0:
        if plan.table.segments > 1:
            return (
                "keys and values of a sequence's segments, masks and pending gradients are kept until its "
                "last segment; fewer pipeline.segments keep less of them"
            )
        return (
            "a split backward keeps both factors of each weight gradient until that is computed; "
            f"{catalog.SIMPLEST} frees them at once"
        )
    both_ends = plan.table.rank_of[0] == plan.table.rank_of[plan.table.depth - 1]
    if state >= computed and both_ends:
        return (
            "one rank has both ends of the model, embedding and head, and halving activations saves less "
            "than these take; it saves more with longer sequences or larger microbatches"
        )
    if state >= computed:
        return "its stages, or their whole buckets, are larger"
    return (
        "the temporaries of one computation, such as the loss over the vocabulary, are most of the memory, "
        "and more is kept at that time"
    )
