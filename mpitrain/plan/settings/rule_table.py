"""The table of rules: which combinations of keys are refused, because of what, and what to take instead.

A rule needs a resolved configuration alone. Messages, the reference of keys, the planner's search and
hints read them here. `idle` rules are of keys that would do nothing in a layout. A value that asks for
something else than the default does is refused, whoever it comes from. A default that --set gives is
only reported: a file with all keys stays one for every layout.

What depends on ranks, nodes, files or a table of the user's own is refused where that is read.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from mpitrain.config import NEUTRAL, Config, flatten, with_values
from mpitrain.errors import ConfigError, counted
from mpitrain.inputs import shown
from mpitrain.origins import NONE, SET, Origins
from mpitrain.plan.declared.family import family_of, with_experts
from mpitrain.plan.declared.optimizers import optimizer_kind
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.division.batch_division import division_of
from mpitrain.plan.division.domains import divided, reduces_each
from mpitrain.plan.settings.experts import (
    fitting_degrees,
    open_to_token,
    positions,
    ranks_of_pipeline_rank,
    rows_at_once,
)
from mpitrain.schedules.catalog import FAMILIES

KEY = re.compile(r"\{(=?)(\w+(?:\.\w+)?)\}")
DEFAULTS = Config()


class Rule(NamedTuple):
    """A combination of keys that is refused.

    key: the key that is refused, as --set takes it.
    because, instead: templates. `{parallel.tp}` is a key with its value, `{=parallel.tp}` the value alone,
    `{ranks}` one of `computed`.
    is_idle: the key does nothing then, and is refused only if it isn't the default.
    """

    key: str
    when: Callable[[ResolvedConfig], bool]
    because: str
    instead: str
    computed: Callable[[ResolvedConfig], Mapping[str, Any]] = lambda config: {}
    is_idle: bool = False

    def refuses(self, config: ResolvedConfig) -> bool:
        return self.when(config) and not (self.is_idle and _value(config, self.key) == default_of(self.key))

    def reason(self, config: ResolvedConfig) -> str:
        return _filled(self.because, config, self.computed(config))

    def message(self, config: ResolvedConfig) -> str:
        return f"{self.reason(config)}; {_filled(self.instead, config, self.computed(config))}"

    def template(self) -> str:
        """Return the message with `...` for what a configuration fills in."""
        text = f"{self.because}; {self.instead}"
        return KEY.sub(lambda match: f"{match[2]} = ..." if "." in match[2] and not match[1] else "...", text)


def _filled(template: str, config: ResolvedConfig, computed: Mapping[str, Any]) -> str:
    def text(match: re.Match[str]) -> str:
        alone, name = match[1], match[2]
        if "." not in name:
            return str(computed[name])
        value = shown(json.dumps(flatten(config)[name]))
        return value if alone else f"{name} = {value}"

    return KEY.sub(text, template)


def _value(config: ResolvedConfig, key: str) -> Any:
    table, _, name = key.partition(".")
    return getattr(getattr(config, table), name)


@cache
def default_of(key: str) -> Any:
    """Return the value of a key that nobody set."""
    table, _, name = key.partition(".")
    return NEUTRAL.get(table, {}).get(name, getattr(getattr(DEFAULTS, table), name))


def idle(key: str, when: Callable[[ResolvedConfig], bool], because: str, instead: str = "") -> Rule:
    """Return the rule of a key that does nothing with what `because` says, unless one does `instead`."""
    reason = f"{{{key}}} does nothing with {because}"
    return Rule(key, when, reason, "leave it out" + f", or {instead}" * bool(instead), is_idle=True)


def idle_with(key: str, other: str, value: Any, instead: str) -> Rule:
    """Return the rule of a key that does nothing where another key has a value."""
    return idle(key, lambda c: bool(_value(c, other) == value), f"{{{other}}}", instead)


def idle_unless(key: str, other: str, value: Any) -> Rule:
    """Return the rule of a key that does nothing where another key has any other value."""
    instead = f"use {other} = {json.dumps(value)}"
    return idle(key, lambda c: bool(_value(c, other) != value), f"{{{other}}}", instead)


def _divides_over(key: str, degree: str, other: str) -> Rule:
    """Return the rule of a number that ranks of a degree divide among them."""
    return Rule(
        key,
        lambda c: _value(c, key) % _value(c, degree) > 0,
        f"{{{key}}} doesn't divide over {{{degree}}}",
        f"use {other} that divides it",
    )


def _has_experts(config: ResolvedConfig) -> bool:
    return family_of(config.model).experts is not None


def _no_experts(key: str, instead: str) -> Rule:
    return Rule(
        key,
        lambda c: not _has_experts(c) and _value(c, key) != default_of(key),
        f"{{{key}}}: {{model.family}} has no experts",
        instead,
        lambda c: dict(families=", ".join(with_experts())),
    )


def _needs_some(name: str) -> Rule:
    """Return the rule of a number of the table `experts` that can't be 0 in a family with experts."""
    return Rule(
        f"experts.{name}",
        lambda c: _has_experts(c) and not getattr(c.experts, name),
        f"experts.{name} = 0 in a family with experts; needed 1 or more",
        "leave it out for the family's own number, or choose another model.family",
    )


