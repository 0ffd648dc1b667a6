"""Orders of a building block of a V: six slots of each rank, repeated for every microbatch.

Its offsets are the slots of the first microbatch's legs, by rank. Where few microbatches
leave slots free, an order is made denser in steps, that of V-Half and V-Min (arXiv:2405.15362):

    reorder  move the warmup's and the cooldown's actions into free slots before them, if the peak
             of stashes stays as it is, first with W where it is, then with W in the first free
             slots
    squeeze  drop slots that are free for all, keeping every rank's order

and those of sail-sg/zero-bubble-pipeline-parallelism (`v_auto_schedule.py`), which are shorter for
most blocks:

    warm up  begin with as many F as the peak has room for
    tighten  let the last I go from rank to rank without a wait
    fill     give each free slot the first of what follows that can be there
"""

from collections import deque
from collections.abc import Iterator
from itertools import chain, product

from mpitrain.schedules.actions import Action
from mpitrain.schedules.families.v_reorder import Reorder, SlotRow
from mpitrain.schedules.families.v_shape import LEGS, before
from mpitrain.schedules.families.v_slots import (
    CHANGES,
    Line,
    Lines,
    W,
    events_of,
    line_of_slots,
    needed_slots,
    repeated,
    rows_of,
    squeeze,
    weights_of,
    with_weights,
)
from mpitrain.schedules.search_progress import SearchProgress

Offsets = tuple[tuple[int, ...], ...]  # of each rank: the slots of the first microbatch's legs


def from_building_block(
    offsets: Offsets, num_microbatches: int, progress: SearchProgress
) -> list[list[Action]]:
    """Return the table of a building block, as V-Half and V-Min are made."""
    # with W twice as many lines as legs
    progress.expect(len(offsets) * num_microbatches * (2 * W + 2))
    ranks = squeeze(Reorder(repeated(offsets, num_microbatches)).run(progress))
    ranks = [legs for *legs, _ in ranks]
    return rows_of(squeeze(map(with_weights, Reorder(ranks).run(progress))))


def filled_from_building_block(offsets: Offsets, num_microbatches: int) -> Iterator[list[list[Action]]]:
    """Yield tables of a building block with a tight cooldown, and what it leaves free filled.

    In all phases, or in the warmup and the cooldown, which were filled before, too.
    """
    progress = SearchProgress(None)
    ranks = repeated(offsets, num_microbatches)
    tight = squeeze(_tightened(squeeze(ranks)))
    yield rows_of(squeeze(Reorder(tight, everywhere=True).run(progress)))
    tight = squeeze(_tightened(squeeze(Reorder(ranks).run(progress))))
    yield rows_of(squeeze(Reorder(tight).run(progress)))


def published_from_building_block(offsets: Offsets, num_microbatches: int) -> list[list[Action]] | None:
    """Return the table that `v_auto_schedule.py` makes of a block, but for a few actions, or None.

    None: a rank waits for ever.
    """
    ranks = repeated(offsets, num_microbatches)
    limit = max(SlotRow(lines).peak for lines in ranks)
    orders = [_warmed_up(lines, rank, len(ranks), limit) for rank, lines in enumerate(ranks)]
    begun = _played(orders)
    return rows_of(_filled(squeeze(_tightened(begun)))) if begun else None


def peak_of_block(offsets: Offsets, num_microbatches: int) -> int:
    """Return the most stashes of half a rank's layers that a rank holds of a repeated block."""
    return max(SlotRow(lines).peak for lines in repeated(offsets, num_microbatches))


# ---------------------------------------------------------------- warm up


