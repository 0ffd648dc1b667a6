"""The table of the configured pipeline schedule: of the catalogue, or the user's own (a file, a module)."""

import math
from typing import Any

from mpitrain.config import Batch, Parallel, Pipeline
from mpitrain.errors import ConfigError, ScheduleError, counted
from mpitrain.inputs import is_there, read_text, shown
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.division.batch_division import division_of
from mpitrain.plan.settings.fp8_sizes import refuse_odd_sides
from mpitrain.plugins import is_plugin, load
from mpitrain.schedules import catalog
from mpitrain.schedules.catalog import placement
from mpitrain.schedules.family import ScheduleFamily
from mpitrain.schedules.formats.user_table import read_any
from mpitrain.schedules.limits import MOST_TABLE_BYTES
from mpitrain.schedules.options import Options, StageTimes, Times
from mpitrain.schedules.table import Table


def num_microbatches(config: ResolvedConfig) -> int:
    """Return how many microbatches each data-parallel rank runs in a step; some can be empty."""
    return division_of(config).longest


def fewest_microbatches(config: ResolvedConfig) -> int:
    """Return how many microbatches show what a step of all of them holds.

    After the warm-up a schedule repeats itself. All are needed where it isn't known that it does,
    and for sums in a tree, which is deeper with more.
    """
    number = num_microbatches(config)
    if not _repeats_itself(config):
        return number
    turn = turn_of(config)
    least = 2 * turn + 2 * config.pipeline.tail
    return min(number, least + (number - least) % turn)


def _repeats_itself(config: ResolvedConfig) -> bool:
    """Return whether a schedule is known to, and nothing else of a step grows with its microbatches."""
    name = config.pipeline.schedule
    return config.numerics.reproducible != "layout" and not _is_file(name) and bool(schedule_of(name).held)


def holds_bounded(config: ResolvedConfig) -> bool:
    """Return whether it is known that ranks hold no more of a step with more microbatches."""
    return _repeats_itself(config) and schedule_of(config.pipeline.schedule).held == "bounded"


def turn_of(config: ResolvedConfig) -> int:
    """Return after how many microbatches a schedule repeats itself: two rounds of pipeline and group."""
    return 2 * math.lcm(config.parallel.pp, config.pipeline.group or 1)


def schedule_of(name: str) -> ScheduleFamily:
    """Return how a named schedule is made: one of the catalogue, or as `module:name` the user's own.

    Raises ScheduleError for a name that there isn't, ConfigError for a module that can't be loaded.
    """
    if is_plugin(name):
        return load("pipeline.schedule", name, ScheduleFamily, "a ScheduleFamily (schedules/family.py)")
    return catalog.schedule_named(name)


def segments_of(pipeline: Pipeline, own: Table | None) -> int:
    """Return into how many segments a schedule cuts a sequence. own: the user's own table."""
    if own is not None:
        return own.segments
    return catalog.segments_of(schedule_of(pipeline.schedule), pipeline.segments)


def own_table(pipeline: Pipeline) -> Table | None:
    """Read the user's own table, if pipeline.schedule is a file.

    Raises ConfigError if it can't be read, or for another key that says something else, or nothing,
    of a table; ScheduleError for a flaw.
    """
    if not _is_file(pipeline.schedule):
        return None
    table = _read(pipeline.schedule)
    _refuse_uneven(table)
    _refuse_keys(pipeline, table)
    return table


def _refuse_uneven(table: Table) -> None:
    """Raise ScheduleError unless all ranks have as many stages, and a second copy runs backwards."""
    counts = list(map(len, table.chunks))
    if (uneven := next((rank for rank, count in enumerate(counts) if count != counts[0]), None)) is not None:
        raise ScheduleError(
            f"{table.name}: found {counted(counts[0], 'stages')} on rank 0 and {counts[uneven]} on "
            f"rank {uneven}; needed "
            "as many on every rank"
        )
    if table.depth % len(table.ranks):
        stages = f"found {counted(table.depth, 'stages')} of one copy on {counted(len(table.ranks), 'ranks')}"
        raise ScheduleError(f"{table.name}: {stages}; needed as many on every rank")
    mirrored = tuple(len(table.ranks) - 1 - rank for rank in table.rank_of[: table.depth])
    if table.copies > 2 or (table.copies == 2 and table.rank_of[table.depth :] != mirrored):
        raise ScheduleError(
            f"{table.name}: found {counted(table.copies, 'copies')}; needed one, or two of which "
            "the second runs backwards"
        )


def _refuse_keys(pipeline: Pipeline, table: Table) -> None:
    for key in ("group", "times", "stage_times", "memory_limit", "weight_memory", "recompute", "offload"):
        if (value := getattr(pipeline, key)) is not None:
            raise ConfigError(
                f"pipeline.{key} = {value}: has no effect on a table of your own ({table.name}); leave it out"
            )
    for key, stated in (("chunks", chunks_in(table)), ("segments", table.segments)):
        if getattr(pipeline, key) not in (None, stated):
            raise ScheduleError(
                f"{table.name}: found pipeline.{key} = {getattr(pipeline, key)}, the table has {stated}; "
                "leave it out"
            )