def _ranks(config: ResolvedConfig) -> dict[str, Any]:
    """Return the ranks that experts are spread over, and the degrees that fit."""
    ranks = ranks_of_pipeline_rank(config.parallel)
    return dict(ranks=ranks, fitting=fitting_degrees(config.experts.count, ranks, config.parallel.etp))


def _spreads_experts(config: ResolvedConfig) -> bool:
    return config.parallel.ep * config.parallel.etp > 1


def _cuts_sequences(config: ResolvedConfig) -> bool:
    family = FAMILIES.get(config.pipeline.schedule)  # none of a file or a plug-in
    return family is not None and "segments" in family.takes


def _reduces_whole_microbatches(config: ResolvedConfig) -> bool:
    """Return whether parallel.reduce = "microbatch" is known to reduce one microbatch at a time."""
    family = FAMILIES.get(config.pipeline.schedule)
    return family is not None and family.copies == 1 and not _cuts_sequences(config)


def _steps_after_warmup(config: ResolvedConfig) -> int:
    return max((config.schedule.steps or config.run.steps) - config.schedule.warmup, 0)


def _divisors(config: ResolvedConfig) -> dict[str, Any]:
    dp = config.parallel.dp
    return dict(divisors=", ".join(str(n) for n in range(1, dp + 1) if dp % n == 0))


def _drops_weights(config: ResolvedConfig) -> bool:
    """Return whether ZeRO-3 is asked for. An unresolved configuration may leave it open."""
    return (config.parallel.zero or 0) == 3


def _needs_one_sum(config: ResolvedConfig) -> list[str]:
    """Return the same settings, none if a data rank has one sum."""
    return [] if division_of(config).is_even else _take_one_sum(config)


def _take_one_sum(config: ResolvedConfig) -> list[str]:
    """Return the settings that take one sum of gradients from each data rank."""
    parallel = config.parallel
    family = FAMILIES.get(config.pipeline.schedule)
    against = {
        f"parallel.tp = {parallel.tp}": parallel.tp > 1,
        f"parallel.cp = {parallel.cp}": parallel.cp > 1,
        "parallel.zero = 0": parallel.zero == 0,
        f"parallel.dp_shard = {parallel.dp_shard}": parallel.dp_shard not in (0, parallel.dp),
        f'pipeline.schedule = "{config.pipeline.schedule}"': family is not None and family.copies > 1,
        "run.noise_scale = true": config.run.noise_scale,
    }
    return [key for key, is_set in against.items() if is_set]


