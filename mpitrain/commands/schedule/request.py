"""What a user asks of `mpitrain schedule`: the table of a schedule by its name, or of a file."""

from typing import NamedTuple

from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.inputs import is_there, os_errors_as, read_text, shown
from mpitrain.plan.settings.pipeline_table import schedule_of
from mpitrain.schedules import catalog
from mpitrain.schedules.auto_choice import AUTO, StageTimesOf, fastest
from mpitrain.schedules.catalog import chunks_of, placement
from mpitrain.schedules.family import ScheduleFamily
from mpitrain.schedules.formats.user_table import read_any
from mpitrain.schedules.limits import MOST_TABLE_BYTES
from mpitrain.schedules.options import DEFAULTS, Options
from mpitrain.schedules.played import PROVED_AT_ONCE, Played, played
from mpitrain.schedules.table import Table

PLANNED_WITH = "times", "memory_limit", "weight_memory", "recompute", "offload"


class Request(NamedTuple):
    """A schedule of the catalogue, or of a file, and its size.

    options: times and memory are for every schedule; only the automatic ones also plan with them.
    stage_times_of: instead of equal shares of the times, as a run measured them. error: the share
    by which they may be wrong.
    """

    name: str
    num_ranks: int | None = None
    num_microbatches: int | None = None
    options: Options = DEFAULTS
    stage_times_of: StageTimesOf | None = None
    error: float = 0


def play(request: Request, most_proved: int = PROVED_AT_ONCE) -> Played:
    """Make the table that was asked for and play it; prove it if it has no more operations than that.

    Raises ScheduleError if the schedule isn't defined for this size or has a flaw, ConfigError if a
    file can't be read.
    """
    table = _table(request)
    stages = request.stage_times_of(table.rank_of[: table.depth]) if request.stage_times_of else None
    return played(table, request.options._replace(stage_times=stages), most_proved)


def _table(request: Request) -> Table:
    if request.name not in catalog.FAMILIES and is_there(request.name):
        return _own_table(request)
    if request.name != AUTO:
        family = schedule_of(request.name)  # refuses a name that there isn't
    if None in (request.num_ranks, request.num_microbatches):
        raise ConfigError(f"{request.name}: needs --stages and --microbatches, which only a table file says")
    if request.name == AUTO:
        assert request.num_ranks is not None and request.num_microbatches is not None
        size = request.num_ranks, request.num_microbatches
        return fastest(*size, request.options, request.stage_times_of, error=request.error).table
    return catalog.build(
        request.name, request.num_ranks, request.num_microbatches, _options(request, family), family
    )


def _options(request: Request, family: ScheduleFamily) -> Options:
    """Return the options that a schedule plans with; times and memory are for every one."""
    number = chunks_of(request.name, request.options.chunks, family)  # refuses another than its own
    left_out = [key for key in (*PLANNED_WITH, "chunks") if key not in family.takes]
    options = request.options._replace(**dict.fromkeys(left_out))
    if "stage_times" in family.takes and request.stage_times_of is not None:
        assert request.num_ranks is not None
        stage_times = request.stage_times_of(placement(request.name, request.num_ranks, number))
        options = options._replace(stage_times=stage_times)
    return options.strict()


def _own_table(request: Request) -> Table:
    """Read the user's file, whose size may be given too and must then agree."""
    with os_errors_as(ConfigError, f"{shown(request.name)}: can't be read"):
        table = read_any(read_text(request.name, MOST_TABLE_BYTES), shown(request.name))
    options = request.options
    if options.group is not None:
        raise ScheduleError(f"{table.name}: --group has no effect on a table of your own; leave it out")
    for option, asked, found in (
        ("--stages", request.num_ranks, len(table.ranks)),
        ("--microbatches", request.num_microbatches, table.num_microbatches // table.segments * table.copies),
        ("--chunks", options.chunks, max(map(len, table.chunks)) // table.copies),
        ("--segments", options.segments, table.segments),
    ):
        if asked not in (None, found):
            raise ScheduleError(f"{table.name}: found {option} {asked}, the table has {found}; leave it out")
    return table
