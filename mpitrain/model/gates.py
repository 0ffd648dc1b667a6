"""What opens the hidden units of a gated feed-forward: hidden = opened(gate) * factor(up), and the
way back.
"""

from typing import Protocol

import torch
from torch.nn import functional


class Gate(Protocol):
    """Elementwise functions of gate and up, and what their gradients become.

    Given as those of `opened` and of `factor`.
    """

    def opened(self, gate: torch.Tensor) -> torch.Tensor: ...

    def factor(self, up: torch.Tensor) -> torch.Tensor: ...

    def grad_of_gate(self, grad: torch.Tensor, gate: torch.Tensor) -> torch.Tensor: ...

    def grad_of_up(self, grad: torch.Tensor, up: torch.Tensor) -> torch.Tensor: ...


class Silu:
    """silu(gate) * up (SwiGLU, arXiv:2002.05202)."""

    def opened(self, gate: torch.Tensor) -> torch.Tensor:
        return functional.silu(gate)

    def factor(self, up: torch.Tensor) -> torch.Tensor:
        return up

    def grad_of_gate(self, grad: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.silu_backward(grad, gate)

    def grad_of_up(self, grad: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return grad


class Clamped:
    """g sigmoid(1.702 g) * (u + 1), gate and up clamped to `limit` first, up on both sides
    (gpt-oss, arXiv:2508.10925, section 2.1).
    """

    STEEPNESS = 1.702

    def __init__(self, limit: float):
        self.limit = limit

    def opened(self, gate: torch.Tensor) -> torch.Tensor:
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(self.STEEPNESS * gate)

    def factor(self, up: torch.Tensor) -> torch.Tensor:
        return up.clamp(-self.limit, self.limit) + 1

    def grad_of_gate(self, grad: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        share = torch.sigmoid(self.STEEPNESS * gate.clamp(max=self.limit))
        return (grad * share * (1 + self.STEEPNESS * gate * (1 - share))).masked_fill_(gate > self.limit, 0)

    def grad_of_up(self, grad: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return grad.masked_fill(up.abs() > self.limit, 0)