EXPERTS = (
    _no_experts("run.routing", "leave it out"),
    _no_experts("run.expert_load", "leave it out"),
    _no_experts("parallel.ep", "use {families}"),
    _no_experts("parallel.etp", "use {families}"),
    *map(_needs_some, NEUTRAL["experts"]),
    Rule(
        "experts.active",
        lambda c: c.experts.active > c.experts.count,
        "{experts.active} of {experts.count}",
        "send a token to fewer, or have more",
    ),
    Rule(
        "experts.groups",
        lambda c: _has_experts(c) and c.experts.count % c.experts.groups > 0,
        "{experts.groups} doesn't divide {experts.count}",
        "use a divisor",
    ),
    Rule(
        "experts.groups_active",
        lambda c: c.experts.groups_active > c.experts.groups,
        "{experts.groups_active} of {experts.groups}",
        "use at most as many",
    ),
    Rule(
        "experts.active",
        lambda c: _has_experts(c) and c.experts.active > open_to_token(c.experts),
        "{experts.active}, but {=experts.groups_active} of {=experts.groups} groups have {open} experts",
        "raise experts.groups_active, or send a token to fewer",
        lambda c: dict(open=open_to_token(c.experts)),
    ),
    Rule(
        "experts.bias_rate",
        lambda c: _has_experts(c) and c.experts.balance != "bias" and c.experts.bias_rate is not None,
        "{experts.bias_rate} does nothing with {experts.balance}",
        'use "bias"',
    ),
    Rule(
        "experts.balance_weight",
        lambda c: c.experts.balance == "none" and bool(c.experts.balance_weight),
        "{experts.balance_weight} does nothing with {experts.balance}",
        'use "microbatch", "sequence", "global" or "bias"',
    ),
    Rule(
        "run.expert_load",
        lambda c: bool(c.run.expert_load) and not 1 <= c.run.expert_load <= c.experts.count,
        "{run.expert_load}: tokens of the most loaded rank over the mean are 1 to {experts.count}",
        "leave it out for an estimate",
    ),
    Rule(
        "run.expert_load",
        lambda c: bool(c.run.expert_load and c.experts.replay),
        "{run.expert_load} with experts.replay, which says how tokens load experts",
        "leave one out",
    ),
    Rule(
        "parallel.ep",
        lambda c: ranks_of_pipeline_rank(c.parallel) % (c.parallel.ep * c.parallel.etp) > 0,
        "parallel.ep x parallel.etp = {=parallel.ep} x {=parallel.etp} doesn't divide "
        "parallel.tp x parallel.cp x parallel.dp = {=parallel.tp} x {=parallel.cp} x {=parallel.dp} = "
        "{ranks} ranks, over which experts are folded",
        "use {fitting}",
        _ranks,
    ),
    Rule(
        "experts.count",
        lambda c: c.experts.count % c.parallel.ep > 0,
        "{experts.count} doesn't divide over {parallel.ep}",
        "use {fitting}",
        _ranks,
    ),
    _divides_over("experts.width", "parallel.etp", "an etp"),
    Rule(
        "parallel.sequence",
        lambda c: _has_experts(c) and c.parallel.tp > 1 and not c.parallel.sequence,
        "{parallel.sequence} with experts and parallel.tp > 1: each rank sends its own tokens to the experts",
        "use parallel.sequence = true",
    ),
    Rule(
        "numerics.reproducible",
        lambda c: c.numerics.reproducible == "layout" and _spreads_experts(c),
        "{numerics.reproducible} with parallel.ep x parallel.etp > 1: tokens of several ranks meet "
        "in one product, not in a tree of sums",
        "use ep = 1",
    ),
    Rule(
        "experts.capacity",
        lambda c: bool(c.experts.capacity) and _cuts_sequences(c),
        "{experts.capacity} with {pipeline.schedule}: an expert has room for its part of a "
        "microbatch, and segments come one after another",
        "leave experts.capacity out, or use another schedule",
    ),
    Rule(
        "optimizer.name",
        lambda c: _has_experts(c) and optimizer_kind(c.optimizer).whole_matrices,
        "{optimizer.name} with experts: their matrices are stored together, and it knows single ones",
        'use "adamw"',
    ),
    Rule(
        "memory.offload",
        lambda c: _has_experts(c) and c.memory.offload in ("activations", "all"),
        "{memory.offload} with experts: numbers of rows vary, and buffers in host memory have one length",
        'use "optimizer", or memory.recompute',
    ),
    Rule(
        "precision.compute",
        lambda c: _has_experts(c) and c.precision.compute == "fp8",
        "{precision.compute} with experts: their grouped products have no fp8 yet",
        'use "bf16"',
    ),
    Rule(
        "experts.buffer",
        lambda c: _has_experts(c) and positions(c, c.parallel) > 0 and rows_at_once(c) < 1,
        "{experts.buffer}: a rank can't receive one token at once",
        "use {least} or more",
        lambda c: dict(least=f"{1 / (c.batch.micro * positions(c, c.parallel) * c.experts.active):.2g}"),
    ),
    idle(
        "experts.buffer",  # one rank has all experts, and room for all rows: no second round
        lambda c: not _spreads_experts(c) and c.experts.buffer >= 1,
        "{parallel.ep} and {parallel.etp}",
        "use parallel.ep = 2, or a buffer below 1",
    ),
    idle(
        "experts.wire",
        lambda c: not _spreads_experts(c),
        "{parallel.ep} and {parallel.etp}",
        "use parallel.ep = 2",
    ),
    Rule(
        "experts.wire",
        lambda c: c.experts.wire == "bf16" and c.precision.compute in ("bf16", "fp16"),
        "{experts.wire} sends no less with {precision.compute}",
        'use "fp8", or leave it out',
    ),
)

