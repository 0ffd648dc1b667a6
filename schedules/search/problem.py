"""What a search for an order of a step is given: stages on ranks, times, and a limit of memory."""

from collections.abc import Sequence
from functools import cached_property
from math import inf
from typing import NamedTuple, TypeVar

from mpitrain.schedules.options import UNIT_TIMES, Options, StageTimes, Times

_T = TypeVar("_T")
ROUNDING = 1e-9  # sums of floats that differ by less are equal
TINY, SMALL, MIDDLE = 200, 600, 3000  # operations of steps that are searched under ever fewer limits
LARGE = 50_000  # operations from which a play takes half a second and more
# kinds of computations: a whole backward is I and W in one; a forward that keeps its input alone is
# DROPPED, and AGAIN before its backward; of an offloaded stash they are SENT, FETCHED, FETCHED_WHOLE
FORWARD, INPUT, WEIGHT, WHOLE, AGAIN, DROPPED, SENT, FETCHED, FETCHED_WHOLE = range(9)
# what each is without that
PLAIN = FORWARD, INPUT, WEIGHT, WHOLE, AGAIN, FORWARD, FORWARD, INPUT, WHOLE


def is_large(num_stages: int, num_microbatches: int) -> bool:
    """Whether there is no time to play a step many times."""
    return 3 * num_stages * num_microbatches > LARGE


class StageCosts(NamedTuple):
    """Stages on ranks, and times of one stage and microbatch. message: to another rank's stage."""

    rank_of: tuple[int, ...]
    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    message: float

    @property
    def num_ranks(self) -> int:
        return max(self.rank_of) + 1

    def between(self, stage: int, other: int) -> float:
        """Return the time of a message from one stage to another."""
        return 0 if self.rank_of[stage] == self.rank_of[other] else self.message


def stage_costs(
    rank_of: tuple[int, ...], times: Times, stage_times: tuple[StageTimes, ...] | None = None
) -> StageCosts:
    """Divide the times of a rank's whole share of layers over its stages, unless each has its own."""
    if stage_times is not None:
        forward, grad, weight = zip(*stage_times)
        return StageCosts(rank_of, forward, grad, weight, times.message)
    chunks = len(rank_of) // (max(rank_of) + 1)
    forward, grad, weight = (tuple(time / chunks for _ in rank_of) for time in times[:3])
    return StageCosts(rank_of, forward, grad, weight, times.message)


def _of_kinds(forwards: _T, inputs: _T, others: _T) -> tuple[_T, ...]:
    by_plain = forwards, inputs, others, inputs, others
    return tuple(by_plain[kind] for kind in PLAIN)


