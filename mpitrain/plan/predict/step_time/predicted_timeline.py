"""A predicted step as a timeline: one rank of each pipeline rank, as the prediction plays it."""

from collections.abc import Mapping
from typing import NamedTuple

from mpitrain.errors import ConfigError, counted
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.step_time.machine import MachineRates
from mpitrain.plan.predict.step_time.optimizer_seconds import update_seconds
from mpitrain.plan.predict.step_time.stage_seconds import StageSeconds, stages_of
from mpitrain.plan.predict.step_time.step import message_seconds, play_pipeline, state_exposed, table_of
from mpitrain.plan.predict.step_time.step_model import StepModel
from mpitrain.schedules.actions import Action
from mpitrain.schedules.play.timeline import Timeline
from mpitrain.schedules.table import Table


class PredictedTimeline(NamedTuple):
    """What a prediction plays. Times are in seconds.

    stages: of the model. num_played: microbatches of the timeline; num_microbatches: of a step.
    state_s: after it, of weights and gradients between data ranks, what nothing hides. update_s:
    the optimiser, after that.
    """

    table: Table
    timeline: Timeline
    stages: list[StageSeconds]
    num_played: int
    num_microbatches: int
    state_s: float
    update_s: float

    @property
    def played(self) -> str:
        """Which microbatches are played, in words."""
        if self.num_played == self.num_microbatches:
            return counted(self.num_played, "microbatches")
        return f"the first {self.num_played} of {self.num_microbatches} microbatches"

    def exposed(self, action: Action) -> Mapping[str, float]:
        """Return the seconds of a computation that wait for messages, by axis."""
        stage = self.stages[action.stage % self.table.depth]
        if action.kind == "W":
            return {}
        forward = stage.exposed_forward
        if action.kind in ("F", "R"):
            whole = forward
        else:
            whole = {axis: took - forward.get(axis, 0.0) for axis, took in stage.exposed.items()}
        return {axis: took / self.table.segments for axis, took in whole.items() if took > 0}


def predict_timeline(model: StepModel, layout: StepLayout, machine: MachineRates) -> PredictedTimeline:
    """Return the timeline of a step. Raises ConfigError for a schedule that can't be played."""
    stages = stages_of(model, layout, machine)
    table = table_of(layout)
    if table is None:
        raise ConfigError(
            f"{layout.describe()}: its schedule isn't played: too large, or none of the catalogue; fix "
            "another pipeline.schedule, or leave --timeline out"
        )
    return PredictedTimeline(
        table,
        play_pipeline(
            stages, layout, table, message_seconds(model, layout, machine), machine.sends_meanwhile
        ),
        stages,
        table.num_microbatches * table.copies // table.segments,
        layout.num_microbatches,
        state_exposed(model, layout, machine, stages),
        update_seconds(model, layout, machine),
    )
