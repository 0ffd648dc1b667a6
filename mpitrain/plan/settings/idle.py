"""Keys that would do nothing in a layout: refused, since whoever sets one expects something of it.

A value that asks for something else than the default does is refused, whoever it comes from. A default
that --set gives is only reported: a file with all keys stays one for every layout.
"""

import json
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from mpitrain.config import Config, flatten
from mpitrain.errors import ConfigError
from mpitrain.inputs import shown
from mpitrain.origins import NONE, SET, Origins
from mpitrain.plan.declared.resolved import ResolvedConfig


class Idle(NamedTuple):
    """When a key does nothing.

    because: the setting that makes it idle, as text.
    instead: what makes the key do something.
    """

    key: str
    is_idle: Callable[[ResolvedConfig], bool]
    because: Callable[[ResolvedConfig], str]
    instead: str


def _says(*keys: str) -> Callable[[ResolvedConfig], str]:
    """Return what says how some keys are set."""
    return lambda config: " and ".join(f"{key} = {json.dumps(flatten(config)[key])}" for key in keys)


def _one_stage_only(config: ResolvedConfig) -> bool:
    return config.parallel.pp * (config.pipeline.chunks or 1) > 1


def _holds_all_rows(config: ResolvedConfig) -> bool:
    """Return whether one rank has all experts, and room for all rows of a microbatch at once.

    It never needs a second round.
    """
    return config.parallel.ep * config.parallel.etp == 1 and config.experts.buffer >= 1


RULES = (
    Idle(
        "data.val_fraction",
        lambda c: bool(c.data.val_path),
        _says("data.val_path"),
        "leave data.val_path out",
    ),
    Idle(
        "schedule.decay",
        lambda c: c.schedule.name != "wsd",
        _says("schedule.name"),
        'use schedule.name = "wsd"',
    ),
    Idle(
        "schedule.steps",
        lambda c: c.schedule.name == "constant",
        _says("schedule.name"),
        'use schedule.name = "cosine" or "wsd"',
    ),
    Idle(
        "schedule.final",
        lambda c: c.schedule.name == "constant",
        _says("schedule.name"),
        'use schedule.name = "cosine" or "wsd"',
    ),
    Idle("pipeline.tail", _one_stage_only, _says("parallel.pp", "pipeline.chunks"), "use one stage"),
    Idle(
        "pipeline.weight_memory",
        lambda c: not c.pipeline.memory_limit,
        lambda c: "no pipeline.memory_limit",
        "set the limit",
    ),
    Idle("parallel.context", lambda c: c.parallel.cp == 1, _says("parallel.cp"), "use parallel.cp = 2"),
    Idle("parallel.async_tp", lambda c: c.parallel.tp == 1, _says("parallel.tp"), "use parallel.tp = 2"),
    Idle("parallel.sequence", lambda c: c.parallel.tp == 1, _says("parallel.tp"), "use parallel.tp = 2"),
    Idle("parallel.regather", lambda c: c.parallel.tp == 1, _says("parallel.tp"), "use parallel.tp = 2"),
    Idle(
        "parallel.regather",
        lambda c: not c.parallel.sequence,
        _says("parallel.sequence"),
        "use parallel.sequence = true",
    ),
    Idle(
        "parallel.regather",
        lambda c: c.parallel.async_tp,
        _says("parallel.async_tp"),
        "use parallel.async_tp = false",
    ),
    Idle(
        "parallel.regather",
        lambda c: c.memory.recompute in ("full", "every-k"),
        lambda c: f"{_says('memory.recompute')(c)}, which gathers it again already",
        'use memory.recompute = "selective"',
    ),
    Idle(
        "precision.reduce",
        lambda c: c.parallel.dp * c.parallel.cp == 1,
        _says("parallel.dp", "parallel.cp"),
        "use parallel.dp = 2",
    ),
    Idle(
        "experts.buffer",
        _holds_all_rows,
        _says("parallel.ep", "parallel.etp"),
        "use parallel.ep = 2, or a buffer below 1",
    ),
    Idle(
        "spikes.window",
        lambda c: c.spikes.do == "nothing",
        _says("spikes.do"),
        'use spikes.do = "count", "skip" or "rollback"',
    ),
    Idle(
        "spikes.threshold",
        lambda c: c.spikes.do == "nothing",
        _says("spikes.do"),
        'use spikes.do = "count", "skip" or "rollback"',
    ),
    Idle(
        "spikes.most", lambda c: c.spikes.do != "rollback", _says("spikes.do"), 'use spikes.do = "rollback"'
    ),
    Idle("comm.synchronous", lambda c: c.parallel.pp == 1, _says("parallel.pp"), "use parallel.pp = 2"),
)


