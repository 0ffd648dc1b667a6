"""Gradient accumulation: which instructions of a program add to which gradients, and complete a group."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mpitrain.plan.declared.parameters import EXPERT
from mpitrain.plan.division.batch_division import TreeRun
from mpitrain.plan.division.buckets import BucketPlan
from mpitrain.schedules.actions import Action
from mpitrain.schedules.table import Table


class BucketLike(Protocol):
    """A bucket of a stage on one rank, or the plan of one.

    gradients: one for each use. weights: two stages can share them.
    """

    @property
    def plan(self) -> BucketPlan: ...

    @property
    def weights(self) -> Any: ...

    @property
    def gradients(self) -> Sequence[Any]: ...


class StageLike(Protocol):
    """What has buckets."""

    @property
    def buckets(self) -> Sequence[BucketLike]: ...


Completed = Mapping[Action, list[tuple[Any, range]]]


def completed_by(
    program: Sequence[Action], stages: Mapping[int, StageLike], table: Table, run: TreeRun
) -> Completed:
    """Return which groups of which gradients are complete after an instruction of this rank's program."""
    last: dict[tuple[int, range], tuple[Action, Any]] = {}
    for action in program:
        for gradient in added_to(action, stages):
            microbatch = action.index // table.segments
            if not run.is_empty(microbatch):
                last[id(gradient), run.group_of(microbatch)] = action, gradient
    completed: dict[Action, list[tuple[Any, range]]] = {}
    for (_, group), (action, gradient) in last.items():
        completed.setdefault(action, []).append((gradient, group))
    return completed


def added_to(action: Action, stages: Mapping[int, StageLike]) -> list[Any]:
    """Return the gradients that an instruction adds to.

    A backward for inputs only to those of experts, whose rows can come in rounds.
    """
    if action.kind not in ("B", "I", "W"):
        return []
    stage_buckets = stages[action.stage].buckets
    buckets = [b for b in stage_buckets if action.part is None or action.part in b.plan.parts]
    if action.kind == "I":
        buckets = [b for b in buckets if b.plan.domain == EXPERT]
    return [gradient for bucket in buckets for gradient in bucket.gradients]


def summed_in(bucket: BucketLike, stages: Mapping[int, StageLike]) -> list[Any]:
    """Return the gradients of this rank that a bucket's is the sum of, itself first: of a tied
    embedding all its uses.
    """
    others = [
        other
        for state in stages.values()
        for other in state.buckets
        if bucket.plan.tied and other.plan.tied and other is not bucket
    ]
    return [gradient for tied in (bucket, *others) for gradient in tied.gradients]
