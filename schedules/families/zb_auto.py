"""The automatic zero-bubble scheduler: a greedy search with measured times and a memory limit.

arXiv:2401.10241 section 3.1; its ZB-1p and ZB-2p are the tables for limits of p and 2p stashes. The
search plays all ranks in rounds: a round gives each rank at most one F, down the ranks, and one I,
up the ranks; W goes where a rank would wait anyway, or where memory is short. Whether to wait is
asked three times in it, and all eight answers are tried.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, count, product
from math import inf
from typing import NamedTuple

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import Action
from mpitrain.schedules.families.one_f_one_b import ONE_F_ONE_B
from mpitrain.schedules.families.zero_bubble import ZB_H1, ZB_H2
from mpitrain.schedules.family import ScheduleFamily
from mpitrain.schedules.limits import require_searchable
from mpitrain.schedules.options import DEFAULTS, UNIT_TIMES, Options, Times
from mpitrain.schedules.search.improve import by_rules
from mpitrain.schedules.search.problem import ROUNDING, Problem, stage_costs
from mpitrain.schedules.search.timed_order import OrderedPlay, Rows, order_of, shortest
from mpitrain.schedules.search_progress import REMEMBERED, Listener, SearchProgress

SHARE = 0.4  # of a stash, held between I and W


class Heuristics(NamedTuple):
    """What a search does where it could also do otherwise."""

    spare_first_input: bool  # leave out warmup forwards that would delay the first I
    inputs_first: bool  # leave out a round's forward if the next rank is behind
    weights_first: bool  # run W rather than wait, even if other ranks have waited longer


CHOICES = 2 ** len(Heuristics._fields)


class SearchPlan(NamedTuple):
    """What an automatic scheduler plans with. memory_limit: in stashes of a rank's whole share.

    weight_memory: the share of a stash that is still held between I and W.
    """

    times: Times
    memory_limit: float
    weight_memory: float


def zb_auto(num_ranks: int, num_microbatches: int, options: Options) -> list[list[Action]]:
    """Compute order of every rank.

    For 3 ranks, 5 microbatches, equal times and a limit of 3 stashes it is ZB-H1:

    rank 0:  F0 F1 F2 I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
    rank 1:  F0 F1 I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
    rank 2:  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

    Of the paper's eight tables it is the first of the shortest span, unless 1F1B, ZB-H1 or ZB-H2 fits
    and has a shorter makespan, or for small steps such a table of a smaller limit. Below p stashes
    those that simple rules make take part (see search/improve). `options.memory_limit`
    is p if not given: as much as 1F1B holds.

    The paper counts bytes, and of a stash only the inputs of W's matrix products are held between I
    and W: in its models 0.37 to 0.43 of it. If `options.weight_memory` doesn't say how much, a
    table that holds whole stashes until W comes first, and one that counts on SHARE of a stash is
    taken only if it is shorter. It is what meets the paper's table 5 for ZB-2p.
    """
    require_searchable("zb-auto", num_ranks, num_microbatches)
    plan = planned("zb-auto", options, memory_limit=num_ranks)
    listener = Listener(options.notify)
    return list(map(list, _remembered(num_ranks, num_microbatches, plan, options.weight_memory, listener)))


ZB_AUTO = ScheduleFamily(
    zb_auto, name="zb-auto", takes=("times", "memory_limit", "weight_memory"), held="bounded"
)


@lru_cache(REMEMBERED)
def _remembered(
    num_ranks: int, num_microbatches: int, plan: SearchPlan, share: float | None, listener: Listener
) -> Rows:
    """Search once: `auto` and `plain-auto` ask again for the same order."""
    progress = SearchProgress(listener.notify)
    where = stage_costs(tuple(range(num_ranks)), plan.times)
    tables: list[Rows] = []
    fits = Problem(where, num_microbatches, plan.memory_limit, plan.weight_memory)
    lower = [limit for limit in reversed(fits.rungs) if limit % 1 == 0]
    for limit in dict.fromkeys((plan.memory_limit, *lower)):
        step = plan._replace(memory_limit=limit)
        tables.append(_published(num_ranks, num_microbatches, step, share, progress))
    fixed = [family.rows(num_ranks, num_microbatches, DEFAULTS) for family in (ONE_F_ONE_B, ZB_H1, ZB_H2)]
    return shortest_with_rules(fits, tables, fixed)


def shortest_with_rules(problem: Problem, tables: Sequence[Rows], fixed: Sequence[Rows]) -> Rows:
    """Return the shortest of tables, of fixed ones that fit, and of simple rules' below 1F1B's memory."""
    unlimited = problem.within(inf)
    best = shortest(unlimited, [*tables, *(rows for rows in fixed if shortest(problem, [rows]))])
    usual = min(problem.where.num_ranks, problem.num_microbatches) * max(map(len, problem.stages))
    if problem.limit < usual - ROUNDING:
        plan = OrderedPlay(unlimited, order_of(best, split=False)).play() if best else None
        more = by_rules(problem, plan.makespan if plan else inf)
        best = shortest(unlimited, chain([best] if best else [], more))
    assert best is not None
    return best


def zb_orders(num_ranks: int, num_microbatches: int, options: Options) -> Iterator[list[list[Action]]]:
    """Yield the paper's best table within a limit."""
    plan = planned("zb-auto", options, memory_limit=num_ranks)
    yield _published(num_ranks, num_microbatches, plan, options.weight_memory, SearchProgress(None))