DIVISION = (
    Rule(
        "parallel.async_tp",
        lambda c: c.parallel.async_tp and not c.parallel.sequence,
        "{parallel.async_tp} with {parallel.sequence}: it computes while parts of the sequence travel",
        "use parallel.sequence = true, or leave parallel.async_tp out",
    ),
    _divides_over("model.heads", "parallel.tp", "a tp"),
    _divides_over("model.ffn", "parallel.tp", "a tp"),
    Rule(
        "model.kv_heads",
        lambda c: c.model.kv_heads % c.parallel.tp > 0 and c.parallel.tp % c.model.kv_heads > 0,
        "{model.kv_heads} and {parallel.tp}: one must divide the other, to divide or repeat heads",
        "change one of them",
    ),
    Rule(
        "model.vocab",
        lambda c: c.model.vocab < c.parallel.tp,
        "{model.vocab} is less than {parallel.tp}: every rank needs a row of the embedding",
        "use a smaller tp",
    ),
    Rule(
        "data.sequence",
        lambda c: (
            c.parallel.sequence
            and c.data.sequence % c.parallel.cp == 0
            and c.data.sequence // c.parallel.cp % c.parallel.tp > 0
        ),
        "{data.sequence} / {parallel.cp} doesn't divide over {parallel.tp}",
        "change one of them, or use parallel.sequence = false",
    ),
    Rule(
        "parallel.dp_shard",
        lambda c: c.parallel.dp_shard > 0 and c.parallel.zero == 0,
        "{parallel.dp_shard} with {parallel.zero} divides nothing",
        "set parallel.zero to 1, 2 or 3",
    ),
    Rule(
        "parallel.dp_shard",
        lambda c: c.parallel.dp_shard > 0 and c.parallel.dp % c.parallel.dp_shard > 0,
        "{parallel.dp_shard} doesn't divide {parallel.dp}",
        "use {divisors}",
        _divisors,
    ),
    idle(
        "parallel.gather",
        lambda c: not _drops_weights(c) and c.parallel.gather != "use",
        "{parallel.zero}",
        "set parallel.zero = 3",
    ),
    idle("parallel.ahead", lambda c: not _drops_weights(c), "{parallel.zero}", "set parallel.zero = 3"),
    idle_with("parallel.context", "parallel.cp", 1, "use parallel.cp = 2"),
    idle_with("parallel.async_tp", "parallel.tp", 1, "use parallel.tp = 2"),
    idle_with("parallel.sequence", "parallel.tp", 1, "use parallel.tp = 2"),
    idle_with("parallel.regather", "parallel.tp", 1, "use parallel.tp = 2"),
    idle_unless("parallel.regather", "parallel.sequence", True),
    idle_unless("parallel.regather", "parallel.async_tp", False),
    idle(
        "parallel.regather",
        lambda c: c.memory.recompute in ("full", "every-k"),
        "{memory.recompute}, which gathers it again already",
        'use memory.recompute = "selective"',
    ),
    idle(
        "parallel.regather",
        lambda c: bool(c.attention.kv_rank),
        "{attention.kv_rank}: latent attention gathers narrow vectors, which are kept",
    ),
    idle(
        "pipeline.tail",
        lambda c: c.parallel.pp * (c.pipeline.chunks or 1) > 1,
        "{parallel.pp} and {pipeline.chunks}",
        "use one stage",
    ),
    idle(
        "pipeline.weight_memory",
        lambda c: not c.pipeline.memory_limit,
        "no pipeline.memory_limit",
        "set the limit",
    ),
    idle(
        "recovery.partner",
        lambda c: c.recovery.partner != 0 and not c.recovery.every,
        "{recovery.every}",
        "use recovery.every = 1",
    ),
    idle(
        "recovery.replace_slow",
        lambda c: c.recovery.replace_slow is not None and not c.comm.slow_after,
        "{comm.slow_after}, which measures no rank",
        "use comm.slow_after = 50",
    ),
    Rule(
        "recovery.shrink",
        lambda c: c.recovery.shrink and c.numerics.reproducible != "layout",
        "{recovery.shrink} with {numerics.reproducible}: fewer data ranks would have other bits",
        'use numerics.reproducible = "layout"',
    ),
    Rule(
        "recovery.shrink",
        lambda c: c.recovery.shrink and c.parallel.dp > 1 and bool(_take_one_sum(c)),
        "{recovery.shrink}: fewer data ranks send several sums of gradients, and {against} takes one",
        "change {against}",
        lambda c: dict(against=", ".join(_take_one_sum(c))),
    ),
    idle("run.eval_shots", lambda c: not c.run.eval_tasks, "{run.eval_tasks}", "name files of tasks there"),
    idle(
        "run.noise_scale",
        lambda c: c.parallel.cp > 1,
        "{parallel.cp}: ranks have parts of the same sequences",
        "use parallel.cp = 1",
    ),
    idle(
        "run.noise_scale",
        lambda c: c.parallel.dp == 1 and (not reduces_each(c) or c.batch.global_ <= c.batch.micro),
        "{parallel.dp}, {parallel.reduce} and {batch.global}: nothing is summed over shards of a batch",
        'use parallel.dp = 2, or parallel.reduce = "microbatch" and several microbatches',
    ),
    idle(
        "run.noise_scale",
        lambda c: reduces_each(c) and not _reduces_whole_microbatches(c),
        "{pipeline.schedule} and {parallel.reduce}: shards of a batch aren't microbatches",
        'use parallel.reduce = "step"',
    ),
    idle("run.keep_best_by", lambda c: not c.run.keep_best, "{run.keep_best}", "set run.keep_best"),
    Rule(
        "comm.transport",
        lambda c: (
            (c.recovery.spares > 0 or c.recovery.shrink) and c.comm.transport in ("collectives", "shared")
        ),
        "{comm.transport} with {recovery.spares} and {recovery.shrink}: memory that ranks share, "
        "and collectives of MPI, don't outlive the death of a rank",
        'use comm.transport = "messages"',
    ),
    idle("run.eval_sources", lambda c: not c.data.sources, "one source", "list them as [[data.sources]]"),
    idle_with("comm.synchronous", "parallel.pp", 1, "use parallel.pp = 2"),
)

