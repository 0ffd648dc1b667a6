"""1F1B-V: a V of stages with whole backwards, and two thirds of 1F1B's memory (arXiv:2405.15362)."""

from itertools import accumulate

from mpitrain.schedules.actions import Action, B, F
from mpitrain.schedules.family import ScheduleFamily
from mpitrain.schedules.options import Options

PERIOD = 6  # slots of a building block: F F B B, of which each B takes two
LENGTH = {"F": 1, "B": 2}


def v_1f1b(num_ranks: int, num_microbatches: int, _: Options) -> list[list[Action]]:
    """Compute order of every rank under 1F1B-V (arXiv:2405.15362 section 3.3). For 2 ranks, 3 microbatches:

    rank 0:  F0@0 F1@0 F2@0 F0@3 B0@3 F1@3 B1@3 B0@0 F2@3 B2@3 B1@0 B2@0
    rank 1:  F0@1 F0@2 F1@1 F1@2 B0@2 B0@1 F2@1 F2@2 B1@2 B1@1 B2@2 B2@1

    A microbatch's block of slots repeats every 6 of them. On its way back it rests for three slots
    after every third B, so that no two blocks meet. What can be earlier is then moved to the first
    free slots before it, unless the peak would rise. The peak is about two thirds of 1F1B's.
    Messages are waited for in each turn.
    """
    blocks = []
    for rank, (down, up, back_down, back_up) in enumerate(_offsets(num_ranks)):
        late = 2 * num_ranks - 1 - rank
        for m in range(num_microbatches):
            block = ((down, F(m, rank)), (up, F(m, late)), (back_down, B(m, late)), (back_up, B(m, rank)))
            blocks += [(slot + PERIOD * m, rank, action) for slot, action in block]
    rows = _Rows(num_ranks, sorted(blocks))
    return [[action for _, action in sorted(row.items())] for row in rows.moved()]


V_1F1B = ScheduleFamily(v_1f1b, name="1f1b-v", placed="v", held="bounded")


def _offsets(num_ranks: int) -> list[tuple[int, int, int, int]]:
    """Return a microbatch's slots on each rank: F down and up the ranks, B down and up."""
    backwards = []
    slot = 2 * num_ranks + (3 if num_ranks % 3 == 0 else 0)
    until_rest = (num_ranks + 2) % 3 or 3
    for _ in range(2 * num_ranks):
        backwards.append(slot)
        slot += 2
        until_rest -= 1
        if not until_rest:
            until_rest = 3
            slot += 3
    last = 2 * num_ranks - 1
    return [(rank, last - rank, backwards[rank], backwards[last - rank]) for rank in range(num_ranks)]


class _Rows:
    """The slots of all ranks. held: stashes after each slot; ends: the slot after what was moved."""

    def __init__(self, num_ranks: int, blocks: list[tuple[int, int, Action]]):
        self.blocks = blocks
        self.taken: list[set[int]] = [set() for _ in range(num_ranks)]
        changes = [[0] * (blocks[-1][0] + 2) for _ in range(num_ranks)]
        for slot, rank, action in blocks:
            last = slot + LENGTH[action.kind] - 1
            self.taken[rank] |= {slot, last}
            changes[rank][last] += 1 if action.kind == "F" else -1
        self.held = [list(accumulate(row)) for row in changes]
        self.peak = max(map(max, self.held))
        self.last_stage = 2 * num_ranks - 1
        self.ends: dict[Action, int] = {}

    def moved(self) -> list[dict[int, Action]]:
        """Return what each rank has in its slots when everything is as early as it can be."""
        rows: list[dict[int, Action]] = [{} for _ in self.taken]
        for slot, rank, action in self.blocks:
            start = self._move(slot, rank, action)
            rows[rank][start] = action
            self.ends[action] = start + LENGTH[action.kind]
        return rows

    def _move(self, slot: int, rank: int, action: Action) -> int:
        """Move an action to the first slots that are free; return the first of them."""
        taken, held, length = self.taken[rank], self.held[rank], LENGTH[action.kind]
        taken -= {slot, slot + length - 1}
        start = first = max(self.ends.get(need, 0) for need in self._needs(action))
        if action.kind == "F":
            start = slot
            while start > first and held[start - 1] < self.peak:
                start -= 1
        while start in taken or start + length - 1 in taken:
            start += 1
        taken |= {start, start + length - 1}
        change = 1 if action.kind == "F" else -1
        for between in range(start + length - 1, slot + length - 1):
            held[between] += change
        return start

    def _needs(self, action: Action) -> tuple[Action, Action]:
        """Return what comes before an action: this of the microbatch before; and where it comes from."""
        kind, m, stage, _ = action
        before = action._replace(index=m - 1)
        if kind == "F":
            return before, F(m, stage - 1)
        return before, B(m, stage + 1) if stage < self.last_stage else F(m, stage)
