"""V-Half and V-Min: a V of stages with a half or a third of 1F1B's memory (arXiv:2405.15362).

Every 6 units of time a microbatch starts, and each rank runs F, F, I, I, W, W of some microbatches:
a *building block*. Its offsets (when a microbatch has its legs on each rank, see v_shape) determine
how long a stash is held. The table is built from it in steps:

    repeat   the block for every microbatch
    reorder  move the warmup's and the cooldown's actions into free slots before them, if the peak
             of stashes stays as it is, first with W where it is, then with W in the first free
             slots
    squeeze  drop slots that are free for all, keeping every rank's order

The order doesn't depend on the times of F, I and W; its bubble grows with every microbatch if they
differ much.
"""

from bisect import insort
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate, chain
from math import inf

from mpitrain.schedules.actions import Action
from mpitrain.schedules.families.one_f_one_b import ONE_F_ONE_B
from mpitrain.schedules.families.v_shape import LEGS, action, before, weight_of
from mpitrain.schedules.family import ScheduleFamily
from mpitrain.schedules.options import Options
from mpitrain.schedules.search_progress import REMEMBERED, Listener, SearchProgress

PERIOD = 6  # slots of a building block: F F I I W W
W = len(LEGS)  # the line of W of both stages, after those of the legs
CHANGES = {0: 1, 1: 1, 2: 0, 3: 0, W: -1, None: 0}  # by how many stashes a line changes what is held

Lines = list[list[int]]  # of a rank: the slots of all microbatches on each leg, perhaps of W


def v_half(num_ranks: int, num_microbatches: int, options: Options) -> list[list[Action]]:
    """Compute order of every rank under V-Half (arXiv:2405.15362 section 3.3). For 2 ranks, 3 microbatches:

    rank 0:  F0@0 F1@0 F2@0 F0@3 I0@3 W0@3 F1@3 I0@0 I1@3 W1@3 F2@3 I2@3 I1@0 W2@3 I2@0 W0@0 W1@0
             W2@0
    rank 1:  F0@1 F0@2 F1@1 F1@2 I0@2 W0@2 I0@1 W0@1 F2@1 F2@2 I1@2 I1@1 I2@2 I2@1 W1@2 W2@2 W1@1
             W2@1
    """
    gap = 3 if num_ranks % 2 == 0 else 0
    p = num_ranks
    offsets = [(2 * r, 3 * p - 2 - r, 3 * p - 1 + gap + 2 * r, 6 * p - 2 + gap - r) for r in range(p)]
    return list(map(list, _remembered(tuple(offsets), num_microbatches, Listener(options.notify))))


# bubbles: arXiv:2405.15362
V_HALF = ScheduleFamily(
    v_half, name="v-half", placed="v", held="bounded", bubble=0.5, stashes=0.55, less_than=(ONE_F_ONE_B,)
)


def v_min(num_ranks: int, num_microbatches: int, options: Options) -> list[list[Action]]:
    """Compute order of every rank under V-Min (arXiv:2405.15362 section 3.3). For 2 ranks, 3 microbatches:

    rank 0:  F0@0 F1@0 F0@3 I0@3 W0@3 I0@0 W0@0 F1@3 I1@3 W1@3 F2@0 I1@0 W1@0 F2@3 I2@3 W2@3 I2@0
             W2@0
    rank 1:  F0@1 F0@2 I0@2 I0@1 F1@1 F1@2 W0@2 W0@1 I1@2 I1@1 F2@1 F2@2 W1@2 W1@1 I2@2 I2@1 W2@2
             W2@1
    """
    gap = 2 if num_ranks % 3 == 0 else 0
    p = num_ranks
    offsets = [(r, 2 * p - 1 - r, 2 * p + gap + r, 4 * p - 1 + gap - r) for r in range(p)]
    return list(map(list, _remembered(tuple(offsets), num_microbatches, Listener(options.notify))))


V_MIN = ScheduleFamily(
    v_min, name="v-min", placed="v", held="bounded", bubble=2 / 3, stashes=0.4,
    less_than=(ONE_F_ONE_B, V_HALF),
)  # fmt: skip


@lru_cache(REMEMBERED)
def _remembered(
    offsets: tuple[tuple[int, ...], ...], num_microbatches: int, listener: Listener
) -> list[list[Action]]:
    return from_building_block(offsets, num_microbatches, SearchProgress(listener.notify))


def from_building_block(
    offsets: tuple[tuple[int, ...], ...], num_microbatches: int, progress: SearchProgress
) -> list[list[Action]]:
    """Return the table of a building block. offsets: the slots of the first microbatch's legs, by rank."""
    # with W twice as many lines as legs
    progress.expect(len(offsets) * num_microbatches * (2 * W + 2))
    ranks = _squeeze(_Reorder(_repeated(offsets, num_microbatches)).run(progress))
    ranks = [legs for *legs, _ in ranks]
    return _rows(_squeeze(map(_with_weights, _Reorder(ranks).run(progress))))


