"""Find the ranks that caused a hang, from where all ranks of a job are and what each waits for.

    rank 2  RECV_F1@2  waits for rank 1, which owes it SEND_F1@1, position 8 of its program
    rank 1  RECV_F1@1  waits for rank 0, which owes it SEND_F1@0, position 5
    rank 0  F1@0       position 4, stopped: it is behind, and owes SEND_F1@0 to rank 1; in the end 1
                       and 2 wait for it

A wait names the ranks whose messages have not come (comm/progress.py), and the instruction by which
they send them; a wait for the rank's own device names nobody. A rank is behind if somebody waits
for it, and it is stopped or dead, or waits for nobody. Where all wait, and an instruction that is
waited for has been run, its message is lost on the way.

Standard library only, and no MPI: the watchdog has this.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mpitrain.cluster.processes import CONDITIONS, DEAF
from mpitrain.cluster.status_board import BUSY, HUNG, LEFT, WAITING, WORKING, ExpectedInstruction, Where

MOST_NAMED = 8


@dataclass(frozen=True)
class Rank:
    """A rank when its node, of this name, was asked.

    condition, held_in: of its process; where in the kernel.  for_s: it is where it is.
    gave_up: what it said when its wait was too long.  late: it is there for longer than its limit.
    """

    where: Where
    node: str
    condition: str
    held_in: str
    for_s: float
    gave_up: str = ""
    late: bool = False

    @property
    def stopped(self) -> bool:
        """Whether the system says that it can do nothing."""
        return self.condition in CONDITIONS

    @property
    def waits(self) -> bool:
        """Whether it waits for others, as far as it could say."""
        return bool(self.where.waiting_on) if self.where.waits_for else self.where.state in (WAITING, HUNG)

    @property
    def how(self) -> str:
        """Why it does nothing, or what it does, in words."""
        stack = "; it can't show its stack" if self.stopped else ""
        does = "it waits for no message: it computes or is stuck"
        if self.where.waits_for:
            does = f"it waits for its own device: {self.where.waits_for}"
        return f"{self.condition_or(does)}{stack}"

    def condition_or(self, otherwise: str) -> str:
        """Return its condition in words, and where the kernel holds it."""
        held = f", in {self.held_in}" if self.held_in and self.condition == "D" else ""
        return f"{CONDITIONS.get(self.condition, otherwise)}{held}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> "Rank":
        where = dict(fields["where"])
        where["waiting_on"] = tuple(where["waiting_on"])
        where["expected"] = ExpectedInstruction(*where["expected"])
        return Rank(**{**fields, "where": Where(**where)})


@dataclass(frozen=True)
class HangReport:
    """text: for the user.  behind: the ranks whose stacks tell more."""

    text: str
    behind: tuple[int, ...] = ()


def at_fault(ranks: Sequence[Rank]) -> bool:
    """Return whether something is wrong: more than that ranks wait for others that are at work."""
    there = [rank for rank in ranks if _counts(rank)]
    wrong = any(rank.late or rank.condition in DEAF or rank.where.state == HUNG for rank in there)
    return wrong or not any(rank.where.state in (WORKING, BUSY) for rank in ranks)


def _counts(rank: Rank) -> bool:
    """Return whether it has not left, or can't end."""
    return rank.where.state != LEFT or rank.late


def report(ranks: Iterable[Rank], silent: Sequence[str] = ()) -> HangReport:
    """Say who is behind. silent: nodes that reported nothing."""
    rank_by_number = {rank.where.rank: rank for rank in ranks if rank.where.rank >= 0 and _counts(rank)}
    lines = _gave_up(rank_by_number)
    late = [rank for rank in rank_by_number.values() if rank.late]
    if late and not lines:
        causes = [rank for rank in late if rank.stopped] or late
        lines = [f"mpitrain: {_stuck(rank)}" for rank in causes[:MOST_NAMED]]
    else:
        causes = _behind(rank_by_number)
        lines += map(_first_behind, causes[:MOST_NAMED])
        if not causes and not silent:
            lines += _lost(rank_by_number) or _least(rank_by_number)
    for rank in causes[:MOST_NAMED]:
        lines += _owes(rank, rank_by_number)
    lines += [f"mpitrain: node {name} doesn't answer: it is down, or the network to it" for name in silent]
    return HangReport("\n".join(lines), tuple(rank.where.rank for rank in causes))


