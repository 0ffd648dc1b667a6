"""Make a plan shorter by moving single computations in it: those that its length depends on.

Moves that make it a little longer are taken too, ever fewer (simulated annealing, Kirkpatrick et
al. 1983): from many orders no single move leads down.
"""

import random
from operator import attrgetter

from mpitrain.schedules.search.problem import AGAIN, FORWARD, INPUT, PLAIN, ROUNDING, WEIGHT, Problem
from mpitrain.schedules.search.recomputation import recomputed
from mpitrain.schedules.search.timed_order import Order, OrderedPlay, TimedOrder

FARTHEST = 6  # places that one move goes
WARMTH = 0.3  # of a microbatch's time on a rank: what a move may cost at first
OVERLAPS = (0, 0.5, 1)
LENGTH = attrgetter("length")


def polish(problem: Problem, plan: TimedOrder, moves: int) -> TimedOrder:
    """Return the plan, or a shorter one that a number of moves leads to."""
    best = plan
    for warmth in (0, WARMTH):
        best = min(best, _anneal(problem, best, moves // 2, warmth * problem.period), key=LENGTH)
    return best


def _anneal(problem: Problem, plan: TimedOrder, moves: int, warmth: float) -> TimedOrder:
    chance = random.Random(moves)  # its random() alone is the same everywhere
    best, length = plan, plan.makespan
    path, now = critical_path(problem, best), best.without_weights()
    for turn in range(moves):
        if best.makespan <= problem.bound * (1 + ROUNDING):
            return best
        order = _moved(now, path, chance)
        played = recomputed(problem, order) if problem.frees and order else order
        if order is None or played is None:
            continue
        allowed = length + warmth * chance.random() * (1 - turn / moves)
        moved = OrderedPlay(problem, played, OVERLAPS[int(3 * chance.random())], allowed).play()
        if moved is not None:
            length, path, now = moved.makespan, critical_path(problem, moved), order
            best = min(best, moved, key=LENGTH)
    return best


def critical_path(problem: Problem, plan: TimedOrder) -> list[tuple[int, int]]:
    """Return (rank, place in its F and I) of computations; each begins when the next here ends.

    Of a W or a recomputation it is the next F or I's.
    """
    where: dict[tuple[int, int, int], tuple[int, int, int]] = {}
    for rank, row in enumerate(plan.rows):
        place = 0
        for position, (kind, stage, m, _, _) in enumerate(row):
            where[PLAIN[kind], stage, m] = rank, position, place
            place += kind not in (WEIGHT, AGAIN)
    rank = max(range(len(plan.rows)), key=lambda number: plan.rows[number][-1][4])
    position = len(plan.rows[rank]) - 1
    path = []
    while True:
        kind, stage, m, start, _ = plan.rows[rank][position]
        kind = PLAIN[kind]
        path.append((rank, where[kind, stage, m][2]))
        if position and plan.rows[rank][position - 1][4] >= start:
            position -= 1
        elif kind in (WEIGHT, AGAIN) or (kind == FORWARD and stage == 0):
            return path
        elif kind == FORWARD:
            rank, position, _ = where[FORWARD, stage - 1, m]
        elif stage + 1 == problem.num_stages:
            rank, position, _ = where[FORWARD, stage, m]
        else:
            rank, position, _ = where[INPUT, stage + 1, m]


def _moved(order: Order, path: list[tuple[int, int]], chance: random.Random) -> Order | None:
    """Return the order with one of the path moved; None if others of its stage are in the way."""
    rank, place = path[int(chance.random() * len(path))]
    row = list(order[rank])
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
    return [*order[:rank], row, *order[rank + 1 :]]
