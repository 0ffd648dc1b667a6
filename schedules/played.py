"""A schedule, played: its table, what was proved of it, and its times."""

from dataclasses import dataclass
from functools import cached_property

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import OFFLOAD, SENDS
from mpitrain.schedules.lowering.lower import lower
from mpitrain.schedules.lowering.reductions import Reduction
from mpitrain.schedules.options import DEFAULTS, INPUT_SHARE, UNIT_TIMES, Options, StageTimes, Times
from mpitrain.schedules.play.simulate import simulate_table
from mpitrain.schedules.play.timeline import Timeline
from mpitrain.schedules.proof.check import Proof, check
from mpitrain.schedules.search.problem import Problem, stage_costs
from mpitrain.schedules.table import Table

PROVED_AT_ONCE = 100_000  # operations; about two seconds


@dataclass(frozen=True)
class Played:
    """A table with its simulated timeline. proof: None of one too large while a user waits."""

    table: Table
    timeline: Timeline
    times: Times
    memory_limit: float | None
    weight_memory: float
    proof: Proof | None
    stage_times: tuple[StageTimes, ...] | None
    recompute: float
    offload: float

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
        """A rank's time without any bubble, of the busiest if their stages differ."""
        if self.stage_times is None:
            return self.num_microbatches * sum(self.times[:3])
        return max(map(self.timeline.busy, range(self.num_ranks)))

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
        """Stashes of a rank's whole share, comparable between schedules; a share of a late W's."""
        return [max((held for _, held in self.memory(rank)), default=0) for rank in range(self.num_ranks)]

    @cached_property
    def recomputed(self) -> set[tuple[int | None, ...]]:
        """(microbatch, stage) of what is recomputed."""
        return self._with("R")

    @cached_property
    def offloaded(self) -> set[tuple[int | None, ...]]:
        """(microbatch, stage) of what goes to host memory."""
        return self._with(OFFLOAD)

    def _with(self, kind: str) -> set[tuple[int | None, ...]]:
        return {action[1:3] for row in self.table.ranks for action in row if action.kind == kind}

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """Return (time, stashes held from then on): from a forward's start until B or W has ended.

        Of what is recomputed the input is held until then; what is offloaded while F, and I or B,
        run.
        """
        late = self.weight_memory
        whole = self.stashes_per_microbatch
        change = {"F": 1, "I": late - 1, "B": -1, "W": -late, "R": 1 - self.recompute}
        held = 0.0
        curve = [(0.0, 0.0)]
        for action, start, end in self.timeline.computations(rank):
            kind, is_sent = action.kind, action[1:3] in self.offloaded
            if is_sent and kind in ("I", "B"):
                held += 1
                curve.append((start, held / whole))
            held += self.recompute if kind == "F" and action[1:3] in self.recomputed else change[kind]
            curve.append((start if kind in ("F", "R") else end, held / whole))
            if is_sent and kind == "F":
                held -= 1
                curve.append((end, held / whole))
        return curve

    @cached_property
    def bound(self) -> float:
        """A time that no order of these stages takes less than, with no more memory.

        Of two copies, or of segments, it is the work of a rank, or the way of a microbatch.
        """
        table, parts = self.table, self.table.segments * self.table.copies
        costs = stage_costs(table.rank_of[: table.depth], self.times, self.stage_times)
        if parts == 1:
            limit = max(self.peak_stashes) * self.stashes_per_microbatch
            share = self.recompute if self.recomputed else None
            copy = self.offload / self.stashes_per_microbatch if self.offloaded else None
            return Problem(costs, table.num_microbatches, limit, self.weight_memory, share, copy).bound
        way = Problem(costs, 1, len(costs.rank_of), self.weight_memory).bound / table.segments
        return max(way, max(map(self.timeline.busy, range(self.num_ranks))))

    @property
    def messages(self) -> list[int]:
        """Messages that each rank sends."""
        return [sum(action.kind in SENDS for action in program) for program in self.timeline.programs]

    @property
    def above_limit(self) -> bool:
        return self.memory_limit is not None and max(self.peak_stashes) > self.memory_limit + 1e-9


def played(table: Table, options: Options = DEFAULTS, most_proved: int = PROVED_AT_ONCE) -> Played:
    """Prove a table if it has no more than so many operations, and play it.

    options: its times, and what of a stash is held when. Raises ScheduleError if the table has a flaw.
    """
    proof = _prove(table) if sum(map(len, table.ranks)) <= most_proved else None
    times, offload = options.times or UNIT_TIMES, options.offload or 0
    late, kept = options.weight_memory, options.recompute
    return Played(
        table,
        simulate_table(table, times, options.stage_times, offload),
        times,
        options.memory_limit,
        1.0 if late is None else late,
        proof,
        options.stage_times,
        INPUT_SHARE if kept is None else kept,
        offload,
    )


def _prove(table: Table) -> Proof:
    programs = lower(table, [Reduction(1, ())] * table.num_stages)
    try:
        return check(
            programs, table.num_stages, table.num_microbatches, copies=table.copies, segments=table.segments
        )
    except ScheduleError as error:
        raise ScheduleError(f"{table.name}: {error.args[0]}") from None
