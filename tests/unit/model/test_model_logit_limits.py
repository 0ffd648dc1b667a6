"""Logits that are capped, with rows that pad the vocabulary: their loss and gradient are plain torch's."""

from types import SimpleNamespace

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("soft_cap", [0.0, 30.0])
@pytest.mark.parametrize("padding", [0, 5])
def test_rows_that_pad_have_no_share_and_no_gradient(dtype, soft_cap, padding):
    from mpitrain.kernels.functions import EAGER
    from mpitrain.model.embedding_and_head import LogitLimits, _CrossEntropy

    made = torch.Generator().manual_seed(1)
    logits = 20 * torch.randn(7, 16, dtype=torch.float64, generator=made)
    targets = torch.randint(0, 16 - padding, (7,), generator=made)
    weight = SimpleNamespace(spec=SimpleNamespace(shape=(16, 4), whole=(16, 4), offset=(0, 0)))
    limits = LogitLimits(weight, padding, soft_cap)
    given = logits.to(dtype).requires_grad_()
    loss = _CrossEntropy.apply(given * 1, targets, EAGER, limits)
    loss.backward()

    plain = logits.to(dtype).double().requires_grad_()
    capped = soft_cap * torch.tanh(plain / soft_cap) if soft_cap else plain
    expected = torch.nn.functional.cross_entropy(capped[:, : 16 - padding], targets, reduction="sum")
    expected.backward()
    near = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=near, atol=near)
    torch.testing.assert_close(given.grad.double(), plain.grad, rtol=near, atol=near)
    assert not padding or (given.grad[:, 16 - padding :] == 0).all()
