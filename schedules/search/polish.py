"""Make a plan shorter by moving single computations in it: those that its length depends on.

Moves that make it a little longer are taken too, ever fewer (simulated annealing, Kirkpatrick et
al. 1983): what all ranks do has many orders from which no single move leads down.
"""

import random

from mpitrain.schedules.search.problem import ROUNDING, Problem
from mpitrain.schedules.search.timed_order import FORWARD, INPUT, WEIGHT, Order, OrderedPlay, TimedOrder

FARTHEST = 6  # places that one move goes
WARMTH = 0.3  # of a microbatch's time on a rank: what a move may cost at first
OVERLAPS = (0, 0.5, 1)


def polish(problem: Problem, plan: TimedOrder, moves: int) -> TimedOrder:
    """Return the plan, or a shorter one that a number of moves leads to."""
    best = plan
    for warmth in (0, WARMTH):
        best = min(best, _anneal(problem, best, moves // 2, warmth * problem.period), key=_length)
    return best


def _length(plan: TimedOrder) -> tuple[float, float]:
    return plan.makespan, plan.span


def _anneal(problem: Problem, plan: TimedOrder, moves: int, warmth: float) -> TimedOrder:
    chance = random.Random(moves)  # its random() alone is the same everywhere
    best, length = plan, plan.makespan
    now, path = best, critical_path(problem, best)
    for turn in range(moves):
        if best.makespan <= problem.bound * (1 + ROUNDING):
            return best
        order = _moved(now, path, chance)
        if order is None:
            continue
        moved = OrderedPlay(problem, order, OVERLAPS[int(3 * chance.random())]).play()
        if moved is None:
            continue
        allowed = length + warmth * chance.random() * (1 - turn / moves)
        if moved.makespan <= allowed * (1 + ROUNDING):
            now, length, path = moved, moved.makespan, critical_path(problem, moved)
            best = min(best, now, key=_length)
    return best


def critical_path(problem: Problem, plan: TimedOrder) -> list[tuple[int, int]]:
    """Return (rank, position) of computations of which each begins when the next one here ends."""
    where = {step[:3]: (rank, i) for rank, row in enumerate(plan.rows) for i, step in enumerate(row)}
    rank = max(range(len(plan.rows)), key=lambda number: plan.rows[number][-1].end)
    position = len(plan.rows[rank]) - 1
    path = []
    while True:
        path.append((rank, position))
        kind, stage, m, start, _ = plan.rows[rank][position]
        if position and plan.rows[rank][position - 1].end >= start:
            position -= 1
        elif kind == WEIGHT or (kind == FORWARD and stage == 0):
            return path
        elif kind == FORWARD:
            rank, position = where[FORWARD, stage - 1, m]
        elif stage + 1 == problem.num_stages:
            rank, position = where[FORWARD, stage, m]
        else:
            rank, position = where[INPUT, stage + 1, m]


def _moved(plan: TimedOrder, path: list[tuple[int, int]], chance: random.Random) -> Order | None:
    """Return the order of F and I with one of the path moved; None if its stage's others are in the way."""
    rank, position = path[int(chance.random() * len(path))]
    order = plan.without_weights()
    row = order[rank]
    place = sum(step.kind != WEIGHT for step in plan.rows[rank][:position])
    if place == len(row):
        return None
    far = 1 + int(FARTHEST * chance.random() ** 2)
    to = place - far if chance.random() < 0.6 else place + far
    if not 0 <= to < len(row):
        return None
    kind, stage, _ = row[place]
    passed = row[to:place] if to < place else row[place + 1 : to + 1]
    if any(other[:2] == (kind, stage) for other in passed):
        return None
    row.insert(to, row.pop(place))
    return order
