"""AdamW with decoupled weight decay (arXiv:1711.05101) over the parameters a rank owns. torch's fused kernel does the arithmetic."""

from collections.abc import Iterator

import torch

from mpitrain.config import Optimizer
from mpitrain.model.parameters import Parameter
from mpitrain.slicing import Spec


class AdamW:
    """The optimiser of one rank: matrices decay, vectors (norms) don't."""

    def __init__(self, settings: Optimizer, parameters: list[Parameter]):
        self.parameters = parameters
        for parameter in parameters:
            parameter.data.grad = parameter.grad
        groups = [
            {"params": [p.data for p in parameters if p.data.dim() > 1], "weight_decay": settings.decay},
            {"params": [p.data for p in parameters if p.data.dim() == 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self._adamw = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)

    def step(self, lr: float) -> None:
        """Update the parameters from their gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()

    def moments(self, parameters: list[Parameter]) -> Iterator[tuple[str, Spec, torch.Tensor]]:
        """Yield ("adam/m/NAME", spec, tensor) and the same of adam/v for some of its parameters; zeros before the first step."""
        for parameter in parameters:
            state = self._adamw.state.get(parameter.data) or self._fresh(parameter.data)
            yield f"adam/m/{parameter.name}", parameter.spec, state["exp_avg"]
            yield f"adam/v/{parameter.name}", parameter.spec, state["exp_avg_sq"]

    def set_step(self, num_updates: int) -> None:
        """Set the number of updates made so far, on which the bias correction depends."""
        for parameter in self.parameters:
            state = self._adamw.state.get(parameter.data) or self._fresh(parameter.data)
            state["step"].fill_(float(num_updates))

    def _fresh(self, data: torch.Tensor) -> dict[str, torch.Tensor]:
        state = {"step": torch.zeros((), dtype=torch.float32, device=data.device)}
        state |= {"exp_avg": torch.zeros_like(data), "exp_avg_sq": torch.zeros_like(data)}
        self._adamw.state[data] = state
        return state
