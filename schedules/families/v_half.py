"""V-Half and V-Min: a V of stages with a half or a third of 1F1B's memory (arXiv:2405.15362).

Every 6 units of time a microbatch starts, and each rank runs F, F, I, I, W, W of some microbatches:
a *building block*. Its offsets (when a microbatch has its legs on each rank, see v_shape) determine
how long a stash is held. How a table is made of it: building_block.py.

The order doesn't depend on the times of F, I and W; its bubble grows with every microbatch if they
differ much.
"""

from functools import lru_cache

from mpitrain.schedules.actions import Action
from mpitrain.schedules.families.building_block import from_building_block
from mpitrain.schedules.families.one_f_one_b import ONE_F_ONE_B
from mpitrain.schedules.family import ScheduleFamily
from mpitrain.schedules.options import Options
from mpitrain.schedules.search_progress import REMEMBERED, Listener, SearchProgress


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
