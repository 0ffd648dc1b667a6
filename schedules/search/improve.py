"""Search for the order of the shortest step: plays that are led by what was learnt from the best before.

The first plays take their urgencies from simple rules. Later ones take the latest start of each
computation in a good plan, a little disturbed, as list scheduling by critical paths does
(Kolisch and Hartmann 2006). What is found is polished. For small steps all smaller limits are
searched first, so that more memory doesn't cost time.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import islice, product, tee
from math import ceil, inf
from typing import NamedTuple

from mpitrain.schedules.actions import Action
from mpitrain.schedules.search.list_schedule import Guide, ListSchedule, Urgency
from mpitrain.schedules.search.polish import polish
from mpitrain.schedules.search.problem import FORWARD, INPUT, ROUNDING, SMALL, WEIGHT, Problem, is_large
from mpitrain.schedules.search.recomputation import recomputed
from mpitrain.schedules.search.timed_order import Order, OrderedPlay, Rows, TimedOrder, is_shorter, order_of
from mpitrain.schedules.search_progress import Notify, SearchProgress

KEPT, KEPT_OF_FEW = 10, 6  # plans that others are made from; where there is time for fewer than MANY plays
KEPT_RECOMPUTED = 3  # of those that recompute
RULES = 6  # simple rules that are followed at least, but for large steps
OPERATIONS = 100_000  # of all plays under a limit: a second
RULE_SHARE = 3  # as many simple rules are followed for each play that there is time for
FEWEST, MOST = 4, 150  # plays
MANY = 50  # plays: then there is time to polish each of the best
MOVES, MOST_MOVES = 6, 800  # of the polish: for each play that there is time for; at all


class RankedOrder(NamedTuple):
    """A plan, and the guide that led to it, or would lead near it."""

    cost: tuple[float, float]  # makespan, span
    plan: TimedOrder
    guide: Guide


def search(problem: Problem, known: Iterable[Rows] = (), notify: Notify | None = None) -> list[list[Action]]:
    """Return the best order that is found: of the shortest makespan, and of these the shortest span.

    known: orders of others, of which those that fit take part.
    """
    (orders,) = tee(_different(known), 1)  # read on as far as they are played
    pool: list[RankedOrder] = []
    limits = levels(problem)
    progress = SearchProgress(notify)
    progress.expect(len(limits))
    for limit in limits:
        step = problem.within(limit)
        is_brief = limit < limits[-1]
        for order, overlap in _each_with(orders, (None,) if is_brief else (None, 0, 1)):
            if pool and _is_best(step, pool[0]):
                break
            _play_known(step, pool, order, overlap)
        _improve(step, pool, is_brief)
        progress.step()
    return pool[0].plan.actions()


def _different(known: Iterable[Rows]) -> Iterator[Order]:
    """Yield the orders of tables, each once."""
    found = set()
    for rows in known:
        order = order_of(rows)
        if (key := tuple(map(tuple, order))) not in found:
            found.add(key)
            yield order


def _each_with(
    orders: Iterator[Order], overlaps: Sequence[float | None]
) -> Iterator[tuple[Order, float | None]]:
    """Yield every order with every overlap, from the first order on each time; `orders` is of tee()."""
    return ((order, overlap) for order in copy(orders) for overlap in overlaps)


def search_recomputed(
    problem: Problem, known: Iterable[Rows], notify: Notify | None = None
) -> list[list[Action]] | None:
    """Return the best order of others in which stashes are recomputed as the limit asks for; None: none fits.

    Those of smaller limits take part, as in search().
    """
    orders = [order_of(rows) for rows in known]
    best: list[TimedOrder] = []
    moves = min(MOVES * num_plays(problem.num_operations), MOST_MOVES) // 2  # each takes twice as long
    limits = levels(problem)
    progress = SearchProgress(notify)
    progress.expect(len(limits))
    for limit in limits:
        step, is_brief = problem.within(limit), limit < limits[-1]
        plans = [
            _play_recomputed(step, order, overlap)
            for order in orders
            for overlap in ((None,) if is_brief else (None, 0, 1))
        ]
        different = {_cost(plan): plan for plan in (*best, *plans) if plan is not None}
        best = [different[cost] for cost in sorted(different)[: 1 if is_brief else KEPT_RECOMPUTED]]
        progress.step()
    best = [polish(problem, plan, moves) for plan in best]
    return min(best, key=_cost).actions() if best else None


def _play_recomputed(problem: Problem, order: Order, overlap: float | None) -> TimedOrder | None:
    if overlap is not None:
        order = [[step for step in row if step[0] != WEIGHT] for row in order]
    complete = recomputed(problem, order)
    return None if complete is None else OrderedPlay(problem, complete, overlap).play()


def num_plays(num_operations: int) -> int:
    """Return how many plays of a step there is time for."""
    return OPERATIONS // num_operations


def _play_known(problem: Problem, pool: list[RankedOrder], order: Order, overlap: float | None) -> None:
    """Play an order as it is, or with W where a rank waits."""
    if overlap is not None:
        order = [[step for step in row if step[0] != WEIGHT] for row in order]
    if plan := OrderedPlay(problem, order, overlap).play():
        guide = Guide(*_starts(problem, plan), _unlimited(problem), overlap or 0)
        _add(problem, pool, RankedOrder(_cost(plan), plan, guide))


def _improve(problem: Problem, pool: list[RankedOrder], is_brief: bool) -> None:
    number = num_plays(problem.num_operations)
    plays = FEWEST if number else 1
    for guide in islice(first_guides(problem), RULES if is_brief else _num_rules(problem)):
        if not pool or not _is_best(problem, pool[0]):
            _play(problem, pool, guide)
    chance = random.Random(0)  # its random() alone is the same everywhere
    for _ in range(plays if is_brief else min(max(number, plays), MOST)):
        if not _is_best(problem, pool[0]):
            _play(problem, pool, _near(problem, pool, chance))
    moves = min(MOVES * number, MOST_MOVES)
    for best in pool[: 1 if is_brief or number < MANY else KEPT]:
        if _is_best(problem, pool[0]):
            return
        plan = polish(problem, best.plan, moves // 16 if is_brief else moves)
        _add(problem, pool, RankedOrder(_cost(plan), plan, best.guide))


def _play(problem: Problem, pool: list[RankedOrder], guide: Guide) -> None:
    longest = pool[-1].cost[0] if len(pool) == _most_kept(problem) else inf
    if plan := ListSchedule(problem, guide, longest).play():
        _add(problem, pool, RankedOrder(_cost(plan), plan, guide))


def _is_best(problem: Problem, candidate: RankedOrder) -> bool:
    """Whether no order has a shorter makespan."""
    return candidate.cost[0] <= problem.bound * (1 + ROUNDING)


def levels(problem: Problem) -> list[float]:
    """Return the limits that are tried, the problem's last."""
    chunks = max(map(len, problem.stages))
    top = min(problem.limit, chunks * problem.num_microbatches)
    tried: list[float] = []
    limit = chunks
    while limit < top - ROUNDING and problem.num_operations <= SMALL:
        tried.append(limit)
        limit += 1
    return [*tried, top]


