"""Prove a set of programs before any rank sends a message."""

from collections.abc import Sequence
from dataclasses import dataclass

from mpitrain.errors import ScheduleError
from mpitrain.schedules import rules
from mpitrain.schedules.actions import SENDS
from mpitrain.schedules.deadlock import no_deadlock, play
from mpitrain.schedules.draw import grid
from mpitrain.schedules.lower import Reduction
from mpitrain.schedules.needs import Needs, Programs


@dataclass(frozen=True)
class Report:
    """What was proved, in numbers."""

    num_stages: int
    num_microbatches: int
    num_actions: int
    num_messages: int
    peak_in_flight: tuple[int, ...]  # per rank: most (stage, microbatch) stashes held at once


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
) -> Report:
    """Prove that the lowered programs of all pipeline ranks compute one step, and return a Report.

    Every stage sees every microbatch exactly once forward and once backward; whatever an action needs comes before it or is
    received; every message has its two ends; gradients are summed in ascending microbatch order; the update comes last; and
    all ranks reach their end although no send is buffered. Sends are started without blocking and waited for at the end of
    the step; with `blocking_sends` each send waits for its receive at once, under which GPipe still ends and 1F1B doesn't.
    With `reduces`, as given to `lower`, every bucket is reduced once and after all that adds to it.

    Raises ScheduleError naming rank, position (from 0), instruction and what it waits for, with the grid of the schedule.
    """
    if not programs:
        raise ScheduleError("found no programs, needed one for each pipeline rank")
    assert reduces is None or len(reduces) == num_stages
    needs = Needs(programs, copies=copies, segments=segments)
    try:
        _prove(needs, num_stages, num_microbatches, reduces, train)
        no_deadlock(needs, blocking_sends=blocking_sends)
    except rules.Flaw as flaw:
        _, cursors = play(needs)
        waits = all(cursor == len(program) for cursor, program in zip(cursors, programs))
        raise ScheduleError(f"{flaw.args[0]}\n\n{grid(programs, mark=flaw.place, waits=waits)}") from None
    return Report(
        num_stages,
        num_microbatches,
        num_actions=sum(map(len, programs)),
        num_messages=sum(action.kind in SENDS for program in programs for action in program),
        peak_in_flight=_peak_in_flight(needs) if train else (0,) * len(programs),  # evaluation keeps nothing
    )


def _prove(needs: Needs, num_stages: int, num_microbatches: int, reduces: Sequence[Reduction] | None, train: bool) -> None:
    """Apply all rules that need no playing. Each may rely on those before it."""
    rules.nothing_foreign(needs, num_stages, num_microbatches)
    rules.nothing_twice(needs)
    rules.everything_computed(needs, num_stages, num_microbatches, train)
    rules.parts_complete(needs, reduces)
    rules.pairs_whole(needs)
    rules.needs_come_first(needs)
    rules.messages_matched(needs)
    rules.gradients_ascend(needs)
    if train and reduces is not None:
        rules.reductions_follow(needs, reduces)
    rules.update_at_end(needs, train)


def _peak_in_flight(needs: Needs) -> tuple[int, ...]:
    """Count, per rank, the most stashes held at once: from a forward to the end of its B or W."""
    peaks = []
    for program in needs.programs:
        held = peak = 0
        for action in program:
            held += action.kind == "F"
            peak = max(peak, held)
            held -= action.kind in ("B", "W") and needs.last_part[action[:3]] == action
        peaks.append(peak)
    return tuple(peaks)
