"""From a configuration to the list of instructions of every rank, and its proof. No torch is imported for this."""

from typing import NamedTuple

from mpitrain.config import Config
from mpitrain.schedule import table_of
from mpitrain.schedules.actions import Action
from mpitrain.schedules.check import Report, check
from mpitrain.schedules.lower import lower
from mpitrain.schedules.table import Table, forwards
from mpitrain.slicing import reduction_of


class Programs(NamedTuple):
    """The instructions of a step for every pipeline rank, proved, and the table they come from."""

    table: Table
    ranks: list[list[Action]]
    report: Report


def training(config: Config) -> Programs:
    """Return the programs of a training step. Raises ScheduleError with the flaw."""
    table = table_of(config)
    reduces = [reduction_of(config, stage % table.depth) for stage in range(table.num_stages)]
    programs = lower(table, reduces, tail=min(config.pipeline.tail, table.num_microbatches))
    return Programs(table, programs, _proved(table, programs, reduces=reduces))


def evaluation(table: Table) -> Programs:
    """Return the programs that only run a table's forwards, in its order."""
    forward = forwards(table)
    programs = lower(forward, [], train=False)
    return Programs(forward, programs, _proved(forward, programs, train=False))


def _proved(table: Table, programs: list[list[Action]], **facts) -> Report:
    return check(programs, table.num_stages, table.num_microbatches, copies=table.copies, segments=table.segments, **facts)
