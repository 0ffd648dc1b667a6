"""From a configuration to the list of instructions of every rank, and its proof. No torch is imported for this."""

from pathlib import Path

from mpitrain.config import Config
from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.schedules import catalog
from mpitrain.schedules.actions import Action
from mpitrain.schedules.check import Report, check
from mpitrain.schedules.lower import lower
from mpitrain.schedules.table import Table, read_table
from mpitrain.slicing import reduction_of


def num_microbatches(config: Config) -> int:
    """Return how many microbatches each data-parallel rank runs in a step."""
    return config.batch.global_ // (config.parallel.dp * config.batch.micro)


def table_of(config: Config) -> Table:
    """Return the schedule's table: one of the catalogue by name, or the user's own from a file."""
    name, pp, m = config.pipeline.schedule, config.parallel.pp, num_microbatches(config)
    if name in catalog.NAMES or not Path(name).is_file():
        return catalog.build(name, pp, m)
    try:
        table = read_table(Path(name).read_text(encoding="utf-8"), name)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"pipeline.schedule = {name!r} can't be read: {error}") from None
    if table.rank_of != tuple(range(pp)) or table.num_microbatches != m:
        raise ScheduleError(
            f"{name}: a table of {table.num_stages} stages x {table.num_microbatches} microbatches; "
            f"this layout has one stage on each of {pp} ranks and {m} microbatches"
        )
    return table


def training(config: Config) -> tuple[list[list[Action]], Report]:
    """Return the program of a training step for every pipeline rank, proved. Raises ScheduleError with the flaw."""
    table = table_of(config)
    reduces = [reduction_of(config, stage) for stage in range(table.num_stages)]
    programs = lower(table, reduces, tail=min(config.pipeline.tail, table.num_microbatches))
    return programs, check(programs, table.num_stages, table.num_microbatches, reduces=reduces)


def evaluation(config: Config) -> list[list[Action]]:
    """Return the forward-only program of every pipeline rank, proved."""
    pp, m = config.parallel.pp, num_microbatches(config)
    programs = lower(catalog.build("forward", pp, m), [], train=False)
    check(programs, pp, m, train=False)
    return programs
