"""Which cases of a long list are told by default: few in which every two features that meet in the
list meet.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Case = TypeVar("Case")


def covering(
    cases: Sequence[Case], features: Callable[[Case], Iterable[object]], cost: Callable[[Case], float]
) -> list[Case]:
    """Return some of `cases`, in their order, that have every pair of features that any of them has.

    The cheap ones are preferred.

    A greedy choice: next comes who adds most pairs for what it costs. features: what a case has,
    hashable. cost: more than 0.
    """
    pairs = [set(itertools.combinations(dict.fromkeys(features(case)), 2)) for case in cases]
    chosen = set()
    while any(pairs):
        best = max(range(len(cases)), key=lambda i: (len(pairs[i]) / cost(cases[i]), -i))
        chosen.add(best)
        for i, others in enumerate(pairs):
            if i != best:
                others -= pairs[best]
        pairs[best] = set()
    return [case for i, case in enumerate(cases) if i in chosen]
