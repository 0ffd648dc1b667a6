"""What all ranks do, and when; and a plan whose order is given."""

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from mpitrain.schedules.actions import PAIR, Action
from mpitrain.schedules.search.problem import ROUNDING, Problem

FORWARD, INPUT, WEIGHT = range(3)
KINDS = "FIW"
Rows = Sequence[Sequence[Action]]
Order = list[list[tuple[int, int, int]]]  # of each rank: kind, stage, microbatch


class Step(NamedTuple):
    """One computation of a rank."""

    kind: int
    stage: int
    microbatch: int
    start: float
    end: float


class TimedOrder(NamedTuple):
    """What all ranks do, and when."""

    rows: list[list[Step]]

    @property
    def makespan(self) -> float:
        return max(row[-1].end for row in self.rows)

    @property
    def span(self) -> float:
        return max(row[-1].end - row[0].start for row in self.rows)

    def actions(self) -> list[list[Action]]:
        return [[Action(KINDS[step.kind], step.microbatch, step.stage) for step in row] for row in self.rows]

    def without_weights(self) -> Order:
        """Return the order of F and I."""
        return [[step[:3] for step in row if step.kind != WEIGHT] for row in self.rows]


def order_of(rows: Rows) -> Order:
    """Return the order of a table's rows. A whole B is an I and its W, also in a pair."""
    return [
        [
            (KINDS.index(kind), action.stage, action.index)
            for action in row
            if action != PAIR
            for kind in ("IW" if action.kind == "B" else action.kind)
        ]
        for row in rows
    ]


def shortest(problem: Problem, tables: Iterable[Rows]) -> Rows | None:
    """Return the first table that fits of the shortest makespan, and of these of the shortest span."""
    best: tuple[TimedOrder, Rows] | None = None
    for rows in tables:
        plan = OrderedPlay(problem, order_of(rows)).play()
        if plan is not None and (best is None or is_shorter(plan, best[0])):
            best = plan, rows
    return best and best[1]


def is_shorter(plan: TimedOrder, other: TimedOrder) -> bool:
    """Tell whether a plan has the shorter makespan, or else the shorter span."""
    if abs(plan.makespan - other.makespan) > ROUNDING * other.makespan:
        return plan.makespan < other.makespan
    return plan.span < other.span * (1 - ROUNDING)


class OrderedPlay:
    """Plays ranks in a given order, each computation as early as possible.

    overlap: W isn't in the order, and goes where a rank waits or has no room; it is begun if no more
    than this share of it is still to do when the message arrives. None: W is in the order.
    """

    def __init__(self, problem: Problem, order: Order, overlap: float | None = None):
        self.problem = problem
        self.order = order
        self.overlap = overlap
        ends = range(problem.num_stages)
        self.ends: list[list[list[float | None]]] = [
            [[None] * problem.num_microbatches for _ in ends] for _ in (FORWARD, INPUT)
        ]
        ranks = range(len(order))
        self.cursors = [0 for _ in ranks]
        self.late: list[list[tuple[int, int]]] = [[] for _ in ranks]
        self.weights_done = [0 for _ in ranks]
        self.held: list[float] = [0 for _ in ranks]
        self.rows: list[list[Step]] = [[] for _ in ranks]
        self.now: list[float] = [0 for _ in ranks]

    def play(self) -> TimedOrder | None:
        """Return the plan; None if the order can't be played, or not within the limit."""
        waiting = list(range(len(self.order)))
        while waiting:
            rank = waiting.pop()
            for other in self._run(rank):
                if other not in waiting:
                    waiting.append(other)
        if any(cursor < len(row) for cursor, row in zip(self.cursors, self.order)):
            return None
        for rank in range(len(self.order)):
            self._weights(rank, inf)
        return TimedOrder(self.rows)

    def _run(self, rank: int) -> set[int]:
        """Run a rank until it waits for another; return the ranks it has sent to."""
        problem, order = self.problem, self.order[rank]
        rank_of = problem.where.rank_of
        receivers = set()
        for position in range(self.cursors[rank], len(order)):
            kind, stage, m = order[position]
            arrival = self._arrival(kind, stage, m)
            if arrival is None:
                break
            if kind != WEIGHT and self.overlap is not None:
                self._weights(rank, arrival)
            if kind == FORWARD:
                while self._is_full(rank) and self._weight_left(rank):
                    self._weight(rank)
                if self._is_full(rank):
                    break
            self._step(rank, kind, stage, m, arrival)
            self.cursors[rank] = position + 1
            if kind != WEIGHT:
                other = stage + (1 if kind == FORWARD else -1)
                if 0 <= other < problem.num_stages and rank_of[other] != rank:
                    receivers.add(rank_of[other])
        return receivers

    def _arrival(self, kind: int, stage: int, m: int) -> float | None:
        """Return when a computation has its message; None: nobody has sent it yet."""
        last = self.problem.num_stages - 1
        if kind == WEIGHT or (kind == FORWARD and stage == 0):
            return 0
        if kind == INPUT and stage == last:
            return self.ends[FORWARD][stage][m]
        before = stage - 1 if kind == FORWARD else stage + 1
        end = self.ends[kind][before][m]
        return None if end is None else end + self.problem.where.between(before, stage)

    def _is_full(self, rank: int) -> bool:
        return self.held[rank] + 1 > self.problem.limit + ROUNDING

    def _weight_left(self, rank: int) -> bool:
        return self.overlap is not None and self.weights_done[rank] < len(self.late[rank])

    def _weights(self, rank: int, arrival: float) -> None:
        """Run W while a rank waits for a message."""
        while self._weight_left(rank):
            stage, _ = self.late[rank][self.weights_done[rank]]
            if self.now[rank] + self.problem.where.weight[stage] * (1 - (self.overlap or 0)) > arrival:
                return
            self._weight(rank)

    def _weight(self, rank: int) -> None:
        stage, m = self.late[rank][self.weights_done[rank]]
        self.weights_done[rank] += 1
        self._step(rank, WEIGHT, stage, m, 0)

    def _step(self, rank: int, kind: int, stage: int, m: int, arrival: float) -> None:
        where = self.problem.where
        start = max(self.now[rank], arrival)
        end = start + (where.forward, where.input, where.weight)[kind][stage]
        self.held[rank] += (1, self.problem.late - 1, -self.problem.late)[kind]
        if kind == INPUT:
            self.late[rank].append((stage, m))
        if kind != WEIGHT:
            self.ends[kind][stage][m] = end
        self.rows[rank].append(Step(kind, stage, m, start, end))
        self.now[rank] = end
