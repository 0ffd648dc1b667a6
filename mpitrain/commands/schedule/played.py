"""A schedule, played: its table, what was proved of it, and its times.

What `mpitrain schedule` prints, draws and compares.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.inputs import is_there, read_text, shown
from mpitrain.plan.settings.pipeline_table import schedule_of
from mpitrain.schedules import catalog
from mpitrain.schedules.actions import SENDS
from mpitrain.schedules.catalog import chunks_of
from mpitrain.schedules.family import ScheduleFamily
from mpitrain.schedules.formats.user_table import read_any
from mpitrain.schedules.limits import MOST_TABLE_BYTES
from mpitrain.schedules.lowering.lower import Reduction, lower
from mpitrain.schedules.options import UNIT_TIMES, Options, Times
from mpitrain.schedules.play.simulate import Timeline, simulate_table
from mpitrain.schedules.proof.check import Proof, check
from mpitrain.schedules.search_progress import Notify
from mpitrain.schedules.table import Table

PROVED_AT_ONCE = 100_000  # operations; about two seconds


class Request(NamedTuple):
    """What the user asked for.

    name: of the catalogue, or a file. memory_limit: in stashes of a rank's whole share of layers.
    weight_memory: the share of a stash that is held between I and W. notify: hears how far a long
    search is.
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
    notify: Notify | None = None


@dataclass(frozen=True)
class Played:
    """A table with its simulated timeline. proof is None where the table was too large to prove
    while the user waits.
    """

    table: Table
    timeline: Timeline
    times: Times
    memory_limit: float | None
    weight_memory: float
    proof: Proof | None

    @property
    def num_ranks(self) -> int:
        return len(self.table.ranks)

    @property
    def num_microbatches(self) -> int:
        """Of the whole step: of both copies, and each with all its segments."""
        return self.table.num_microbatches // self.table.segments * self.table.copies

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        return self.table.chunks

    @cached_property
    def stashes_per_microbatch(self) -> int:
        """How many stashes make up one microbatch on a rank's whole share of layers."""
        return -(-max(map(len, self.chunks)) // self.table.copies) * self.table.segments

    @property
    def ideal(self) -> float:
        """A rank's time without any bubble."""
        return self.num_microbatches * sum(self.times[:3])

    @cached_property
    def span(self) -> float:
        return self.timeline.span

    @property
    def bubble_rate(self) -> float:
        """The zero-bubble papers' (arXiv:2401.10241, 5.3)."""
        return (self.span - self.ideal) / self.span if self.span else 0.0

    @cached_property
    def idle(self) -> list[float]:
        return [self.timeline.idle(rank) for rank in range(self.num_ranks)]

    @cached_property
    def peak_in_flight(self) -> list[int]:
        """Stashes: of one stage, one microbatch, one segment."""
        return [self.timeline.peak_in_flight(rank) for rank in range(self.num_ranks)]

    @cached_property
    def peak_stashes(self) -> list[float]:
        """Stashes of a rank's whole share of layers, which compare between schedules.

        Of a late W's stash its share counts.
        """
        return [max((held for _, held in self.memory(rank)), default=0) for rank in range(self.num_ranks)]

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """Return (time, stashes held from then on): a forward's from its start, and until B or W
        has ended.
        """
        late = self.weight_memory
        whole = self.stashes_per_microbatch
        change = {"F": 1, "I": late - 1, "B": -1, "W": -late}
        held = 0.0
        curve = [(0.0, 0.0)]
        for action, start, end in self.timeline.computations(rank):
            held += change[action.kind]
            curve.append((start if action.kind == "F" else end, held / whole))
        return curve

    @property
    def messages(self) -> list[int]:
        """Messages that each rank sends."""
        return [sum(action.kind in SENDS for action in program) for program in self.timeline.programs]

    @property
    def above_limit(self) -> bool:
        return self.memory_limit is not None and max(self.peak_stashes) > self.memory_limit + 1e-9


def play(request: Request, most_proved: int = PROVED_AT_ONCE) -> Played:
    """Make the table that was asked for, prove it if it has no more than so many operations, and
    play it with the times.

    Raises ScheduleError if the schedule isn't defined for this size or has a flaw, ConfigError if a
    file can't be read.
    """
    table = _table(request)
    proof = _prove(table) if sum(map(len, table.ranks)) <= most_proved else None
    share = 1 if request.weight_memory is None else request.weight_memory
    return Played(
        table, simulate_table(table, request.times), request.times, request.memory_limit, share, proof
    )


def _prove(table: Table) -> Proof:
    programs = lower(table, [Reduction(1, ())] * table.num_stages)
    try:
        return check(
            programs, table.num_stages, table.num_microbatches, copies=table.copies, segments=table.segments
        )
    except ScheduleError as error:
        raise ScheduleError(f"{table.name}: {error.args[0]}") from None


# ---------------------------------------------------------------- the table


def _table(request: Request) -> Table:
    if request.name not in catalog.FAMILIES and is_there(request.name):
        return _own_table(request)
    family = schedule_of(request.name)
    if None in (request.num_ranks, request.num_microbatches):
        raise ConfigError(f"{request.name}: needs --stages and --microbatches; only a file says its own size")
    return catalog.build(
        request.name, request.num_ranks, request.num_microbatches, _options(request, family), family
    )


def _options(request: Request, family: ScheduleFamily) -> Options:
    """Times and memory are for every schedule; only the automatic ones also plan with them."""
    asked = request._asdict()
    plans = {key: asked[key] for key in ("times", "memory_limit", "weight_memory") if key in family.takes}
    chunks = request.chunks
    if "chunks" not in family.takes:
        chunks_of(request.name, chunks, family)  # refuses another number than the schedule's own
        chunks = None
    return Options(chunks, request.group, request.segments, notify=request.notify)._replace(**plans).strict()


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
