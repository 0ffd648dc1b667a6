"""How many buffers of each kind a program needs at once: with ZeRO-2 for gradients, with ZeRO-3 for weights too."""

from collections import Counter
from collections.abc import Mapping, Sequence

from mpitrain.parallel.pool import Kind
from mpitrain.parallel.zero import Sharding
from mpitrain.schedules.actions import Action
from mpitrain.stage import Stage


def reserve(sharding: Sharding, stages: Mapping[int, Stage], *programs: Sequence[Action]) -> None:
    """Allocate what the programs of this rank will borrow. Collective over the data axis, whose ranks have the same programs."""
    if sharding.stage == 3:
        fetched = [_most_fetched(program, stages) for program in programs]
        sharding.weights.reserve({kind: max(counts[kind] for counts in fetched) for counts in fetched for kind in counts})
    if sharding.stage >= 2:
        most = Counter[Kind]()
        for program in programs:
            most |= _most_added_to(program, stages)
        total = Counter(gradient.kind for stage in stages.values() for bucket in stage.buckets for gradient in bucket.gradients)
        sharding.gradients.reserve({kind: min(count + 1, total[kind]) for kind, count in most.items()})  # one is being reduced


def _most_fetched(program: Sequence[Action], stages: Mapping[int, Stage]) -> Counter[Kind]:
    users, held, most = Counter[int](), Counter[Kind](), Counter[Kind]()
    for action in program:
        if action.kind in ("GATHER", "RELEASE"):
            weights = stages[action.stage].buckets[action.index].weights
            users[id(weights)] += 1 if action.kind == "GATHER" else -1
            if users[id(weights)] == (action.kind == "GATHER"):
                held[weights.kind] += 1 if action.kind == "GATHER" else -1
                most |= held
    return most


def _most_added_to(program: Sequence[Action], stages: Mapping[int, Stage]) -> Counter[Kind]:
    added, held, most = set[int](), Counter[Kind](), Counter[Kind]()
    for action in program:
        if action.kind in ("B", "I", "W"):
            for bucket in stages[action.stage].buckets:
                if action.part is None or action.part in bucket.parts:
                    new = [gradient for gradient in bucket.gradients if id(gradient) not in added]
                    added |= {id(gradient) for gradient in new}
                    held.update(gradient.kind for gradient in new)
            most |= held
        elif action.kind == "REDUCE":
            bucket = stages[action.stage].buckets[action.index]
            if bucket.over is None:  # the others are reduced at the end
                held.subtract(gradient.kind for gradient in bucket.gradients)
                added -= {id(gradient) for gradient in bucket.gradients}
    return most
