"""AdamW with decoupled weight decay (arXiv:1711.05101) over the pieces a rank owns. torch's fused
kernel does the arithmetic.
"""

from collections.abc import Iterator

import torch
from torch.optim.adamw import adamw

from mpitrain.config import OptimizerTable
from mpitrain.optim.moments import Moments
from mpitrain.parallel.zero.shards import ParameterShard

KINDS = ("adam/m", "adam/v")


class AdamW:
    """The optimiser of one rank: matrices decay, vectors (norms) don't."""

    def __init__(self, settings: OptimizerTable, pieces: list[ParameterShard], seed: int):
        self._settings = settings
        self._num_updates = 0
        narrow = settings.moments == "bf16"
        decaying, others = (
            [p for p in pieces if (p.spec.group != "vector") == decays] for decays in (True, False)
        )
        groups = (decaying, settings.decay), (others, 0.0)
        self._groups = [(Moments(group, KINDS, narrow=narrow, seed=seed), decay) for group, decay in groups]

    def step(self, lr: float) -> None:
        """Update the weights of the pieces from their gradients."""
        for moments, decay in self._groups:
            for weights, grads, (m, v) in moments.opened(self._num_updates):
                self._update(weights, grads, m, v, lr, decay)
        self._num_updates += 1

    def _update(
        self,
        weights: list[torch.Tensor],
        grads: list[torch.Tensor],
        m: list[torch.Tensor],
        v: list[torch.Tensor],
        lr: float,
        decay: float,
    ) -> None:
        # a rehearsal has shapes only
        (beta1, beta2), fused = self._settings.betas, not weights[0].is_meta
        steps = torch.full(
            (len(weights),), float(self._num_updates), device=weights[0].device if fused else "cpu"
        ).unbind()
        adamw(
            weights, grads, m, v, [], list(steps), fused=fused, amsgrad=False, maximize=False,
            beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay, eps=self._settings.eps,
        )  # fmt: skip

    def moments(self, piece: ParameterShard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ("adam/m", tensor) and the same of adam/v for one of its pieces; zeros before the
        first step.
        """
        yield from next(moments for moments, _ in self._groups if piece in moments).of(piece)

    def set_step(self, num_updates: int) -> None:
        """Set the number of updates made so far, on which the bias correction depends."""
        self._num_updates = num_updates
