"""Search for the order of the shortest step: plays that are led by what was learnt from the best before.

The first plays take their urgencies from simple rules, later ones the latest starts in a good plan,
a little disturbed, as list scheduling by critical paths does (Kolisch and Hartmann 2006). What is
found is polished.
"""

import random
from collections.abc import Iterable, Iterator
from itertools import islice
from math import inf
from operator import attrgetter
from typing import NamedTuple

from mpitrain.schedules.actions import Action
from mpitrain.schedules.search.guides import first_guides, near, starts, unlimited
from mpitrain.schedules.search.list_schedule import Guide, ListSchedule
from mpitrain.schedules.search.polish import LENGTH, polish
from mpitrain.schedules.search.problem import ROUNDING, SMALL, WEIGHT, Problem, is_large
from mpitrain.schedules.search.recomputation import recomputed
from mpitrain.schedules.search.timed_order import Order, OrderedPlay, Rows, TimedOrder, is_shorter, order_of
from mpitrain.schedules.search_progress import Notify, SearchProgress

KEPT, KEPT_OF_FEW = 10, 6  # plans that others are made from; where there is time for fewer than MANY plays
KEPT_FREED = 3  # of those that recompute or offload
PLAYS_LATER = 20  # plays there is time for, for each plan that is kept of those that are played later
RULES = 6  # simple rules that are followed at least, but for large steps
OPERATIONS = 100_000  # of all plays under a limit: a second
RULE_SHARE = 3  # as many simple rules are followed for each play that there is time for
FEWEST, MOST = 4, 150  # plays near the best
MANY = 50  # plays: then there is time to polish each of the best
OVERLAPS = 0, 0.1, 1  # of W: a message may come a little before its end
OVERLAPS_OF_FEW = 0, 0.1, 0.3, 1  # where a rank waits for messages most of the step: few microbatches
MOVES, MOST_MOVES = 6, 800  # of the polish: for each play that there is time for; at all


class RankedOrder(NamedTuple):
    """A plan, and the guide that led to it, or would lead near it."""

    plan: TimedOrder
    guide: Guide


def search(
    problem: Problem,
    known: Iterable[Rows],
    more: Iterable[Rows],
    last: Iterable[Rows],
    notify: Notify | None = None,
) -> TimedOrder:
    """Return the best plan that is found: of the shortest makespan, and of these the shortest span.

    known: orders of others, of which those that fit take part.
    more: orders for when these have left something to gain, in a pool of their own; of small steps
    the best of both pools are one at last.
    last: orders that are played as they are, at the end: the best plan is as short as each of them.
    """
    progress = SearchProgress(notify)
    progress.expect(1)
    pool: list[RankedOrder] = []
    _play_all(problem, pool, known)
    _follow_rules(problem, pool)
    _improve(problem, pool)
    if not _is_best(problem, pool[0]):
        _improve_later(problem, pool, more)
        _play_as_they_are(problem, pool, last)
    progress.step()
    return pool[0].plan


