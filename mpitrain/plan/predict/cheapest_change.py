"""The cheapest change of settings with which a layout fits into memory that it is too large for.

Cheapest first: settings that send no more, then what is quickly computed again, then sums after
each microbatch, blocks that are computed again, and weights that are fetched for each use. Where
none of them is enough, two together: a stage of ZeRO, and another setting. A change names each key
that has to change with it, so it can be given as it is said.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mpitrain.config import Config, flatten, with_values
from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.plan.plan import Plan
from mpitrain.plan.settings.rule_table import can_regather

Keys = Mapping[str, Any]
# which of ZeRO's keys does nothing, or is refused, below a stage
NEEDED_STAGE = {"parallel.dp_shard": 1, "parallel.gather": 3, "parallel.ahead": 3}
# in which order changes are tried
COSTS_OF_ZERO = {0: 0, 1: 0, 2: 3, 3: 5}
COST_OF_REGATHER = 1
COSTS_OF_MODES = {"none": 2, "selective": 2, "every-k": 4, "full": 4}


def cheapest_change(
    plan: Plan, given: Config, planned: Callable[[Config], Plan], fits: Callable[[Plan], bool]
) -> str:
    """Return the cheapest change with which a plan fits, as keys and values; "" where none is enough.

    given: the configuration that the plan is of, before it was resolved.
    planned: makes the plan of another one, or raises what refuses that.
    """
    for keys in changes(plan, given):
        try:
            fitting = fits(planned(with_values(given, keys)))
        except (ConfigError, ScheduleError):
            continue  # such as a mode of recomputation that a stage of ZeRO doesn't take
        if fitting:
            return " and ".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
    return ""


def changes(plan: Plan, given: Config) -> Iterator[Keys]:
    """Yield changes of one setting, the cheapest first, and then of a stage of ZeRO with another one."""
    singles = _singles(plan, given)
    yield from singles
    pairs = itertools.combinations(singles, 2)
    mixed = [pair for pair in pairs if sum("parallel.zero" in keys for keys in pair) == 1]
    for first, second in sorted(mixed, key=lambda pair: singles.index(pair[1])):
        yield {**first, **second}


def _singles(plan: Plan, given: Config) -> list[Keys]:
    """Return changes of one setting, the cheapest first."""
    mine, mode = plan.config.parallel.zero, plan.config.memory.recompute
    # with one microbatch, ZeRO-2 sends no more than ZeRO-1
    of_zero = COSTS_OF_ZERO | ({2: COSTS_OF_ZERO[1]} if plan.num_microbatches == 1 else {})
    changes = [(cost, _zero(given, stage)) for stage, cost in of_zero.items() if stage != mine]
    if can_regather(plan.config) and not plan.config.parallel.regather:
        changes.append((COST_OF_REGATHER, {"parallel.regather": True}))
    changes += [(cost, _recompute(plan, other)) for other, cost in COSTS_OF_MODES.items() if other != mode]
    return [keys for _, keys in sorted(changes, key=lambda change: change[0])]


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
