"""A schedule: which rank computes what, in which order. The text form is also how users write their own:

    # two stages, two microbatches
    rank 0: F0@0 F1@0 B0@0 B1@0
    rank 1: F0@1 B0@1 F1@1 B1@1

A pipeline can have two *copies* (DualPipe): stages 0 to n-1 are the first, n to 2n-1 the second,
with the same weights, and each has its own share of the microbatches, numbered from 0. A microbatch
can be cut into *segments* of its sequence (Seq1F1B): index 3*k + 1 is then segment 1 of microbatch
3. Such a table begins with a line `copies 2` or `segments 4`.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from mpitrain.errors import ScheduleError, counted
from mpitrain.schedules.actions import COMPUTE, OFFLOAD, PAIR, Action, parse
from mpitrain.schedules.limits import require_size


class Table(NamedTuple):
    """The compute actions of every pipeline rank; `lower` adds messages, reductions, the update."""

    name: str
    num_microbatches: int  # of one copy; with segments, their total number
    ranks: tuple[tuple[Action, ...], ...]
    rank_of: tuple[int, ...]  # stage -> pipeline rank
    copies: int = 1  # of the model
    segments: int = 1  # of a microbatch's sequence
    notes: tuple[str, ...] = ()  # what was left out or changed when it was read from a file

    @property
    def num_stages(self) -> int:
        """Stages of all copies."""
        return len(self.rank_of)

    @property
    def depth(self) -> int:
        """Stages of one copy, from the embedding to the loss."""
        return len(self.rank_of) // self.copies

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, ascending: its chunk 0, 1, ..."""
        stages: list[list[int]] = [[] for _ in self.ranks]
        for stage, rank in enumerate(self.rank_of):
            stages[rank].append(stage)
        return tuple(map(tuple, stages))


def make_table(name: str, ranks: Iterable[Iterable[Action]], *, copies: int = 1, segments: int = 1) -> Table:
    """Build a table; the number of microbatches and the placement of stages follow from the actions.

    Raises ScheduleError if something else than a whole F, B, I, W, R, an O or a PAIR of F and B is
    in it, if stages are missing or on two ranks, if stages or microbatches don't divide into copies
    or segments, if a microbatch is recomputed and offloaded, or has segments and is either, or if
    two copies of a stage are on one rank.
    """
    rows = tuple(tuple(actions) for actions in ranks)
    for rank, actions in enumerate(rows):
        for position, action in enumerate(actions):
            where = f"{name}: rank {rank}, position {position}"
            if action == PAIR:
                _refuse_misfit_pair(where, actions[position + 1 : position + 3])
            elif action.kind not in (*COMPUTE, OFFLOAD) or action.part is not None:
                raise ScheduleError(
                    f"{where}: found {action}, a table holds whole F B I W R, O and PAIR; "
                    "messages, parts, reductions and the update are added later"
                )
    rank_of = _placement(name, rows)
    num_microbatches = 1 + max(action.index for actions in rows for action in actions if action != PAIR)
    require_size(
        name,
        num_microbatches * len(rank_of),
        f"found {counted(num_microbatches, 'microbatches', ',')} on {counted(len(rank_of), 'stages', ',')}",
    )
    for what, number, divisor in (
        ("stages", len(rank_of), copies),
        ("microbatches", num_microbatches, segments),
    ):
        if number % divisor:
            raise ScheduleError(f"{name}: found {number} {what}, needed a multiple of {divisor}")
    _refuse_misfit_stashes(name, rows, segments)
    _refuse_copies_together(name, rank_of, copies)
    return Table(name, num_microbatches, rows, rank_of, copies, segments)


def forwards(table: Table) -> Table:
    """Return a table's forwards, in its order: what evaluation runs."""
    rows = [[action for action in actions if action.kind == "F"] for actions in table.ranks]
    return make_table(table.name, rows, copies=table.copies, segments=table.segments)


def _refuse_misfit_pair(where: str, two: Sequence[Action]) -> None:
    if [action.kind for action in two] != ["F", "B"]:
        raise ScheduleError(
            f"{where}: PAIR is followed by {' '.join(map(str, two)) or 'nothing'}, needed a forward and a "
            "whole backward"
        )


def _refuse_misfit_stashes(name: str, rows: tuple[tuple[Action, ...], ...], segments: int) -> None:
    again, sent = (
        {action[1:3] for actions in rows for action in actions if action.kind == kind} for kind in "RO"
    )
    if segments > 1 and (again or sent):
        raise ScheduleError(
            f"{name}: found {'R' if again else 'O'} with {segments} segments; needed whole microbatches"
        )
    for index, stage in sorted(again & sent):
        raise ScheduleError(f"{name}: found O{index}@{stage} and R{index}@{stage}; needed one of them")


