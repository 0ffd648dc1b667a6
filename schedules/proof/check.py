"""Prove a set of programs before any rank sends a message."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import SENDS, Action
from mpitrain.schedules.lowering.needs import Needs, Programs
from mpitrain.schedules.lowering.reductions import Reduction
from mpitrain.schedules.lowering.residency import Residency
from mpitrain.schedules.play.draw import grid
from mpitrain.schedules.proof import bucket_rules, rules
from mpitrain.schedules.proof.deadlock import no_deadlock, play
from mpitrain.schedules.table import Table


@dataclass(frozen=True)
class Proof:
    """What was proved, in numbers."""

    num_stages: int
    num_microbatches: int
    num_actions: int
    num_messages: int
    peak_in_flight: tuple[int, ...]  # per rank: most (stage, microbatch) stashes held at once
    gathers: tuple[int, ...] = ()  # per rank: how often a bucket's parameters are fetched
    peak_resident: tuple[int, ...] = ()  # per rank: most buckets that are fetched and not released


def check(
    programs: Programs,
    num_stages: int,
    num_microbatches: int,
    *,
    copies: int = 1,
    segments: int = 1,
    reduces: Sequence[Reduction] | None = None,
    train: bool = True,
    blocking_sends: bool = False,
    residency: Residency | None = None,
    reduce_each: bool = False,
) -> Proof:
    """Prove that the lowered programs of all pipeline ranks compute one step, and return a Proof.

    Every stage sees every microbatch once forward and once backward; whatever an action needs comes
    before it or is received; every message has its two ends; gradients are summed in ascending
    microbatch order; the update comes last; and all ranks reach their end although no send is
    buffered.
    blocking_sends: each send waits for its receive at once, not at the end of the step: GPipe still
    ends, 1F1B doesn't.
    reduces: as given to `lower`: every bucket is summed and reduced once, after all that adds to
    it, and ranks start the sums that join them in one order.
    reduce_each: it is reduced for every microbatch, before the next one adds to it, unless it is
    summed over other axes first.
    residency: every part finds the buckets it needs gathered, no more are held than it allows, and
    at the end all are released.

    Raises ScheduleError naming rank, position (from 0), instruction and what it waits for, with the
    grid of the schedule.
    """
    if not programs:
        raise ScheduleError("found no programs, needed one for each pipeline rank")
    assert reduces is None or len(reduces) == num_stages
    assert residency is None or len(residency.uses) == num_stages
    if not train:
        reduces = None
    needs = Needs(programs, copies=copies, segments=segments, reduces=reduces or ())
    try:
        _prove(needs, num_stages, num_microbatches, _num_parts(reduces, residency), train)
        _prove_buckets(needs, reduces, residency, reduce_each)
        no_deadlock(needs, blocking_sends=blocking_sends)
    except rules.Flaw as flaw:
        waits = play(needs) == list(map(len, programs))
        raise ScheduleError(f"{flaw.args[0]}\n\n{grid(programs, mark=flaw.place, waits=waits)}") from None
    return _report(needs, num_stages, num_microbatches, train)


def _report(needs: Needs, num_stages: int, num_microbatches: int, train: bool) -> Proof:
    programs = needs.programs
    return Proof(
        num_stages,
        num_microbatches,
        num_actions=sum(map(len, programs)),
        num_messages=sum(action.kind in SENDS for program in programs for action in program),
        # evaluation keeps nothing
        peak_in_flight=_peak_in_flight(needs) if train else (0,) * len(programs),
        gathers=tuple(sum(action.kind == "GATHER" for action in program) for program in programs),
        peak_resident=tuple(map(_peak_resident, programs)),
    )


def check_table(table: Table) -> None:
    """Refuse a user's table that isn't complete, or not in order on one rank, in its own words."""
    needs = Needs(table.ranks, copies=table.copies, segments=table.segments)
    try:
        rules.nothing_twice(needs)
        rules.everything_computed(needs, table.num_stages, table.num_microbatches, train=True)
        rules.needs_come_first(needs, messages=False)
        rules.gradients_ascend(needs)
    except rules.Flaw as flaw:
        waits = play(needs) == list(map(len, table.ranks))
        raise ScheduleError(
            f"{table.name}: {flaw.args[0]}\n\n{grid(table, mark=flaw.place, waits=waits)}"
        ) from None


def _num_parts(reduces: Sequence[Reduction] | None, residency: Residency | None) -> list[int] | None:
    if residency is not None:
        return [len(parts) for parts in residency.uses]
    return None if reduces is None else [reduction.num_parts for reduction in reduces]


def _prove(
    needs: Needs, num_stages: int, num_microbatches: int, num_parts: Sequence[int] | None, train: bool
) -> None:
    """Apply all rules that need no playing. Each may rely on those before it."""
    rules.nothing_foreign(needs, num_stages, num_microbatches)
    rules.nothing_twice(needs)
    rules.everything_computed(needs, num_stages, num_microbatches, train)
    rules.parts_complete(needs, num_parts)
    rules.pairs_fit(needs)
    rules.needs_come_first(needs)
    rules.messages_matched(needs)
    rules.gradients_ascend(needs)
    rules.copy_at_begin(needs, train)
    rules.update_at_end(needs, train)


def _prove_buckets(
    needs: Needs, reduces: Sequence[Reduction] | None, residency: Residency | None, reduce_each: bool
) -> None:
    bucket_rules.parameters_resident(needs, residency)
    if reduces is not None:
        bucket_rules.reductions_follow(needs, each=reduce_each)
        bucket_rules.sums_meet(needs)


def _peak_in_flight(needs: Needs) -> tuple[int, ...]:
    """Return the most stashes that each rank holds: from a forward's start to the end of B or W.

    What is recomputed, from then on.
    """
    peaks = []
    for program in needs.programs:
        held = peak = 0
        for action in program:
            again = ("R", *action[1:3]) in needs.last_part
            held += action.kind == ("R" if again else "F") and not action.part
            peak = max(peak, held)
            held -= action.kind in ("B", "W") and needs.last_part[action[:3]] == action
        peaks.append(peak)
    return tuple(peaks)


def _peak_resident(program: Sequence[Action]) -> int:
    return max(
        accumulate(((action.kind == "GATHER") - (action.kind == "RELEASE") for action in program), initial=0)
    )