def filled_from_building_block(
    offsets: tuple[tuple[int, ...], ...], num_microbatches: int
) -> Iterator[list[list[Action]]]:
    """Yield tables of a building block whose cooldown is tight, which is shorter for most.

    The tight cooldown is that of sail-sg/zero-bubble-pipeline-parallelism (`v_auto_schedule.py`). What it
    leaves free is filled: in all phases, or in the warmup and the cooldown, which were filled before, too.
    """
    progress = SearchProgress(None)
    ranks = _repeated(offsets, num_microbatches)
    tight = _squeeze(_tight_cooldown(_squeeze(ranks)))
    yield _rows(_squeeze(_Reorder(tight, everywhere=True).run(progress)))
    tight = _squeeze(_tight_cooldown(_squeeze(_Reorder(ranks).run(progress))))
    yield _rows(_squeeze(_Reorder(tight).run(progress)))


def peak_of_block(offsets: tuple[tuple[int, ...], ...], num_microbatches: int) -> int:
    """Return the most stashes of half a rank's layers that a rank holds when a block is repeated."""
    return max(_SlotRow(lines).peak for lines in _repeated(offsets, num_microbatches))


def _repeated(offsets: tuple[tuple[int, ...], ...], num_microbatches: int) -> list[Lines]:
    """Return the slots of all microbatches' legs, and of W in the first free ones."""
    ranks = [
        [[start + PERIOD * m for m in range(num_microbatches)] for start in starts] for starts in offsets
    ]
    return list(map(_with_weights, ranks))


def _rows(ranks: list[Lines]) -> list[list[Action]]:
    return [_order(legs, rank, len(ranks)) for rank, (*legs, _) in enumerate(ranks)]


def _order(legs: Lines, rank: int, num_ranks: int) -> list[Action]:
    """Return a rank's actions in the order of their slots."""
    slots = [(slot, action(leg, m, rank, num_ranks)) for leg in LEGS for m, slot in enumerate(legs[leg])]
    done = {2: 0, 3: 0}
    for slot, leg in _weights(legs):
        slots.append((slot, weight_of(leg, done[leg], rank, num_ranks)))
        done[leg] += 1
    return [what for _, what in sorted(slots)]


# ---------------------------------------------------------------- weights


def _with_weights(legs: Lines) -> Lines:
    return [*legs, [slot for slot, _ in _weights(legs)]]


def _weights(legs: Lines) -> Iterator[tuple[int, int]]:
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


# ---------------------------------------------------------------- steps


def _events(ranks: list[Lines]) -> list[tuple[int, int, int, int]]:
    """Return (slot, rank, line, microbatch) of everything, in the order of time."""
    return sorted(
        (s, r, i, m)
        for r, lines in enumerate(ranks)
        for i, line in enumerate(lines)
        for m, s in enumerate(line)
    )


def _needed(ranks: list[Lines], rank: int, line: int, m: int) -> list[int]:
    """Return the slots of what an action waits for: this leg on the rank before, the leg before,
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


def _squeeze(ranks: Iterable[Lines]) -> list[Lines]:
    """Start everything as early as it can, keeping every rank's order."""
    ranks = list(ranks)
    early = [[[0] * len(line) for line in lines] for lines in ranks]
    free = [0] * len(ranks)
    for _, rank, line, m in _events(ranks):
        slot = max([free[rank], *(needed + 1 for needed in _needed(early, rank, line, m))])
        early[rank][line][m] = slot
        free[rank] = slot + 1
    return early


def _tight_cooldown(ranks: list[Lines]) -> list[Lines]:
    """Let the last I of both legs go from rank to rank without a wait, as many as there can be stashes.

    The last of all begins in the slot after the first rank's last F, those before it two slots earlier
    each; W takes the first free slots. Where an order breaks or two need a slot, nothing moves.
    """
    num_ranks = len(ranks)
    num_microbatches = len(ranks[0][0])
    peak = max(_SlotRow(lines).peak for lines in ranks)
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
    if any(slot <= needed for slot, *what in _events(tight) for needed in _needed(tight, *what)):
        return ranks
    return list(map(_with_weights, tight))


def _every_other(last: int, number: int) -> list[int]:
    """Return so many slots up to the last, two apart."""
    return [last - 2 * back for back in reversed(range(number))]