def _placement(name: str, ranks: tuple[tuple[Action, ...], ...]) -> tuple[int, ...]:
    if not ranks:
        raise ScheduleError(f"{name}: found no ranks, needed at least one line such as 'rank 0: F0@0 B0@0'")
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        if not actions:
            raise ScheduleError(f"{name}: rank {rank} computes nothing; leave it out or give it a stage")
        for action in actions:
            if action != PAIR and rank_of.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"{name}: stage {action.stage} is on ranks {rank_of[action.stage]} and {rank} "
                    f"({action}), needs one"
                )
    for stage in range(len(rank_of)):
        if stage not in rank_of:
            raise ScheduleError(
                f"{name}: no rank computes stage {stage}; stages are numbered from 0 without gaps"
            )
    return tuple(rank_of[stage] for stage in range(len(rank_of)))


def _refuse_copies_together(name: str, rank_of: tuple[int, ...], copies: int) -> None:
    depth = len(rank_of) // copies
    for stage, rank in enumerate(rank_of[depth:], start=depth):
        for other in range(stage % depth, stage, depth):
            if rank_of[other] == rank:
                raise ScheduleError(
                    f"{name}: stage {other} and its copy, stage {stage}: found both on rank {rank}, needed "
                    "two ranks"
                )


# ---------------------------------------------------------------- text

Rows = list[list[Action]]  # what stands in each rank's line
HEADS = ("copies", "segments")
_LINE = re.compile(r"rank\s+([0-9]{1,9})\s*:(.*)")
_LOOSE_LINE = re.compile(r"rank\s+([0-9]{1,9})\b\s*:?(.*)")
HEAD = re.compile(rf"({'|'.join(HEADS)})\s+([1-9][0-9]{{0,3}})")


def read_table(text: str, name: str = "user") -> Table:
    """Read a table, a line per rank; `#` starts a comment. Raises ScheduleError naming the line."""
    ranks, heads = read_lines(text, name)
    return make_table(name, ranks, **heads)


def read_lines(
    text: str, name: str, read: Callable[[str], list[Action]] | None = None
) -> tuple[Rows, dict[str, int]]:
    """Return what each rank's line says, and the heads. Raises ScheduleError naming the line.

    read: what a token says, for users' own files. In these `rank 0:` and its colon may be left out,
    commas may stand between tokens, and an indented line continues the rank above.
    """
    ranks: Rows = []
    heads: dict[str, int] = {}
    for number, written in enumerate(text.splitlines(), start=1):
        where = f"{name}, line {number}"
        line = written.partition("#")[0].strip()
        try:
            if head := HEAD.fullmatch(line):
                add_head(heads, head[1], int(head[2]))
            elif line and read is not None:
                _read_loosely(line, written[:1].isspace(), ranks, read)
            elif line:
                ranks.append([parse(token) for token in _actions_of_rank(_LINE, line, len(ranks)).split()])
        except ScheduleError as error:
            raise ScheduleError(f"{where}: {error.args[0]}") from None
    return ranks, heads


def add_head(heads: dict[str, int], what: str, number: int) -> None:
    """Note the number of copies or segments. Raises ScheduleError if it was said before."""
    if what in heads:
        raise ScheduleError(f"{what} again, {number} after {heads[what]}; leave one out")
    heads[what] = number


def _actions_of_rank(pattern: re.Pattern[str], line: str, rank: int) -> str:
    match = pattern.fullmatch(line)
    if match is None or int(match[1]) != rank:
        raise ScheduleError(f"found {line[:30]!r}, needed 'rank {rank}: ' and its actions")
    return match[2]


def _read_loosely(line: str, indented: bool, ranks: Rows, read: Callable[[str], list[Action]]) -> None:
    is_named = line.startswith("rank")
    tokens = _actions_of_rank(_LOOSE_LINE, line, len(ranks)) if is_named else line
    actions = [action for token in re.split(r"[\s,]+", tokens) for action in read(token)]
    if indented and ranks and not is_named:
        ranks[-1] += actions
    else:
        ranks.append(actions)


def write_table(table: Table) -> str:
    """Write a table as text that `read_table` reads back exactly."""
    heads = [f"{what} {number}" for what, number in heads_of(table)]
    rows = [f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(table.ranks)]
    return "\n".join([comment_of(table), *heads, *rows, ""])


def comment_of(table: Table) -> str:
    """Return the first line of a file that a table is written to."""
    microbatches = counted(table.num_microbatches, "microbatches")
    return f"# {table.name}: {counted(table.num_stages, 'stages')}, {microbatches}"


def heads_of(table: Table) -> list[tuple[str, int]]:
    """Return the lines that stand before those of the ranks."""
    return [(what, getattr(table, what)) for what in HEADS if getattr(table, what) > 1]