def _warmed_up(lines: Lines, rank: int, num_ranks: int, limit: int) -> list[int]:
    """Return the order of a rank's lines with another one before its first I of the last leg.

    First F of leg 0 while no microbatch comes back, then F of both legs in turn, at last I, W and F
    in turn. limit: stashes at most.
    """
    num_microbatches = len(lines[0])
    order = [line for line in line_of_slots(lines) if line is not None]
    counts = [sum(slot < lines[3][0] for slot in line) for line in lines]
    down, up, inputs, _, weights = counts
    room = min(rank + 1, limit // 2, num_microbatches)
    up_early, down_early = min(room, up), min(limit - room, num_microbatches, down)
    alone = min(2 * (num_ranks - 1 - rank), down_early)
    begun = [0] * alone
    for number in range(rank + 1):
        begun += [0] * (alone + number < down_early) + [1] * (number < up_early)
    up, down = up - begun.count(1), down - begun.count(0)
    for number in range(max(inputs, weights, up + down)):
        begun += [2] * (number < inputs) + [W] * (number < weights)
        begun += [1] * (number < up) + [0] * (up <= number < up + down)
    return begun + order[sum(counts) :]


def _played(orders: list[list[int]]) -> list[Lines] | None:
    """Return the slots of orders in which W comes after its I; None: some rank waits for ever."""
    ranks: list[Lines] = [[[] for _ in range(W + 1)] for _ in orders]
    free = [0] * len(orders)
    left = list(map(deque, orders))
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(left):
            while order and _has_needed(ranks, rank, order[0]):
                line = order.popleft()
                number = len(ranks[rank][line])
                slot = max([free[rank], *(slot + 1 for slot in needed_slots(ranks, rank, line, number))])
                ranks[rank][line].append(slot)
                free[rank], moved = slot + 1, True
    return None if any(left) else ranks


def _has_needed(ranks: list[Lines], rank: int, line: int) -> bool:
    """Whether what the next action of a line waits for has a slot."""
    number = len(ranks[rank][line])
    if line == W:
        return True
    source = before(line, rank, len(ranks))
    if source is not None:
        return len(ranks[source][line]) > number
    return line == 0 or len(ranks[rank][line - 1]) > number


# ---------------------------------------------------------------- tighten


def _tightened(ranks: list[Lines]) -> list[Lines]:
    """Let the last I of both legs go from rank to rank without a wait: as many as stashes there can be.

    The last of all begins in the slot after the first rank's last F, those before it two slots
    earlier each; W takes the first free slots. Where an order breaks or two need a slot, nothing
    moves.
    """
    num_ranks = len(ranks)
    num_microbatches = len(ranks[0][0])
    peak = max(SlotRow(lines).peak for lines in ranks)
    num_up = min((peak + 1) // 2, num_microbatches)
    end = ranks[0][1][-1]
    tight = []
    for rank, (*forwards, down, up, _) in enumerate(ranks):
        num_down = min(rank + 1, peak - num_up, num_microbatches)
        down = down[: num_microbatches - num_down] + _every_other(end + 1 + rank, num_down)
        up = up[: num_microbatches - num_up] + _every_other(end + 2 * num_ranks - rank, num_up)
        tight.append([*forwards, down, up])
        if len(set(chain(*tight[rank]))) < num_microbatches * len(LEGS):
            return ranks
    if any(slot <= needed for slot, *what in events_of(tight) for needed in needed_slots(tight, *what)):
        return ranks
    return list(map(with_weights, tight))


def _every_other(last: int, number: int) -> list[int]:
    return [last - 2 * back for back in reversed(range(number))]


# ---------------------------------------------------------------- fill

# W of leg 2 and of leg 3 have a line each: which of them comes first decides what moves
CHANGE = {**CHANGES, W + 1: -1}  # of what is held, as CHANGES


def _filled(ranks: list[Lines]) -> list[Lines]:
    """Give each free slot, in order, the first that can be there without a higher peak."""
    limit = max(SlotRow(lines).peak for lines in ranks)
    rows = [line_of_slots(_with_both_weights(lines)) for lines in ranks]
    done: list[Lines] = [[[] for _ in range(W + 2)] for _ in ranks]
    held = [0] * len(ranks)
    length = max(map(len, rows))
    for row in rows:
        row += [None] * (length - len(row))
    for slot, rank in product(range(length), range(len(ranks))):
        row = rows[rank]
        if row[slot] is None:
            later = _first_that_can(row, slot, done, rank, limit - held[rank])
            if later is not None:
                row[slot], row[later] = row[later], None
        line = row[slot]
        if line is not None:
            done[rank][line].append(slot)
            held[rank] += CHANGE[line]
    return [[*legs, sorted(down + up)] for *legs, down, up in done]


def _with_both_weights(lines: Lines) -> Lines:
    *legs, _ = lines
    weights: Lines = [[], []]
    for slot, leg in weights_of(legs):
        weights[leg - 2].append(slot)
    return [*legs, *weights]


def _first_that_can(row: list[Line], slot: int, done: list[Lines], rank: int, room: int) -> int | None:
    """Return the slot of the first action after a free slot that can be there.

    room: for stashes that are held from there on until the action's own slot.
    """
    refused: set[int] = set()
    change = most = 0
    for later in range(slot + 1, len(row)):
        line = row[later]
        if line is None:
            continue
        if line not in refused:
            if _can(done, rank, line, slot) and not (CHANGE[line] > 0 and most >= room):
                return later
            refused.add(line)
            if len(refused) == W + 2:
                return None
        change += CHANGE[line]
        most = max(most, change)
    return None


def _can(done: list[Lines], rank: int, line: int, slot: int) -> bool:
    """Whether the next action of a line can be in a slot. done: the slots of those before it."""
    number = len(done[rank][line])
    if line >= W:
        return number < len(done[rank][line - 2])
    source = before(line, rank, len(done))
    if source is None:
        return line == 0 or number < len(done[rank][line - 1])
    return number < len(done[source][line]) and done[source][line][number] < slot
