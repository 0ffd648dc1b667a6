"""What all ranks do, and when; and a plan whose order is given."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
from math import inf
from typing import NamedTuple

from mpitrain.schedules.actions import PAIR, Action
from mpitrain.schedules.search.problem import FORWARD, INPUT, ROUNDING, WEIGHT, Problem

KINDS = "FIWB"
Rows = Sequence[Sequence[Action]]
Order = list[list[tuple[int, int, int]]]  # of each rank: kind, stage, microbatch
Step = tuple[int, int, int, float, float]  # kind, stage, microbatch, start, end


class TimedOrder(NamedTuple):
    """What all ranks do, and when."""

    rows: list[list[Step]]

    @property
    def makespan(self) -> float:
        return max(row[-1][4] for row in self.rows)

    @property
    def span(self) -> float:
        return max(row[-1][4] - row[0][3] for row in self.rows)

    def peak(self, late: float) -> float:
        """Return the most stashes of one stage that a rank holds. late: the share of one between I and W."""
        changes = 1, late - 1, -late, -1
        return max(max(accumulate(changes[step[0]] for step in row)) for row in self.rows)

    def actions(self) -> list[list[Action]]:
        return [[Action(KINDS[kind], m, stage) for kind, stage, m, *_ in row] for row in self.rows]

    def without_weights(self) -> Order:
        """Return the order of F and I."""
        return [[step[:3] for step in row if step[0] != WEIGHT] for row in self.rows]


def order_of(rows: Rows, *, split: bool = True) -> Order:
    """Return the order of a table's rows. A whole B is an I and its W, also in a pair; it stays one if
    `split` is false.
    """
    return [
        [
            (KINDS.index(kind), action.stage, action.index)
            for action in row
            if action != PAIR
            for kind in ("IW" if split and action.kind == "B" else action.kind)
        ]
        for row in rows
    ]


def shortest(problem: Problem, tables: Iterable[Rows]) -> Rows | None:
    """Return the first table that fits of the shortest makespan, and of these of the shortest span."""
    best: tuple[TimedOrder, Rows] | None = None
    for rows in tables:
        plan = OrderedPlay(problem, order_of(rows, split=False)).play()
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
    longest: a plan that takes longer is of no use, and is given up where that is seen.
    """

    def __init__(self, problem: Problem, order: Order, overlap: float | None = None, longest: float = inf):
        self.problem = problem
        self.order = order
        # how much of W is done when the message arrives, at least
        self.begun = None if overlap is None else 1 - overlap
        self.longest = longest * (1 + ROUNDING)
        m = problem.num_microbatches
        nothing = [0.0] * m
        forwards, inputs = ([[inf] * m for _ in range(problem.num_stages)] for _ in (FORWARD, INPUT))
        self.ends = (forwards, inputs, [nothing] * problem.num_stages, inputs)
        # where the end of what is waited for will stand
        self.sources = (
            [nothing, *forwards[:-1]],
            gradients := [*inputs[1:], forwards[-1]],
            self.ends[WEIGHT],
            gradients,
        )
        ranks = range(len(order))
        self.cursors = [0 for _ in ranks]
        self.late: list[list[tuple[int, int]]] = [[] for _ in ranks]
        self.weights_done = [0 for _ in ranks]
        self.held: list[float] = [0 for _ in ranks]
        self.rows: list[list[Step]] = [[] for _ in ranks]
        self.now: list[float] = [0 for _ in ranks]
        self.left = list(problem.work)

    def play(self) -> TimedOrder | None:
        """Return the plan; None if the order can't be played, not within the limit, or takes too long."""
        waiting = list(range(len(self.order)))
        while waiting:
            rank = waiting.pop()
            for other in self._run(rank):
                if other not in waiting:
                    waiting.append(other)
            if self.now[rank] + self.left[rank] > self.longest:
                return None
        if any(cursor < len(row) for cursor, row in zip(self.cursors, self.order)):
            return None
        for rank in range(len(self.order)):
            while self.weights_done[rank] < len(self.late[rank]):
                self._weight(rank)
        return TimedOrder(self.rows)

    def _run(self, rank: int) -> set[int]:
        """Run a rank until it waits for another; return the ranks it has sent to."""
        problem, row, late = self.problem, self.rows[rank], self.late[rank]
        room, longest = problem.limit - 1 + ROUNDING, self.longest
        costs, delays, receivers = problem.costs, problem.delays, problem.receivers
        changes = 1, problem.late - 1, -problem.late, -1
        begun = self.begun
        now, left = self.now[rank], self.left[rank]
        sent = set()
        for kind, stage, m in islice(self.order[rank], self.cursors[rank], None):
            arrival = self.sources[kind][stage][m] + delays[kind][stage]
            if arrival == inf or now + left > longest:
                break
            if begun is not None:
                while self.weights_done[rank] < len(late):
                    waits = now + costs[WEIGHT][late[self.weights_done[rank]][0]] * begun <= arrival
                    if not waits and (kind != FORWARD or self.held[rank] <= room):
                        break
                    self.now[rank], self.left[rank] = now, left
                    self._weight(rank)
                    now, left = self.now[rank], self.left[rank]
            if kind == FORWARD and self.held[rank] > room:
                break
            start = max(now, arrival)
            cost = costs[kind][stage]
            now = start + cost
            left -= cost
            self.held[rank] += changes[kind]
            if kind == INPUT and begun is not None:
                late.append((stage, m))
            if kind != WEIGHT:
                self.ends[kind][stage][m] = now
                sent.add(receivers[kind][stage])
            row.append((kind, stage, m, start, now))
            self.cursors[rank] += 1
        self.now[rank], self.left[rank] = now, left
        sent.discard(rank)
        return sent

    def _weight(self, rank: int) -> None:
        """Run the oldest W of a rank."""
        stage, m = self.late[rank][self.weights_done[rank]]
        start, cost = self.now[rank], self.problem.costs[WEIGHT][stage]
        self.weights_done[rank] += 1
        self.held[rank] -= self.problem.late
        self.rows[rank].append((WEIGHT, stage, m, start, start + cost))
        self.now[rank] = start + cost
        self.left[rank] -= cost
