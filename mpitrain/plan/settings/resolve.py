"""Fill in what a configuration left open: degrees, batch, vocabulary. Refuse what doesn't fit together."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from mpitrain import config_hints
from mpitrain.config import (
    FIRST_FAMILY,
    NEUTRAL,
    AttentionTable,
    Batch,
    Config,
    Data,
    ExpertsTable,
    Model,
    Pipeline,
    RecoveryTable,
    with_values,
)
from mpitrain.data.batch_sizes import BatchSizes
from mpitrain.data.mixture import weights_by_step
from mpitrain.data.source import SOURCES
from mpitrain.errors import ConfigError, counted, nearest
from mpitrain.inputs import shown
from mpitrain.plan.declared.family import OF_SOME, family_of, presets
from mpitrain.plan.declared.optimizers import optimizer_kind
from mpitrain.plan.declared.resolved import (
    ResolvedAttention,
    ResolvedConfig,
    ResolvedExperts,
    ResolvedModel,
    ResolvedParallel,
    ResolvedPipeline,
    filled,
)
from mpitrain.plan.division.batch_division import BatchDivision, round_of
from mpitrain.plan.division.domains import divided, reduces_each
from mpitrain.plan.division.sequence import placement_of_rows
from mpitrain.plan.settings.attention import resolve_attention, with_heads
from mpitrain.plan.settings.dispatch import resolve_dispatch
from mpitrain.plan.settings.experts import resolve_experts
from mpitrain.plan.settings.fp8_sizes import refuse_odd_sides
from mpitrain.plan.settings.job_ranks import JobRanks
from mpitrain.plan.settings.log_pace import log_pace
from mpitrain.plan.settings.partner import ranks_left, resolve_recovery, with_spares
from mpitrain.plan.settings.pipeline_table import (
    chunks_in,
    microbatches_in,
    own_table,
    require_size_of,
    schedule_of,
    segments_of,
)
from mpitrain.plan.settings.profile_request import ProfileRequest
from mpitrain.plan.settings.rule_table import refuse, without_idle
from mpitrain.plan.settings.schedule_choice import with_schedule
from mpitrain.schedules.catalog import chunks_of
from mpitrain.schedules.limits import MOST_FORWARDS
from mpitrain.schedules.table import Table

MOST_SEQUENCES = 2**62  # of an order: places after skipped ones are of 64 bits


def resolve(config: Config, ranks: JobRanks | int, vocab: int, needed: int | None = None) -> ResolvedConfig:
    """Resolve a configuration for a job's ranks and a tokenizer of `vocab` tokens.

    ranks: a number of them is on one node; comm.node_ranks overrides what was found of nodes.
    needed: rows for what texts have of these tokens; None: for all.
    """
    ranks = JobRanks(ranks) if isinstance(ranks, int) else ranks
    if near := config.comm.node_ranks:
        ranks = ranks._replace(num_nodes=-(-ranks.size // near), node_ranks=near)
    config = with_schedule(config, lambda closed: resolve(closed, ranks, vocab, needed))
    SOURCES.find(config.data.source)  # or raise ConfigError
    _refuse_skip(config.data)
    declared = config.model, config.attention, config.experts
    model, attention, experts = _architecture(*declared, vocab, needed or vocab)
    own = own_table(config.pipeline)
    if own is None:
        schedule_of(config.pipeline.schedule)  # refuses a name that there isn't
    parallel, batch = _layout(config, own, model.layers, ranks)
    if own is not None:
        require_size_of(own, parallel, batch)
    pipeline = _pipeline(config.pipeline, own, parallel, model.layers)
    _refuse_mixture(config.data, batch)
    tables = dict(model=model, attention=attention, experts=experts, parallel=parallel, batch=batch)
    resolved = filled(ResolvedConfig, config, pipeline=pipeline, **tables)
    _refuse_layout(resolved)
    _refuse_rows(resolved)
    experts, comm = resolve_dispatch(resolved, ranks)
    resolved = msgspec.structs.replace(resolved, experts=experts, comm=with_spares(comm, config.recovery))
    resolved = msgspec.structs.replace(resolved, parallel=with_reduce(parallel, resolved))
    refuse_odd_sides(resolved)
    log_pace(config.run)
    ProfileRequest.read(config.run.profile)
    _refuse_endless(resolved, segments_of(pipeline, own))
    optimizer = optimizer_kind(config.optimizer).resolve(config.optimizer)
    recovery = resolve_recovery(config.recovery, ranks)
    return msgspec.structs.replace(resolved, optimizer=optimizer, recovery=recovery)


@lru_cache(maxsize=4)  # a search resolves one model in many layouts
def _architecture(
    model: Model, attention: AttentionTable, experts: ExpertsTable, vocab: int, needed: int
) -> tuple[ResolvedModel, ResolvedAttention, ResolvedExperts]:
    preset = _preset(model)
    resolved = _model(model, preset, vocab, needed)
    family = family_of(resolved)
    of_attention = resolve_attention(attention, resolved, family, preset.get("attention", {}))
    return resolved, of_attention, resolve_experts(experts, resolved, family, preset.get("experts", {}))


def on_one_rank(config: ResolvedConfig) -> ResolvedConfig:
    """Return a resolved configuration for the same model on one rank, in one stage."""
    one = msgspec.structs.replace(
        config,
        experts=msgspec.structs.replace(config.experts, dispatch="auto"),
        parallel=ResolvedParallel(dp=1, pp=1, zero=0, reduce="step"),
        pipeline=ResolvedPipeline(chunks=1, tail=1),
        recovery=RecoveryTable(),
    )
    return without_idle(one, config)


def with_reduce(parallel: ResolvedParallel, config: ResolvedConfig) -> ResolvedParallel:
    """Settle when gradients are reduced, and take ZeRO for none where there is one data rank."""
    if not divided(config):
        parallel = msgspec.structs.replace(parallel, zero=0, gather="auto", ahead=1, dp_shard=0)
    each = reduces_each(msgspec.structs.replace(config, parallel=parallel))
    return msgspec.structs.replace(parallel, reduce="microbatch" if each else "step")


def _refuse_layout(config: ResolvedConfig) -> None:
    """Raise ConfigError for what the table of rules refuses, and for sequences that cp can't divide."""
    refuse(config)
    placement_of_rows(config)