def _gave_up(rank_by_number: Mapping[int, Rank]) -> list[str]:
    said = [rank.gave_up for rank in rank_by_number.values() if rank.gave_up]
    more = len(said) - MOST_NAMED
    return said[:MOST_NAMED] + [f"mpitrain: and {more} more"] * (more > 0)


def _first_behind(rank: Rank) -> str:
    return f"mpitrain: cause of the hang: {rank.where}, for {rank.for_s:.0f} s: {rank.how}"


def _stuck(rank: Rank) -> str:
    limit = f"the limit is {rank.where.limit_s:g} s (comm.timeout_s)"
    stuck = f"{rank.where}: stuck for {rank.for_s:.0f} s"
    return f"{stuck}, {limit}: {rank.condition_or('it does nothing')}"


def _behind(rank_by_number: Mapping[int, Rank]) -> list[Rank]:
    """Return the ranks that are waited for and wait for nobody; of these the stopped, if any."""
    free = [rank for rank in rank_by_number.values() if rank.stopped or not rank.waits]
    awaited = {
        number
        for rank in rank_by_number.values()
        if rank.waits and not rank.stopped
        for number in rank.where.waiting_on
    }
    free = [rank for rank in free if rank.where.rank in awaited] or free
    return sorted([rank for rank in free if rank.stopped] or free, key=_cursor)


def _cursor(rank: Rank) -> tuple[int, bool, int]:
    """Validation follows its step."""
    return rank.where.step, rank.where.phase == "validation", rank.where.position


def _owes(rank: Rank, rank_by_number: Mapping[int, Rank]) -> list[str]:
    """Say what a rank owes, to whom, and who waits for it in the end."""
    others = [other.where for other in rank_by_number.values() if other is not rank]
    waiting = [where for where in others if rank.where.rank in where.waiting_on]
    if not waiting:
        return []
    first = min(waiting, key=lambda at: (at.expected.position < 0, at.expected.position, at.rank))
    expected = first.expected
    same = _names(where.rank for where in waiting if where.expected == expected)
    at = f", position {expected.position} of its program" if expected.position >= 0 else ""
    what = f"  rank {rank.where.rank} owes {expected.instruction}{at}, to {same}: {first.waits_for}"
    after = _transitively(rank.where.rank, rank_by_number)
    return [f"{what}; {_names(after)} {'wait' if len(after) > 1 else 'waits'} for it in the end"]


def _transitively(number: int, rank_by_number: Mapping[int, Rank]) -> set[int]:
    places = [rank.where for rank in rank_by_number.values()]
    waiting: set[int] = set()
    new = {number}
    while new:
        new = {where.rank for where in places if new.intersection(where.waiting_on)} - waiting - {number}
        waiting |= new
    return waiting


def _lost(rank_by_number: Mapping[int, Rank]) -> list[str]:
    """Name the messages that were sent, and have not come."""
    lines = []
    for rank in rank_by_number.values():
        expected = rank.where.expected
        senders = [rank_by_number[number] for number in rank.where.waiting_on if number in rank_by_number]
        for sender in senders:
            if (
                expected.position >= 0
                and sender.where.phase == rank.where.phase == "step"
                and (sender.where.step, sender.where.position) > (rank.where.step, expected.position)
            ):
                lines.append(
                    f"mpitrain: cause of the hang: no rank: rank {sender.where.rank} on {sender.node} has "
                    f"run {expected.instruction}, and rank {rank.where.rank} on {rank.node} waits for it: "
                    "the message is lost, or the link between them is down"
                )
    return lines[:MOST_NAMED]


def _least(rank_by_number: Mapping[int, Rank]) -> list[str]:
    if not rank_by_number:
        return []
    least = min(rank_by_number.values(), key=_cursor)
    return [f"mpitrain: cause of the hang: {least.where}: all ranks wait, and it has made least progress"]


def _names(numbers: Iterable[int]) -> str:
    """Name ranks, neighbours as from-to."""
    numbers = sorted(numbers)
    runs = list[list[int]]()
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs]
    more = f" and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(texts[:MOST_NAMED])}{more}"
