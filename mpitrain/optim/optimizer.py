"""What an actor knows of an optimiser, and which one the configuration names."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

import torch

from mpitrain.comm.mesh import Mesh
from mpitrain.config import Config
from mpitrain.layout.domains import domains_of
from mpitrain.layout.stages import StagePlan
from mpitrain.optim.adamw import AdamW
from mpitrain.optim.expert_bias import Balanced
from mpitrain.optim.matrices import deal, holdings
from mpitrain.optim.muon import Muon
from mpitrain.optim.offload import Offloaded
from mpitrain.optim.sgd import SGD
from mpitrain.parallel.zero.shards import ParameterShard


class Optimizer(Protocol):
    """The optimiser of one rank, over the pieces that it owns.

    What is kept of a piece has the piece's elements, one for one: whoever has a box of the
    parameter can go on with that of its state.
    """

    def step(self, lr: float) -> None:
        """Update the weights of the pieces from their gradients, which stay as they are."""

    def moments(self, piece: ParameterShard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is kept of one of its pieces, with its name in a checkpoint.

        Zeros before the first step.
        """

    def set_step(self, num_updates: int) -> None:
        """Set the number of updates made so far."""


def optimizer_of(
    config: Config,
    stages: Sequence[StagePlan],
    pieces: list[ParameterShard],
    mesh: Mesh,
    like: torch.Tensor,
    device: torch.device,
) -> Optimizer:
    """Return the optimiser that the configuration names.

    stages: of the model, those of this rank.
    mesh: has, for each domain, the axis of the ranks that have parts of one matrix.
    like: of the type and in the memory of the weights; a rank can have no piece.
    device: of the gradients.
    """
    trained, counted = ([piece for piece in pieces if piece.spec.trained == each] for each in (True, False))
    make = partial(_of_pieces, config, stages, mesh, like, device)
    if config.memory.offload in ("optimizer", "all"):
        optimizer = Offloaded(trained, device, make, whole=config.optimizer.name == "muon")
    else:
        optimizer = make(trained)
    return (
        Balanced(optimizer, counted, config.experts.bias_rate or 0.0) if config.experts.count else optimizer
    )


def _of_pieces(
    config: Config,
    stages: Sequence[StagePlan],
    mesh: Mesh,
    like: torch.Tensor,
    device: torch.device,
    pieces: list[ParameterShard],
) -> Optimizer:
    settings = config.optimizer
    seed = config.run.seed
    if settings.name == "adamw":
        return AdamW(settings, pieces, seed)
    if settings.name == "sgd":
        return SGD(settings, pieces, seed)
    rounds = []
    for name, domain in domains_of(config).items():
        axis = mesh[domain.matrix]
        rounds += deal(holdings(config, stages, axis.size // config.parallel.tp, name), axis, like)
    return Muon(settings, pieces, seed, rounds, device)
