"""How many buffers of each kind a program needs at once: with ZeRO-2, or sums in a tree, for gradients; with ZeRO-3 for weights too."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpitrain.layout.gradient_uses import Stage, added_to, completed_by, group_of, summed_in
from mpitrain.layout.held import FIRST, held_by
from mpitrain.layout.plan import Plan
from mpitrain.schedules.actions import OF_GRADIENTS, Action
from mpitrain.schedules.table import Table

Lent = tuple[str, int]  # domain, elements


class Needed(NamedTuple):
    """Buffers that are in use at once, at most."""

    weights: Counter[Lent]
    gradients: Counter[Lent]


def needed_by(plan: Plan, rank: int, place: tuple[int, int] = FIRST) -> Needed:
    """Return what the programs of a pipeline rank will borrow. place: as in held_by."""
    zero, tree = plan.config.parallel.zero, plan.config.numerics.reproducible == "layout"
    stages, training, evaluation = held_by(plan, rank, place), plan.training.ranks[rank], plan.evaluation.ranks[rank]
    weights = most_fetched(training, stages) | most_fetched(evaluation, stages)
    gradients = most_added_to(training, stages, plan.table, zero, tree=tree) if zero >= 2 or tree else Counter[Lent]()
    if zero >= 2:
        gradients.update(gradients.keys())  # one more while one is being reduced
    return Needed(weights, gradients)


def most_fetched(program: Sequence[Action], stages: Mapping[int, Stage]) -> Counter[Lent]:
    """Play what weights do with their buffers, and return how many of each kind are in use at once."""
    users, held, most = Counter[int](), Counter[Lent](), Counter[Lent]()
    for action in program:
        if action.kind in ("GATHER", "RELEASE"):
            bucket = stages[action.stage].buckets[action.index]
            users[id(bucket.weights)] += 1 if action.kind == "GATHER" else -1
            if users[id(bucket.weights)] == (action.kind == "GATHER"):
                held[bucket.plan.domain, bucket.weights.length] += 1 if action.kind == "GATHER" else -1
                most |= held
    return most


def most_added_to(
    program: Sequence[Action], stages: Mapping[int, Stage], table: Table, zero: int, *, tree: bool
) -> Counter[Lent]:
    """Play what gradients do with their buffers: a tree has one for each group of microbatches, and for each sum that waits."""
    completed, open_, held, most = completed_by(program, stages, table), set(), Counter[Lent](), Counter[Lent]()
    waiting: dict[int, list[int]] = defaultdict(list)  # by gradient: levels of sums
    buckets = [bucket for state in stages.values() for bucket in state.buckets]
    lent = {id(gradient): (bucket.plan.domain, gradient.length) for bucket in buckets for gradient in bucket.gradients}
    for action in program:
        for gradient in added_to(action, stages):
            key = (id(gradient), group_of(table, action.index) if tree else 0)
            if key not in open_:
                open_.add(key)
                held[lent[id(gradient)]] += 1
        most |= held
        for gradient, _ in completed.get(action, ()) if tree else ():
            level, levels = 0, waiting[id(gradient)]
            while levels and levels[-1] == level:
                level = levels.pop() + 1
                held[lent[id(gradient)]] -= 1
            levels.append(level)
        for gradient in given_back(action, stages, zero):
            held[lent[id(gradient)]] -= 1
            open_ -= {key for key in open_ if key[0] == id(gradient)}
            waiting[id(gradient)].clear()
    return most


def given_back(action: Action, stages: Mapping[int, Stage], zero: int) -> list:
    """Return the gradients whose buffers an instruction gives back.

    Below ZeRO-2 what a tree has lent is copied to what is always there, as soon as all microbatches are summed. From 2 on a use of a
    tied embedding is given back when it has been added to the first, all else when it has been reduced.
    """
    if action.kind not in OF_GRADIENTS:
        return []
    bucket = stages[action.stage].buckets[action.index]
    if action.kind == "REDUCE":
        read = bucket.gradients[:1] if bucket.plan.over else bucket.gradients
        return read if zero >= 2 or not bucket.plan.over else []
    if action.part or not bucket.plan.over:
        return []
    return summed_in(bucket, stages)[1 if zero >= 2 else 0 :]
