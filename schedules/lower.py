"""Complete a table into every rank's program: messages, gradient reductions, the update."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import ADD_TO_GRADIENTS, NORM, PAIR, RECV_B, RECV_F, REDUCE, SEND_B, SEND_F, UPDATE, Action
from mpitrain.schedules.table import Table


class Reduction(NamedTuple):
    """When the gradient buckets of one stage are complete.

    The stage's backward has `num_parts` parts, walked 0, 1, ...; bucket k is complete after part ready[k] of the last backward.
    """

    num_parts: int
    ready: tuple[int, ...]


def lower(table: Table, reduces: Sequence[Reduction], *, tail: int = 1, train: bool = True) -> list[list[Action]]:
    """Return the program of each pipeline rank. For 1F1B, 2 stages, 2 microbatches, two parts and buckets a stage:

    rank 0:  F0@0 SEND_F0@0 F1@0 SEND_F1@0 RECV_B0@0 B0@0 RECV_B1@0 B1@0/0 REDUCE0@0 B1@0/1 REDUCE1@0 NORM UPDATE
    rank 1:  RECV_F0@1 F0@1 B0@1 SEND_B0@1 RECV_F1@1 F1@1 B1@1/0 REDUCE0@1 B1@1/1 SEND_B1@1 REDUCE1@1 NORM UPDATE

    A receive stands right before its consumer. A send stands right after its producer and before a reduction, because the next
    rank waits for it; stages on the same rank hand over without a message. Whatever adds last to a stage's weight gradients (B,
    or W of a split backward) is walked in parts, and reductions start between the parts. A stage without buckets keeps its
    backward whole. Evaluation (`train=False`) gets messages only and ignores `reduces`.

    `tail=K` is a breadth-first tail (arXiv:2211.05953) for a pipeline of one stage: the last K backwards are walked together,
    part by part, so that reductions overlap with K microbatches instead of one:

        B2@0/0 B3@0/0 REDUCE0@0 B2@0/1 B3@0/1 REDUCE1@0

    Where forwards stand between these backwards, as in 1F1B, they move in front of them: K microbatches are then in flight.
    Each parameter's gradient is still summed in ascending microbatch order, so bits don't change. With more stages the next
    rank waits for each backward, and `tail` is ignored.

    Raises ScheduleError if `reduces` doesn't fit the table.
    """
    programs = with_messages(table)
    if not train:
        return programs
    _refuse_misfit(table, reduces, tail)
    late = tail if table.num_stages == 1 else 1
    for stage, reduction in enumerate(reduces):
        if reduction.ready:
            rank = table.rank_of[stage]
            programs[rank] = _with_reductions(programs[rank], stage, reduction, late)
    return [[*program, NORM, UPDATE] for program in programs]


def _refuse_misfit(table: Table, reduces: Sequence[Reduction], tail: int) -> None:
    if len(reduces) != table.num_stages:
        raise ScheduleError(f"{table.name}: found reductions of {len(reduces)} stages, needed {table.num_stages}")
    if tail < 1:
        raise ScheduleError(f"{table.name}: found a tail of {tail} microbatches, needed at least 1")
    for stage, (num_parts, ready) in enumerate(reduces):
        for bucket, part in enumerate(ready):
            if not 0 <= part < num_parts:
                raise ScheduleError(f"stage {stage}: bucket {bucket} is complete after part {part}, the backward has {num_parts} parts")


# ---------------------------------------------------------------- messages


def with_messages(table: Table) -> list[list[Action]]:
    """Put the receive before each action that needs a message and the send after each that makes one.

    Of a pair both receives come first and both sends last, so that nothing interrupts it.
    """
    return [_with_messages(table, actions) for actions in table.ranks]


def _with_messages(table: Table, actions: Iterable[Action]) -> list[Action]:
    program: list[Action] = []
    rest = iter(actions)
    for action in rest:
        group = [next(rest), next(rest)] if action == PAIR else [action]
        messages = [_messages(table, member) for member in group]
        program += [receive for receive, _ in messages if receive]
        program += [PAIR, *group] if action == PAIR else group
        program += [send for _, send in messages if send]
    return program


def _messages(table: Table, action: Action) -> tuple[Action | None, Action | None]:
    """Return the receive that a computation needs and the send of what it makes."""
    kind, m, stage, _ = action
    rank_of, in_copy = table.rank_of, stage % table.depth
    previous = in_copy > 0 and rank_of[stage - 1] != rank_of[stage]
    following = in_copy + 1 < table.depth and rank_of[stage + 1] != rank_of[stage]
    if kind == "F":
        return RECV_F(m, stage) if previous else None, SEND_F(m, stage) if following else None
    if kind in ("B", "I"):
        return RECV_B(m, stage) if following else None, SEND_B(m, stage) if previous else None
    return None, None


# ---------------------------------------------------------------- reductions


def _with_reductions(program: list[Action], stage: int, reduction: Reduction, tail: int) -> list[Action]:
    """Walk the last `tail` backwards of a stage part by part, at the place of the last one, with its reductions."""
    adding = [action for action in program if action.stage == stage and action.kind in ADD_TO_GRADIENTS]
    late = adding[-tail:]
    result: list[Action] = []
    for position, action in enumerate(program):
        if action == PAIR and program[position + 2] in late:
            continue  # a backward that is walked in parts stands alone
        if action == late[-1]:
            result += _part_by_part(late, stage, reduction)
        elif action not in late:
            result.append(action)
    return _sends_first(result)


def _sends_first(program: list[Action]) -> list[Action]:
    """Move each gradient's send in front of the reductions it stands behind: another rank waits for it, nobody yet for them."""
    result: list[Action] = []
    for action in program:
        at = len(result)
        while action.kind == "SEND_B" and at and result[at - 1].kind == "REDUCE":
            at -= 1
        result.insert(at, action)
    return result


def _part_by_part(backwards: list[Action], stage: int, reduction: Reduction) -> list[Action]:
    walk = []
    for part in range(reduction.num_parts):
        walk += [backward._replace(part=part) for backward in backwards]
        walk += [REDUCE(bucket, stage) for bucket, ready in enumerate(reduction.ready) if ready == part]
    return walk
