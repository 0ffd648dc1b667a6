"""RMSNorm and LayerNorm against plain torch in fp64.

Its statistics aren't rounded to the type of the activations, and don't overflow in it.
"""

from types import SimpleNamespace

import pytest
import torch

from mpitrain.kernels.functions import EAGER, layer_norm, layer_norm_again, layer_norm_backward
from mpitrain.model.selective import Norm

WIDTH = 2048
KINDS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class NormWeight:
    """As a parameter is seen by the norm."""

    spec = SimpleNamespace(plus_one=False, eps=1e-5)

    def __init__(self, data):
        self.data = data


def both(x, weight, grad, again):
    """Return output and gradients of the input and the weight, of the norm and of plain torch in
    fp64, from the same rounded numbers.
    """
    small = []
    leaf = x.clone().requires_grad_()
    y = Norm.apply(leaf, NormWeight(weight), None, small, again, EAGER)
    if again:
        with torch.no_grad():  # as in a backward
            assert torch.equal(Norm.again(y.grad_fn), y)
    y.backward(grad)
    exact = x.double().requires_grad_()
    exact_weight = weight.double().requires_grad_()
    expected = exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * exact_weight
    expected.backward(grad.double())
    return (y.detach(), leaf.grad, small[0][1]), (expected.detach(), exact.grad, exact_weight.grad)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("size", [1e-2, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_it_is_that_of_fp64_but_for_the_rounding_of_numbers(kind, size, again):
    dice = torch.Generator().manual_seed(1)
    x = (size * torch.randn(4, 3, WIDTH, generator=dice)).to(kind)
    weight, grad = (
        (0.5 + torch.rand(*shape, generator=dice)).to(kind) for shape in ((WIDTH,), (4, 3, WIDTH))
    )
    found, expected = both(x, weight, grad, again)
    step = torch.finfo(kind).eps
    for name, a, b in zip(("output", "gradient", "weight's gradient"), found, expected):
        assert a.dtype == kind and a.isfinite().all(), name
        error = (a.double() - b).abs() / (b.abs() + b.abs().mean())
        assert error.max() < 8 * step, f"{name}: {error.max() / step:.1f} units in the last place"


@pytest.mark.parametrize("size", [1e-2, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_layer_norm_is_that_of_fp64_but_for_the_rounding_of_numbers(kind, size):
    """Of rows whose mean isn't 0."""
    dice = torch.Generator().manual_seed(1)
    x = (size * (1 + torch.randn(4, 3, WIDTH, generator=dice))).to(kind)
    weight, bias, grad = (
        (0.5 + torch.rand(*shape, generator=dice)).to(kind) for shape in ((WIDTH,), (WIDTH,), (4, 3, WIDTH))
    )
    y, unit, scale = layer_norm(x, weight, bias, 1e-5)
    assert all(map(torch.equal, layer_norm_again(x, weight, bias, scale), (y, unit)))
    found = y, *layer_norm_backward(grad, weight, unit, scale)
    leaves = [each.double().requires_grad_() for each in (x, weight, bias)]
    exact = torch.nn.functional.layer_norm(leaves[0], (WIDTH,), leaves[1], leaves[2], 1e-5)
    expected = exact, *torch.autograd.grad(exact, leaves, grad.double())
    step = torch.finfo(kind).eps
    for name, a, b in zip(("output", "gradient", "weight's", "bias's"), found, expected):
        assert a.isfinite().all(), name
        error = (a.double() - b).abs() / (b.abs() + b.abs().mean())
        # sums over the width cancel
        assert error.max() < 64 * step, f"{name}: {error.max() / step:.1f} units in the last place"


@pytest.mark.parametrize("kind", KINDS[2:], ids=str)
def test_a_row_is_scaled_by_what_is_not_rounded(kind):
    """All elements of a row share their factor: each is that of fp64, rounded once."""
    x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1)).to(kind)
    y = Norm.apply(x, NormWeight(torch.ones(WIDTH, dtype=kind)), None, [], False, EAGER)
    exact = (x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(kind)
    assert (y == exact).double().mean() > 0.999
