"""Activation functions of gated products: their gradients are those of autograd, in segments, too."""

import pytest
import torch
from torch.nn import functional

from mpitrain.kernels.activation_functions import SILU, Clamped, GatedProduct, Gelu, Silu
from mpitrain.kernels.functions import EAGER
from mpitrain.model.segment import Tape

PLAIN = {
    SILU: lambda gate, up: functional.silu(gate) * up,
    Gelu(): lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    Gelu("none"): lambda gate, up: functional.gelu(gate) * up,
    Clamped(1.5): lambda gate, up: (
        gate.clamp(max=1.5) * torch.sigmoid(1.702 * gate.clamp(max=1.5)) * (up.clamp(-1.5, 1.5) + 1)
    ),
}


def made():
    """Return gate, up and the gradient of their product."""
    generator = torch.Generator().manual_seed(1)
    return [2 * torch.randn(3, 5, 8, dtype=torch.float64, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("activation", PLAIN, ids=lambda activation: type(activation).__name__)
def test_gradients_are_those_of_autograd(activation, kept):
    *given, grad = made()
    leaves = [x.clone().requires_grad_() for x in given]
    expected = PLAIN[activation](*leaves)
    wanted = torch.autograd.grad(expected, leaves, grad)
    product = GatedProduct(activation)
    found, activated = product.forward(*given)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
    for a, b in zip(product.backward(grad, *given, activated if kept else None), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("activation", PLAIN, ids=lambda activation: type(activation).__name__)
def test_a_segment_takes_them_with_and_without_recomputation(activation, selective):
    *given, grad = made()
    leaves = [x.clone().requires_grad_() for x in given]
    out, again = Tape(selective).gated(*leaves, activation)
    assert (again is not None) == selective
    assert again is None or torch.equal(again(), out)
    for a, b in zip(
        torch.autograd.grad(out, leaves, grad),
        GatedProduct(activation).backward(grad, *given, None),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_equal_activations_are_one():
    """A layer compares its activation with silu, of which more is kept."""
    assert Silu() == SILU != Gelu() and Clamped(1.0) != Clamped(2.0)
    assert EAGER.gated_by(Silu()) is EAGER
    assert not EAGER.gated_by(Gelu()).keep_activated
