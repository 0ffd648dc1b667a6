"""What all ranks do, and when; and a plan whose order is given."""

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from mpitrain.schedules.actions import OFFLOAD, PAIR, Action
from mpitrain.schedules.search.problem import (
    AGAIN,
    DROPPED,
    FETCHED,
    FETCHED_WHOLE,
    FORWARD,
    INPUT,
    PLAIN,
    ROUNDING,
    SENT,
    WEIGHT,
    WHOLE,
    Problem,
)

KINDS = "FIWBRFFIB"
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

    @property
    def length(self) -> tuple[float, float]:
        """What plans are sorted by: makespan, then span."""
        return self.makespan, self.span

    def peak(self, problem: Problem) -> float:
        """Return the most stashes of one stage that a rank holds."""
        peak = 0.0
        for row in self.rows:
            held = 0.0
            for kind, *_ in row:
                peak = max(peak, held + problem.needs[kind])
                held += problem.changes[kind]
        return peak

    def actions(self) -> list[list[Action]]:
        return [
            [
                Action(letter, m, stage)
                for kind, stage, m, *_ in row
                for letter in (OFFLOAD * (kind == SENT) + KINDS[kind])
            ]
            for row in self.rows
        ]

    def without_weights(self) -> Order:
        """Return the order of F and I."""
        return [
            [(PLAIN[kind], stage, m) for kind, stage, m, *_ in row if kind not in (WEIGHT, AGAIN)]
            for row in self.rows
        ]


def order_of(rows: Rows, *, split: bool = True) -> Order:
    """Return the order of a table's rows; if `split`, a whole B, also in a pair, is I and W."""
    kinds: dict[str, tuple[int, ...]] = {kind: (KINDS.index(kind),) for kind in "FIWBR"}
    kinds |= {PAIR.kind: (), OFFLOAD: ()}
    if split:
        kinds["B"] = INPUT, WEIGHT
    order = [
        [(kind, action.stage, action.index) for action in row for kind in kinds[action.kind]] for row in rows
    ]
    dropped = {action[2:0:-1] for row in rows for action in row if action.kind == "R"}
    sent = {action[2:0:-1] for row in rows for action in row if action.kind == OFFLOAD}
    if not dropped and not sent:
        return order
    freed = {FORWARD: DROPPED}, {FORWARD: SENT, INPUT: FETCHED, WHOLE: FETCHED_WHOLE}

    def of(step: tuple[int, int, int]) -> tuple[int, int, int]:
        names = freed[0] if step[1:] in dropped else freed[1] if step[1:] in sent else {}
        return names.get(step[0], step[0]), *step[1:]

    return [list(map(of, row)) for row in order]


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

    overlap: W isn't in the order, and goes where a rank waits or has no room; it is begun if no
    more than this share of it is left when the message arrives. None: W is in the order.
    longest: a plan that takes longer is given up where that is seen.
    """

    def __init__(self, problem: Problem, order: Order, overlap: float | None = None, longest: float = inf):
        self.problem = problem
        self.order = order
        self.places_weights = overlap is not None
        self.begun = 1 - (overlap or 0)  # how much of W is done when the message arrives, at least
        self.longest = longest * (1 + ROUNDING)
        m = problem.num_microbatches
        at_once = [[0.0] * m] * problem.num_stages
        forwards, inputs = ([[inf] * m for _ in range(problem.num_stages)] for _ in (FORWARD, INPUT))
        before, gradients = [at_once[0], *forwards[:-1]], [*inputs[1:], forwards[-1]]
        # of each kind and stage: where the ends of what is waited for stand, and its own, and its traits
        backward, alone = (gradients, inputs), (at_once, at_once)
        places = (before, forwards), backward, alone, backward, alone  # as in PLAIN
        self.steps = [
            [(source, end, *traits) for source, end, traits in zip(*places[plain], of_stages)]
            for plain, of_stages in zip(PLAIN, problem.traits)
        ]
        self.late = [list[tuple[int, int]]() for _ in order]  # of each rank: I whose W may follow
        self.rows = [list[Step]() for _ in order]
        # ranks that run next; those that wait for a message; how many are done
        self.ready = list(range(len(order)))
        self.waits = [False for _ in order]
        self.num_done = 0
        self.is_too_long = False

    def play(self) -> TimedOrder | None:
        """Return the plan; None if the order can't be played, not within the limit, or takes too long."""
        ranks = [self._run(rank) for rank in range(len(self.order))]
        while self.ready and not self.is_too_long:
            next(ranks[self.ready.pop()], None)
        return TimedOrder(self.rows) if self.num_done == len(ranks) else None

    def _run(self, rank: int) -> Iterator[None]:
        """Run a rank; stop where it waits for a message; end early where there is no room."""
        problem, row, late, waits = self.problem, self.rows[rank], self.late[rank], self.waits
        steps, weights, begun, longest = self.steps, problem.costs[WEIGHT], self.begun, self.longest
        now, left, held, num_late = 0.0, problem.work[rank], 0.0, 0
        for kind, stage, m in self.order[rank]:
            sources, ends, delay, cost, change, room, receiver = steps[kind][stage]
            while sources[m] == inf:
                waits[rank] = True
                yield
            arrival = sources[m] + delay
            while num_late:
                of_stage, of_m = late[-num_late]
                end = now + weights[of_stage]
                if now + weights[of_stage] * begun > arrival and held <= room:
                    break
                row.append((WEIGHT, of_stage, of_m, now, end))
                left -= weights[of_stage]
                now, held, num_late = end, held - problem.late, num_late - 1
            if held > room:
                return
            start = arrival if arrival > now else now
            now = start + cost
            left -= cost
            if now + left > longest:
                self.is_too_long = True
                return
            held += change
            row.append((kind, stage, m, start, now))
            if kind in (WEIGHT, AGAIN):
                continue
            if self.places_weights and PLAIN[kind] == INPUT:
                late.append((stage, m))
                num_late += 1
            ends[m] = now
            if waits[receiver]:
                waits[receiver] = False
                self.ready.append(receiver)
        self._run_weights(rank, now, late[len(late) - num_late :])
        self.num_done += 1

    def _run_weights(self, rank: int, now: float, late: Sequence[tuple[int, int]]) -> None:
        for stage, m in late:
            end = now + self.problem.costs[WEIGHT][stage]
            self.rows[rank].append((WEIGHT, stage, m, now, end))
            now = end
