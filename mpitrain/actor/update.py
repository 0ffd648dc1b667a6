"""COPY, and NORM, UPDATE, SPREAD: the end of a step, in which the optimiser updates the weights of a rank."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mpitrain.actor.partner_copies import PartnerCopies
from mpitrain.actor.reductions import Gradients
from mpitrain.actor.stage import Stage
from mpitrain.actor.step_totals import StepTotals
from mpitrain.actor.step_work import Work
from mpitrain.comm.mesh import Mesh
from mpitrain.data.documents import num_counted
from mpitrain.optim import noise_scale
from mpitrain.optim.expert_bias import inequality
from mpitrain.optim.loss_scale import LossScale
from mpitrain.optim.norm import norm
from mpitrain.optim.protocol import Optimizer
from mpitrain.parallel.zero.shards import Weights
from mpitrain.plan.axes import COPIES
from mpitrain.plan.declared.layer import is_loss
from mpitrain.plan.division.domains import reduces_each
from mpitrain.plan.plan import NOISE, Plan
from mpitrain.schedules.actions import Action


def owned_weights(stages: Mapping[int, Stage]) -> list[Weights]:
    """Return the weights that stages own, in the order of the forward."""
    return [
        bucket.weights
        for stage in stages.values()
        for bucket in reversed(stage.state.buckets)
        if bucket.owned
    ]


@dataclass
class Update:
    """The end of a step: sums are waited for, gradients clipped, the optimiser steps, weights go out."""

    _plan: Plan
    _mesh: Mesh
    _owned: Sequence[Weights]
    _gradients: Gradients
    _optimizer: Optimizer
    _loss_scale: LossScale
    _totals: StepTotals

    def __post_init__(self) -> None:
        unreplicated = self._plan.axes.unreplicated
        self.partner_copies = PartnerCopies(self._mesh[COPIES]) if unreplicated else None

    def copy(self, action: Action, work: Work) -> None:
        """Start sending the copy that was made after the last step, if there was one."""
        assert self.partner_copies is not None, "a program with COPY has an axis for it"
        self.partner_copies.start()

    def norm(self, action: Action, work: Work) -> None:
        """Wait for all sums and copies, and measure the step: loss, gradient norm, what to skip."""
        self._gradients.wait()
        if self.partner_copies is not None:
            self.partner_copies.wait()
        self._compare_loads(work)
        self._compare_shards(work)
        counted = (piece.grad for piece in self._gradients.counted if piece.spec.updated)
        parts = self._totals.of(work, self._totals.measure.squares(counted))
        total = self._totals.measure.total(parts)
        result = work.result
        # no target, no mean: nothing to learn, the step is skipped
        result.num_tokens = int(total.count)
        count = total.count or math.nan
        result.loss = math.fsum(total.loss) / count
        result.grad_norm = norm(total.squares) / (count * self._loss_scale.value)
        result.stop = total.stop
        result.save_progress = total.save_progress
        result.peak_in_flight = [part.peak for part in parts[:: self._mesh["tp"].size]]
        sums = {name: math.fsum(numbers) for name, numbers in zip(self._plan.metrics, total.metrics)}
        if self._plan.config.run.noise_scale:
            squares = [sums.pop(name) for name in NOISE]
            result.noise = noise_scale.estimates(*squares, result.num_tokens)
        # a layer's losses are divided as training divides them: by the targets that carry loss
        result.metrics = {name: value / (count if is_loss(name) else 1) for name, value in sums.items()}
        result.skipped = not math.isfinite(result.grad_norm)
        result.spike = work.asked.skip_update(result.loss)

    def _compare_loads(self, work: Work) -> None:
        """Tell how unequal the loads of experts are, a mean over blocks."""
        for piece in self._gradients.counted:
            if piece.spec.group == "load":
                for name, value in inequality(piece.grad).items():
                    work.record_metric(name, value / len(self._plan.loads))

    def _compare_shards(self, work: Work) -> None:
        """Note the squares of this rank's gradients, of its shards of the batch and of what it has of all."""
        if self._plan.config.run.noise_scale:
            of_batch = noise_scale.squares(piece.grad for piece in self._gradients.compared)
            squares = self._gradients.squares_of_shards, of_batch, self._squares_of_targets(work)
            for name, found in zip(NOISE, squares, strict=True):
                for square in found:
                    work.record_metric(name, square)

    def _squares_of_targets(self, work: Work) -> Iterable[torch.Tensor]:
        """Return the squares of the numbers of targets of a data rank's shards, on one of its ranks."""
        table = self._plan.table
        if self._mesh["tp"].rank or self._mesh["pp"].rank != table.rank_of[table.depth - 1]:
            return ()
        targets = [one.targets for one in work.microbatches if one.targets is not None]
        if not targets:  # of a rehearsal
            return ()
        counts = torch.stack([num_counted(of_one) for of_one in targets]).double()
        return (counts if reduces_each(self._plan.config) else counts.sum(0, keepdim=True)).square()

    def update(self, action: Action, work: Work) -> None:
        """Divide by all ranks' tokens, clip and step; without finite gradients, halve the scale."""
        scale = 1.0 / (max(1, work.result.num_tokens) * self._loss_scale.value)
        if work.result.num_tokens:  # without a target no gradient tells of the range
            self._loss_scale.update(work.result.skipped)
        if work.result.skipped or work.result.spike:
            return
        clip = self._plan.config.optimizer.clip
        if clip and work.result.grad_norm > clip:
            scale *= clip / work.result.grad_norm
        self._gradients.scale(scale)
        self._optimizer.step(work.lr)
        for weights in self._owned:
            weights.update()

    def settle(self) -> None:
        """Wait for weights that are on their way: what is read next would be written over by them."""
        for weights in self._owned:
            weights.wait()

    def restored(self, num_updates: int) -> None:
        """Take over what was read into the pieces. Collective over the data axis."""
        self._optimizer.set_step(num_updates)
        for weights in self._owned:
            weights.update()
            if weights.whole is not None:
                weights.spread()

    def spread(self, action: Action, work: Work) -> None:
        """Send updated weights to ranks that share them; the next forward waits for each bucket."""
        for weights in self._owned:
            weights.spread()
