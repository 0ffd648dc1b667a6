"""Newton-Schulz iterations: singular values come near 1, directions stay."""

import pytest
import torch

from mpitrain.optim.newton_schulz import newton_schulz


@pytest.mark.parametrize("shape", [(40, 40), (24, 96), (96, 24), (1, 7), (7, 1)])
def test_directions_stay_and_singular_values_come_near_1(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    polls = []
    kept = matrix.clone()
    found = newton_schulz(matrix, 5, lambda: polls.append(1))
    assert len(polls) == 5 and torch.equal(matrix, kept)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    middle = left.mT @ found @ right.mT
    assert (middle - torch.diag(middle.diagonal())).abs().max() < 1e-12
    clear = values > 0.01 * values.norm()  # smaller ones need more steps
    assert ((middle.diagonal() > 0.65) & (middle.diagonal() < 1.25))[clear].all()


def test_the_scale_does_not_matter():
    matrix = torch.randn(12, 20, generator=torch.Generator().manual_seed(1))
    assert torch.equal(newton_schulz(matrix, 5), newton_schulz(1024 * matrix, 5))


def test_of_nothing_comes_nothing():
    assert not newton_schulz(torch.zeros(5, 3), 5).any()
