"""Where buffers that are lent for a while lie in one stretch of memory, their arena.

Two that are lent at once don't overlap.

A program says when each is taken and given back. They are placed before it runs (arXiv:2001.03288,
section 5), and buffers of all lengths share the arena: with ZeRO-3 it holds the largest block and
its neighbour, not a pair of each length.

    taking   0    1    2    3    4    the embedding is 3 long, blocks are 1 long: an arena of 4
    3            | block 1 | block 3
    0..2    | embedding | block 2 |
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple


class Stay(NamedTuple):
    """One buffer of `length` elements, from the taking `begin` on, which it is part of.

    `end` is the first that may have its memory.
    """

    length: int
    begin: int
    end: int


class Arena(NamedTuple):
    """An arena of `length` elements.

    offsets: by program, where each buffer lies, in the order in which they are taken.
    """

    length: int
    offsets: dict[str, list[int]]


def arena_of(programs: Mapping[str, Sequence[Stay]]) -> Arena:
    """Return the arena in which the buffers of each program lie; only one program runs at a time."""
    places = {name: placed(stays) for name, stays in programs.items()}
    return Arena(max((_length(stays, places[name]) for name, stays in programs.items()), default=0), places)


def placed(stays: Sequence[Stay]) -> list[int]:
    """Return the offset of each buffer, by whichever of two ways needs less memory."""
    return min((by_size(stays), by_time(stays)), key=lambda offsets: _length(stays, offsets))


def by_size(stays: Sequence[Stay]) -> list[int]:
    """Place the longest first, each as low as it fits. Best where lengths differ much."""
    offsets = [0] * len(stays)
    # by taking: the memory of buffers that are lent then
    there: dict[int, list[tuple[int, int]]] = defaultdict(list)
    begun: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of those that it takes
    for number in sorted(range(len(stays)), key=lambda number: (-stays[number].length, stays[number].begin)):
        length, begin, end = stays[number]
        taken = [*there[begin], *(memory for taking in range(begin + 1, end) for memory in begun[taking])]
        at = _lowest(length, sorted(taken))
        offsets[number] = at
        begun[begin].append((at, at + length))
        for taking in range(begin, end):
            there[taking].append((at, at + length))
    return offsets


def by_time(stays: Sequence[Stay]) -> list[int]:
    """Place them in slots, the first first, each in one that is free and grows least.

    Best where all are about as long.
    """
    # free: the first taking that a slot is free for
    sizes = list[int]()
    free = list[int]()
    slots = [0] * len(stays)
    for number in sorted(range(len(stays)), key=lambda number: stays[number].begin):
        length, begin, end = stays[number]
        fitting = [slot for slot in range(len(sizes)) if free[slot] <= begin]
        if not fitting:
            fitting = [len(sizes)]
            sizes.append(0)
            free.append(0)
        slot = min(fitting, key=lambda slot: (max(length - sizes[slot], 0), sizes[slot]))
        sizes[slot] = max(sizes[slot], length)
        free[slot] = end
        slots[number] = slot
    begins = [0, *accumulate(sizes)]
    return [begins[slot] for slot in slots]


def _length(stays: Sequence[Stay], offsets: Sequence[int]) -> int:
    return max((at + stay.length for stay, at in zip(stays, offsets)), default=0)


def _lowest(length: int, taken: Sequence[tuple[int, int]]) -> int:
    """Return the lowest place of `length` elements that none of the ranges, in ascending order, overlaps."""
    at = 0
    for begin, end in taken:
        if begin - at >= length:
            break
        at = max(at, end)
    return at
