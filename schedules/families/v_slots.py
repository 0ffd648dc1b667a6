"""Slots of a V's legs on every rank: a microbatch starts every six, and W takes what is free.

Orders of a V are made by moving actions from slot to slot (v_reorder.py, building_block.py).
"""

from collections.abc import Iterable, Iterator

from mpitrain.schedules.actions import Action
from mpitrain.schedules.families.v_shape import LEGS, action, before, weight_of

PERIOD = 6  # slots of a building block: F F I I W W
W = len(LEGS)  # the line of W of both stages, after those of the legs
CHANGES = {0: 1, 1: 1, 2: 0, 3: 0, W: -1, None: 0}  # by how many stashes a line changes what is held

Line = int | None  # of a slot; None: it is free
Lines = list[list[int]]  # of a rank: the slots of all microbatches on each leg, perhaps of W


def repeated(offsets: tuple[tuple[int, ...], ...], num_microbatches: int) -> list[Lines]:
    """Return the slots of all microbatches' legs, and of W in the first free ones."""
    ranks = [
        [[start + PERIOD * m for m in range(num_microbatches)] for start in starts] for starts in offsets
    ]
    return list(map(with_weights, ranks))


def rows_of(ranks: list[Lines]) -> list[list[Action]]:
    return [_order(legs, rank, len(ranks)) for rank, (*legs, _) in enumerate(ranks)]


def _order(legs: Lines, rank: int, num_ranks: int) -> list[Action]:
    slots = [(slot, action(leg, m, rank, num_ranks)) for leg in LEGS for m, slot in enumerate(legs[leg])]
    done = {2: 0, 3: 0}
    for slot, leg in weights_of(legs):
        slots.append((slot, weight_of(leg, done[leg], rank, num_ranks)))
        done[leg] += 1
    return [what for _, what in sorted(slots)]


def with_weights(legs: Lines) -> Lines:
    return [*legs, [slot for slot, _ in weights_of(legs)]]


def weights_of(legs: Lines) -> Iterator[tuple[int, int]]:
    """Give each W the first free slot after its I, leg 2 before leg 3; yield (slot, leg)."""
    leg_at = {slot: leg for leg in LEGS for slot in legs[leg]}
    late = {2: 0, 3: 0}
    for slot in range(max(leg_at) + 1):
        leg = leg_at.get(slot)
        if leg in late:
            late[leg] += 1
        elif leg is None and any(late.values()):
            leg = 2 if late[2] else 3
            late[leg] -= 1
            yield slot, leg
    for leg in late:
        for _ in range(late[leg]):
            slot += 1
            yield slot, leg


def events_of(ranks: list[Lines]) -> list[tuple[int, int, int, int]]:
    """Return (slot, rank, line, microbatch) of everything, in the order of time."""
    return sorted(
        (s, r, i, m)
        for r, lines in enumerate(ranks)
        for i, line in enumerate(lines)
        for m, s in enumerate(line)
    )


def needed_slots(ranks: list[Lines], rank: int, line: int, m: int) -> list[int]:
    """Return the slots that an action waits for: this leg on the rank before, the leg before,
    the microbatch before.
    """
    slots = [ranks[rank][line][m - 1]] if m else []
    if line in LEGS:
        source = before(line, rank, len(ranks))
        if source is not None:
            slots.append(ranks[source][line][m])
        if line:
            slots.append(ranks[rank][line - 1][m])
    return slots


def squeeze(ranks: Iterable[Lines]) -> list[Lines]:
    """Start everything as early as it can, keeping every rank's order."""
    ranks = list(ranks)
    early = [[[0] * len(line) for line in lines] for lines in ranks]
    free = [0] * len(ranks)
    for _, rank, line, m in events_of(ranks):
        slot = max([free[rank], *(needed + 1 for needed in needed_slots(early, rank, line, m))])
        early[rank][line][m] = slot
        free[rank] = slot + 1
    return early


def line_of_slots(lines: Lines) -> list[Line]:
    found: list[Line] = [None] * (1 + max(map(max, lines)))
    for number, line in enumerate(lines):
        for slot in line:
            found[slot] = number
    return found