def _refuse_endless(config: ResolvedConfig, segments: int) -> None:
    """Raise ConfigError if the programs of a step don't fit in memory.

    Where weights or gradients come and go, each block has its own.
    """
    parallel, layers = config.parallel, config.model.layers
    num_microbatches = config.batch.global_ // (parallel.dp * config.batch.micro)
    stages = parallel.pp * config.pipeline.chunks
    walked = parallel.zero == 3 or parallel.reduce == "microbatch"
    forwards = num_microbatches * segments * (layers if walked else stages)
    if forwards > MOST_FORWARDS:
        cut = f" of {segments} segments" if segments > 1 else ""
        count = counted(layers, "blocks")
        blocks = f", {count} walked one by one (parallel.zero = {parallel.zero})" if walked else ""
        raise ConfigError(
            "batch.global / batch.micro / parallel.dp = "
            f"{counted(num_microbatches, 'microbatches', ',')}{cut} on {counted(stages, 'stages')}{blocks}: "
            f"a program of so many forwards doesn't fit in memory, at most {MOST_FORWARDS:,} do; "
            "raise batch.micro"
        )


def _pipeline(
    pipeline: Pipeline, own: Table | None, parallel: ResolvedParallel, layers: int
) -> ResolvedPipeline:
    """Fill in the stages a rank: a schedule's name has its number, and the user's own table says it."""
    if own is None:
        chunks = chunks_of(pipeline.schedule, pipeline.chunks, schedule_of(pipeline.schedule))
    else:
        chunks = chunks_in(own)
    pp, stages = parallel.pp, pipeline.stages
    if pp * chunks > layers:
        raise ConfigError(
            f"parallel.pp = {pp} x {counted(chunks, 'stages')} a rank ({pipeline.schedule}) = "
            f"{counted(pp * chunks, 'stages')} for "
            f"model.layers = {counted(layers, 'blocks')}; a stage needs at least one block"
        )
    if stages is not None and (len(stages) != pp * chunks or sum(stages) != layers):
        raise ConfigError(
            f"pipeline.stages = {stages}: {sum(stages):g} blocks on {counted(len(stages), 'stages')}; needed "
            f"model.layers = {counted(layers, 'blocks')} on parallel.pp = {pp} x pipeline.chunks = "
            f"{counted(chunks, 'stages')}"
        )
    return filled(ResolvedPipeline, pipeline, chunks=chunks)


def _preset(model: Model) -> dict[str, Any]:
    """Return the keys of a preset: those of the model, and of the tables that are about parts of it."""
    known = presets(model.family)
    if model.preset not in known:
        raise ConfigError(
            f"model.preset = {shown(repr(model.preset))}{_refusal_of_name(model.preset, known)}"
        )
    return known[model.preset]


def _refusal_of_name(name: str, known: Collection[str]) -> str:
    """Return what to use instead of a preset that there isn't: a model's name elsewhere, or its folder."""
    if recognised := config_hints.recognised(name):
        sizes = config_hints.keys_of_model(name)
        trained = f"; such a model is trained from the beginning with {sizes}" if sizes else ""
        return f" is {recognised}, needed a name of sizes{trained}; known: {', '.join(known)}"
    near = nearest(name.rpartition("/")[2].lower(), known)
    return f"; did you mean {near}?" if near else f"; known: {', '.join(known)}"