class Problem:
    """A step that is to be ordered.

    limit: stashes of one stage that a rank may hold.  late: the share of one held between I and W.
    kept: the share, a stage's input, held of what is recomputed; None: nothing is.
    copy: the time to copy a stash of one stage to host memory, or back; None: nothing is offloaded.
    """

    def __init__(
        self,
        where: StageCosts,
        num_microbatches: int,
        limit: float,
        late: float = 1,
        kept: float | None = None,
        copy: float | None = None,
    ):
        self.where = where
        self.num_microbatches = num_microbatches
        self.limit = limit
        self.late = late
        self.kept = kept
        self.copy = copy
        self.num_stages = len(where.rank_of)
        self.stages: list[list[int]] = [[] for _ in range(where.num_ranks)]
        for stage, rank in enumerate(where.rank_of):
            self.stages[rank].append(stage)

    def within(self, limit: float) -> "Problem":
        """Return the same step with another limit."""
        return Problem(self.where, self.num_microbatches, limit, self.late, self.kept, self.copy)

    @property
    def frees(self) -> bool:
        """Whether stashes may be recomputed, or offloaded."""
        return self.kept is not None or self.copy is not None

    @cached_property
    def offloads(self) -> list[bool]:
        """Of each stage, whether a stash that doesn't fit is offloaded; else it is recomputed."""
        if self.copy is None or self.kept is None:
            return [self.copy is not None] * self.num_stages
        return [self._copied(stage) <= time for stage, time in enumerate(self.where.forward)]

    def _copied(self, stage: int) -> float:
        """Return how much longer computations take that a stash is copied beside."""
        copy, where = self.copy or 0, self.where
        return max(0, copy - where.forward[stage]) + max(0, copy - where.input[stage])

    @cached_property
    def changes(self) -> tuple[float, ...]:
        """By how many stashes each kind changes what a rank holds."""
        kept = self.kept or 0
        return 1, self.late - 1, -self.late, -1, 1 - kept, kept, 0, self.late, 0

    @cached_property
    def needs(self) -> tuple[float, ...]:
        """How many stashes more each kind holds while it runs."""
        kept = self.kept or 0
        return 1, 0, 0, 0, 1 - kept, kept, 1, 1, 1

    @cached_property
    def rooms(self) -> tuple[float, ...]:
        """How much a rank may hold before each kind."""
        return tuple(self.limit - need + ROUNDING if need > 0 else inf for need in self.needs)

    @cached_property
    def costs(self) -> tuple[Sequence[float], ...]:
        """The time of each kind on each stage."""
        where = self.where
        whole = [grad + weight for grad, weight in zip(where.input, where.weight)]
        sent, fetched, fetched_whole = (
            [max(time, self.copy or 0) for time in times] for times in (where.forward, where.input, whole)
        )
        plain = where.forward, where.input, where.weight, whole, where.forward, where.forward
        return *plain, sent, fetched, fetched_whole

    @cached_property
    def delays(self) -> tuple[list[float], ...]:
        """How long what each kind waits for on each stage is under way."""
        between, last = self.where.between, self.num_stages - 1
        stages = range(self.num_stages)
        forwards = [between(stage - 1, stage) if stage else 0 for stage in stages]
        inputs = [between(stage + 1, stage) if stage < last else 0 for stage in stages]
        nothing = [0.0] * self.num_stages
        return _of_kinds(forwards, inputs, nothing)

    @cached_property
    def receivers(self) -> tuple[list[int], ...]:
        """The rank that waits for what each kind makes on each stage; at the ends its own."""
        rank_of = self.where.rank_of
        forwards, inputs = [*rank_of[1:], rank_of[-1]], [rank_of[0], *rank_of[:-1]]
        return _of_kinds(forwards, inputs, list(rank_of))

    @cached_property
    def traits(self) -> list[list[tuple[float, float, float, float, int]]]:
        """Of each kind that there can be, on each stage: delay, cost, change, room, receiver."""
        kinds = zip(self.delays, self.costs, self.changes, self.rooms, self.receivers)
        every = [
            [(delay, cost, change, room, to) for delay, cost, to in zip(delays, costs, receivers)]
            for delays, costs, change, room, receivers in kinds
        ]
        return every if self.frees else every[: WHOLE + 1]

    @cached_property
    def work(self) -> list[float]:
        """How long each rank computes."""
        return [self.num_microbatches * sum(map(self._work, stages)) for stages in self.stages]

    @property
    def num_operations(self) -> int:
        return 3 * self.num_stages * self.num_microbatches

    @cached_property
    def rungs(self) -> list[float]:
        """Return the limits that are searched, ascending up to this one: more memory costs no time.

        Of a tiny step they are all up to what 1F1B holds, and above it those of whole microbatches;
        these alone of a small one; of larger ones quarters of what 1F1B holds, then that, and twice
        as much.
        """
        one = max(map(len, self.stages))
        usual, every = one * self.where.num_ranks, one * self.num_microbatches
        size = self.num_operations
        above = float(one if size <= SMALL else usual / 4 if size <= MIDDLE else usual)
        below = 1 if size <= TINY else above
        found, limit = {float(one), float(every)}, below
        while limit < every:
            found.add(int(2 * limit) / 2)  # in whole or half stashes
            limit += below if limit < usual else above if limit < 2 * usual else limit
        return sorted(limit for limit in found if one <= limit <= self.limit + ROUNDING)

    @cached_property
    def first_forward(self) -> list[float]:
        """When the first microbatch can be at each stage, at the earliest."""
        where = self.where
        times: list[float] = [0]
        for stage in range(1, self.num_stages):
            times.append(times[-1] + where.forward[stage - 1] + where.between(stage - 1, stage))
        return times

    @cached_property
    def first_input(self) -> list[float]:
        """When the first I of each stage can start, at the earliest."""
        where = self.where
        last = self.num_stages - 1
        times = [self.first_forward[last] + where.forward[last]]
        for stage in reversed(range(last)):
            times.append(times[-1] + where.input[stage + 1] + where.between(stage + 1, stage))
        return times[::-1]

    @cached_property
    def lifespan(self) -> list[float]:
        """How long a stash of each stage is held, at the least; between I and W only its share counts."""
        where = self.where
        return [
            self.first_input[stage] + where.input[stage] - self.first_forward[stage]
            + self.late * where.weight[stage]
            for stage in range(self.num_stages)
        ]  # fmt: skip

    @cached_property
    def period(self) -> float:
        """The time that the busiest rank computes for one microbatch."""
        return max(self.work) / self.num_microbatches

    def _work(self, stage: int) -> float:
        return self.where.forward[stage] + self.where.input[stage] + self.where.weight[stage]

    @cached_property
    def bound(self) -> float:
        """A time that no order takes less than.

        A microbatch has its way through all stages. A rank has its work to do, waits for its first
        forward, and for its first I with no more forwards than fit; after its last I the way to the
        first stage is left, and no more W than fit. Each stash is held for its lifespan, unless
        recomputed, which is work.
        """
        where, m = self.where, self.num_microbatches
        bound = self.first_input[0] + where.input[0] + where.weight[0]
        for stages in self.stages:
            first = stages[0]
            start = self.first_forward[first]
            until_input = self.first_input[stages[-1]] - start
            after_input = where.weight[0] + sum(
                where.input[stage] + where.between(stage + 1, stage) for stage in range(first)
            )
            work = m * sum(map(self._work, stages))
            idle = self._idle(until_input, where.forward, stages, 1)
            idle += self._idle(after_input, where.weight, stages, self.late)
            held = m * sum(self.lifespan[stage] for stage in stages)
            bound = max(bound, start + idle + work, start + self._until_held(stages, held, work))
        return bound

    def _until_held(self, stages: list[int], held: float, work: float) -> float:
        """Return how long a rank takes, with as much recomputed as makes that least.

        held: stashes times how long they are held.
        """
        time = held / self.limit
        if not self.frees or time <= work:
            return time
        saved = max(map(self._saved, stages))  # for each time more
        return work if saved == inf else work + (time - work) / (1 + max(0, saved) / self.limit)

    def _saved(self, stage: int) -> float:
        """Return how much less is held if a stash is freed, over the time that this takes more."""
        where = self.where
        needed = where.forward[stage] + where.input[stage] + self.late * where.weight[stage]
        freed = self.lifespan[stage] - needed
        if self.offloads[stage]:
            copied = self._copied(stage)
            return freed / copied if copied else inf
        return (1 - (self.kept or 0)) * freed / where.forward[stage]

    def _idle(self, time: float, cost: tuple[float, ...], stages: list[int], held: float) -> float:
        """Return how much of a time can't be filled with as many F or W as fit."""
        fits = self.num_microbatches * len(stages)
        if held and not self.frees:
            fits = min(fits, int(self.limit / held + ROUNDING))
        return max(0, time - fits * max(cost[stage] for stage in stages))


def problem_of(rank_of: tuple[int, ...], num_microbatches: int, options: Options) -> Problem:
    """Return the step of a placement under a limit. options: of a rank's whole share of layers."""
    chunks = len(rank_of) // (max(rank_of) + 1)
    assert options.memory_limit is not None
    late = 1 if options.weight_memory is None else options.weight_memory
    copy = None if options.offload is None else options.offload / chunks
    where = stage_costs(rank_of, options.times or UNIT_TIMES, options.stage_times)
    return Problem(where, num_microbatches, options.memory_limit * chunks, late, options.recompute, copy)