TRAINING = (
    Rule(
        "model.mtp",
        lambda c: c.model.mtp >= c.data.sequence,
        "{model.mtp} with {data.sequence}: no position has so many tokens after the next one",
        "use a model.mtp below {=data.sequence}",
    ),
    idle("model.mtp_weight", lambda c: not c.model.mtp, "{model.mtp}", "set model.mtp"),
    idle("data.val_fraction", lambda c: bool(c.data.val_path), "{data.val_path}", "leave data.val_path out"),
    idle_unless("schedule.decay", "schedule.name", "wsd"),
    idle_with("schedule.steps", "schedule.name", "constant", 'use schedule.name = "cosine" or "wsd"'),
    idle_with("schedule.final", "schedule.name", "constant", 'use schedule.name = "cosine" or "wsd"'),
    Rule(
        "schedule.decay",
        lambda c: c.schedule.name == "wsd" and c.schedule.decay > _steps_after_warmup(c),
        "{schedule.decay} with {schedule.warmup}: {after} of {steps} follow the warm-up",
        "use at most {after}",
        lambda c: dict(
            after=_steps_after_warmup(c),
            steps=f"schedule.steps = {c.schedule.steps}"
            if c.schedule.steps
            else f"run.steps = {c.run.steps}",
        ),
    ),
    idle_with("spikes.window", "spikes.do", "nothing", 'use spikes.do = "count", "skip" or "rollback"'),
    idle_with("spikes.threshold", "spikes.do", "nothing", 'use spikes.do = "count", "skip" or "rollback"'),
    idle_unless("spikes.most", "spikes.do", "rollback"),
    *(
        idle(key, lambda c: not c.run.keep, "{run.keep}, which keeps all", "set run.keep, the newest to keep")
        for key in ("run.keep_every", "run.keep_best")
    ),
    Rule(
        "run.keep_every",
        lambda c: c.run.keep_every > 0 and (not c.run.save_every or c.run.keep_every % c.run.save_every > 0),
        "{run.keep_every} is no multiple of {run.save_every}: few of these steps are saved, or none",
        "make it a multiple",
    ),
    Rule(
        "run.keep_best",
        lambda c: (
            c.run.keep_best > 0
            and (c.run.keep_best_by == "val_loss" or "/" in c.run.keep_best_by)
            and (not c.run.eval_every or not c.run.save_every or c.run.save_every % c.run.eval_every > 0)
        ),
        "{run.keep_best} needs a validation at each step that is saved: {run.save_every} is no "
        "multiple of {run.eval_every}",
        "make it a multiple",
    ),
)