def require_vocabulary(model: Model, vocab: int, needed: int | None) -> None:
    """Raise ConfigError for a tokenizer that the model has no rows for; its layout may still be open."""
    _model(model, _preset(model), vocab, needed or vocab)


def _model(model: Model, preset: Mapping[str, Any], vocab: int, needed: int) -> ResolvedModel:
    given = {key: value for key, value in msgspec.structs.asdict(model).items() if value not in (None, "")}
    own = {key: value for key, value in preset.items() if key in Model.__struct_fields__}
    model = Model(**{"family": FIRST_FAMILY, "vocab": vocab, **NEUTRAL["model"], **own, **given})
    family = family_of(model)
    family.refuse_unused(model.family, "model", given, NEUTRAL["model"])
    own = {key: value for key, value in own.items() if family.uses("model", key)}
    model = ResolvedModel(
        **{**msgspec.structs.asdict(model), **dict.fromkeys(OF_SOME), **family.model, **own, **given}
    )
    if "padding" not in given:
        rows = -(-model.vocab // model.vocab_multiple) * model.vocab_multiple
        model = msgspec.structs.replace(model, vocab=rows, padding=rows - model.vocab)
    if model.padding >= model.vocab:
        raise ConfigError(
            f"model.padding = {model.padding} of model.vocab = {model.vocab} rows; leave it out, "
            "and set model.vocab_multiple"
        )
    if (rows := model.vocab - model.padding) < needed:
        padding = f" without {model.padding} rows of model.padding" if model.padding else ""
        if model.padding and "padding" in given:  # then the vocabulary that was typed has them
            rows, padding = model.vocab, f", {model.padding} rows of it model.padding"
        without = f", {vocab - needed} of them special ones above all others" if needed < vocab else ""
        raise ConfigError(
            f"model.vocab = {rows}{padding}, but the tokenizer has {vocab} tokens{without}; needed "
            f"at least {needed}: raise model.vocab or leave it out"
        )
    return with_heads(model, family, given.get("kv_heads"))


def _layout(
    config: Config, own: Table | None, layers: int, ranks: JobRanks
) -> tuple[ResolvedParallel, Batch]:
    """Choose the degrees left open: as much data parallelism as the batch divides into, pipeline
    stages for the rest.

    own: the user's own table, which says how many pipeline ranks and microbatches it is for.
    """
    given = config.parallel
    dp = ranks_left(config, ranks.size) if config.recovery.shrink else given.dp
    pp = given.pp
    if own is not None and not pp:
        pp = len(own.ranks)
    inside = given.tp * given.cp  # ranks that share one replica of one stage
    shared = f"parallel.tp = {given.tp} x parallel.cp = {given.cp}"
    if ranks.size % inside:
        raise ConfigError(
            f"{shared}, but {ranks.source} {counted(ranks.size, 'ranks')}; start a multiple of {inside} or "
            "change parallel.*"
        )
    num_ranks = ranks.size // inside
    if pp > layers:
        raise ConfigError(
            f"parallel.pp = {counted(pp, 'stages')} for model.layers = {counted(layers, 'blocks')}; "
            "a stage needs at least one block"
        )
    if not dp:
        dp = _largest_dp(num_ranks, pp, config, layers)
    if not pp and num_ranks % dp == 0:
        pp = num_ranks // dp
    if dp * max(pp, 1) != num_ranks:
        within = f" x {shared}" if inside > 1 else ""
        total = dp * max(pp, 1) * inside
        raise ConfigError(
            f"parallel.dp = {dp} x parallel.pp = {max(pp, 1)}{within} = {counted(total, 'ranks')}, "
            f"but {ranks.source} {ranks.size}; start as many or change parallel.*"
        )
    if pp > layers:
        raise ConfigError(
            f"{counted(num_ranks, 'ranks')} / parallel.dp = {dp} leaves "
            f"{counted(pp, 'stages')} for model.layers = {counted(layers, 'blocks')}; raise parallel.dp"
        )
    # with_reduce() makes it 0 where there is nothing to divide, of experts neither
    zero = 1 if given.zero is None else given.zero
    return filled(ResolvedParallel, given, dp=dp, pp=pp, zero=zero), _batch(config, own, dp)


def _divides(config: Config, dp: int, num_sequences: int) -> bool:
    """Return whether data ranks can have the sequences of a step: equally many without a tree."""
    number, rest = divmod(num_sequences, config.batch.micro)
    return not rest and BatchDivision(number, dp, config.numerics.reproducible == "layout").is_possible


def _batch(config: Config, own: Table | None, dp: int) -> Batch:
    """Fill in the sequences of a step: 24 at least, or the microbatches of the user's own table."""
    batch, sequence = config.batch, config.data.sequence
    per_round = round_of(config, dp) * batch.micro
    rounds = -(-24 // per_round) if own is None else microbatches_in(own)
    first = next((size for step, size in batch.growth if step == 1), 0)
    total = batch.global_ or first or rounds * per_round
    if not _divides(config, dp, total):
        raise ConfigError(
            f"batch.global = {total} doesn't divide into microbatches of batch.micro = {batch.micro} "
            f"on parallel.dp = {counted(dp, 'ranks')}; use a multiple of {per_round}"
        )
    filled_in = Batch(global_=total, micro=batch.micro)
    growth = _changes("batch.growth", batch.growth, total, filled_in, sequence)
    for step, size in growth:
        if not _divides(config, dp, size):
            raise ConfigError(
                f"batch.growth: {size:,} sequences from step {step:,} on don't divide into "
                f"microbatches of all data-parallel ranks; give multiples of {per_round:,}"
            )
    filled_in = msgspec.structs.replace(filled_in, growth=growth)
    lengths = _changes("batch.lengths", batch.lengths, sequence, filled_in, sequence)
    return msgspec.structs.replace(filled_in, lengths=lengths)


def _changes(
    key: str, given: Sequence[tuple[int | str, int]], first: int, batch: Batch, sequence: int
) -> tuple[tuple[int, int], ...]:
    """Return changes by steps, from step 1 on; refuse steps out of order.

    given: may have tokens in place of steps.  first: the value before the first change.
    batch: with the growth that is known; changes of batch.growth itself are added one by one.
    """
    if not given:
        return ()
    changes = () if given[0][0] == 1 else ((1, first),)
    for when, value in given:
        growth = changes if key == "batch.growth" else batch.growth
        sizes = BatchSizes(msgspec.structs.replace(batch, growth=growth))
        changes = (*changes, (sizes.step_of(when, sequence, key), value))
    steps = [step for step, _ in changes]
    if steps != sorted(set(steps)):
        found = ", ".join(map(str, steps))
        raise ConfigError(f"{key}: found steps {found}; give each step once, in their order")
    return changes


def _largest_dp(num_ranks: int, pp: int, config: Config, layers: int) -> int:
    """Return the largest dp that fits ranks, batch and blocks; if none does, whose error explains most."""
    if pp:
        return max(num_ranks // pp, 1)
    if not config.batch.global_:
        return num_ranks
    divisors = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0 and num_ranks // d <= layers]
    return max((d for d in divisors if _divides(config, d, config.batch.global_)), default=num_ranks)


def _refuse_skip(data: Data) -> None:
    """Refuse ranges of data.skip that are empty, overlap, are out of order, or end beyond all orders."""
    empty = any(first >= end for first, end in data.skip)
    overlap = any(end > first for (_, end), (first, _) in itertools.pairwise(data.skip))
    if empty or overlap or any(end > MOST_SEQUENCES for _, end in data.skip):
        found = ", ".join(f"[{first}, {end}]" for first, end in data.skip)
        raise ConfigError(
            f"data.skip: found {found}; give the first sequence and the one after the last, up to 2**62, in "
            "their order"
        )


def _refuse_rows(config: ResolvedConfig) -> None:
    """Refuse rows of batch.lengths that conversations, a sequence or a layout don't divide into."""
    data, lengths = config.data, config.batch.lengths
    if lengths and any(SOURCES.find(kind).converse for kind in data.kinds):
        raise ConfigError("batch.lengths with conversations would cut answers; leave it out")
    for _, length in lengths:
        if data.sequence % length:
            raise ConfigError(
                f"batch.lengths: data.sequence = {data.sequence} doesn't divide into rows of {length} "
                "tokens; give lengths that divide it"
            )
        try:
            _refuse_layout(with_values(config, {"data.sequence": length}))
        except ConfigError as error:
            raise ConfigError(f"batch.lengths, rows of {length} tokens: {error.args[0]}") from None


def _refuse_mixture(data: Data, batch: Batch) -> None:
    if not data.sources:
        return
    for key, value in (("data.path", data.path), ("data.val_path", data.val_path)):
        if value:
            raise ConfigError(f"{key} has no use with data.sources; leave it out")
    for step, weights in weights_by_step(data, BatchSizes(batch)):
        if not any(weights):
            found = f"data.sources: all weights are 0 from step {step} on"
            raise ConfigError(f"{found}; give one of them a weight above 0")
