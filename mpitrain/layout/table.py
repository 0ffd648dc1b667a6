"""The table of the configured pipeline schedule: one of the catalogue by name, or the user's own from a file."""

from mpitrain.config import Config
from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.inputs import is_there, read_text, shown
from mpitrain.layout.attention import head_width
from mpitrain.layout.fp8_sizes import refuse_odd_sides
from mpitrain.schedules import catalog
from mpitrain.schedules.catalog import LOOPED, placement
from mpitrain.schedules.csv_table import read_any
from mpitrain.schedules.limits import MOST_TABLE_BYTES
from mpitrain.schedules.options import Options, Times
from mpitrain.schedules.table import Table


def num_microbatches(config: Config) -> int:
    """Return how many microbatches each data-parallel rank runs in a step."""
    return config.batch.global_ // (config.parallel.dp * config.batch.micro)


def table_of(config: Config) -> Table:
    """Return the schedule's table. Raises ScheduleError if it isn't defined for this layout, ConfigError if its file is unreadable."""
    pipeline, pp, m = config.pipeline, config.parallel.pp, num_microbatches(config)
    if not _is_file(pipeline.schedule):
        return _cut(config, catalog.build(pipeline.schedule, pp, m, _options(config)))
    table = _cut(config, _read(pipeline.schedule))
    counts = list(map(len, table.chunks))
    if (uneven := next((rank for rank, count in enumerate(counts) if count != counts[0]), None)) is not None:
        raise ScheduleError(
            f"{table.name}: found {counts[0]} stages on rank 0 and {counts[uneven]} on rank {uneven}; needed as many on every rank"
        )
    found = f"a table of {len(table.ranks)} ranks with {table.depth // len(table.ranks)} stages each and {_total(table)} microbatches"
    if (len(table.ranks), table.depth, _total(table)) != (pp, pp * pipeline.chunks, m):
        raise ScheduleError(
            f"{table.name}: {found}; this layout has {pp} pipeline ranks (parallel.pp) with {pipeline.chunks} stages each "
            f"(pipeline.chunks) and {m} microbatches (batch.global / batch.micro / parallel.dp)"
        )
    mirrored = tuple(pp - 1 - rank for rank in table.rank_of[: table.depth])
    if table.copies > 2 or (table.copies == 2 and table.rank_of[table.depth :] != mirrored):
        raise ScheduleError(f"{table.name}: found {table.copies} copies; needed one, or two of which the second runs backwards")
    return table


def placement_in(config: Config) -> tuple[tuple[int, ...], int] | None:
    """Return the pipeline rank of every stage of the model (of its first copy), and the number of copies; None if a file says it."""
    name = config.pipeline.schedule
    if _is_file(name):
        return None
    copies = catalog.FAMILIES[name].copies if name in catalog.FAMILIES else 1  # what is unknown, table_of() refuses
    return placement(name, config.parallel.pp, config.pipeline.chunks), copies


def _cut(config: Config, table: Table) -> Table:
    if table.segments > 1 and config.parallel.cp > 1:
        raise ConfigError(f"{table.name} cuts sequences into segments, parallel.cp = {config.parallel.cp} spreads them; use one of the two")
    if config.data.sequence % table.segments:
        raise ConfigError(
            f"data.sequence = {config.data.sequence} tokens don't divide into {table.segments} segments ({table.name}); "
            "change one of them (pipeline.segments)"
        )
    if config.precision.compute == "fp8":
        refuse_odd_sides(config.model, head_width(config), config.data.sequence, config.batch.micro, config.parallel, table.segments)
    return table


def _total(table: Table) -> int:
    return table.num_microbatches // table.segments * table.copies


def _is_file(name: str) -> bool:
    return name not in catalog.NAMES and is_there(name)


def _read(name: str) -> Table:
    try:
        return read_any(read_text(name, MOST_TABLE_BYTES), shown(name))
    except OSError as error:
        raise ConfigError(f'pipeline.schedule = "{shown(name)}" can\'t be read: {error.strerror}') from None


def _options(config: Config) -> Options:
    pipeline = config.pipeline
    return Options(
        chunks=pipeline.chunks if pipeline.schedule in LOOPED else None,
        group=pipeline.group,
        segments=pipeline.segments,
        times=Times(*pipeline.times) if pipeline.times else None,
        memory_limit=pipeline.memory_limit,
        weight_memory=pipeline.weight_memory,
    ).strict()