def _most_kept(problem: Problem) -> int:
    return KEPT if num_plays(problem.num_operations) >= MANY else KEPT_OF_FEW


def _cost(plan: TimedOrder) -> tuple[float, float]:
    return plan.makespan, plan.span


def _add(problem: Problem, pool: list[RankedOrder], candidate: RankedOrder) -> None:
    """Take a candidate into the pool if it is one of the best; of two makespans that are equal one stays."""
    equal = [one for one in pool if abs(candidate.cost[0] - one.cost[0]) <= ROUNDING * one.cost[0]]
    if equal and not is_shorter(candidate.plan, equal[0].plan):
        return
    if equal:
        pool.remove(equal[0])
    pool.append(candidate)
    pool.sort(key=lambda one: one.cost)
    del pool[_most_kept(problem) :]


# ---------------------------------------------------------------- guides


def by_rules(problem: Problem) -> Iterator[list[list[Action]]]:
    """Yield the orders that simple rules lead to; of large steps the most promising."""
    for guide in islice(first_guides(problem), _num_rules(problem)):
        if plan := ListSchedule(problem, guide).play():
            yield plan.actions()


def _num_rules(problem: Problem) -> int:
    """Return how many simple rules there is time for."""
    if is_large(problem.num_stages, problem.num_microbatches):
        return RULES // 2
    return max(RULES, RULE_SHARE * num_plays(problem.num_operations))


def first_guides(problem: Problem) -> Iterator[Guide]:
    """Yield guides from simple rules, the most promising first."""
    most = [_lived(problem, 2), _unlimited(problem), _lived(problem, 1), _shared(problem, 1)]
    most += [_lived(problem, 0), _shared(problem, 0)]
    rules = [_in_time(problem), _forwards_first(problem), _inputs_first(problem)]
    for room, overlap, (forwards, inputs) in product(most, (0, 1), rules):
        yield Guide(forwards, inputs, room, overlap)


def _table(problem: Problem, urgency: Callable[[int, int], float]) -> Urgency:
    return [
        [urgency(stage, m) for m in range(problem.num_microbatches)] for stage in range(problem.num_stages)
    ]


