"""ZB-V: a zero-bubble schedule on a V of stages, down the ranks and up again (arXiv:2401.10241 section 6)."""

from mpitrain.schedules.actions import Action
from mpitrain.schedules.families.one_f_one_b import ONE_F_ONE_B
from mpitrain.schedules.family import ScheduleFamily
from mpitrain.schedules.options import Options


def zbv(num_ranks: int, num_microbatches: int, _: Options) -> list[list[Action]]:
    """Compute order of every rank under the handcrafted ZB-V. For 2 ranks, 4 microbatches:

    rank 0:  F0@0 F1@0 F2@0 F0@3 I0@3 W0@3 F1@3 I1@3 W1@3 F3@0 I0@0 W0@0 F2@3 I2@3 W2@3 I1@0 W1@0
             F3@3 I3@3 W3@3 I2@0 W2@0 I3@0 W3@0
    rank 1:  F0@1 F0@2 F1@1 F1@2 I0@2 W0@2 F2@1 I0@1 W0@1 F2@2 I1@2 W1@2 F3@1 I1@1 W1@1 F3@2 I2@2
             W2@2 I2@1 I3@2 I3@1 W2@1 W3@2 W3@1

    Rank r holds stages r and 2p-1-r, so the loss is on rank 0, where its forward began. With F = I
    = W no rank waits between its first and its last action, and none holds more than 1F1B's first
    rank. With other times zbv-auto is better.

    The pattern is made for 2p-1 microbatches or more; with fewer, those that don't exist are left
    out of it.
    """
    return [_order(num_ranks, num_microbatches, rank) for rank in range(num_ranks)]


ZBV = ScheduleFamily(
    zbv, name="zbv", placed="v", held="bounded", aliases=("v-zb",), bubble=0.0,
    no_more_than=(ONE_F_ONE_B,), proposed="if faster",
)  # fmt: skip


def _order(num_ranks: int, num_microbatches: int, rank: int) -> list[Action]:
    down = _Stage(rank)
    up = _Stage(2 * num_ranks - 1 - rank)
    pattern = max(2 * num_ranks - 1, num_microbatches)
    # warmup
    order = down.do("F" * (2 * (num_ranks - rank) - 1))
    for _ in range(rank):
        order += up.do("F") + down.do("F")
    for _ in range(num_ranks - rank):
        order += up.do("FIW")
    # steady
    while up.done["F"] < pattern:
        order += down.do("FIW" if down.done["F"] < pattern else "IW") + up.do("FIW")
    # cooldown
    for _ in range(rank):
        order += down.do("I") + up.do("I")
    for _ in range(num_ranks - rank):
        order += down.do("IW")
    for stage in (up, down):
        order += stage.do("W" * (pattern - stage.done["W"]))
    return [action for action in order if action.index < num_microbatches]


class _Stage:
    """Counts what a stage has done and writes its next actions."""

    def __init__(self, stage: int):
        self.stage = stage
        self.done = {"F": 0, "I": 0, "W": 0}

    def do(self, kinds: str) -> list[Action]:
        actions = []
        for kind in kinds:
            actions.append(Action(kind, self.done[kind], self.stage))
            self.done[kind] += 1
        return actions