NUMBERS = (
    idle_unless("memory.every", "memory.recompute", "every-k"),
    Rule(
        "memory.recompute",
        lambda c: (
            c.memory.recompute == "every-k" and c.memory.every != 1 and c.parallel.zero == 3 and divided(c)
        ),
        "{memory.recompute} with {parallel.zero}: weights are fetched and dropped block by block, "
        "and blocks are recomputed one by one",
        'use memory.recompute = "full"',
    ),
    idle(
        "precision.products",
        lambda c: c.precision.compute in ("fp32", "fp64"),
        "{precision.compute}, whose products have the type of their sums",
        "use bf16, fp16 or fp8",
    ),
    Rule(
        "numerics.reproducible",
        lambda c: bool(_needs_one_sum(c)),
        "{numerics.reproducible} with {parallel.dp} and {microbatches} a step: data ranks "
        "send several sums of gradients each, and {against} takes one",
        "change {against}, or use a parallel.dp that is a power of 2 and divides {num_microbatches}",
        lambda c: dict(
            against=", ".join(_needs_one_sum(c)),
            microbatches=counted(division_of(c).num_microbatches, "microbatches"),
            num_microbatches=division_of(c).num_microbatches,
        ),
    ),
    Rule(
        "numerics.reproducible",
        lambda c: c.numerics.reproducible == "layout" and c.parallel.reduce == "microbatch",
        "{numerics.reproducible} sums over microbatches first, {parallel.reduce} over ranks",
        "leave one out",
    ),
    Rule(
        "numerics.reproducible",
        lambda c: c.numerics.reproducible == "layout" and c.precision.reduce != "same",
        "{numerics.reproducible} with {precision.reduce}: each rank rounds its sum",
        'use "same"',
    ),
    idle(
        "precision.reduce",
        lambda c: c.parallel.dp * c.parallel.cp == 1,
        "{parallel.dp} and {parallel.cp}",
        "use parallel.dp = 2",
    ),
    Rule(
        "numerics.rerun_every",
        lambda c: c.numerics.rerun_every > 0 and not c.numerics.deterministic,
        "{numerics.rerun_every} with {numerics.deterministic}: kernels that give other bits each "
        "time would be reported each time",
        "leave one of them out",
    ),
)

RULES = (*EXPERTS, *DIVISION, *TRAINING, *NUMBERS)
IDLE = tuple(rule for rule in RULES if rule.is_idle)


def refuse(config: ResolvedConfig) -> None:
    """Raise ConfigError for the first rule that refuses a resolved configuration."""
    for rule in RULES:
        if rule.refuses(config):
            raise ConfigError(rule.message(config))


def without_idle(config: ResolvedConfig, before: ResolvedConfig) -> ResolvedConfig:
    """Return a configuration of another layout, with the defaults of keys that do nothing only there."""
    keys = [rule.key for rule in IDLE if rule.when(config) and not rule.when(before)]
    return with_values(config, {key: default_of(key) for key in keys})


def can_regather(config: ResolvedConfig) -> bool:
    """Return whether parallel.regather = true would do something in a layout."""
    return not any(rule.when(config) for rule in IDLE if rule.key == "parallel.regather")


def idle_settings(config: ResolvedConfig, origins: Origins = NONE) -> list[str]:
    """Say which keys are set and do nothing, of those that aren't refused, and defaults that --set gives.

    Files of runs have parallel.gather = "use" with any ZeRO, and stages of ZeRO are compared with
    several sizes of buckets.
    """
    lines = [rule.reason(config) for rule in IDLE if origins.of(rule.key).kind == SET and rule.when(config)]
    zero, size = config.parallel.zero, config.comm.bucket_mb
    if config.parallel.gather == "use" and zero < 3:
        lines.append(f'parallel.gather = "use" does nothing with parallel.zero = {zero}: weights are whole')
    if size != DEFAULTS.comm.bucket_mb and zero == 3:
        bucket = f"comm.bucket_mb = {size:g} does nothing with parallel.zero = 3"
        lines.append(f"{bucket}: each block is reduced by itself, as it is fetched")
    return lines
