"""Earlier slots for the actions of a V, where the peak of stashes stays as it is."""

from bisect import insort
from collections.abc import Iterable
from itertools import accumulate
from math import inf

from mpitrain.schedules.families.v_slots import CHANGES, Lines, W, events_of, line_of_slots, needed_slots
from mpitrain.schedules.search_progress import SearchProgress


class Reorder:
    """Moves actions of warmup and cooldown, or of all phases (`everywhere`), to earlier slots.

    Without a line of W the warmup stays as it is.
    """

    def __init__(self, ranks: Iterable[Lines], everywhere: bool = False):
        self.ranks = list(ranks)
        self.everywhere = everywhere
        self.has_weights = len(self.ranks[0]) > W
        self.rows = [(SlotRow if self.has_weights else _OpenRow)(lines) for lines in self.ranks]
        self.limit = max(row.peak for row in self.rows)
        self.inputs: list[list[int]] = [[] for _ in self.ranks]  # slots of I, ascending

    def run(self, progress: SearchProgress) -> list[Lines]:
        last = len(self.ranks[0][0]) - 1
        phase = "warmup"
        for slot, rank, line, m in events_of(self.ranks):
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
        needed = needed_slots(self.ranks, rank, line, m) + ([self.inputs[rank][m]] if line == W else [])
        earlier = self.rows[rank].move(slot, max(needed, default=-1) + 1, self.limit)
        self.ranks[rank][line][m] = earlier
        return earlier


class SlotRow:
    """The slots of one rank, and how many stashes are held after each."""

    def __init__(self, lines: Lines):
        self.lines = line_of_slots(lines)
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
    """One rank's slots without W, which fills what is free; and what is held before each."""

    def __init__(self, lines: Lines):
        self.lines = line_of_slots(lines)
        # before each slot: stashes, and those of them that wait for W
        self.held = [(0, 0)] * (len(self.lines) + 1)
        self.peak = self._play(0, len(self.lines))

    def _play(self, start: int, stop: int, changed: int | None = None, limit: float = inf) -> int:
        """Work out what is held from slot `start` to `stop`, to a limit; return the most.

        changed: the last slot that holds something else than before; then what is held stays.
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
        """As SlotRow."""
        return next((earlier for earlier in range(first, slot) if self._moves(slot, earlier, limit)), slot)

    def _moves(self, slot: int, earlier: int, limit: int) -> bool:
        """Move an action if its new slot is free with at most `limit` stashes; return whether."""
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
