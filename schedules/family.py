"""A family of schedules: how a named schedule is made. A new one is one file in schedules/families/.

A family whose ranks hold one stage each is a function of (num_stages, num_microbatches, stage); a
family with its own placement is a function of (num_ranks, num_microbatches, options) that returns
the rows of all ranks. Placements:

    plain     stage s on rank s; each copy of dualpipe, the second backwards
    looped    stage s on rank s mod p: around and around
    v         there and back: rank r has r and 2p-1-r
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from mpitrain.schedules.actions import Action
from mpitrain.schedules.options import Options

Rows = list[list[Action]]


class ScheduleFamily(NamedTuple):
    """How a named schedule is made, which options it understands, and which rank has which stage.

    Users can have their own: a function of stage_per_rank()'s, or rows of all ranks.

    name: what users type; one with a name in a file of schedules/families/ is in the catalogue.
    aliases: names of it in published tables.
    held: what ranks hold of activations in a step of more microbatches: once all ranks are busy no more
        ("bounded"), or more with each microbatch ("all"); "": not known, as of a user's own.
    bubble: by its paper, over 1F1B's, (p - 1)(F + B), with F = I = W; None: 1 / chunks.
    stashes: most microbatches in flight over those that 1F1B, or an order placed alike, has.
    less_than, no_more_than: schedules than which it promises to hold less, and no more.
    proposed: whether a planner tries it: "always", or as the more complex one, "if faster".
    """

    rows: Callable[[int, int, Options], Rows]
    takes: tuple[str, ...] = ()
    copies: int = 1
    placed: Literal["plain", "looped", "v"] = "plain"
    name: str = ""
    held: Literal["bounded", "all", ""] = ""
    aliases: tuple[str, ...] = ()
    bubble: float | None = None
    stashes: float = 1.0
    less_than: "tuple[ScheduleFamily, ...]" = ()
    no_more_than: "tuple[ScheduleFamily, ...]" = ()
    proposed: Literal["always", "if faster", ""] = ""

    def rank_of(self, num_ranks: int, chunks: int) -> tuple[int, ...]:
        """Return the rank of every stage of one copy (the first)."""
        there = tuple(range(num_ranks))
        return there + there[::-1] if self.placed == "v" else there * chunks


def stage_per_rank(
    order: Callable[[int, int, int], list[Action]], name: str = "", held: Literal["bounded", "all", ""] = ""
) -> ScheduleFamily:
    """Place stage s on rank s. What else is known of the schedule is added by _replace()."""

    def rows(num_ranks: int, num_microbatches: int, _: Options) -> Rows:
        return [order(num_ranks, num_microbatches, stage) for stage in range(num_ranks)]

    return ScheduleFamily(rows, name=name, held=held)
