"""The way of a microbatch through a V of stages, on which rank r holds stages r and 2p-1-r.

    leg 0  F, down the ranks, stages 0 to p-1              leg 1  F, up again, stages p to 2p-1
    leg 2  I of the stages of leg 1, down the ranks        leg 3  I of the stages of leg 0, up again

Where a leg ends the next begins, on the same rank and without a message. W of leg 2 or 3 can follow
at any time.
"""

from mpitrain.schedules.actions import Action

LEGS = range(4)


def before(leg: int, rank: int, num_ranks: int) -> int | None:
    """Return the rank a microbatch comes from on this leg, or None if the leg begins here."""
    rank += 1 if leg % 2 else -1
    return rank if 0 <= rank < num_ranks else None


def action(leg: int, microbatch: int, rank: int, num_ranks: int) -> Action:
    """Return what a rank computes on this leg."""
    return Action("F" if leg < 2 else "I", microbatch, rank if leg in (0, 3) else 2 * num_ranks - 1 - rank)


def weight_of(leg: int, microbatch: int, rank: int, num_ranks: int) -> Action:
    """Return the W of leg 2 or 3."""
    return action(leg, microbatch, rank, num_ranks)._replace(kind="W")
