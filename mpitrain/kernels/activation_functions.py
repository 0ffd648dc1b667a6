"""Activation functions of feed-forwards and experts, and their gradients: each is written here, once.

    hidden = activation(gate) * scale(up)

Dense feed-forwards call them by GatedProduct, as one function or compiled (functions.py,
compiled.py); experts call them between their own products; a feed-forward without a gate calls
`activation` alone, of what would be the gate, and `grad_of_gate`. A family hands an object to its
layers, whose methods import
what they need: no torch here.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch


class Activation(Protocol):
    """Elementwise functions of gate and up, and what their gradients become.

    Given as those of `activation` and of `scale`. None changes what it is given.
    """

    def activation(self, gate: "torch.Tensor") -> "torch.Tensor": ...

    def scale(self, up: "torch.Tensor") -> "torch.Tensor": ...

    def grad_of_gate(self, grad: "torch.Tensor", gate: "torch.Tensor") -> "torch.Tensor": ...

    def grad_of_up(self, grad: "torch.Tensor", up: "torch.Tensor") -> "torch.Tensor": ...


@dataclass(frozen=True)
class Silu:
    """silu(gate) * up (SwiGLU, arXiv:2002.05202)."""

    def activation(self, gate: "torch.Tensor") -> "torch.Tensor":
        from torch.nn import functional

        return functional.silu(gate)

    def scale(self, up: "torch.Tensor") -> "torch.Tensor":
        return up

    def grad_of_gate(self, grad: "torch.Tensor", gate: "torch.Tensor") -> "torch.Tensor":
        import torch

        return torch.ops.aten.silu_backward(grad, gate)

    def grad_of_up(self, grad: "torch.Tensor", up: "torch.Tensor") -> "torch.Tensor":
        return grad


@dataclass(frozen=True)
class Gelu:
    """gelu(gate) * up (GEGLU, arXiv:2002.05202).

    approximation: of gelu, as torch names it: by tanh (arXiv:1606.08415, section 2), or "none".
    """

    approximation: str = "tanh"

    def activation(self, gate: "torch.Tensor") -> "torch.Tensor":
        from torch.nn import functional

        return functional.gelu(gate, approximate=self.approximation)

    def scale(self, up: "torch.Tensor") -> "torch.Tensor":
        return up

    def grad_of_gate(self, grad: "torch.Tensor", gate: "torch.Tensor") -> "torch.Tensor":
        import torch

        return torch.ops.aten.gelu_backward(grad, gate, approximate=self.approximation)

    def grad_of_up(self, grad: "torch.Tensor", up: "torch.Tensor") -> "torch.Tensor":
        return grad


@dataclass(frozen=True)
class Clamped:
    """g sigmoid(1.702 g) * (u + 1), gate and up clamped to `limit` first, up on both sides
    (gpt-oss, arXiv:2508.10925, section 2.1).
    """

    STEEPNESS: ClassVar[float] = 1.702
    limit: float

    def activation(self, gate: "torch.Tensor") -> "torch.Tensor":
        gate = gate.clamp(max=self.limit)
        return gate * (self.STEEPNESS * gate).sigmoid()

    def scale(self, up: "torch.Tensor") -> "torch.Tensor":
        return up.clamp(-self.limit, self.limit) + 1

    def grad_of_gate(self, grad: "torch.Tensor", gate: "torch.Tensor") -> "torch.Tensor":
        share = (self.STEEPNESS * gate.clamp(max=self.limit)).sigmoid()
        return (grad * share * (1 + self.STEEPNESS * gate * (1 - share))).masked_fill_(gate > self.limit, 0)

    def grad_of_up(self, grad: "torch.Tensor", up: "torch.Tensor") -> "torch.Tensor":
        return grad.masked_fill(up.abs() > self.limit, 0)


SILU = Silu()


@dataclass(frozen=True)
class GatedProduct:
    """activation(gate) * scale(up) as one function, and its gradients."""

    activation: Activation = SILU

    def forward(self, gate: "torch.Tensor", up: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """Return the product, and activation(gate)."""
        activated = self.activation.activation(gate)
        return activated * self.activation.scale(up), activated

    def backward(
        self, grad: "torch.Tensor", gate: "torch.Tensor", up: "torch.Tensor", activated: "torch.Tensor | None"
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return the gradients of gate and up. activated: activation(gate), if it is there."""
        activated = self.activation.activation(gate) if activated is None else activated
        of_gate = self.activation.grad_of_gate(grad * self.activation.scale(up), gate)
        return of_gate, self.activation.grad_of_up(grad * activated, up)
