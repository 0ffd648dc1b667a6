"""The automatic ZB-V scheduler: for times and a limit (arXiv:2401.10241 section 6, table 8).

As zb_auto it plays all ranks in rounds, each with one I and one F a rank. W goes where a rank would
wait anyway, or where memory is short. Legs of a microbatch's way are numbered as in v_shape.
"""

from collections import deque
from functools import lru_cache
from itertools import product
from math import inf
from operator import attrgetter
from typing import NamedTuple

from mpitrain.schedules.actions import Action
from mpitrain.schedules.families.v_half import v_half, v_min
from mpitrain.schedules.families.v_shape import LEGS, action, before, weight_of
from mpitrain.schedules.families.zb_auto import SearchPlan, planned, shortest_with_rules
from mpitrain.schedules.families.zbv import ZBV, zbv
from mpitrain.schedules.family import ScheduleFamily
from mpitrain.schedules.limits import require_searchable
from mpitrain.schedules.options import DEFAULTS, Options, Times
from mpitrain.schedules.search.problem import Problem, stage_costs
from mpitrain.schedules.search.timed_order import Rows
from mpitrain.schedules.search_progress import REMEMBERED, Listener, SearchProgress


class WeightPriority(NamedTuple):
    """Before which legs W is run rather than waited, even if other ranks have waited longer."""

    turning: bool  # the I that go down the ranks
    forward: bool


class _Stuck(Exception):
    """The search has no room for its next action, or a rank waits longer than in a table before."""


def zbv_auto(num_ranks: int, num_microbatches: int, options: Options) -> list[list[Action]]:
    """Compute order of every rank. For 2 ranks, 3 microbatches and equal times:

    rank 0:  F0@0 F1@0 F2@0 F0@3 I0@3 W0@3 F1@3 I1@3 W1@3 I0@0 W0@0 F2@3 I2@3 I1@0 W2@3 I2@0 W1@0
             W2@0
    rank 1:  F0@1 F0@2 F1@1 F1@2 I0@2 W0@2 F2@1 I0@1 W0@1 F2@2 I1@2 I1@1 I2@2 I2@1 W1@2 W1@1 W2@2
             W2@1

    Of four tables it is the first in which the longest wait of a rank is shortest, unless ZB-V, V-Half
    or V-Min fits and has a shorter makespan, or for small steps such a table of a smaller limit. Below p
    stashes there is no such table, and it is the best of those that simple rules make (see
    search/improve). `options.memory_limit` is p if not given: as much as 1F1B holds.
    """
    require_searchable("zbv-auto", num_ranks, num_microbatches)
    plan = planned("zbv-auto", options, memory_limit=num_ranks)
    return [list(row) for row in _remembered(num_ranks, num_microbatches, plan, Listener(options.notify))]


ZBV_AUTO = ScheduleFamily(
    zbv_auto, name="zbv-auto", takes=("times", "memory_limit", "weight_memory"), placed="v", held="bounded"
)


@lru_cache(REMEMBERED)
def _remembered(num_ranks: int, num_microbatches: int, plan: SearchPlan, listener: Listener) -> Rows:
    """Search once: `auto` and `v-auto` ask again for the same order."""
    where = stage_costs(ZBV.rank_of(num_ranks, 2), plan.times)
    progress = SearchProgress(listener.notify)
    tables: list[Rows] = []
    fits = Problem(where, num_microbatches, 2 * plan.memory_limit, plan.weight_memory)
    for limit in dict.fromkeys((fits.limit, *reversed(fits.rungs))):
        if limit >= 2 * min(num_ranks, num_microbatches):
            step = plan._replace(memory_limit=max(limit / 2, num_ranks))  # no rank ever holds more
            tables += _published(num_ranks, num_microbatches, step, progress)
    fixed = [rows(num_ranks, num_microbatches, DEFAULTS) for rows in (zbv, v_half, v_min)]
    return shortest_with_rules(fits, tables, fixed)


def zbv_orders(num_ranks: int, num_microbatches: int, options: Options) -> list[list[list[Action]]]:
    """Return the paper's best table in a limit; below p stashes that of p, which may hold less."""
    plan = planned("zbv-auto", options, memory_limit=num_ranks)
    if plan.memory_limit < num_ranks and num_microbatches >= 2 * num_ranks:
        return []
    plan = plan._replace(memory_limit=max(plan.memory_limit, num_ranks))  # no rank ever holds more
    return _published(num_ranks, num_microbatches, plan, SearchProgress(None))