def chunks_in(table: Table) -> int:
    """Return the stages a rank of one copy of the model, of a table that has as many on every rank."""
    return table.depth // len(table.ranks)


def microbatches_in(table: Table) -> int:
    """Return the microbatches of a step: of all copies, and each with all its segments."""
    return table.num_microbatches // table.segments * table.copies


def table_of(config: ResolvedConfig) -> Table:
    """Return the schedule's table.

    Raises ScheduleError if it isn't defined for this layout, ConfigError if its file is unreadable.
    """
    pipeline = config.pipeline
    name = pipeline.schedule
    table = own_table(pipeline)
    if table is not None:
        require_size_of(table, config.parallel, config.batch)
    else:
        family = schedule_of(name)
        options = _options(pipeline, family)
        table = catalog.build(name, config.parallel.pp, num_microbatches(config), options, family)
        if is_plugin(name):
            _require_as_declared(table, config)
    _refuse_cuts(config, table)
    return table


def _require_as_declared(table: Table, config: ResolvedConfig) -> None:
    """Raise ScheduleError unless a schedule of the user's own has the stages a rank that it declares,
    ConfigError for a capacity of experts if it cuts sequences.
    """
    _refuse_uneven(table)
    if table.segments > 1 and config.experts.capacity:
        raise ConfigError(
            f"experts.capacity = {config.experts.capacity} with {table.name}, which cuts sequences into "
            "segments: an expert has room for its part of a microbatch; leave experts.capacity out"
        )
    pipeline = config.pipeline
    if chunks_in(table) != pipeline.chunks:
        raise ScheduleError(
            f"{table.name}: found {counted(chunks_in(table), 'stages')} a rank, its ScheduleFamily "
            f"declares {pipeline.chunks}; change `placed` there, or `copies`"
        )


def require_size_of(table: Table, parallel: Parallel, batch: Batch) -> None:
    """Raise ScheduleError unless a layout has the ranks and microbatches of the user's own table."""
    ranks = len(table.ranks)
    total = microbatches_in(table)
    microbatches = batch.global_ // (parallel.dp * batch.micro)
    if (ranks, total) != (parallel.pp, microbatches):
        raise ScheduleError(
            f"{table.name}: a table of {counted(ranks, 'ranks')} with "
            f"{counted(chunks_in(table), 'stages')} each and "
            f"{counted(total, 'microbatches')}; this layout has "
            f"{counted(parallel.pp, 'pipeline ranks')} (parallel.pp) and "
            f"{counted(microbatches, 'microbatches')} (batch.global / batch.micro / parallel.dp); "
            f"set parallel.pp={ranks} and "
            f"batch.global={total * batch.micro * parallel.dp}"
        )


def placement_in(config: ResolvedConfig) -> tuple[tuple[int, ...], int] | None:
    """Return the pipeline rank of every stage of the model (of its first copy), and the number of copies.

    None if a table of the user's own says it.
    """
    name = config.pipeline.schedule
    if _is_file(name) or is_plugin(name):
        return None
    return placement(name, config.parallel.pp, config.pipeline.chunks), catalog.FAMILIES[name].copies


def _refuse_cuts(config: ResolvedConfig, table: Table) -> None:
    if table.segments > 1 and config.parallel.cp > 1:
        raise ConfigError(
            f"{table.name} cuts sequences into segments, parallel.cp = {config.parallel.cp} "
            "spreads them; use one of the two"
        )
    if config.data.sequence % table.segments:
        raise ConfigError(
            f"data.sequence = {config.data.sequence} tokens don't divide into "
            f"{counted(table.segments, 'segments')} "
            f"({table.name}); change one of them (pipeline.segments)"
        )
    refuse_odd_sides(config, table.segments)


def _is_file(name: str) -> bool:
    return name not in catalog.NAMES and is_there(name)


def _read(name: str) -> Table:
    try:
        return read_any(read_text(name, MOST_TABLE_BYTES), shown(name))
    except OSError as error:
        raise ConfigError(f'pipeline.schedule = "{shown(name)}" can\'t be read: {error.strerror}') from None


def given_options(pipeline: Pipeline) -> dict[str, Any]:
    """Return the options of a schedule that are keys of the table `pipeline` as they are."""
    keys = ("group", "segments", "memory_limit", "weight_memory", "recompute", "offload")
    return {key: getattr(pipeline, key) for key in keys}


def _options(pipeline: Pipeline, family: ScheduleFamily) -> Options:
    return Options(
        chunks=pipeline.chunks if family.placed == "looped" else None,
        times=Times(*pipeline.times) if pipeline.times else None,
        stage_times=tuple(StageTimes(*one) for one in pipeline.stage_times) if pipeline.stage_times else None,
        **given_options(pipeline),
    ).strict()
