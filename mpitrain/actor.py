"""One rank at work: it owns a mesh, a stage and a program, and a training step is the walk through the program.

    for instruction in program:     what stands in the list happens, in this order; `cursor` tells where the rank is
        compute                     stage.forward / stage.backward, segment by segment; between segments messages are moved on
        SEND                        starts and returns; all sends are waited for at the end of the step
        RECV                        waits; the next receives of the list are posted ahead, so that messages don't wait for us
        REDUCE                      starts the reduction of one bucket; NORM waits for all of them
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from mpitrain import program
from mpitrain.comm.collectives import all_gather, all_reduce
from mpitrain.comm.links import Links
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.progress import Pending
from mpitrain.config import Config
from mpitrain.model.recipe import run
from mpitrain.optim.adamw import AdamW
from mpitrain.optim.norm import norm, squares
from mpitrain.schedules.actions import Action
from mpitrain.stage import Microbatch, Stage

AHEAD = 2  # receives posted before they are needed


@dataclass
class StepResult:
    """What a step measured; the same on every rank."""

    loss: float = 0.0
    grad_norm: float = 0.0
    num_tokens: int = 0
    skipped: bool = False
    stop: bool = False


@dataclass
class _Work:
    """What is under way in the current step."""

    microbatches: list[Microbatch]
    lr: float = 0.0
    stop: bool = False
    inputs: dict[int, torch.Tensor | None] = field(default_factory=dict)  # received or computed, by microbatch
    grads: dict[int, torch.Tensor | None] = field(default_factory=dict)
    receiving: dict[Action, Pending] = field(default_factory=dict)
    to_receive: deque[Action] = field(default_factory=deque)
    sending: list[Pending] = field(default_factory=list)
    reducing: list[Pending] = field(default_factory=list)
    tying: Pending | None = None
    result: StepResult = field(default_factory=StepResult)


class Actor:
    """This rank. `cursor` is (step, position in the program, instruction)."""

    def __init__(self, config: Config, mesh: Mesh, device: torch.device):
        self.config, self.mesh, self.progress = config, mesh, mesh.progress
        self.pp, self.data, self.tied = mesh["pp"], mesh["data"], mesh["tied"]
        self.stage = Stage(config, self.pp.rank, device, self.data.allocate)
        self.optimizer = AdamW(config.optimizer, self.stage.owned)
        self.training = program.training(config)[0][self.pp.rank]
        self.evaluation = program.evaluation(config)[self.pp.rank]
        self.links = Links(mesh["links"], config.parallel.pp, program.num_microbatches(config))
        self.cursor: tuple[int, int, Action | None] = (0, 0, None)
        # The tied embedding counts once in the norm, and is saved once: by the first stage.
        copy = config.model.tied and self.stage.last and not self.stage.first
        self.counted = [p for p in self.stage.owned if not (copy and p.name == "embedding.weight")]
        self._num_counted = int(max(self._everyone(np.array([float(len(self.counted))]))))
        self._handlers = {
            "F": self._forward,
            "B": self._backward,
            "SEND_F": self._send_f,
            "SEND_B": self._send_b,
            "RECV_F": self._recv_f,
            "RECV_B": self._recv_b,
            "REDUCE": self._reduce,
            "NORM": self._norm,
            "UPDATE": self._update,
        }

    # ------------------------------------------------------------ single training step

    def run_step(self, step: int, microbatches: list[Microbatch], lr: float, *, stop: bool = False) -> StepResult:
        """Run one training step on this rank's microbatches. Collective over all ranks.

        stop: this rank was asked to stop; the result tells whether any was.  Raises HangError, naming the message waited for.
        """
        self.stage.zero_grad()
        return self._walk(self.training, _Work(microbatches, lr, stop), step)

    def evaluate(self, step: int, microbatches: list[Microbatch]) -> tuple[float, float]:
        """Return (summed loss, tokens) of the microbatches of all ranks, without gradients. Collective over all ranks."""
        work = _Work(microbatches)
        self.stage.losses = {}
        with torch.no_grad():
            self._walk(self.evaluation, work, step)
        loss, count, _ = self._totals(work)
        return loss, count

    def _walk(self, instructions: list[Action], work: _Work, step: int) -> StepResult:
        work.to_receive.extend(a for a in instructions if a.kind in ("RECV_F", "RECV_B"))
        self._post_receives(work)
        for position, action in enumerate(instructions):
            self.cursor = (step, position, action)
            self.progress.poll()
            self._handlers[action.kind](action, work)
        for pending in work.sending:
            pending.wait()
        return work.result

    # ------------------------------------------------------------ compute

    def _forward(self, action: Action, work: _Work) -> None:
        m = action.index
        work.inputs[m] = run(self.stage.forward(m, work.inputs.pop(m, None), work.microbatches[m]), self.progress.poll)

    def _backward(self, action: Action, work: _Work) -> None:
        m = action.index
        work.grads[m] = run(self.stage.backward(m, work.grads.pop(m, None), action.part), self.progress.poll)

    # ------------------------------------------------------------ messages

    def _send_f(self, action: Action, work: _Work) -> None:
        to = action.stage + 1
        work.sending.append(self.links.send("F", to, action.index, work.inputs.pop(action.index), to))

    def _send_b(self, action: Action, work: _Work) -> None:
        to = action.stage - 1
        work.sending.append(self.links.send("B", to, action.index, work.grads.pop(action.index).contiguous(), to))

    def _recv_f(self, action: Action, work: _Work) -> None:
        work.inputs[action.index] = self._received(action, work)

    def _recv_b(self, action: Action, work: _Work) -> None:
        work.grads[action.index] = self._received(action, work)

    def _received(self, action: Action, work: _Work) -> torch.Tensor:
        tensor = work.receiving.pop(action).wait()
        self._post_receives(work)
        return tensor

    def _post_receives(self, work: _Work) -> None:
        while work.to_receive and len(work.receiving) < AHEAD:
            action = work.to_receive.popleft()
            kind, source = ("F", action.stage - 1) if action.kind == "RECV_F" else ("B", action.stage + 1)
            work.receiving[action] = self.links.receive(kind, action.stage, action.index, self.stage.activation(), source)

    # ------------------------------------------------------------ gradients and update

    def _reduce(self, action: Action, work: _Work) -> None:
        """Start the reduction of one bucket. The uses of a tied embedding are summed first, then the data axis.

        Ranks start the operations of an axis in one order: so what follows the exchange between first and last stage, which ends
        at any time, is started by NORM.
        """
        bucket = self.stage.buckets[action.index]
        for other in bucket.grads[1:]:
            bucket.grads[0] += other
        if bucket.tied and self.tied.size > 1:
            work.tying = all_reduce(bucket.grads[0], self.tied)
        else:
            work.reducing.append(all_reduce(bucket.grads[0], self.data))

    def _norm(self, action: Action, work: _Work) -> None:
        if work.tying is not None:
            work.reducing.append(all_reduce(work.tying.wait(), self.data))
        for pending in work.reducing:
            pending.wait()
        result = work.result
        loss, count, result.stop = self._totals(work)
        result.loss, result.num_tokens = loss / count, int(count)
        mine = np.zeros(self._num_counted)
        mine[: len(self.counted)] = squares(self.counted)
        result.grad_norm = norm(self._everyone(mine).tolist()) / count
        result.skipped = not np.isfinite(result.grad_norm)

    def _update(self, action: Action, work: _Work) -> None:
        """Divide by the global number of tokens, clip, and step; a step without finite gradients is skipped."""
        if work.result.skipped:
            return
        clip = self.config.optimizer.clip
        scale = 1.0 / work.result.num_tokens
        if clip and work.result.grad_norm > clip:
            scale *= clip / work.result.grad_norm
        for bucket in self.stage.buckets:
            bucket.grads[0].mul_(scale)
        self.optimizer.step(work.lr)

    def _totals(self, work: _Work) -> tuple[float, float, bool]:
        """Return the summed loss, the number of tokens and whether a rank was asked to stop: of all ranks, on all ranks.

        The loss of each microbatch is added in ascending order in fp64, first on the rank, then over the data axis.
        """
        mine = np.array([0.0, 0.0, float(work.stop)])
        for m in sorted(self.stage.losses):
            mine[0] += self.stage.losses[m].item()
            mine[1] += work.microbatches[m].targets.numel()
        all_reduce(mine, self.data).wait()
        loss, count, stop = self._everyone(mine).reshape(-1, 3).T
        return loss[-1], count[-1], bool(stop.any())

    def _everyone(self, mine: np.ndarray) -> np.ndarray:
        """Return the vectors of all stages, in stage order."""
        return all_gather(mine, self.pp, np.empty(len(mine) * self.pp.size)).wait()
