"""GPipe: all forwards, then all backwards."""

from mpitrain.schedules.actions import Action, B, F
from mpitrain.schedules.family import stage_per_rank


def gpipe(num_stages: int, num_microbatches: int, stage: int) -> list[Action]:
    """Compute order of one stage under GPipe (arXiv:1811.06965), the same on every stage. For 4 microbatches:

    each stage:  F0 F1 F2 F3 B0 B1 B2 B3

    Every microbatch is in flight at once. The paper runs the backward from the last microbatch to
    the first; we run it ascending, as every schedule here does, so that gradients are summed in one
    order and bits don't depend on the schedule.
    """
    forward = [F(m, stage) for m in range(num_microbatches)]
    return forward + [B(m, stage) for m in range(num_microbatches)]


GPIPE = stage_per_rank(gpipe, "gpipe", held="all")._replace(aliases=("afab",))