def _published(
    num_ranks: int, num_microbatches: int, plan: SearchPlan, progress: SearchProgress
) -> list[list[list[Action]]]:
    """Return the first of the paper's tables whose longest wait is shortest, if memory is enough."""
    choices = [WeightPriority(*answers) for answers in product((True, False), repeat=2)]
    progress.expect(len(choices) * 2 * num_microbatches)
    searches = [_shortest(num_ranks, num_microbatches, plan, choice, progress) for choice in choices]
    done = [search for search in searches if search]
    return [min(done, key=attrgetter("longest_wait")).actions()] if done else []


def _shortest(
    num_ranks: int, num_microbatches: int, plan: SearchPlan, choice: WeightPriority, progress: SearchProgress
) -> "_VSearch | None":
    """Repeat a search, granting each rank the waits of the last, while it gets shorter.

    None if memory is too short.
    """
    best = None
    granted = [0.0] * num_ranks
    while True:
        search = _VSearch(num_ranks, num_microbatches, plan, choice, granted)
        search.most = best.longest_wait if best else inf
        try:
            search.run(progress)
        except _Stuck:
            return best
        best = search
        granted = [rank.waited for rank in search.ranks]
        progress.expect(2 * num_microbatches)


class _VRank:
    """What one rank has done until now, and when.

    sources: the ends of a leg on the rank that a microbatch comes from; None: the leg begins here.
    """

    def __init__(self, times: Times, weight_memory: float):
        self.weight_memory = weight_memory
        self.cost = [times.forward / 2, times.forward / 2, times.input / 2, times.input / 2]
        self.weight_cost = times.weight / 2
        self.ends: list[list[float]] = [[] for _ in LEGS]
        self.sources: list[list[float] | None] = []
        self.weights: deque[tuple[int, int, bool]] = deque()  # put off, in the order of their I
        self.order: list[tuple[int, int, bool]] = []  # leg, microbatch, whether it is W
        self.in_flight = 0
        self.now: float = 0
        self.waited: float = 0  # since its first action

    def done(self, leg: int) -> int:
        return len(self.ends[leg])

    def put(self, leg: int, arrival: float) -> None:
        """Run the next action of a leg, as soon as its message has arrived."""
        cost = self.cost[leg]
        at_once = self.now + cost
        self.now = max(at_once, arrival + cost)
        if self.order:
            self.waited += self.now - at_once
        ends = self.ends[leg]
        m = len(ends)
        self.order.append((leg, m, False))
        ends.append(self.now)
        if leg >= 2:
            self.weights.append((leg, m, True))
            self.in_flight -= 1
        else:
            self.in_flight += 1

    def put_weight(self) -> None:
        self.order.append(self.weights.popleft())
        self.now += self.weight_cost

    @property
    def stashes(self) -> float:
        """Return what is held, each of half the rank's layers."""
        return self.in_flight + self.weight_memory * len(self.weights)


