"""GATHER, RELEASE, SUM, REDUCE: weights and gradients of one bucket, over ranks, in the middle of a step."""

from collections.abc import Mapping

from mpitrain.actor.reductions import Gradients
from mpitrain.actor.stage import Stage
from mpitrain.actor.step_work import Work
from mpitrain.schedules.actions import Action


class BucketCollectives:
    """What is done to a bucket between forwards and backwards: stage `stage`, number `index` of its own."""

    def __init__(self, stages: Mapping[int, Stage], gradients: Gradients):
        self._stages = stages
        self._gradients = gradients

    def gather(self, action: Action, work: Work) -> None:
        """Fetch the weights of a bucket (ZeRO-3), unless they are here."""
        self._stages[action.stage].state.buckets[action.index].weights.gather()

    def release(self, action: Action, work: Work) -> None:
        """Drop the weights of a bucket that others have (ZeRO-3)."""
        self._stages[action.stage].state.buckets[action.index].weights.release()

    def sum(self, action: Action, work: Work) -> None:
        """Start summing the gradients of a bucket over an axis that isn't the data axis."""
        self._gradients.sum(action.stage, action.index, action.part)

    def reduce(self, action: Action, work: Work) -> None:
        """Start reducing the gradients of a bucket over the data axis."""
        self._gradients.reduce(action.stage, action.index, action.part)
