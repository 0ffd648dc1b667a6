"""Validation: the mean loss of held-out sequences, of all texts and of each source."""

import math
import time
from typing import Any

from mpitrain.actor.actor import Actor
from mpitrain.actor.step_work import StepRequests
from mpitrain.cluster.guard import Guard
from mpitrain.comm.base.world import World
from mpitrain.data.batch_sizes import BatchSizes
from mpitrain.data.mixture import HeldOutMixture
from mpitrain.data.packed_rows import SourceSampler
from mpitrain.training.early_exit import HURRY, LEAVE, STAY, Leaving
from mpitrain.training.run_opening import PreparedRun
from mpitrain.training.step_rows import StepRows
from mpitrain.training.task_scores import TaskScores


class Validation:
    """Computes the loss of held-out sequences, on all ranks.

    num_sequences: of a validation.
    urgency: how urgently the most urgent rank has to leave, as the last validation heard it.
    """

    def __init__(
        self, opened: PreparedRun, actor: Actor, rows: StepRows, world: World, guard: Guard, leaving: Leaving
    ):
        config = opened.plan.run_config
        self._corpora = opened.corpora
        self._actor = actor
        self._rows = rows
        self._world = world
        self._guard = guard
        self._leaving = leaving
        self.urgency = STAY
        self._tasks = TaskScores(actor, world, guard.place, opened.tasks, leaving.hurries)
        asked = config.run.eval_batches * BatchSizes(config.batch).at(1)
        held_out = self._corpora.validation.num_sequences
        self.num_sequences = min(asked, held_out) if self._corpora.by_documents else asked

    def validate(self, step: int, urgency: int, tasks: bool = True) -> dict[str, Any]:
        """Return the mean loss of the validation sequences and of each source, and tasks' metrics.

        Nothing if a rank is in a hurry before all are computed.
        step: the last one that is done. urgency: of the most urgent rank then.
        Raises StoppedEarly on all ranks if one has to leave before the first step.
        """
        begin_s = time.monotonic()
        self.urgency = urgency
        loss = self._mean_loss(step, self._corpora.validation, self.num_sequences)
        sources = {
            name: self._mean_loss(step, sampler, min(self.num_sequences, sampler.num_sequences))
            for name, sampler in self._corpora.validation_of_sources.items()
        }
        evaluations = {name: dict(loss=of_source) for name, of_source in sources.items()}
        if tasks and self.urgency != HURRY:
            evaluations |= self._tasks.metrics()
        if self.urgency == HURRY or self._tasks.stopped:
            return {}
        self._leaving.validated(time.monotonic() - begin_s)
        line: dict[str, Any] = {
            "val_loss": loss  # mean cross-entropy of the validation batches, in nats
        }
        if evaluations:
            # by source, its loss (run.eval_sources); by task, its metrics (run.eval_tasks)
            line["evaluations"] = evaluations
        if tasks and self._tasks.samples:
            # by task, its first answers: what was asked, the model's answer and the right one
            line["samples"] = self._tasks.samples
        return line

    def _mean_loss(self, step: int, sampler: SourceSampler | HeldOutMixture, most: int) -> float:
        """Return the mean loss of the first sequences, `most` of them; of fewer if a rank is in a hurry."""
        requests = self._guard.requests
        urgency = self._leaving.urgency if step else lambda: LEAVE if requests.why() else STAY
        totals = []
        with self._guard.place.at("validation", "reading tokens"):
            for first in range(0, most, self._rows.num_sequences):
                if self.urgency == HURRY:
                    break
                microbatches = self._rows.microbatches(sampler, first, most)
                *total, stop = self._actor.evaluate(step, microbatches, StepRequests(urgency))
                totals.append(total)
                if stop and step == 0:
                    self._guard.leave_if_asked(self._world)
                self.urgency = max(self.urgency, stop)
        return sum(loss for loss, _ in totals) / (sum(count for _, count in totals) or math.nan)
