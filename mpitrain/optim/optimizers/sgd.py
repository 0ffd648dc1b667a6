"""Stochastic gradient descent with momentum and decoupled weight decay (arXiv:1711.05101, algorithm
1). torch's fused kernel computes.

    momentum <- settings.momentum * momentum + gradient, and the weights go down along it
"""

from typing import TYPE_CHECKING

from mpitrain.config import OptimizerTable
from mpitrain.plan.declared.optimizers import OptimizerKind

if TYPE_CHECKING:
    from mpitrain.optim.moments import UpdateBatch
    from mpitrain.optim.protocol import Optimizer, OptimizerParts


def _moments(settings: OptimizerTable, group: str) -> tuple[str, ...]:
    return ("sgd/momentum",) if settings.momentum else ()


def _build(parts: "OptimizerParts") -> "Optimizer":
    from mpitrain.optim.elementwise import Elementwise  # torch

    return Elementwise(parts, _update)


def _update(
    settings: OptimizerTable, batch: "UpdateBatch", lr: float, decay: float, num_updates: int
) -> None:
    from torch.optim.sgd import sgd

    weights = batch.weights
    if decay:
        for weight in weights:
            weight.mul_(1 - lr * decay)
    momenta = batch.moments[0] if batch.moments else [None] * len(weights)
    fused = not weights[0].is_meta  # a rehearsal has shapes only
    sgd(
        weights, batch.grads, momenta, fused=fused, lr=lr, momentum=settings.momentum,
        nesterov=settings.nesterov, weight_decay=0.0, dampening=0.0, maximize=False,
    )  # fmt: skip


def _passes(settings: OptimizerTable, group: str) -> float:
    """Return the passes of an update: one kernel, and weights that decay before it."""
    return 3 + 2 * bool(settings.momentum) + 2 * bool(settings.decay)


SGD = OptimizerKind("sgd", dict(momentum=0.9, nesterov=False), _moments, _build, own_passes=_passes)
