"""F, B, I, W, R, O, PAIR: what the stages of a rank compute; GATHER, RELEASE: with what weights."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mpitrain.actor.reductions import Gradients
from mpitrain.actor.stage import Stage
from mpitrain.actor.step_work import Work, number_in_step
from mpitrain.kernels.dropout import DropoutDraw
from mpitrain.kernels.precision import TYPES
from mpitrain.optim.loss_scale import LossScale
from mpitrain.parallel.walk import Walk, run, run_together
from mpitrain.plan.division.batch_division import sequences_of
from mpitrain.plan.plan import Plan
from mpitrain.plan.routing import Routes
from mpitrain.schedules.actions import Action


@dataclass
class Compute:
    """The stages of a rank at work.

    dp_rank: whose share of a step the microbatches are.
    recorded: takes the routing of a step; None: nobody wants it.
    """

    _plan: Plan
    _stages: Mapping[int, Stage]
    _gradients: Gradients
    _loss_scale: LossScale
    _device: torch.device
    _dp_rank: int
    recorded: list | None = None

    def __post_init__(self) -> None:
        self._table = self._plan.table
        self._run = self._plan.run_of(self._dp_rank)
        # (microbatch, stage) whose activations aren't kept
        self._recomputed = {action[1:3] for row in self._table.ranks for action in row if action.kind == "R"}

    def forward(self, action: Action, work: Work) -> None:
        """Run F, a whole forward or a part of it."""
        self._end_forward(action, run(self._forward_walk(action, work), work.between), work)

    def _end_forward(self, action: Action, made: torch.Tensor, work: Work) -> None:
        _, m, stage, part = action
        if part is not None and part + 1 < len(self._stages[stage].parts) and not self._is_empty(m):
            work.inputs[stage, m] = made  # for the next part
        else:
            self._pass_on(action, made, work)

    def backward(self, action: Action, work: Work) -> None:
        """Run B, or I: the gradients of inputs alone."""
        self._end_backward(action, run(self._backward_walk(action, work), work.between), work)

    def _end_backward(self, action: Action, grad: torch.Tensor | None, work: Work) -> None:
        if action.index in self._stages[action.stage].stashes:
            work.grads[action.stage, action.index] = grad  # for the next part
        else:
            self._pass_on(action, grad, work)
        self._gradients.added(action)

    def weight_backward(self, action: Action, work: Work) -> None:
        """Run W: the gradients of weights that an I has left."""
        if self._is_empty(action.index):
            return
        self._gradients.hold(action)
        run(self._stages[action.stage].weight_backward(action.index, action.part), work.between)
        self._gradients.added(action)

    def offload(self, action: Action, work: Work) -> None:
        """Run O: what the microbatch's forward keeps will go to host memory."""
        self._stages[action.stage].offloaded.add(action.index)

    def gather(self, action: Action, work: Work) -> None:
        """Run GATHER: fetch the weights of a bucket (ZeRO-3), unless they are here."""
        self._stages[action.stage].state.buckets[action.index].weights.gather()

    def release(self, action: Action, work: Work) -> None:
        """Run RELEASE: drop the weights of a bucket that others have (ZeRO-3)."""
        self._stages[action.stage].state.buckets[action.index].weights.release()

    def recompute(self, action: Action, work: Work) -> None:
        """Run R: the forward of a microbatch again, whose activations F hasn't kept."""
        if self._is_empty(action.index):
            return
        walk = self._stages[action.stage].recompute(action.index, action.part)
        if not action.part:
            self._count_stash(work)
        run(walk, work.between)

    def pair(self, forward: Action, backward: Action, work: Work) -> None:
        """Run a forward and a backward, or a part of each, in turns."""
        walks = [self._forward_walk(forward, work), self._backward_walk(backward, work)]
        made, grad = run_together(walks, work.between)
        self._end_forward(forward, made, work)
        self._end_backward(backward, grad, work)

    def _is_empty(self, index: int) -> bool:
        """Return whether other data ranks have a microbatch more than this one."""
        return self._run.is_empty(index // self._table.segments)

    def _empty_walk(self, action: Action, work: Work) -> Walk:
        """Compute nothing of an empty microbatch; return something for the message that follows."""
        _, m, stage, _ = action
        for received in (work.inputs, work.grads):
            received.pop((stage, m), None)
        yield None
        ends_here = self._stages[stage].last if action.kind == "F" else self._stages[stage].first
        if ends_here:
            return None
        dtype = TYPES[self._plan.config.precision.compute]
        return torch.zeros(self._plan.activation_shape(), dtype=dtype, device=self._device)

    def _forward_walk(self, action: Action, work: Work) -> Walk:
        _, m, stage, part = action
        if self._is_empty(m):
            return self._empty_walk(action, work)
        x = work.inputs.pop((stage, m), None)
        microbatch = work.microbatches[number_in_step(self._table, stage, m)]
        lent = dict(record_metric=work.record_metric, scale=self._loss_scale.value)
        if torch.is_grad_enabled():  # validation is never replayed, and nothing of it is dropped
            lent["routes"], lent["dropout"] = self._routes_and_dropout(stage, m, work)
        keep = (m, stage) not in self._recomputed
        walk = self._stages[stage].forward(m, x, microbatch, part, **lent, keep=keep)
        if torch.is_grad_enabled() and not part and keep:
            self._count_stash(work)
        return walk

    def _count_stash(self, work: Work) -> None:
        """Count what is held, for a backward or weight gradients, while one more stash is made."""
        stages = self._stages.values()
        held = 1 + sum(len({*stage.stashes, *stage.deferred_weight_gradients}) for stage in stages)
        work.peak_in_flight = max(work.peak_in_flight, held)

    def _backward_walk(self, action: Action, work: Work) -> Walk:
        _, m, stage, part = action
        if self._is_empty(m):
            return self._empty_walk(action, work)
        self._gradients.hold(action)
        grad = self._grad_of_output(stage, m, work)
        return self._stages[stage].backward(m, grad, part, inputs_only=action.kind == "I")

    def _grad_of_output(self, stage: int, index: int, work: Work) -> torch.Tensor | None:
        """Return the gradient of a stage's output; of a loss the scale, None for a scale of 1."""
        grad = work.grads.pop((stage, index), None)
        if grad is None and self._loss_scale.dynamic:
            return torch.full((), self._loss_scale.value, device=self._device)
        return grad

    def _routes_and_dropout(self, stage: int, index: int, work: Work) -> tuple[Routes | None, DropoutDraw]:
        """Return the routes of a microbatch, if they are replayed or recorded, and its dropout."""
        config = self._plan.config
        batch = config.batch
        number = number_in_step(self._table, stage, index) // self._table.segments
        first = sequences_of(config, self._dp_rank).start + number * batch.micro
        sequences = range(first, first + batch.micro)
        dropout = DropoutDraw(config.run.seed, work.step, sequences)
        if self._plan.routing is None and self.recorded is None:
            return None, dropout
        return Routes(work.step, sequences, self._plan.routing, self.recorded), dropout

    def _pass_on(self, action: Action, made: torch.Tensor | None, work: Work) -> None:
        """Keep an activation or gradient for a stage of this rank, or for the send that follows."""
        if made is None:  # the last backward, and the end of a microbatch that is empty
            return
        kind, m, stage, _ = action
        if kind == "F" and self._stages[stage].last:
            work.losses[stage, m] = made.detach()
            return
        to, kept, send = stage - 1, work.grads, "SEND_B"
        if kind == "F":
            to, kept, send = stage + 1, work.inputs, "SEND_F"
        if to in self._stages:
            kept[to, m] = made
        else:
            work.outputs[Action(send, m, stage)] = made.contiguous()
