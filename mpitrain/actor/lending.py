"""How many buffers of each kind a program needs at once: with ZeRO-2, or sums in a tree, for gradients; with ZeRO-3 for weights too."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from mpitrain.actor.slots import added_to, completed_by, group_of
from mpitrain.actor.stage_state import StageState
from mpitrain.parallel.zero.pool import Kind
from mpitrain.parallel.zero.shards import Sharding
from mpitrain.schedules.actions import Action
from mpitrain.schedules.table import Table


def reserve(
    sharding: Sharding, stages: Mapping[int, StageState], table: Table, training: Sequence[Action], evaluation: Sequence[Action]
) -> None:
    """Allocate what the programs of this rank will borrow. Collective over the data axis, whose ranks have the same programs."""
    if sharding.stage == 3:
        fetched = [most_fetched(program, stages) for program in (training, evaluation)]
        sharding.weights.reserve({kind: max(counts[kind] for counts in fetched) for counts in fetched for kind in counts})
    if sharding.stage >= 2 or sharding.tree:
        most = most_added_to(training, stages, table, sharding)
        slack = sharding.stage >= 2  # one more while one is being reduced
        sharding.gradients.reserve({kind: count + slack for kind, count in most.items()})


def most_fetched(program: Sequence[Action], stages: Mapping[int, StageState]) -> Counter[Kind]:
    """Play what weights do with their buffers, and return how many of each kind are in use at once."""
    users, held, most = Counter[int](), Counter[Kind](), Counter[Kind]()
    for action in program:
        if action.kind in ("GATHER", "RELEASE"):
            weights = stages[action.stage].buckets[action.index].weights
            users[id(weights)] += 1 if action.kind == "GATHER" else -1
            if users[id(weights)] == (action.kind == "GATHER"):
                held[weights.kind] += 1 if action.kind == "GATHER" else -1
                most |= held
    return most


def most_added_to(program: Sequence[Action], stages: Mapping[int, StageState], table: Table, sharding: Sharding) -> Counter[Kind]:
    """Play what gradients do with their buffers: a tree has one for each group of microbatches, and for each sum that waits."""
    completed, open_, held, most = completed_by(program, stages, table), set(), Counter[Kind](), Counter[Kind]()
    waiting: dict[int, list[int]] = defaultdict(list)  # by gradient: levels of sums
    for action in program:
        for gradient in added_to(action, stages):
            key = (id(gradient), group_of(table, action.index) if sharding.tree else 0)
            if key not in open_:
                open_.add(key)
                held[gradient.kind] += 1
        most |= held
        for gradient, _ in completed.get(action, ()) if sharding.tree else ():
            level, levels = 0, waiting[id(gradient)]
            while levels and levels[-1] == level:
                level = levels.pop() + 1
                held[gradient.kind] -= 1
            levels.append(level)
        if action.kind == "REDUCE":
            bucket = stages[action.stage].buckets[action.index]
            for gradient in bucket.gradients:
                if sharding.stage < 2 or bucket.over is None:  # the others are reduced at the end
                    held[gradient.kind] -= 1
                    open_ -= {key for key in open_ if key[0] == id(gradient)}
                waiting[id(gradient)].clear()
    return most
