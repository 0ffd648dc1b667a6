"""Complete a table into every rank's program.

Lowering adds messages, gradient reductions, the coming and going of parameters, and the update. For
1F1B, 2 stages, 2 microbatches, two parts and buckets a stage:

rank 0:  F0@0 SEND_F0@0 F1@0 SEND_F1@0 RECV_B0@0 B0@0 RECV_B1@0 B1@0/0 REDUCE0@0 B1@0/1
         REDUCE1@0 NORM UPDATE
rank 1:  RECV_F0@1 F0@1 B0@1 SEND_B0@1 RECV_F1@1 F1@1 B1@1/0 REDUCE0@1 B1@1/1 SEND_B1@1
         REDUCE1@1 NORM UPDATE

A receive stands right before its consumer. A send stands right after its producer and before a
reduction, because the next rank waits for it; stages on the same rank hand over without a message.
Whatever adds last to a stage's weight gradients (B, or W of a split backward) is walked in parts,
and reductions start between the parts. A stage without buckets keeps its backward whole.

`tail=K` is a breadth-first tail (arXiv:2211.05953) for a pipeline of one stage: the last K
backwards are walked together, part by part, so that reductions overlap with K microbatches instead
of one:

    B2@0/0 B3@0/0 REDUCE0@0 B2@0/1 B3@0/1 REDUCE1@0

Where forwards stand between these backwards, as in 1F1B, they move in front of them: K microbatches
are then in flight. Each parameter's gradient is still summed in ascending microbatch order, so bits
don't change. With more stages the next rank waits for each backward, and `tail` is ignored; so it
is where sequences are cut: a backward waits for the next segment's.

`head=K` is the same for the first K forwards, where parameters are on their way when a step begins
(ZeRO-1 to 3): the last ones may take as long as K microbatches instead of one. With a tail of K,
too, there are never more than K in flight:

    F0@0/0 F1@0/0 F0@0/1 F1@0/1 B0@0 F2@0 B1@0/0 B2@0/0 REDUCE0@0 B1@0/1 B2@0/1 REDUCE1@0

`reduce_each` is for gradients that aren't kept whole (ZeRO-2): every B or W is walked in parts and
reduced at once, as in B0@0/0 REDUCE0@0/0 B0@0/1 REDUCE1@0/0. `tail` and `head` are ignored: a tail
is there to reduce once for several microbatches.

A bucket that other axes have copies of is summed over them first (see sums); here bucket 0 over one
axis:

    B1@0/0 SUM0@0 B1@0/1 REDUCE1@0 REDUCE0@0

`residency` is for parameters that aren't kept whole (ZeRO-3): every F, B and I is walked in parts,
and GATHER and RELEASE stand between them. One stage, two buckets, two parts:

    GATHER1@0 GATHER0@0 F0@0/0 RELEASE1@0 F0@0/1 GATHER1@0 B0@0/0 RELEASE0@0 REDUCE0@0 B0@0/1
        RELEASE1@0 REDUCE1@0 NORM UPDATE

The parts of a tail use the same buckets one after the other, and so each is gathered once for its K
backwards; so do those of a head.

`pairs` is for both: with "whole", pairs dissolve where computations are walked in parts. With
"parts" they are walked part with part, what one has more than the other alone, with GATHER and
RELEASE, or REDUCE, between. The room is that of both: twice as many buckets. `tail` and `head` are
ignored. A stage 0 of two parts with a stage 3 of three, each reduced at once:

    RECV_F1@0 RECV_B0@3 PAIR F1@0/0 B0@3/0 REDUCE0@3/0 PAIR F1@0/1 B0@3/1 SEND_F1@0 REDUCE1@3/0
        B0@3/2 SEND_B0@3 REDUCE2@3/0
"""

from collections.abc import Sequence
from typing import Literal

from mpitrain.errors import ScheduleError, counted
from mpitrain.schedules.actions import NORM, PAIR, UPDATE, Action
from mpitrain.schedules.lowering.messages import with_messages
from mpitrain.schedules.lowering.reductions import Reduction, with_reductions
from mpitrain.schedules.lowering.residency import Residency, in_parts, with_residency
from mpitrain.schedules.lowering.sums import Chains, with_sums
from mpitrain.schedules.table import Table