def _published(
    num_ranks: int, num_microbatches: int, plan: SearchPlan, share: float | None, progress: SearchProgress
) -> list[list[Action]]:
    """Return the first of the paper's tables of the shortest span, of these the shortest makespan.

    Those that hold whole stashes until W come first, then those that hold a share of one.
    """
    best: _ZbSearch | None = None
    for held in dict.fromkeys((1, SHARE if share is None else share)):
        progress.expect(CHOICES * (num_microbatches - 1))
        for three in product((True, False), repeat=len(Heuristics._fields)):
            step = plan._replace(weight_memory=held)
            search = _ZbSearch(num_ranks, num_microbatches, step, Heuristics(*three))
            search.most = best.span() * (1 + ROUNDING) if best else inf
            if search.run(progress) and (best is None or search.is_shorter(best)):
                best = search
    assert best is not None
    return best.orders()


def planned(name: str, options: Options, memory_limit: float) -> SearchPlan:
    """Fill in what a scheduler plans with, whole stashes if nothing else is said.

    Raises ScheduleError for times, shares and limits that can't be.
    """
    times = Times(*(options.times or UNIT_TIMES))
    if not (all(time > 0 for time in times[:3]) and times.message >= 0):  # nan is neither
        raise ScheduleError(
            f"{name}: found times {', '.join(map(str, times))}, needed F, I, W above 0 and messages of at "
            "least 0"
        )
    weight_memory = 1 if options.weight_memory is None else options.weight_memory
    if not 0 <= weight_memory <= 1:
        raise ScheduleError(
            f"{name}: found {options.weight_memory} of a stash held between I and W, needed 0 to 1"
        )
    limit = memory_limit if options.memory_limit is None else options.memory_limit
    if not limit >= 1:
        raise ScheduleError(
            f"{name}: found a memory limit of {limit} stashes, needed at least 1, a microbatch in flight; "
            "raise the limit"
        )
    return SearchPlan(times, limit, weight_memory)


class _ZbRank:
    def __init__(self, stage: int, times: Times, weight_memory: float):
        self.stage = stage
        self.weight_memory = weight_memory
        self.cost = {"F": times.forward, "I": times.input, "W": times.weight}
        self.ends: dict[str, list[float]] = {"F": [], "I": [], "W": []}
        self.order: list[str] = []
        self.now: float = 0
        self.waited: float = 0  # since its first action

    def done(self, kind: str) -> int:
        return len(self.ends[kind])

    def put(self, kind: str, arrival: float) -> None:
        """Run the next action of a kind, as soon as its message has arrived."""
        at_once = self.now + self.cost[kind]
        end = max(at_once, arrival + self.cost[kind])
        if self.order:
            self.waited += end - at_once
        self.order.append(kind)
        self.ends[kind].append(end)
        self.now = end

    def actions(self) -> list[Action]:
        numbers = {kind: count() for kind in self.ends}
        return [Action(kind, next(numbers[kind]), self.stage) for kind in self.order]

    @property
    def late_weights(self) -> int:
        return self.done("I") - self.done("W")

    def stashes(self, more: int = 0) -> float:
        """Return what the rank would hold after `more` forwards."""
        return self.done("F") + more - self.done("I") + self.weight_memory * self.late_weights


