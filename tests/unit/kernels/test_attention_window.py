"""Attention in a window and with sinks, block by block, equals softmax of masked scores with one more column.

Also its gradients.
"""

import math

import pytest
import torch

from mpitrain.kernels.attention import AttentionRequest
from mpitrain.kernels.attention_window import (
    BLOCK,
    attend_in_window,
    attend_in_window_backward,
    grad_of_sinks,
)


def dense(q, k, v, window, sinks, visible):
    """Write scores out, and a column for the sink."""
    num_queries = q.shape[-2]
    num_keys = k.shape[-2]
    distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
    seen = (distance >= 0) & (distance < window) if window else distance >= 0
    seen = seen if visible is None else seen & visible
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(len(q), -1, num_queries, 1)), -1)
    return scores.softmax(-1)[..., :num_keys] @ v


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "window"),
    [
        (9, 9, 0),
        (9, 9, 1),
        (9, 9, 4),
        (9, 9, 50),
        (300, 300, 5),
        (300, 300, 200),
        (2 * BLOCK, 2 * BLOCK, BLOCK),
        (150, 400, 7),
        (5, 20, 0),
    ],
)
def test_blocks_equal_masked_scores(num_queries, num_keys, window, documents, with_sinks):
    torch.manual_seed(1)
    q = torch.randn(2, 6, num_queries, 4, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 2, num_keys, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sinks = torch.randn(6, dtype=torch.float64, requires_grad=True) if with_sinks else None
    visible = None
    if documents:
        number = torch.randint(0, 2, (2, num_keys)).cumsum(1) // 7
        visible = (number[:, -num_queries:, None] == number[:, None, :])[:, None]
    expected = dense(q, k, v, window, sinks, visible)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [x for x in (q, k, v, sinks) if x is not None], grad)
    request = AttentionRequest(window=window, sinks=sinks)
    with torch.no_grad():
        out, lse = attend_in_window(q, k, v, request, visible)
        found = attend_in_window_backward(grad, q, k, v, out, lse, request, visible)
        found += (grad_of_sinks(grad, out, lse, sinks),) if with_sinks else ()
    assert (out - expected).abs().max() < 1e-12
    assert all((a - b).abs().max() < 1e-11 for a, b in zip(found, wanted, strict=True))
