"""Guides of plays: from simple rules, and from what a good plan did when."""

import random
from collections.abc import Callable, Iterator
from itertools import product
from math import ceil, inf

from mpitrain.schedules.search.list_schedule import Guide, Urgency
from mpitrain.schedules.search.problem import FORWARD, INPUT, ROUNDING, WEIGHT, Problem
from mpitrain.schedules.search.timed_order import TimedOrder


def first_guides(problem: Problem) -> Iterator[Guide]:
    """Yield guides from simple rules, the most promising first."""
    most = [_lived(problem, 2), unlimited(problem), _lived(problem, 1), _shared(problem, 1)]
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


def unlimited(problem: Problem) -> tuple[float, ...]:
    return (inf,) * problem.num_stages


def _lived(problem: Problem, more: int) -> tuple[float, ...]:
    """Return each stage's stashes if none is held longer than it has to be, and some more."""
    return tuple(max(1, ceil(life / problem.period)) + more for life in problem.lifespan)


def _shared(problem: Problem, more: int) -> tuple[float, ...]:
    """Divide each rank's limit over its stages by how long their stashes are held."""
    most = [1] * problem.num_stages
    for stages in problem.stages:
        whole = sum(problem.lifespan[stage] for stage in stages)
        for stage in stages:
            most[stage] = max(1, int(problem.limit * problem.lifespan[stage] / whole + ROUNDING) + more)
    return tuple(most)


def near(problem: Problem, plan: TimedOrder, origin: Guide, chance: random.Random) -> Guide:
    """Return a guide near a plan, and near the guide that led to it."""
    urgencies = starts if chance.random() < 0.5 else _latest_starts
    disturbance = problem.period / 2 * chance.random() ** 2
    forwards, inputs = (
        [[start + disturbance * chance.random() for start in row] for row in rows]
        for rows in urgencies(problem, plan)
    )
    most = origin.most
    if chance.random() < 0.5:
        most = _changed(problem, most, chance)
    overlap = (0, 0.5, 1)[int(3 * chance.random())] if chance.random() < 0.5 else origin.overlap
    return Guide(forwards, inputs, most, overlap)


def _changed(problem: Problem, most: tuple[float, ...], chance: random.Random) -> tuple[float, ...]:
    """Give some stages in a row room for one stash more or fewer, or all room for any number."""
    if chance.random() < 0.3:
        return unlimited(problem)
    first = int(chance.random() * problem.num_stages)
    last = first if chance.random() < 0.5 else int(chance.random() * problem.num_stages)
    more = 1 if chance.random() < 0.5 else -1
    return tuple(
        max(1, min(number, problem.limit) + more * (min(first, last) <= stage <= max(first, last)))
        for stage, number in enumerate(most)
    )


def starts(problem: Problem, plan: TimedOrder) -> tuple[Urgency, Urgency]:
    tables = [_table(problem, lambda *_: 0), _table(problem, lambda *_: 0)]
    for row in plan.rows:
        for kind, stage, m, start, _ in row:
            if kind != WEIGHT:
                tables[kind][stage][m] = start
    return tables[FORWARD], tables[INPUT]


def _latest_starts(problem: Problem, plan: TimedOrder) -> tuple[Urgency, Urgency]:
    """Return the latest start of each F and I, in the plan's order, that doesn't make it longer."""
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