def lower(
    table: Table,
    reduces: Sequence[Reduction],
    *,
    tail: int = 1,
    head: int = 1,
    train: bool = True,
    residency: Residency | None = None,
    reduce_each: bool = False,
    pairs: Literal["whole", "parts"] = "whole",
) -> list[list[Action]]:
    """Return the program of each pipeline rank. The module's docstring draws what each option adds.

    Evaluation (`train=False`) gets messages only, and what a residency asks for.
    Raises ScheduleError if `reduces` or `residency` don't fit the table or each other.
    """
    _refuse_misfit_residency(table, reduces if train else None, residency)
    if train:
        _refuse_misfit(table, reduces, tail, head)
    computes_in_parts = residency is not None or (train and reduce_each)
    pairs_of_parts = computes_in_parts and pairs == "parts"
    if computes_in_parts and not pairs_of_parts:
        table = _without_pairs(table)
    programs = with_messages(table, _num_parts(reduces, residency) if pairs_of_parts else None)
    if train:
        if pairs_of_parts:
            tail = head = 1
        programs = _with_gradients(programs, table, reduces, tail, head, reduce_each)
    if residency:
        programs = [with_residency(in_parts(program, residency), residency) for program in programs]
    return [[*program, NORM, UPDATE] for program in programs] if train else programs


def walks_together(table: Table) -> bool:
    """Whether a tail and a head do anything: a pipeline of one stage, and sequences that are whole."""
    return table.num_stages == 1 and table.segments == 1


def _with_gradients(
    programs: list[list[Action]],
    table: Table,
    reduces: Sequence[Reduction],
    tail: int,
    head: int,
    reduce_each: bool,
) -> list[list[Action]]:
    """Reduce and sum every stage's gradients, and walk the head and the tail in parts.

    Raises ScheduleError if tied weights are where their axis doesn't reach.
    """
    if reduce_each or not walks_together(table):
        tail = head = 1
    reduced = list(programs)
    for stage, reduction in enumerate(reduces):
        if reduction.ready:
            rank = table.rank_of[stage]
            reduced[rank] = with_reductions(reduced[rank], stage, reduction, tail=tail, each=reduce_each)
    if head > 1:
        reduced[0] = _with_head(reduced[0], reduces[0].num_parts, head)
    chains = Chains(reduces, table.rank_of, table.depth)
    chains.refuse_misplaced()
    return with_sums(reduced, chains)


def _with_head(program: list[Action], num_parts: int, head: int) -> list[Action]:
    """Walk the first `head` forwards of a stage together, part by part, in the place of the first."""
    together = [action for action in program if action.kind == "F"][:head]
    if len(together) < 2 or num_parts < 2:
        return program
    at = program.index(together[0])
    walked = [forward._replace(part=part) for part in range(num_parts) for forward in together]
    return program[:at] + walked + [action for action in program[at:] if action not in together]


def _num_parts(reduces: Sequence[Reduction], residency: Residency | None) -> list[int]:
    return (
        [reduction.num_parts for reduction in reduces]
        if residency is None
        else list(map(len, residency.uses))
    )


def _without_pairs(table: Table) -> Table:
    return table._replace(
        ranks=tuple(tuple(action for action in actions if action != PAIR) for actions in table.ranks)
    )


def _refuse_misfit(table: Table, reduces: Sequence[Reduction], tail: int, head: int) -> None:
    if len(reduces) != table.num_stages:
        raise ScheduleError(
            f"{table.name}: found reductions of {counted(len(reduces), 'stages')}, needed {table.num_stages}"
        )
    for what, count in (("tail", tail), ("head", head)):
        if count < 1:
            raise ScheduleError(f"{table.name}: found a {what} of {count} microbatches, needed at least 1")
    for stage, (num_parts, ready, *_) in enumerate(reduces):
        for bucket, part in enumerate(ready):
            if not 0 <= part < num_parts:
                raise ScheduleError(
                    f"stage {stage}: bucket {bucket} is complete after part {part}, the backward has "
                    f"{num_parts} parts"
                )


def _refuse_misfit_residency(
    table: Table, reduces: Sequence[Reduction] | None, residency: Residency | None
) -> None:
    if residency is None:
        return
    if len(residency.uses) != table.num_stages:
        raise ScheduleError(
            f"{table.name}: found the uses of {counted(len(residency.uses), 'stages')}, needed "
            f"{table.num_stages}"
        )
    if residency.ahead < 0 or residency.until not in ("use", "step"):
        raise ScheduleError(
            f"{table.name}: found {residency[1:]}, needed ahead of at least 0 and until 'use' or 'step'"
        )
    for stage in range(table.num_stages):
        found = residency.num_parts(stage)
        needed = reduces[stage].num_parts if reduces else None
        if found == 0 or found != (needed or found):
            raise ScheduleError(
                f"stage {stage}: found what {found} parts use, needed {needed or 'at least 1'}"
            )
