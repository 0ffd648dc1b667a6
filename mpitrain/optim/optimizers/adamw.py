"""AdamW with decoupled weight decay (arXiv:1711.05101) over the pieces a rank owns. torch's fused
kernel does the arithmetic.
"""

from typing import TYPE_CHECKING

from mpitrain.config import OptimizerTable
from mpitrain.plan.declared.optimizers import OptimizerKind

if TYPE_CHECKING:
    from mpitrain.optim.moments import UpdateBatch
    from mpitrain.optim.protocol import Optimizer, OptimizerParts

KEYS = dict(betas=(0.9, 0.95), eps=1e-8)


def moments(settings: OptimizerTable, group: str) -> tuple[str, ...]:
    """Return the names of both moments of the gradient."""
    return "adam/m", "adam/v"


def build(parts: "OptimizerParts") -> "Optimizer":
    """Return the optimiser of one rank."""
    from mpitrain.optim.elementwise import Elementwise  # torch

    return Elementwise(parts, update)


def update(settings: OptimizerTable, batch: "UpdateBatch", lr: float, decay: float, num_updates: int) -> None:
    """Update weights and moments in place."""
    import torch
    from torch.optim.adamw import adamw

    (m, v), (beta1, beta2) = batch.moments, settings.betas
    fused = not batch.weights[0].is_meta  # a rehearsal has shapes only
    device = batch.weights[0].device if fused else "cpu"
    steps = torch.full((len(batch.weights),), float(num_updates), device=device).unbind()
    adamw(
        batch.weights, batch.grads, m, v, [], list(steps), fused=fused, amsgrad=False, maximize=False,
        beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay, eps=settings.eps,
    )  # fmt: skip


ADAMW = OptimizerKind("adamw", KEYS, moments, build)
