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
from mpitrain.schedules.families.building_block import (
    Offsets,
    filled_from_building_block,
    from_building_block,
    peak_of_block,
    published_from_building_block,
)
from mpitrain.schedules.families.v_shape import LEGS
from mpitrain.schedules.families.v_slots import PERIOD
from mpitrain.schedules.search_progress import REMEMBERED, SearchProgress

MANY = 50  # blocks: then there is time to look at what few microbatches hold


def v_orders(
    num_ranks: int, num_microbatches: int, limit: float, number: int, *, fills: bool
) -> Iterator[list[list[Action]]]:
    """Yield orders of so many blocks, those that hold most within a limit of stages' stashes first.

    Those that hold more come last: without room W may run earlier than in the block.
    fills: two of each, whose cooldown is tight, and what that leaves free is filled; else one that isn't.
    """
    few = num_microbatches if number >= MANY else None
    for _, offsets in _nearest(_blocks(num_ranks, few), limit)[:number]:
        if fills:
            yield from filled_from_building_block(offsets, num_microbatches)
        else:
            yield from_building_block(offsets, num_microbatches, SearchProgress(None))


def published_v_orders(
    num_ranks: int, num_microbatches: int, limit: float, number: int
) -> Iterator[list[list[Action]]]:
    """Yield the orders that others publish of so many blocks within a limit."""
    for peak, offsets in _nearest(_blocks(num_ranks, None), limit)[:number]:
        if peak <= limit and (rows := published_from_building_block(offsets, num_microbatches)):
            yield rows


def _nearest(blocks: list[tuple[int, Offsets]], limit: float) -> list[tuple[int, Offsets]]:
    return sorted(blocks, key=lambda one: (one[0] > limit, abs(limit - one[0])))


@lru_cache(REMEMBERED)
def _blocks(num_ranks: int, num_microbatches: int | None) -> list[tuple[int, Offsets]]:
    """Return (peak, block) of so many microbatches, or of many; what returns first comes first."""
    found = sorted(
        {_offsets(block) for block in _patterns(num_ranks)}, key=lambda block: (block[0][-1], block)
    )
    return [(_peak(block, num_microbatches), block) for block in found]


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


def _peak(block: Offsets, num_microbatches: int | None) -> int:
    """Return how many stashes a rank holds at most, with each W in the first free slot after its I."""
    if num_microbatches is not None and num_microbatches < block[0][-1] // PERIOD + 2:  # not all are busy
        return peak_of_block(block, num_microbatches)
    return max(
        sum((end - 1 - begin - (now - begin) % PERIOD) // PERIOD + 1 for begin, end in (legs[::3], legs[1:3]))
        + late
        for legs in block
        for now, late in enumerate(_late(legs))
    )


def _late(legs: tuple[int, ...]) -> list[int]:
    """Return how many stashes wait for their W in each slot of the six."""
    slots = [slot % PERIOD for slot in legs]
    late, waiting = [0] * PERIOD, 0
    for slot in (*range(PERIOD), *range(PERIOD)):  # in the first turn some wait that began before
        if slot in slots[2:]:
            waiting += 1
        elif slot not in slots and waiting:
            waiting -= 1
        late[slot] = waiting
    return late