class _Reorder:
    """Moves actions of the warmup and the cooldown to earlier slots, or of all phases (`everywhere`).

    Without a line of W the warmup stays as it is.
    """

    def __init__(self, ranks: Iterable[Lines], everywhere: bool = False):
        self.ranks = list(ranks)
        self.everywhere = everywhere
        self.has_weights = len(self.ranks[0]) > W
        self.rows = [(_SlotRow if self.has_weights else _OpenRow)(lines) for lines in self.ranks]
        self.limit = max(row.peak for row in self.rows)
        self.inputs: list[list[int]] = [[] for _ in self.ranks]  # slots of I, ascending

    def run(self, progress: SearchProgress) -> list[Lines]:
        last = len(self.ranks[0][0]) - 1
        phase = "warmup"
        for slot, rank, line, m in _events(self.ranks):
            if phase == "warmup" and (rank, line) == (0, 3):
                phase = "steady"
            is_early = phase == "warmup" and self.has_weights
            if self.everywhere or is_early or phase == "cooldown":
                slot = self._move(slot, rank, line, m)
            if phase == "steady" and (line, m) == (0, last):
                phase = "cooldown"
            if line in (2, 3):
                insort(self.inputs[rank], slot)
            progress.step()
        return self.ranks

    def _move(self, slot: int, rank: int, line: int, m: int) -> int:
        """Give an action the first slot that is free and where it doesn't raise the peak; return it."""
        needed = _needed(self.ranks, rank, line, m) + ([self.inputs[rank][m]] if line == W else [])
        earlier = self.rows[rank].move(slot, max(needed, default=-1) + 1, self.limit)
        self.ranks[rank][line][m] = earlier
        return earlier


def _line_of_slots(lines: Lines) -> list[int | None]:
    found: list[int | None] = [None] * (1 + max(map(max, lines)))
    for number, line in enumerate(lines):
        for slot in line:
            found[slot] = number
    return found


class _SlotRow:
    """The slots of one rank, and how many stashes are held after each."""

    def __init__(self, lines: Lines):
        self.lines = _line_of_slots(lines)
        self.held = list(accumulate(CHANGES[line] for line in self.lines))
        self.peak = max(self.held)

    def move(self, slot: int, first: int, limit: int) -> int:
        """Move an action to the first free slot from `first` on where no more than `limit` stashes are held
        then; return it.
        """
        line = self.lines[slot]
        change = CHANGES[line]
        if change > 0:
            begin, first = first, slot
            while first > begin and self.held[first - 1] < limit:
                first -= 1
        if None not in self.lines[first:slot]:
            return slot
        earlier = self.lines.index(None, first)
        self.lines[earlier], self.lines[slot] = line, None
        if change:
            self.held[earlier:slot] = [held + change for held in self.held[earlier:slot]]
        return earlier


class _OpenRow:
    """The slots of one rank without W, which is in every free slot it can; and what is held before each."""

    def __init__(self, lines: Lines):
        self.lines = _line_of_slots(lines)
        # before each slot: stashes, and those of them that wait for W
        self.held = [(0, 0)] * (len(self.lines) + 1)
        self.peak = self._play(0, len(self.lines))

    def _play(self, start: int, stop: int, changed: int | None = None, limit: float = inf) -> int:
        """Work out what is held from slot `start` to `stop`; return the most. It ends where that is above a
        limit.

        changed: the last slot that holds something else than before; after it what is held as before
        stays so.
        """
        stashes, late = self.held[start]
        peak = stashes
        for slot in range(start, stop):
            line = self.lines[slot]
            if line is None:
                if late:
                    stashes = stashes - 1
                    late = late - 1
            elif line in (2, 3):
                late += 1
            else:
                stashes += 1
                if stashes > peak:
                    peak = stashes
                    if peak > limit:
                        break
            if changed is not None and slot >= changed and self.held[slot + 1] == (stashes, late):
                break
            self.held[slot + 1] = stashes, late
        return peak

    def move(self, slot: int, first: int, limit: int) -> int:
        """As _SlotRow."""
        return next((earlier for earlier in range(first, slot) if self._moves(slot, earlier, limit)), slot)

    def _moves(self, slot: int, earlier: int, limit: int) -> bool:
        """Move an action if its new slot is free and no more than `limit` stashes are held then;
        return whether.
        """
        if self.lines[earlier] is not None:
            return False
        self.lines[earlier] = self.lines[slot]
        self.lines[slot] = None
        before = self.held[earlier + 1 : slot + 1]
        if self._play(earlier, slot, limit=limit) <= limit:
            self._play(slot, len(self.lines), slot)  # no more is held than before
            return True
        self.lines[earlier], self.lines[slot] = None, self.lines[earlier]
        self.held[earlier + 1 : slot + 1] = before
        return False
