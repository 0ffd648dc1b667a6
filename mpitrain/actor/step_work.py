"""What is under way in a step of a rank, what is asked of it, and what it found."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from mpitrain.comm.progress import Pending
from mpitrain.parallel.microbatch import Microbatch
from mpitrain.schedules.actions import Action
from mpitrain.schedules.table import Table

Key = tuple[int, int]  # (stage, microbatch)


def number_in_step(table: Table, stage: int, index: int) -> int:
    """Return the number of a microbatch in the step: each copy of the model has its own share of them."""
    return stage // table.depth * table.num_microbatches + index


@dataclass(frozen=True)
class StepRequests:
    """What the ranks decide together in a step, by its totals.

    stop: asked after the backward: how urgently this rank is to stop, 0: not at all; the maximum
    over ranks counts.
    save_progress: a number below 2**53; the result is the maximum over ranks.
    skip_update: whether a step with this loss makes no update; alike on all ranks.
    """

    stop: Callable[[], int] = lambda: 0
    save_progress: int = 0
    skip_update: Callable[[float], bool] = lambda loss: False


NOTHING_ASKED = StepRequests()


@dataclass
class StepResult:
    """What a step measured; the same on every rank.

    num_tokens: those whose prediction counts for the loss.
    peak_in_flight: the most stashes that each pipeline rank held at once.
    save_progress: the highest number that a rank was given.
    metrics: by name, what layers made besides their outputs, summed over layers and microbatches.
    noise: what optim/noise_scale.py estimates, with run.noise_scale.
    skipped, spike: no update was made, because gradients weren't finite, or because of the loss; it
    can be both.
    """

    loss: float = 0.0
    grad_norm: float = 0.0
    num_tokens: int = 0
    skipped: bool = False
    spike: bool = False
    stop: int = 0
    save_progress: int = 0
    peak_in_flight: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)


@dataclass
class Work:
    """What is under way in a step."""

    microbatches: list[Microbatch]
    # where the other ends of messages stand in the programs of other ranks
    ends: Mapping[Action, int]
    between: Callable[[], None]  # called between items of a block
    step: int = 0
    lr: float = 0.0
    asked: StepRequests = NOTHING_ASKED
    peak_in_flight: int = 0
    # of forwards: received, or handed over by a stage of this rank
    inputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    # of outputs, the same; and between the parts of a backward
    grads: dict[Key, torch.Tensor] = field(default_factory=dict)
    outputs: dict[Action, torch.Tensor] = field(default_factory=dict)  # by the send they wait for
    receiving: dict[Action, Pending] = field(default_factory=dict)
    to_receive: deque[Action] = field(default_factory=deque)
    sending: list[Pending] = field(default_factory=list)
    losses: dict[Key, torch.Tensor] = field(default_factory=dict)
    # by name: what layers made besides their outputs
    metrics: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    result: StepResult = field(default_factory=StepResult)

    def record_metric(self, name: str, value: torch.Tensor) -> None:
        """Keep what a layer made besides its output."""
        self.metrics.setdefault(name, []).append(value.detach())
