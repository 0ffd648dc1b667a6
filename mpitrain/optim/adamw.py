"""AdamW with decoupled weight decay (arXiv:1711.05101) over the pieces a rank owns. torch's fused kernel does the arithmetic."""

from collections.abc import Iterator

import torch

from mpitrain.config import Optimizer
from mpitrain.parallel.zero import Piece


class AdamW:
    """The optimiser of one rank: matrices decay, vectors (norms) don't."""

    def __init__(self, settings: Optimizer, pieces: list[Piece]):
        self.pieces = pieces
        for piece in pieces:
            piece.weight.grad = piece.grad
        groups = [
            {"params": [p.weight for p in pieces if len(p.spec.shape) > 1], "weight_decay": settings.decay},
            {"params": [p.weight for p in pieces if len(p.spec.shape) == 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]] or [{"params": [torch.zeros(0)]}]  # a shard can be all padding
        fused = not any(piece.weight.is_meta for piece in pieces)  # a rehearsal has shapes only
        self._adamw = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused)

    def step(self, lr: float) -> None:
        """Update the weights of the pieces from their gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()

    def moments(self, piece: Piece) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ("adam/m", tensor) and the same of adam/v for one of its pieces; zeros before the first step."""
        state = self._state(piece)
        yield "adam/m", state["exp_avg"]
        yield "adam/v", state["exp_avg_sq"]

    def set_step(self, num_updates: int) -> None:
        """Set the number of updates made so far, on which the bias correction depends."""
        for piece in self.pieces:
            self._state(piece)["step"].fill_(float(num_updates))

    def _state(self, piece: Piece) -> dict[str, torch.Tensor]:
        state = self._adamw.state[piece.weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=piece.weight.device)
            state |= {"exp_avg": torch.zeros_like(piece.weight), "exp_avg_sq": torch.zeros_like(piece.weight)}
        return state
