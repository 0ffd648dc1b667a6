"""One play of all ranks in the order of time, in which each takes the most urgent thing that it can do.

It never gets stuck, whatever the urgencies are: of what a rank has room for, enough is kept for the
chunks that its oldest microbatch still has to go through (the banker's algorithm, Dijkstra 1965).
"""

from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from mpitrain.schedules.search.problem import ROUNDING, Problem
from mpitrain.schedules.search.timed_order import FORWARD, INPUT, WEIGHT, Step, TimedOrder

Urgency = list[list[float]]  # of a stage and a microbatch; what has less comes first


class Guide(NamedTuple):
    """What a rank prefers.

    most: stashes of each stage. overlap: W is begun if no more than this share of it is still to do
    when the next message arrives.
    """

    forwards: Urgency
    inputs: Urgency
    most: tuple[float, ...]
    overlap: float


class ListSchedule:
    """The state of all ranks while they are played."""

    def __init__(self, problem: Problem, guide: Guide):
        self.problem = problem
        self.guide = guide
        stages = range(problem.num_stages)
        # when the message of each forward and I is there; None: nobody has sent it
        self.arrivals: list[list[list[float | None]]] = [
            [[None] * problem.num_microbatches for _ in stages] for _ in (FORWARD, INPUT)
        ]
        self.arrivals[FORWARD][0] = [0] * problem.num_microbatches
        self.done = [[0] * problem.num_stages for _ in (FORWARD, INPUT)]
        self.stashes = [0] * problem.num_stages
        ranks = range(problem.where.num_ranks)
        self.late: list[list[tuple[int, int]]] = [[] for _ in ranks]  # I whose W may follow
        self.weights_done = [0 for _ in ranks]
        self.held: list[float] = [0 for _ in ranks]
        self.free: list[float] = [0 for _ in ranks]
        self.rows: list[list[Step]] = [[] for _ in ranks]
        self.events: list[tuple[float, int]] = [(0, rank) for rank in ranks]

    def play(self) -> TimedOrder:
        while self.events:
            now, rank = heappop(self.events)
            if self.free[rank] <= now:
                self._next(rank, now)
        return TimedOrder(self.rows)

    def _next(self, rank: int, now: float) -> None:
        """Let a free rank take what is most urgent, or W while it waits."""
        kind, stage, arrival, is_full = self._most_urgent(rank, now)
        if stage is not None:
            self._run(rank, kind, stage, self.done[kind][stage], now)
            return
        late = self.late[rank]
        if self.weights_done[rank] < len(late):
            stage, microbatch = late[self.weights_done[rank]]
            cost = self.problem.where.weight[stage]
            if is_full or now + cost * (1 - self.guide.overlap) <= arrival:
                self._run(rank, WEIGHT, stage, microbatch, now)
                return
        if arrival < inf:
            heappush(self.events, (arrival, rank))

    def _most_urgent(self, rank: int, now: float) -> tuple[int, int | None, float, bool]:
        """Return the kind and the stage of what is there, when the next message is, and whether a
        forward that is there has no room.
        """
        guide, problem = self.guide, self.problem
        forwards, inputs = self.done
        least, arrival = inf, inf
        chosen: int | None = None
        kind, is_full = FORWARD, False
        stages = problem.stages[rank]
        oldest = inputs[stages[0]]
        room = problem.limit + ROUNDING - self.held[rank]
        for stage in stages:
            m = inputs[stage]
            if m < forwards[stage]:
                there = self.arrivals[INPUT][stage][m]
                if there is not None and there <= now:
                    if guide.inputs[stage][m] < least:
                        least, kind, chosen = guide.inputs[stage][m], INPUT, stage
                elif there is not None and there < arrival:
                    arrival = there
            m = forwards[stage]
            if m == problem.num_microbatches:
                continue
            there = self.arrivals[FORWARD][stage][m]
            if there is None:
                continue
            if self.stashes[stage] >= guide.most[stage] or room < self._needed(stages, stage, m, oldest):
                is_full |= there <= now
            elif there <= now:
                if guide.forwards[stage][m] < least:
                    least, kind, chosen = guide.forwards[stage][m], FORWARD, stage
            elif there < arrival:
                arrival = there
        return kind, chosen, arrival, is_full

    def _needed(self, stages: list[int], stage: int, microbatch: int, oldest: int) -> int:
        """Return the room that a forward needs, with what the oldest microbatch will need after it."""
        done = self.done[FORWARD]
        needed = 1 if microbatch != oldest else 0
        for other in stages:
            if done[other] <= oldest:
                needed += 1
        return needed

    def _run(self, rank: int, kind: int, stage: int, microbatch: int, now: float) -> None:
        where = self.problem.where
        if kind == WEIGHT:
            end = now + where.weight[stage]
            self.weights_done[rank] += 1
            self.held[rank] -= self.problem.late
            self.stashes[stage] -= 1
        else:
            end = now + (where.forward, where.input)[kind][stage]
            self.done[kind][stage] += 1
            if kind == FORWARD:
                self.held[rank] += 1
                self.stashes[stage] += 1
            else:
                self.held[rank] += self.problem.late - 1
                self.late[rank].append((stage, microbatch))
            self._send(rank, kind, stage, microbatch, end)
        self.rows[rank].append(Step(kind, stage, microbatch, now, end))
        self.free[rank] = end
        heappush(self.events, (end, rank))

    def _send(self, rank: int, kind: int, stage: int, microbatch: int, end: float) -> None:
        """Tell the next stage, or the I of the last, when it can start."""
        if kind == FORWARD and stage + 1 == self.problem.num_stages:
            self.arrivals[INPUT][stage][microbatch] = end
            return
        other = stage + 1 if kind == FORWARD else stage - 1
        if other < 0:
            return
        arrival = end + self.problem.where.between(stage, other)
        self.arrivals[kind][other][microbatch] = arrival
        if (to := self.problem.where.rank_of[other]) != rank:
            heappush(self.events, (arrival, to))
