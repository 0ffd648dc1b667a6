"""What a user asks of `mpitrain schedule`: the table of a schedule by its name, or of a file."""

from typing import NamedTuple

from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.inputs import is_there, read_text, shown
from mpitrain.plan.settings.pipeline_table import schedule_of
from mpitrain.schedules import catalog
from mpitrain.schedules.auto_choice import AUTO, StageTimesOf, fastest
from mpitrain.schedules.catalog import chunks_of, placement
from mpitrain.schedules.family import ScheduleFamily
from mpitrain.schedules.formats.user_table import read_any
from mpitrain.schedules.limits import MOST_TABLE_BYTES
from mpitrain.schedules.options import UNIT_TIMES, Options, Times
from mpitrain.schedules.played import PROVED_AT_ONCE, Played, played
from mpitrain.schedules.search_progress import Notify
from mpitrain.schedules.table import Table

PLANNED_WITH = "times", "memory_limit", "weight_memory", "recompute", "offload"


class Request(NamedTuple):
    """What the user asked for.

    name: of the catalogue, or a file. memory_limit: in stashes of a rank's whole share of layers.
    weight_memory: the share of a stash that is held between I and W. recompute: searches may recompute, and
    this share stays then. offload: or offload, which takes this time for a rank's stash.
    stage_times_of: instead of equal shares of the times, as a run measured them. error: the share by which
    they may be wrong.
    notify: hears how far a long search is.
    """

    name: str
    num_ranks: int | None = None
    num_microbatches: int | None = None
    chunks: int | None = None
    group: int | None = None
    segments: int | None = None
    times: Times = UNIT_TIMES
    memory_limit: float | None = None
    weight_memory: float | None = None
    recompute: float | None = None
    offload: float | None = None
    stage_times_of: StageTimesOf | None = None
    error: float = 0
    notify: Notify | None = None

    @property
    def options(self) -> Options:
        """All that can be chosen of a schedule, but for the times of stages."""
        asked = self._asdict()
        return Options(**{name: asked[name] for name in Options._fields if name in asked})


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
        raise ConfigError(f"{request.name}: needs --stages and --microbatches; only a file says its own size")
    if request.name == AUTO:
        assert request.num_ranks is not None and request.num_microbatches is not None
        size = request.num_ranks, request.num_microbatches
        return fastest(*size, request.options, request.stage_times_of, error=request.error).table
    return catalog.build(
        request.name, request.num_ranks, request.num_microbatches, _options(request, family), family
    )


def _options(request: Request, family: ScheduleFamily) -> Options:
    """Times and memory are for every schedule; only the automatic ones also plan with them."""
    left_out = [key for key in PLANNED_WITH if key not in family.takes]
    options = request.options._replace(**dict.fromkeys(left_out))
    if "chunks" not in family.takes:
        chunks_of(request.name, request.chunks, family)  # refuses another number than the schedule's own
        options = options._replace(chunks=None)
    if "stage_times" in family.takes and request.stage_times_of is not None:
        assert request.num_ranks is not None
        number = chunks_of(request.name, options.chunks, family)
        rank_of = placement(request.name, request.num_ranks, number)
        options = options._replace(stage_times=request.stage_times_of(rank_of))
    return options.strict()


def _own_table(request: Request) -> Table:
    """Read the user's file, whose size may be given too and must then agree."""
    try:
        table = read_any(read_text(request.name, MOST_TABLE_BYTES), shown(request.name))
    except OSError as error:
        raise ConfigError(f"{shown(request.name)}: can't be read: {error.strerror}") from None
    if request.group is not None:
        raise ScheduleError(f"{table.name}: --group has no effect on a table of your own; leave it out")
    for option, asked, found in (
        ("--stages", request.num_ranks, len(table.ranks)),
        ("--microbatches", request.num_microbatches, table.num_microbatches // table.segments * table.copies),
        ("--chunks", request.chunks, max(map(len, table.chunks)) // table.copies),
        ("--segments", request.segments, table.segments),
    ):
        if asked not in (None, found):
            raise ScheduleError(f"{table.name}: found {option} {asked}, the table has {found}; leave it out")
    return table
