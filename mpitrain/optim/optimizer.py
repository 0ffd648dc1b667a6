"""Build the optimiser that the configuration names, of this rank's pieces."""

from collections.abc import Sequence
from functools import partial

import torch

from mpitrain.comm.mesh import Mesh
from mpitrain.config import Config
from mpitrain.optim.expert_bias import Balanced
from mpitrain.optim.matrices import MatrixRound, deal, holdings
from mpitrain.optim.offload import Offloaded
from mpitrain.optim.protocol import Optimizer, OptimizerParts
from mpitrain.parallel.zero.shards import ParameterShard
from mpitrain.plan.declared.optimizers import optimizer_kind
from mpitrain.plan.division.domains import domains_of
from mpitrain.plan.division.stages import StagePlan


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
    trained = [piece for piece in pieces if piece.spec.updated]
    counted = [piece for piece in pieces if not piece.spec.trained]
    kind = optimizer_kind(config.optimizer)
    rounds = partial(_rounds, config, stages, mesh, like) if kind.whole_matrices else tuple

    def make(pieces: Sequence[ParameterShard]) -> Optimizer:
        seed = config.run.seed
        return kind.build(OptimizerParts(kind, config.optimizer, pieces, seed, rounds(), device))

    if config.memory.offload in ("optimizer", "all"):
        cores = mesh.cores_of_rank
        optimizer = Offloaded(trained, device, make, whole=kind.whole_matrices, cores=cores)
    else:
        optimizer = make(trained)
    if config.experts.count or config.optimizer.frozen:
        return Balanced(optimizer, counted, config.experts.bias_rate or 0.0)
    return optimizer


def _rounds(config: Config, stages: Sequence[StagePlan], mesh: Mesh, like: torch.Tensor) -> list[MatrixRound]:
    """Return who puts which matrices together, over the axes of all domains."""
    rounds = []
    for name, domain in domains_of(config).items():
        axis = mesh[domain.matrix]
        rounds += deal(holdings(config, stages, axis.size // config.parallel.tp, name), axis, like)
    return rounds