def refuse_idle_keys(config: ResolvedConfig) -> None:
    """Raise ConfigError for the first key of a resolved configuration that is set and would do nothing."""
    defaults = Config()
    for rule in RULES:
        table, _, name = rule.key.partition(".")
        value = getattr(getattr(config, table), name)
        if value != getattr(getattr(defaults, table), name) and rule.is_idle(config):
            idle = f"{rule.key} = {shown(json.dumps(value))} does nothing with {rule.because(config)}"
            raise ConfigError(f"{idle}; leave it out, or {rule.instead}")


def without_idle(config: ResolvedConfig, before: ResolvedConfig) -> ResolvedConfig:
    """Return a configuration of another layout, without what does nothing there and did before.

    These keys have their default, and aren't refused.
    """
    defaults = Config()
    idle = [rule.key for rule in RULES if rule.is_idle(config) and not rule.is_idle(before)]
    for table, key in (name.split(".") for name in idle):
        default = getattr(getattr(defaults, table), key)
        changed = msgspec.structs.replace(getattr(config, table), **{key: default})
        config = msgspec.structs.replace(config, **{table: changed})
    return config


def can_regather(config: ResolvedConfig) -> bool:
    """Return whether parallel.regather = true would do something in a layout, and isn't refused."""
    idle = any(rule.is_idle(config) for rule in RULES if rule.key == "parallel.regather")
    return not (idle or config.attention.kv_rank)


def idle_settings(config: ResolvedConfig, origins: Origins = NONE) -> list[str]:
    """Say which keys of a resolved configuration are set and do nothing, of those that aren't refused.

    origins: of its keys. A default that --set gives is named, too.

    A run before wrote parallel.gather = "use" down whatever its ZeRO was, and a bucket's size is
    one of several that stages of ZeRO are compared with.
    """
    parallel = config.parallel
    values = flatten(config)
    lines = [
        f"{rule.key} = {json.dumps(values[rule.key])} does nothing with {rule.because(config)}"
        for rule in RULES
        if origins.of(rule.key).kind == SET and rule.is_idle(config)
    ]
    if parallel.gather == "use" and parallel.zero < 3:
        lines.append(
            f'parallel.gather = "use" does nothing with parallel.zero = {parallel.zero}: weights are whole'
        )
    if config.comm.bucket_mb != Config().comm.bucket_mb and parallel.zero == 3:
        idle = f"comm.bucket_mb = {config.comm.bucket_mb:g} does nothing with parallel.zero = 3"
        lines.append(f"{idle}: each block is reduced by itself, as it is fetched")
    return lines


def refuse_long_decay(config: ResolvedConfig) -> None:
    """Raise ConfigError for a final decay longer than what follows the warm-up.

    The rate would fall at once by what doesn't fit.
    """
    schedule = config.schedule
    key = "schedule.steps" if config.schedule.steps else "run.steps"
    steps = schedule.steps or config.run.steps
    after = max(steps - schedule.warmup, 0)
    if schedule.name == "wsd" and schedule.decay > after:
        raise ConfigError(
            f"schedule.decay = {schedule.decay} with {key} = {steps} and schedule.warmup = "
            f"{schedule.warmup}: {after} steps follow the warm-up; use at most {after}"
        )