def _improve_later(problem: Problem, pool: list[RankedOrder], more: Iterable[Rows]) -> None:
    """Play more orders, and near the best of them; take the best into the pool."""
    later: list[RankedOrder] = []
    _play_all(problem, later, more)
    if not later:
        return
    _improve(problem, later, num_plays(problem.num_operations) // PLAYS_LATER)
    for one in later:
        _add(problem, pool, one)
    if problem.num_operations <= SMALL:
        _improve(problem, pool)


def _play_as_they_are(problem: Problem, pool: list[RankedOrder], last: Iterable[Rows]) -> None:
    for order in _different(last):
        if plan := _played(problem, order, None, pool[0].plan.makespan):
            _add(problem, pool, RankedOrder(plan, Guide(*starts(problem, plan), unlimited(problem), 0)))


def search_freed(problem: Problem, known: Iterable[Rows]) -> TimedOrder | None:
    """Return the best plan with stashes recomputed or offloaded as the limit asks, or None."""
    moves = min(MOVES * num_plays(problem.num_operations), MOST_MOVES) // 2  # each takes twice as long
    plans = [plan for one in _each_way(problem, known) if (plan := _play_freed(problem, *one)) is not None]
    different = {plan.length: plan for plan in plans}
    best = [polish(problem, different[length], moves) for length in sorted(different)[:KEPT_FREED]]
    return min(best, key=LENGTH, default=None)


def _different(known: Iterable[Rows]) -> Iterator[Order]:
    found = set()
    for rows in known:
        order = order_of(rows)
        if (key := tuple(map(tuple, order))) not in found:
            found.add(key)
            yield order


def _play_all(problem: Problem, pool: list[RankedOrder], known: Iterable[Rows]) -> None:
    for order, overlap in _each_way(problem, known):
        if pool and _is_best(problem, pool[0]):
            return
        if plan := _played(problem, order, overlap, _longest(problem, pool)):
            guide = Guide(*starts(problem, plan), unlimited(problem), overlap or 0)
            _add(problem, pool, RankedOrder(plan, guide))


def _each_way(problem: Problem, known: Iterable[Rows]) -> Iterator[tuple[Order, float | None]]:
    """Yield each order with each overlap of W that it is played with."""
    overlaps = OVERLAPS_OF_FEW if problem.num_microbatches < problem.where.num_ranks else OVERLAPS
    for order in _different(known):
        for overlap in (None, *overlaps):
            yield order, overlap


def _played(problem: Problem, order: Order, overlap: float | None, longest: float) -> TimedOrder | None:
    order = order if overlap is None else _without_weights(order)
    return OrderedPlay(problem, order, overlap, longest).play()


def _without_weights(order: Order) -> Order:
    return [[step for step in row if step[0] != WEIGHT] for row in order]


def _play_freed(problem: Problem, order: Order, overlap: float | None) -> TimedOrder | None:
    order = order if overlap is None else _without_weights(order)
    complete = recomputed(problem, order)
    return None if complete is None else OrderedPlay(problem, complete, overlap).play()


def num_plays(num_operations: int) -> int:
    """Return how many plays of a step there is time for."""
    return OPERATIONS // num_operations


def _follow_rules(problem: Problem, pool: list[RankedOrder]) -> None:
    for guide in islice(first_guides(problem), _num_rules(problem)):
        if not pool or not _is_best(problem, pool[0]):
            _play(problem, pool, guide)


def _improve(problem: Problem, pool: list[RankedOrder], most: int = KEPT) -> None:
    """Play near the best plans, and polish them: `most` of them where there is time."""
    number = num_plays(problem.num_operations)
    chance = random.Random(0)  # its random() alone is the same everywhere
    for _ in range(min(max(number, FEWEST if number else 1), MOST)):
        if not _is_best(problem, pool[0]):
            origin = _one_of(pool, chance)
            _play(problem, pool, near(problem, origin.plan, origin.guide, chance))
    for best in pool[: most if number >= MANY else 1]:
        if _is_best(problem, pool[0]):
            return
        plan = polish(problem, best.plan, min(MOVES * number, MOST_MOVES))
        _add(problem, pool, RankedOrder(plan, best.guide))


def _one_of(pool: list[RankedOrder], chance: random.Random) -> RankedOrder:
    """Return one of the best: each half as often as the one before."""
    number = 0
    while number + 1 < len(pool) and chance.random() < 0.5:
        number += 1
    return pool[number]


def _play(problem: Problem, pool: list[RankedOrder], guide: Guide) -> None:
    if plan := ListSchedule(problem, guide, _longest(problem, pool)).play():
        _add(problem, pool, RankedOrder(plan, guide))


def _is_best(problem: Problem, candidate: RankedOrder) -> bool:
    return candidate.plan.makespan <= problem.bound * (1 + ROUNDING)


def _most_kept(problem: Problem) -> int:
    return KEPT if num_plays(problem.num_operations) >= MANY else KEPT_OF_FEW


def _add(problem: Problem, pool: list[RankedOrder], candidate: RankedOrder) -> None:
    """Take a candidate into the pool if it is one of the best; of equal makespans one stays."""
    makespan = candidate.plan.makespan
    equal = [one for one in pool if abs(makespan - one.plan.makespan) <= ROUNDING * one.plan.makespan]
    if equal and not is_shorter(candidate.plan, equal[0].plan):
        return
    if equal:
        pool.remove(equal[0])
    pool.append(candidate)
    pool.sort(key=attrgetter("plan.length"))
    del pool[_most_kept(problem) :]


def _longest(problem: Problem, pool: list[RankedOrder]) -> float:
    return pool[-1].plan.makespan if len(pool) == _most_kept(problem) else inf


def by_rules(problem: Problem, makespan: float) -> Iterator[list[list[Action]]]:
    """Yield the orders that simple rules lead to, of large steps the most promising.

    Lower limits are followed too, where an order can be shorter than `makespan`.
    """
    for limit in reversed(problem.rungs):
        step = problem.within(limit)
        if step.bound >= makespan * (1 - ROUNDING):
            return
        for guide in islice(first_guides(step), _num_rules(step)):
            if plan := ListSchedule(step, guide, makespan).play():
                yield plan.actions()


def _num_rules(problem: Problem) -> int:
    """Return how many simple rules there is time for."""
    if is_large(problem.num_stages, problem.num_microbatches):
        return RULES // 2
    return max(RULES, RULE_SHARE * num_plays(problem.num_operations))
