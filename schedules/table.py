"""A schedule: which rank computes what, in which order. The text form is also how users write their own:

    # two stages, two microbatches
    rank 0: F0@0 F1@0 B0@0 B1@0
    rank 1: F0@1 B0@1 F1@1 B1@1
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import COMPUTE, Action, parse


class Table(NamedTuple):
    """The compute actions of every pipeline rank. Messages, reductions and the update are added by `lower`."""

    name: str
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    rank_of: tuple[int, ...]  # stage -> pipeline rank

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)


def make_table(name: str, ranks: Iterable[Iterable[Action]]) -> Table:
    """Build a table; the number of microbatches and the placement of stages follow from the actions.

    Raises ScheduleError if something else than a whole F, B, I or W is in it, or if stages are missing or on two ranks.
    """
    ranks = tuple(tuple(actions) for actions in ranks)
    for rank, actions in enumerate(ranks):
        for position, action in enumerate(actions):
            if action.kind not in COMPUTE or action.part is not None:
                raise ScheduleError(
                    f"{name}: rank {rank}, position {position}: found {action}, a table holds whole F B I W; "
                    "messages, parts, reductions and the update are added later"
                )
    rank_of = _placement(name, ranks)
    return Table(name, 1 + max(action.index for actions in ranks for action in actions), ranks, rank_of)


def _placement(name: str, ranks: tuple[tuple[Action, ...], ...]) -> tuple[int, ...]:
    """Find the rank of every stage."""
    if not ranks:
        raise ScheduleError(f"{name}: found no ranks, needed at least one line such as 'rank 0: F0@0 B0@0'")
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        if not actions:
            raise ScheduleError(f"{name}: rank {rank} computes nothing; leave it out or give it a stage")
        for action in actions:
            if rank_of.setdefault(action.stage, rank) != rank:
                raise ScheduleError(f"{name}: stage {action.stage} is on ranks {rank_of[action.stage]} and {rank} ({action}), needs one")
    for stage in range(len(rank_of)):
        if stage not in rank_of:
            raise ScheduleError(f"{name}: no rank computes stage {stage}; stages are numbered from 0 without gaps")
    return tuple(rank_of[stage] for stage in range(len(rank_of)))


# ---------------------------------------------------------------- text

_LINE = re.compile(r"rank\s+([0-9]+)\s*:(.*)")


def read_table(text: str, name: str = "user") -> Table:
    """Read a table, one line per rank in order; `#` starts a comment. Raises ScheduleError naming the line."""
    ranks: list[list[Action]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].strip()
        if line:
            try:
                ranks.append(_read_line(line, len(ranks)))
            except ScheduleError as error:
                raise ScheduleError(f"{name}, line {number}: {error.args[0]}") from None
    return make_table(name, ranks)


def _read_line(line: str, rank: int) -> list[Action]:
    match = _LINE.fullmatch(line)
    if match is None or int(match[1]) != rank:
        raise ScheduleError(f"found {line[:30]!r}, needed 'rank {rank}: ' and its actions")
    return [parse(token) for token in match[2].split()]


def write_table(table: Table) -> str:
    """Write a table as text that `read_table` reads back exactly."""
    head = f"# {table.name}: {table.num_stages} stages, {table.num_microbatches} microbatches\n"
    return head + "".join(f"rank {rank}: {' '.join(map(str, actions))}\n" for rank, actions in enumerate(table.ranks))
