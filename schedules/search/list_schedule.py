"""One play of all ranks in the order of time; each takes the most urgent thing that it can do.

It never gets stuck: of what a rank has room for, enough is kept for the chunks that each of its
microbatches still has to go through (the banker's algorithm, Dijkstra 1965).
"""

from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from mpitrain.schedules.search.problem import FORWARD, INPUT, ROUNDING, WEIGHT, Problem
from mpitrain.schedules.search.timed_order import Step, TimedOrder

Urgency = list[list[float]]  # of a stage and a microbatch; what has less comes first


class Guide(NamedTuple):
    """What a rank prefers. most: stashes of each stage.

    overlap: W is begun if no more than this share of it is left when the next message arrives.
    """

    forwards: Urgency
    inputs: Urgency
    most: tuple[float, ...]
    overlap: float


class ListSchedule:
    """The state of all ranks while they are played. longest: a longer plan is given up."""

    def __init__(self, problem: Problem, guide: Guide, longest: float = inf):
        self.problem = problem
        self.guide = guide
        self.longest = longest * (1 + ROUNDING)
        m = problem.num_microbatches
        # when the message of each forward and I is there; after the last microbatch none is
        self.arrivals = [[[inf] * (m + 1) for _ in range(problem.num_stages)] for _ in (FORWARD, INPUT)]
        self.arrivals[FORWARD][0][:m] = [0] * m
        self.done = [[0] * problem.num_stages for _ in (FORWARD, INPUT)]
        self.stashes = [0] * problem.num_stages
        ranks = range(problem.where.num_ranks)
        self.late: list[list[tuple[int, int]]] = [[] for _ in ranks]  # I whose W may follow
        self.weights_done = [0 for _ in ranks]
        self.held: list[float] = [0 for _ in ranks]
        self.free: list[float] = [0 for _ in ranks]
        self.left = list(problem.work)
        self.rows: list[list[Step]] = [[] for _ in ranks]
        self.events: list[tuple[float, int]] = [(0, rank) for rank in ranks]

    def play(self) -> TimedOrder | None:
        """Return the plan; None if it takes too long."""
        while self.events:
            now, rank = heappop(self.events)
            if self.free[rank] <= now:
                if now + self.left[rank] > self.longest:
                    return None
                self._next(rank, now)
        assert sum(map(len, self.rows)) == self.problem.num_operations, "ranks wait for one another"
        return TimedOrder(self.rows)

    def _next(self, rank: int, now: float) -> None:
        """Let a free rank take what is most urgent, or W while it waits."""
        kind, stage, arrival, is_full = self._most_urgent(rank, now)
        if stage >= 0:
            self._run(rank, kind, stage, self.done[kind][stage], now)
            return
        late, number = self.late[rank], self.weights_done[rank]
        if number < len(late):
            stage, microbatch = late[number]
            cost = self.problem.costs[WEIGHT][stage]
            if is_full or now + cost * (1 - self.guide.overlap) <= arrival:
                self._run(rank, WEIGHT, stage, microbatch, now)

    def _most_urgent(self, rank: int, now: float) -> tuple[int, int, float, bool]:
        """Return the kind and the stage of what is there (-1: none), when the next message is, and
        whether a forward that is there has no room.
        """
        (forward_urgency, input_urgency, most, _), problem = self.guide, self.problem
        forward_arrivals, input_arrivals = self.arrivals
        forwards, inputs = self.done
        least, arrival = inf, inf
        chosen, kind, is_full = -1, FORWARD, False
        for stage in problem.stages[rank]:
            m = inputs[stage]
            there = input_arrivals[stage][m]
            if there <= now:
                if input_urgency[stage][m] < least:
                    least, kind, chosen = input_urgency[stage][m], INPUT, stage
            elif there < arrival:
                arrival = there
            m = forwards[stage]
            there = forward_arrivals[stage][m]
            if there == inf:
                continue
            if self.stashes[stage] >= most[stage] or not self._has_room(rank, stage):
                is_full |= there <= now
            elif there <= now:
                if forward_urgency[stage][m] < least:
                    least, kind, chosen = forward_urgency[stage][m], FORWARD, stage
            elif there < arrival:
                arrival = there
        return kind, chosen, arrival, is_full

    def _has_room(self, rank: int, stage: int) -> bool:
        """Whether all microbatches can come to their end, the oldest first, after a forward of this stage."""
        stages = self.problem.stages[rank]
        forwards, inputs = self.done
        room = self.problem.limit + ROUNDING - self.held[rank] - 1
        if room < 0 or room >= len(stages):
            return room >= 0
        if len(stages) <= 2:  # what the oldest frees is enough for the next
            oldest = inputs[stages[0]]
            return (
                room >= (forwards[stage] != oldest) + sum(forwards[other] <= oldest for other in stages) - 1
            )
        forwards[stage] += 1
        for m in range(inputs[stages[0]], forwards[stages[0]]):
            needed = sum(forwards[other] <= m for other in stages)
            if room < needed or room >= len(stages):
                break
            room += sum(inputs[other] <= m for other in stages) - needed
        else:
            needed = 0
        forwards[stage] -= 1
        return room >= needed

    def _run(self, rank: int, kind: int, stage: int, microbatch: int, now: float) -> None:
        cost = self.problem.costs[kind][stage]
        end = now + cost
        if kind == WEIGHT:
            self.weights_done[rank] += 1
            self.held[rank] -= self.problem.late
            self.stashes[stage] -= 1
        else:
            self.done[kind][stage] += 1
            if kind == FORWARD:
                self.held[rank] += 1
                self.stashes[stage] += 1
            else:
                self.held[rank] += self.problem.late - 1
                self.late[rank].append((stage, microbatch))
            self._send(rank, kind, stage, microbatch, end)
        self.rows[rank].append((kind, stage, microbatch, now, end))
        self.left[rank] -= cost
        self.free[rank] = end
        heappush(self.events, (end, rank))

    def _send(self, rank: int, kind: int, stage: int, microbatch: int, end: float) -> None:
        if kind == FORWARD and stage + 1 == self.problem.num_stages:
            self.arrivals[INPUT][stage][microbatch] = end
            return
        other = stage + 1 if kind == FORWARD else stage - 1
        if other < 0:
            return
        arrival = end + self.problem.delays[kind][other]
        self.arrivals[kind][other][microbatch] = arrival
        to = self.problem.where.rank_of[other]
        if to != rank and arrival > self.free[to]:  # else it looks when it is free
            heappush(self.events, (arrival, to))
