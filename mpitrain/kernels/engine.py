"""Gradients of local segments, by torch's engine.

torch.autograd.grad compares shapes as symbols, and loads sympy for that: 36 MB and a second of each
rank. The engine compares them, too.
"""

from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward

Differentiable = torch.Tensor | GradientEdge


def gradients(
    outputs: Sequence[Differentiable],
    inputs: Sequence[Differentiable],
    grad_of_outputs: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of all inputs, and free the graph. grad_of_outputs: None for a loss."""
    if any(given is None for given in grad_of_outputs):
        return torch.autograd.grad(outputs, inputs, grad_of_outputs)
    keep = again = unused = False
    return _engine_run_backward(
        tuple(outputs), tuple(grad_of_outputs), keep, again, tuple(inputs), unused, accumulate_grad=False
    )