def _in_time(problem: Problem) -> tuple[Urgency, Urgency]:
    """Return when everything would be if a microbatch began each period and waited for nothing."""
    turn = problem.period
    return (
        _table(problem, lambda stage, m: problem.first_forward[stage] + m * turn),
        _table(problem, lambda stage, m: problem.first_input[stage] + m * turn),
    )


def _inputs_first(problem: Problem) -> tuple[Urgency, Urgency]:
    every = problem.num_microbatches * problem.num_stages
    return (
        _table(problem, lambda stage, m: every + m - stage * problem.num_microbatches + every),
        _table(problem, lambda stage, m: m * problem.num_stages - stage),
    )


def _forwards_first(problem: Problem) -> tuple[Urgency, Urgency]:
    every = problem.num_microbatches * problem.num_stages
    return (
        _table(problem, lambda stage, m: m - stage * problem.num_microbatches),
        _table(problem, lambda stage, m: every + m * problem.num_stages - stage),
    )


def _unlimited(problem: Problem) -> tuple[float, ...]:
    return (inf,) * problem.num_stages


def _lived(problem: Problem, more: int) -> tuple[float, ...]:
    """Return the stashes that each stage holds if none is held longer than it has to be, and some more."""
    return tuple(max(1, ceil(life / problem.period)) + more for life in problem.lifespan)


def _shared(problem: Problem, more: int) -> tuple[float, ...]:
    """Divide the limit of each rank over its stages by how long their stashes are held."""
    most = [1] * problem.num_stages
    for stages in problem.stages:
        whole = sum(problem.lifespan[stage] for stage in stages)
        for stage in stages:
            most[stage] = max(1, int(problem.limit * problem.lifespan[stage] / whole + ROUNDING) + more)
    return tuple(most)


def _near(problem: Problem, pool: list[RankedOrder], chance: random.Random) -> Guide:
    """Return a guide near one of the best."""
    number = 0
    while number + 1 < len(pool) and chance.random() < 0.5:
        number += 1
    origin = pool[number]
    urgencies = _starts if chance.random() < 0.5 else _latest_starts
    disturbance = problem.period / 2 * chance.random() ** 2
    forwards, inputs = (
        [[start + disturbance * chance.random() for start in row] for row in rows]
        for rows in urgencies(problem, origin.plan)
    )
    most = origin.guide.most
    if chance.random() < 0.5:
        most = _changed(problem, most, chance)
    overlap = (0, 0.5, 1)[int(3 * chance.random())] if chance.random() < 0.5 else origin.guide.overlap
    return Guide(forwards, inputs, most, overlap)


def _changed(problem: Problem, most: tuple[float, ...], chance: random.Random) -> tuple[float, ...]:
    """Give some stages in a row room for one stash more or fewer, or all room for any number."""
    if chance.random() < 0.3:
        return _unlimited(problem)
    first = int(chance.random() * problem.num_stages)
    last = first if chance.random() < 0.5 else int(chance.random() * problem.num_stages)
    more = 1 if chance.random() < 0.5 else -1
    return tuple(
        max(1, min(number, problem.limit) + more * (min(first, last) <= stage <= max(first, last)))
        for stage, number in enumerate(most)
    )


def _starts(problem: Problem, plan: TimedOrder) -> tuple[Urgency, Urgency]:
    tables = [_table(problem, lambda *_: 0), _table(problem, lambda *_: 0)]
    for row in plan.rows:
        for kind, stage, m, start, _ in row:
            if kind != WEIGHT:
                tables[kind][stage][m] = start
    return tables[FORWARD], tables[INPUT]


def _latest_starts(problem: Problem, plan: TimedOrder) -> tuple[Urgency, Urgency]:
    """Return the latest start of each F and I that doesn't make the plan longer, in its order."""
    where, last = problem.where, problem.num_stages - 1
    end = plan.makespan
    tables = [_table(problem, lambda *_: end) for _ in range(3)]
    forwards, inputs, weights = tables
    following = [end] * len(plan.rows)
    steps = sorted(
        ((step[3], rank, step) for rank, row in enumerate(plan.rows) for step in row), reverse=True
    )
    for _, rank, (kind, stage, m, start, stop) in steps:
        latest = following[rank]
        if kind == FORWARD:
            latest = min(
                latest,
                inputs[stage][m]
                if stage == last
                else forwards[stage + 1][m] - where.between(stage, stage + 1),
            )
        elif kind == INPUT:
            latest = min(latest, weights[stage][m])
            if stage:
                latest = min(latest, inputs[stage - 1][m] - where.between(stage, stage - 1))
        tables[kind][stage][m] = following[rank] = latest - (stop - start)
    return forwards, inputs