class _ZbSearch:
    def __init__(self, num_ranks: int, num_microbatches: int, plan: SearchPlan, choice: Heuristics):
        self.num_microbatches = num_microbatches
        self.choice = choice
        self.times = plan.times
        self.limit = plan.memory_limit
        self.ranks = [_ZbRank(stage, plan.times, plan.weight_memory) for stage in range(num_ranks)]
        self.longest_wait: float = 0
        self.most: float = inf  # a span above this is of no use

    def run(self, progress: SearchProgress) -> bool:
        """Tell whether the span can be at most `most`: without, the search ends early."""
        self._warm_up()
        busy = self.num_microbatches * sum(self.times[:3])
        for _ in range(1, self.num_microbatches):
            if busy + self.longest_wait > self.most:
                return False
            self._round()
            progress.step()
        for rank in self.ranks:
            self._put_weights(rank)
        return True

    def orders(self) -> list[list[Action]]:
        return [rank.actions() for rank in self.ranks]

    def span(self) -> float:
        return max(rank.now - rank.ends["F"][0] + self.times.forward for rank in self.ranks)

    def is_shorter(self, other: "_ZbSearch") -> bool:
        """Tell whether the span is shorter, or else the makespan."""
        if abs(self.span() - other.span()) > ROUNDING * other.span():
            return self.span() < other.span()
        return max(rank.now for rank in self.ranks) < max(rank.now for rank in other.ranks) * (1 - ROUNDING)

    # ---------------------------------------------------------------- warmup

    def _warm_up(self) -> None:
        """Run the forwards before each rank's first I, and that I."""
        for rank in self.ranks:
            self._put(rank, "F")
        for rank, extra in zip(self.ranks, self._extra_forwards()):
            for _ in range(extra):
                self._put(rank, "F")
        for rank in reversed(self.ranks):
            self._put(rank, "I")

    def _extra_forwards(self) -> list[int]:
        """Return how many forwards more each rank runs until its first I: fewer down the ranks."""
        extra = [0] * len(self.ranks)
        first_input = self.ranks[-1].now + self.times.input
        for rank in reversed(self.ranks[:-1]):
            arrival = first_input + self.times.message
            now = rank.now
            number = 0
            while (
                number + 1 < self.num_microbatches
                and rank.stashes(number + 1) <= self.limit
                and self._fits(now, arrival)
            ):
                now += self.times.forward
                number += 1
            extra[rank.stage] = number
            first_input = max(now, arrival) + self.times.input
        for stage in range(1, len(extra)):
            if 1 + extra[stage] < self.num_microbatches:
                extra[stage] = max(0, min(extra[stage], extra[stage - 1] - 1))
        return extra

    def _fits(self, now: float, arrival: float) -> bool:
        return now + self.times.forward <= arrival if self.choice.spare_first_input else now < arrival

    # ---------------------------------------------------------------- steady

    def _round(self) -> None:
        """Run at most one F on each rank, and one I."""
        forwards = [self._forward_due(rank) for rank in self.ranks]
        for stage in reversed(range(len(forwards) - 1)):
            forwards[stage] &= forwards[stage + 1]
        for rank, due in zip(self.ranks, forwards):
            if due:
                while rank.stashes(1) > self.limit:
                    self._put(rank, "W")
                self._wait_with_weights(rank, "F")
                self._put(rank, "F")
        for rank in reversed(self.ranks):
            self._wait_with_weights(rank, "I")
            if rank.stage == 0 and rank.done("F") == self.num_microbatches:
                self._put_weights(rank)  # nobody waits for the first rank any more
            self._put(rank, "I")

    def _forward_due(self, rank: _ZbRank) -> bool:
        if rank.done("F") == self.num_microbatches:
            return False
        if not self.choice.inputs_first or rank.stage + 1 == len(self.ranks):
            return True
        following = self.ranks[rank.stage + 1]
        if rank.done("F") < following.done("F") + 2:
            return True
        next_input = following.now + self.times.forward + self.times.input + self.times.message
        if rank.now >= next_input:
            return False
        weights: float = 0
        freed = 0
        while rank.stashes(1) - freed * rank.weight_memory > self.limit and freed < rank.late_weights:
            weights += self.times.weight
            freed += 1
        if rank.now + self.times.forward + weights <= next_input:
            return True
        return next_input - rank.now > self.longest_wait - rank.waited

    # ---------------------------------------------------------------- actions

    def _put(self, rank: _ZbRank, kind: str) -> None:
        rank.put(kind, self._arrival(rank, kind))
        self.longest_wait = max(self.longest_wait, rank.waited)

    def _put_weights(self, rank: _ZbRank) -> None:
        while rank.late_weights:
            self._put(rank, "W")

    def _wait_with_weights(self, rank: _ZbRank, kind: str) -> None:
        arrival = self._arrival(rank, kind)
        while rank.late_weights and rank.now + self.times.weight <= arrival:
            self._put(rank, "W")
        if rank.late_weights and rank.now < arrival:
            # no longer in all than another rank
            may_wait = arrival - rank.now <= self.longest_wait - rank.waited
            if self.choice.weights_first or not may_wait:
                self._put(rank, "W")

    def _arrival(self, rank: _ZbRank, kind: str) -> float:
        stage = rank.stage + {"F": -1, "I": 1, "W": len(self.ranks)}[kind]
        if not 0 <= stage < len(self.ranks):
            return 0
        return self.ranks[stage].ends[kind][rank.done(kind)] + self.times.message
