"""Attention on a CPU, piece by piece, against torch's in fp64.

Every shape that makes other pieces, masks, and bf16.
"""

import math

import pytest
import torch
from torch.nn import functional

from mpitrain.kernels import attention_cpu_16bit

SHAPES = [  # B, H, K, T, C
    (1, 6, 2, 256, 64),
    (3, 4, 4, 37, 16),
    (2, 8, 2, 130, 32),  # a last piece of two queries
    (5, 3, 1, 1, 8),
    (1, 8, 8, 300, 16),  # several pieces of heads
    (40, 2, 2, 65, 8),  # several pieces of sequences
]


def made(shape, dtype=torch.float64, later=0):
    """Return q, k, v and the gradient of the result, in memory as the projections leave them.

    later: keys that stand before.
    """
    batch, heads, kv_heads, length, width = shape
    torch.manual_seed(1)
    q, grad = (torch.randn(batch, length, heads, width, dtype=dtype).transpose(1, 2) for _ in range(2))
    k, v = (
        torch.randn(batch, later + length, kv_heads, width, dtype=dtype).transpose(1, 2) for _ in range(2)
    )
    return q, k, v, grad


def by_torch(q, k, v, grad, visible):
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    mask = None if visible is None else visible.double()
    out = functional.scaled_dot_product_attention(
        *leaves, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def by_ourselves(q, k, v, grad, visible, keep):
    out, kept = attention_cpu_16bit.attend(q, k, v, visible, keep)
    assert (kept is not None) == keep
    return [out, *attention_cpu_16bit.attend_backward(grad, q, k, v, visible, kept)]


def masks(shape, dtype):
    """Return what may be added to scores.

    nothing; documents of each sequence; segments, whose queries see keys from before.
    """
    batch, _, _, length, _ = shape
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    documents = torch.randint(0, 3, (batch, 1, length)).sort(-1).values
    separate = causal & (documents[..., None] == documents[..., None, :])
    longer = torch.ones(length, 7 + length, dtype=torch.bool).tril(7)
    return {
        name: None if seen is None else torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -math.inf)
        for name, seen in (("causal", None), ("documents", separate), ("segments", longer))
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mask", ["causal", "documents", "segments"])
def test_results_and_gradients_are_those_of_torch(shape, mask):
    q, k, v, grad = made(shape, later=7 if mask == "segments" else 0)
    visible = masks(shape, torch.float64)[mask]
    expected = by_torch(q, k, v, grad, visible)
    for keep in (False, True):
        for a, b in zip(by_ourselves(q, k, v, grad, visible, keep), expected, strict=True):
            assert a.shape == b.shape and (a - b).abs().max() < 1e-12


# the last has more queries a piece
@pytest.mark.parametrize("shape", [*SHAPES[:3], (1, 3, 3, 1100, 16)], ids=str)
def test_bf16_is_as_near_as_torchs_own(shape):
    q, k, v, grad = made(shape, torch.bfloat16)
    exact = by_torch(q, k, v, grad, None)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    theirs = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    for found, other, right in zip(by_ourselves(q, k, v, grad, None, keep=False), theirs, exact, strict=True):
        assert found.dtype == torch.bfloat16
        assert (found - right).norm() <= 1.5 * (other - right).norm() + 2**-9 * right.norm()


def test_the_same_bits_kept_or_recomputed_and_among_other_sequences():
    q, k, v, grad = made((4, 6, 2, 200, 32), torch.float32)
    once, again = (by_ourselves(q, k, v, grad, None, keep) for keep in (False, True))
    assert all(map(torch.equal, once, again))
    alone = by_ourselves(*(x[1:2] for x in (q, k, v, grad)), None, keep=False)
    assert all(torch.equal(a[1:2], b) for a, b in zip(once, alone, strict=True))


def test_the_result_lies_side_by_side_and_gradients_as_what_they_are_of():
    q, k, v, grad = made((2, 6, 2, 20, 8))
    out, *grads = by_ourselves(q, k, v, grad, None, keep=False)
    assert out.transpose(1, 2).is_contiguous()
    assert [x.stride() for x in grads] == [x.stride() for x in (q, k, v)]


def test_lengths_that_grow_leave_no_table_of_each_behind():
    """As `generate` asks for them, a token longer each time."""
    for length in range(1, 40):
        q, k, v, _ = made((1, 2, 1, length, 8), torch.bfloat16)
        attention_cpu_16bit.attend(q, k, v)
    assert attention_cpu_16bit._causal.cache_info().currsize <= 2