class _VSearch:
    def __init__(
        self,
        num_ranks: int,
        num_microbatches: int,
        plan: SearchPlan,
        choice: WeightPriority,
        granted: list[float],
    ):
        self.num_ranks = num_ranks
        self.num_microbatches = num_microbatches
        self.choice = choice
        self.message = plan.times.message
        self.limit = 2 * plan.memory_limit
        self.ranks = [_VRank(plan.times, plan.weight_memory) for _ in range(num_ranks)]
        for number, rank in enumerate(self.ranks):
            sources = [before(leg, number, num_ranks) for leg in LEGS]
            rank.sources = [
                None if source is None else self.ranks[source].ends[leg] for leg, source in zip(LEGS, sources)
            ]
        self.granted = granted
        self.longest_wait: float = 0
        self.most: float = inf  # a wait as long as this is of no use

    def run(self, progress: SearchProgress) -> None:
        self._warm_up()
        for _ in range(2 * self.num_microbatches):
            self._round_of_inputs()
            self._round_of_forwards()
            progress.step()
        for rank in self.ranks:
            while rank.weights:
                rank.put_weight()

    def actions(self) -> list[list[Action]]:
        p = self.num_ranks
        return [
            [(weight_of if late else action)(leg, m, number, p) for leg, m, late in rank.order]
            for number, rank in enumerate(self.ranks)
        ]

    # ---------------------------------------------------------------- warmup

    def _warm_up(self) -> None:
        """Run the forwards before each rank's first I."""
        for rank in self.ranks:
            self._put(rank, 0)
        for number in reversed(range(self.num_ranks)):
            self._fill_until_turned(number)
            self._put(self.ranks[number], 1)
        leg = 0
        for number in range(1, self.num_ranks):
            while self._behind(self.ranks[number], self.ranks[number - 1]):
                for lower in reversed(self.ranks[number:]):
                    if lower.done(leg) < self.num_microbatches:
                        self._put(lower, leg)
                leg = 1 - leg

    def _fill_until_turned(self, number: int) -> None:
        """Send more microbatches down to a rank while it waits for the first to come up again."""
        if number == self.num_ranks - 1:
            return
        rank = self.ranks[number]
        arrival = self._arrival(rank, 1)
        while (
            # what the ranks below will hold more than it
            rank.stashes + 2 * (number + 1) <= self.limit
            and rank.now + rank.cost[0] <= arrival
            and rank.done(0) < self.num_microbatches
        ):
            for upper in self.ranks[: number + 1]:
                self._put(upper, 0)

    def _behind(self, rank: _VRank, above: _VRank) -> bool:
        """Return whether a rank must run more forwards before the I of the one above comes."""
        fewer = rank.done(0) + rank.done(1) < above.done(0) + above.done(1)
        return fewer or rank.done(1) <= above.done(1) < self.num_microbatches

    # ---------------------------------------------------------------- steady

    def _round_of_inputs(self) -> None:
        """Run one I on each rank: first those that go up, from the last rank on, then those that go down."""
        legs = [self._input_leg(rank) for rank in self.ranks]
        for number in reversed(range(self.num_ranks)):
            if legs[number] == 3:
                self._wait_and_put(number, 3, True)
        for number, leg in enumerate(legs):
            if leg == 2:
                self._wait_and_put(number, 2, self.choice.turning)

    def _input_leg(self, rank: _VRank) -> int:
        if rank.done(3) >= rank.done(2):
            return 2
        return 3 if self._ready(rank, 3) or rank.done(2) >= self.num_microbatches else 2

    def _round_of_forwards(self) -> None:
        """Run at most one F on each rank, up rather than down."""
        for number, rank in enumerate(self.ranks):
            leg = self._forward_leg(rank)
            if leg is not None:
                while rank.stashes + 1 > self.limit:
                    self._put_weight(rank)
                self._wait_and_put(number, leg, self.choice.forward)

    def _forward_leg(self, rank: _VRank) -> int | None:
        if rank.done(1) >= self.num_microbatches:
            return None
        if rank.done(1) >= rank.done(0):
            return 0
        if self._ready(rank, 1):
            return 1
        return 0 if rank.done(0) < self.num_microbatches and self._ready(rank, 0) else None

    # ---------------------------------------------------------------- actions

    def _put(self, rank: _VRank, leg: int) -> None:
        arrival = self._arrival(rank, leg)
        if leg < 2 and rank.stashes + 1 > self.limit:
            raise _Stuck
        rank.put(leg, arrival)
        if rank.waited > self.longest_wait:
            self.longest_wait = rank.waited
        if self.longest_wait >= self.most:
            raise _Stuck

    def _put_weight(self, rank: _VRank) -> None:
        if not rank.weights:
            raise _Stuck
        rank.put_weight()

    def _wait_and_put(self, number: int, leg: int, weights_first: bool) -> None:
        """Run the next action of a leg, and backwards for weights until its message arrives."""
        rank = self.ranks[number]
        if rank.weights and rank.sources[leg] is not None:
            arrival = self._arrival(rank, leg)
            while rank.weights and arrival >= rank.now + rank.weight_cost:
                rank.put_weight()
            may_wait = max(self.longest_wait, max(self.granted) - self.granted[number]) - rank.waited
            if rank.weights and arrival - rank.now > may_wait and weights_first:
                rank.put_weight()
        self._put(rank, leg)

    def _ready(self, rank: _VRank, leg: int) -> bool:
        """Return whether a leg's next action can run, or has been planned where it comes from."""
        m = len(rank.ends[leg])
        source = rank.sources[leg]
        return (leg == 0 or len(rank.ends[leg - 1]) > m) and (source is None or len(source) > m)

    def _arrival(self, rank: _VRank, leg: int) -> float:
        if not self._ready(rank, leg):
            raise _Stuck
        source = rank.sources[leg]
        return 0 if source is None else source[len(rank.ends[leg])] + self.message
