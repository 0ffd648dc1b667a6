"""Computations that run together: PAIR, and the forward and the backward that follow it."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, zip_longest

from mpitrain.schedules.actions import PAIR, Action


def grouped(actions: Iterable[Action]) -> Iterator[tuple[Action, ...]]:
    """Yield what starts together: PAIR with its two computations, and any other action alone."""
    rest = iter(actions)
    for action in rest:
        yield (action, *islice(rest, 2)) if action == PAIR else (action,)


def part_by_part(forward: Action, backward: Action, num_parts: Sequence[int]) -> Iterator[tuple[Action, ...]]:
    """Yield the groups of a pair that is walked in parts: part i with part i, then the rest alone.

    num_parts: of each stage.
    """
    walks = [
        [action._replace(part=part) for part in range(num_parts[action.stage])]
        for action in (forward, backward)
    ]
    for parts in zip_longest(*walks):
        yield (PAIR, *parts) if all(parts) else tuple(filter(None, parts))
