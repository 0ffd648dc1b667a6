"""Which cases of a long list are told by default: few in which every feature is met, or every two that
meet in the list.
"""

import heapq
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

Case = TypeVar("Case")


def pairwise_cases(
    cases: Sequence[Case], features: Callable[[Case], Iterable[object]], cost: Callable[[Case], float]
) -> list[Case]:
    """Return some of `cases`, in their order, that have every pair of features that any of them has.

    The cheap ones are preferred.

    A greedy choice: next comes who adds most pairs for what it costs. features: what a case has,
    hashable. cost: more than 0.
    """
    pairs = [set(itertools.combinations(dict.fromkeys(features(case)), 2)) for case in cases]
    return [cases[i] for i in _fewest(pairs, [cost(case) for case in cases])]


def once(cases: Sequence[Case], parameters: Callable[[Case], Mapping[str, object]]) -> list[Case]:
    """Return some of `cases`, in their order, in which each value of each parameter is met.

    Of a layout, "tp=2 pp=2", ("tp=2", "pp=2") or a dictionary, each setting is met.
    """
    features = [
        {(name, each) for name, value in parameters(case).items() for each in _settings(value)}
        for case in cases
    ]
    return [cases[i] for i in _fewest(features, [1.0] * len(cases))]


def spread(cases: Sequence[Case], number: int) -> list[Case]:
    """Return `number` of `cases`, the first and the last among them and equal distances between; all, if
    there are no more.
    """
    last = len(cases) - 1
    if number > last:
        return [*cases]
    return [cases[round(i * last / (number - 1))] for i in range(number)] if number > 1 else [*cases[:1]]


def _settings(value: object) -> list[str]:
    if isinstance(value, Mapping):
        return [f"{key}={each}" for key, each in value.items()]
    if isinstance(value, tuple) and all(isinstance(each, str) for each in value):
        value = " ".join(value)
    words = re.split(r"[ ,]+", value) if isinstance(value, str) else []
    if words and all("=" in word for word in words):
        return words
    return [f"{type(value).__name__} {value}"]


def _fewest(features: Sequence[set], cost: Sequence[float]) -> list[int]:
    """Return the numbers of few sets that have together what all have. Empties the sets."""
    having: dict[object, list[set]] = {}
    for each in features:
        for feature in each:
            having.setdefault(feature, []).append(each)
    chosen = list[int]()
    # what a set adds only falls: who comes first by what it once added, and still adds it, is the best
    heap = [(-len(each) / cost[i], i) for i, each in enumerate(features)]
    heapq.heapify(heap)
    while heap:
        before, i = heapq.heappop(heap)
        now = -len(features[i]) / cost[i]
        if now != before:
            heapq.heappush(heap, (now, i))
        elif now:
            chosen.append(i)
            for feature in [*features[i]]:
                for others in having[feature]:
                    others.discard(feature)
    return sorted(chosen)
