"""What parallel axes promise to hold, compared with fewer ranks that don't divide along one."""

from collections.abc import Mapping
from typing import Any

import msgspec

from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.memory import MemoryUsage
from mpitrain.plan.predict.schedule_promises import fullest, more_than
from mpitrain.schedules.catalog import SIMPLEST

# by axis, what a rank that isn't divided along it has no use for
UNDIVIDED: dict[str, Mapping[str, Any]] = {
    "tp": dict(tp=1, sequence=False, async_tp=False, regather=False),
    "cp": dict(cp=1),
    "pp": dict(pp=1),
    "experts": dict(ep=1, etp=1),
}
ONE_STAGE = dict(schedule=SIMPLEST, chunks=1, stages=None, segments=None, group=None, pairs="whole", tail=1)


def idle_axes(plan: Plan) -> list[str]:
    """Say which axes hold no less than a rank without them, with as many data ranks, and why."""
    others = {axis: other for axis in _divided(plan) if (other := _without(plan, axis))}
    if not others:
        return []
    mine = fullest(plan)
    return [
        f"{_said_of(plan, axis)} {more_than(mine.on_device - other.on_device)} {_said_without(axis)} here: "
        f"{_reason(plan, axis, mine, other)}"
        for axis, other in others.items()
        if mine.on_device >= other.on_device
    ]


def _divided(plan: Plan) -> list[str]:
    """Return the axes that divide anything, as UNDIVIDED names them."""
    parallel = plan.config.parallel
    degrees = {"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp, "experts": parallel.ep * parallel.etp}
    return [axis for axis, degree in degrees.items() if degree > 1]


def _without(plan: Plan, axis: str) -> MemoryUsage | None:
    """Return what a rank holds that isn't divided along an axis, if there is such a layout."""
    config = plan.config
    pipeline = msgspec.structs.replace(config.pipeline, **(ONE_STAGE if axis == "pp" else {}))
    parallel = msgspec.structs.replace(config.parallel, **UNDIVIDED[axis])
    if (parallel.dp * parallel.tp * parallel.cp) % (parallel.ep * parallel.etp):
        return None  # experts are divided over ranks of this axis
    try:
        return fullest(
            Plan(msgspec.structs.replace(config, parallel=parallel, pipeline=pipeline), plan.model)
        )
    except (ConfigError, ScheduleError):
        return None


def _said_of(plan: Plan, axis: str) -> str:
    parallel = plan.config.parallel
    if axis == "experts":
        return f"parallel.ep = {parallel.ep} and parallel.etp = {parallel.etp}"
    return f"parallel.{axis} = {getattr(parallel, axis)}"


def _said_without(axis: str) -> str:
    return "1 and 1" if axis == "experts" else "1"


def _reason(plan: Plan, axis: str, mine: MemoryUsage, without: MemoryUsage) -> str:
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
            f"{plan.config.pipeline.schedule} has two stages on each rank, one for each direction, so that "
            "weights are divided by half of parallel.pp"
        )
    if axis == "pp" and computed >= max(lent, messages):
        flight = max(plan.shortest.training.report.peak_in_flight)
        return (
            f"up to {flight} microbatches are in flight on a rank, and their activations take more than "
            "dividing the weights saves"
        )
    if messages >= lent:
        return (
            f"communication buffers take {messages / 1e6:,.2f} MB more, which is more than dividing saves; "
            "it saves more with a larger model or longer sequences"
        )
    return (
        f"weights and gradients that are whole for one computation take {lent / 1e6:,.2f} MB more, which is "
        "more than dividing saves"
    )
