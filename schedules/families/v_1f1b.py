"""1F1B-V: a V of stages with whole backwards, and two thirds of 1F1B's memory (arXiv:2405.15362)."""

from mpitrain.schedules.actions import Action, B, F
from mpitrain.schedules.family import ScheduleFamily
from mpitrain.schedules.options import Options

PERIOD = 6  # slots of a building block: F F B B, of which each B takes two


def v_1f1b(num_ranks: int, num_microbatches: int, _: Options) -> list[list[Action]]:
    """Compute order of every rank under 1F1B-V (arXiv:2405.15362 section 3.3). For 2 ranks, 3 microbatches:

    rank 0:  F0@0 F0@3 B0@3 F1@0 F1@3 B1@3 F2@0 B0@0 F2@3 B2@3 B1@0 B2@0
    rank 1:  F0@1 F0@2 F1@1 F1@2 B0@2 B0@1 F2@1 F2@2 B1@2 B1@1 B2@2 B2@1

    A microbatch's block of slots repeats every 6 of them. On its way back it rests for three slots
    after every third B, so that no two blocks meet. The peak is about two thirds of 1F1B's. Messages
    are waited for in each turn.
    """
    rows = []
    for rank, (down, up, back_down, back_up) in enumerate(_offsets(num_ranks)):
        late = 2 * num_ranks - 1 - rank
        slots = []
        for m in range(num_microbatches):
            block = ((down, F(m, rank)), (up, F(m, late)), (back_down, B(m, late)), (back_up, B(m, rank)))
            slots += [(slot + PERIOD * m, action) for slot, action in block]
        rows.append([action for _, action in sorted(slots, key=lambda placed: placed[0])])
    return rows


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
