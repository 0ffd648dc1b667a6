"""The cheapest change of settings with which a layout fits into memory that it is too large for.

Cheapest first: settings that send no more, then what is quickly computed again, then sums after each
microbatch, blocks that are computed again, and weights that are fetched for each use. Where none of
them is enough, two together: a stage of ZeRO, and another setting. A change names each key that has
to change with it, so it can be given as it is said.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mpitrain.config import Config, flatten
from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.plan.plan import Plan
from mpitrain.plan.settings.idle import can_regather

Keys = Mapping[str, Any]
# which of ZeRO's keys does nothing, or is refused, below a stage
NEEDED_STAGE = {"parallel.dp_shard": 1, "parallel.gather": 3, "parallel.ahead": 3}


def cheapest_change(
    plan: Plan, given: Config, planned: Callable[[Keys], Plan], fits: Callable[[Plan], bool]
) -> str:
    """Return the cheapest change with which a plan fits, as keys and values; "" where none is enough.

    given: the configuration that the plan is of, before it was resolved.
    planned: makes the plan of it with some keys changed, or raises what refuses that.
    """
    for keys in changes(plan, given):
        try:
            found = fits(planned(keys))
        except (ConfigError, ScheduleError):
            continue  # such as a mode of recomputation that a stage of ZeRO doesn't take
        if found:
            return " and ".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
    return ""


def changes(plan: Plan, given: Config) -> Iterator[Keys]:
    """Yield changes of one setting, the cheapest first, and then of a stage of ZeRO with another one."""
    mine = plan.config.parallel.zero
    zeros = {stage: _zero(given, stage) for stage in range(4) if stage != mine}
    modes = {mode: _recompute(plan, mode) for mode in ("none", "selective", "every-k", "full")}
    del modes[plan.config.memory.recompute]
    regather = (
        {} if plan.config.parallel.regather or not can_regather(plan.config) else {"parallel.regather": True}
    )
    # with one microbatch, ZeRO-2 sends no more than ZeRO-1
    free = [stage for stage in zeros if stage < (3 if plan.num_microbatches == 1 else 2)]
    singles = [
        *(zeros[stage] for stage in free),
        *([regather] if regather else []),
        *(keys for mode, keys in modes.items() if mode in ("none", "selective")),
        *(keys for stage, keys in zeros.items() if stage == 2 and stage not in free),
        *(keys for mode, keys in modes.items() if mode in ("every-k", "full")),
        *(keys for stage, keys in zeros.items() if stage == 3),
    ]
    yield from singles
    pairs = [
        pair
        for pair in itertools.combinations(singles, 2)
        if sum("parallel.zero" in keys for keys in pair) == 1
    ]
    for first, second in sorted(pairs, key=lambda pair: singles.index(pair[1])):
        yield {**first, **second}


def _zero(given: Config, stage: int) -> Keys:
    """Return a stage of ZeRO, without what was given for a higher one."""
    values, defaults = flatten(given), flatten(Config())
    above = [key for key, needed in NEEDED_STAGE.items() if stage < needed and values[key] != defaults[key]]
    return {"parallel.zero": stage} | {key: defaults[key] for key in above}


def _recompute(plan: Plan, mode: str) -> Keys:
    """Return a mode of recomputation, without what does nothing with it."""
    keys: dict[str, Any] = {"memory.recompute": mode}
    if plan.config.memory.every and mode != "every-k":
        keys["memory.every"] = 0
    if plan.config.parallel.regather and mode in ("every-k", "full"):
        keys["parallel.regather"] = False
    return keys
