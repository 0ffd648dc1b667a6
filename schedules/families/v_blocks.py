"""Building blocks of a V for any memory (arXiv:2405.15362, appendix A), of which v-half and v-min are two.

A block is repeated every six slots. The first rank has its four legs (see v_shape) in different slots of
the six. From a rank to the next, legs down the ranks are `shift` slots later, from some rank on perhaps
fewer (`small_shift`); legs up again are one slot earlier. The more, the longer a stash is held, and the
less is waited for in each turn.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import permutations, product

from mpitrain.schedules.actions import Action
from mpitrain.schedules.families.v_half import PERIOD, from_building_block, tight_from_building_block
from mpitrain.schedules.families.v_shape import LEGS
from mpitrain.schedules.search_progress import REMEMBERED, SearchProgress

Offsets = tuple[tuple[int, ...], ...]  # of each rank: the slots of the first microbatch's legs


def v_orders(
    num_ranks: int, num_microbatches: int, limit: float, number: int
) -> Iterator[list[list[Action]]]:
    """Yield the orders of so many blocks, those that hold most within a limit of stages' stashes first."""
    for offsets in _fitting(num_ranks, num_microbatches, limit)[:number]:
        yield from_building_block(offsets, num_microbatches, SearchProgress(None))


def tight_v_orders(
    num_ranks: int, num_microbatches: int, limit: float, number: int
) -> Iterator[list[list[Action]]]:
    """Yield the orders of the same blocks with a tight cooldown (see v_half)."""
    for offsets in _fitting(num_ranks, num_microbatches, limit)[:number]:
        yield from tight_from_building_block(offsets, num_microbatches)


def _fitting(num_ranks: int, num_microbatches: int, limit: float) -> list[Offsets]:
    """Return the blocks that hold no more than a limit, with so many microbatches."""
    return [offsets for peak, offsets in _blocks(num_ranks, num_microbatches) if peak <= limit]


@lru_cache(REMEMBERED)
def _blocks(num_ranks: int, num_microbatches: int) -> list[tuple[int, Offsets]]:
    """Return (peak, block), the highest peak first, and of equal ones what returns first."""
    found = {_offsets(block) for block in _patterns(num_ranks)}
    return sorted(
        ((_peak(block, num_microbatches), block) for block in found),
        key=lambda one: (-one[0], one[1][0][-1], one[1]),
    )


def _patterns(num_ranks: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield the slots, modulo six, of each rank's legs."""
    shifts = range(1, PERIOD)
    for first, shift, small_shift in product(permutations(shifts, 3), shifts, shifts):
        if small_shift > shift:
            continue
        # the number of ranks before the shift is the small one
        for change in range(1, num_ranks) if small_shift < shift else [num_ranks]:
            block: list[tuple[int, ...]] = [(0, *first)]
            while len(block) < num_ranks and len(set(block[-1])) == len(LEGS):
                down = shift if len(block) <= change else small_shift
                block.append(tuple((s + d) % PERIOD for s, d in zip(block[-1], (down, -1, down, -1))))
            if len(set(block[-1])) == len(LEGS):
                yield block


def _offsets(block: list[tuple[int, ...]]) -> Offsets:
    """Return the slots of a microbatch that has each leg as early as it can."""
    ranks = range(len(block))
    slots: list[list[int]] = [[] for _ in ranks]
    now = 0
    for leg in LEGS:
        for rank in reversed(ranks) if leg % 2 else ranks:
            now += (block[rank][leg] - now) % PERIOD
            slots[rank].append(now)
            now += 1
    return tuple(map(tuple, slots))


def _peak(block: Offsets, num_microbatches: int) -> int:
    """Return how many stashes a rank holds at most, with each W right after its I.

    Few microbatches hold less than as many as keep a rank busy.
    """
    return max(
        _held(legs, begin + PERIOD * number, num_microbatches)
        for legs in block
        for begin in legs[:2]
        for number in range(min(num_microbatches, (legs[3] - begin) // PERIOD + 2))  # then all are busy
    )


def _held(legs: tuple[int, ...], now: int, num_microbatches: int) -> int:
    """Return how many stashes a rank holds in a slot."""
    begun = [min(num_microbatches, (now - begin) // PERIOD + 1) for begin in legs[:2]]
    ended = [max(0, (now - end - 2) // PERIOD + 1) for end in legs[2:]]
    return sum(begun) - sum(ended)
