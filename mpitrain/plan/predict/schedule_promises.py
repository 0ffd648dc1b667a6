"""What schedules promise to hold, compared with others in a layout."""

import msgspec

from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.memory import MemoryUsage, predict

# by schedule, others and whether it is there to hold less than these; else it is to hold no more
PROMISES: dict[str, tuple[tuple[str, bool], ...]] = {
    "1f1b": (("gpipe", True),),
    "zb-h1": (("1f1b", False),),
    "zbv": (("1f1b", False),),
    "seq1f1b": (("1f1b", True),),
    "v-half": (("1f1b", True),),
    "v-min": (("1f1b", True), ("v-half", True)),
}
CHUNKS = {"v-half": 2}  # stages of a rank; of all others one


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
    if plan.config.parallel.pp == 1 or pipeline.schedule not in PROMISES:
        return []
    mine = fullest(plan)
    for name, less in PROMISES[pipeline.schedule]:
        chunks = CHUNKS.get(name, 1)
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
    if plan.config.pipeline.schedule == "1f1b":
        return "a step has so few microbatches that all are in flight either way"
    state = sum(mine[:5]) - sum(other[:5])  # weights, gradients, moments and what is lent of them
    kept = mine.activations - other.activations
    computed = mine.recomputed + mine.working - other.recomputed - other.working
    if kept >= max(state, computed) and kept > 0:
        if plan.config.pipeline.schedule == "seq1f1b":
            return (
                "keys and values of a sequence's segments, masks and pending gradients are kept until its "
                "last segment; fewer pipeline.segments keep less of them"
            )
        return (
            "a split backward keeps both factors of each weight gradient until that is computed; 1f1b frees "
            "them at once"
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
