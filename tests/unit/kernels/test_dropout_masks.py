"""The masks of dropout: Philox's published vectors, the share dropped, the same mask of any part."""

import numpy as np
import pytest
import torch

from mpitrain.kernels import dropout
from mpitrain.kernels.attention import AttentionRequest
from mpitrain.kernels.attention_tiles import attend, attend_backward
from mpitrain.kernels.attention_window import attend_in_window, attend_in_window_backward
from mpitrain.kernels.dropout import DropoutDraw, ProbabilityDropout, drop, philox

# known answers of Random123 1.14, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, words
VECTORS = [
    ([0, 0, 0, 0], (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (4 * [0xFFFFFFFF], (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        (0xA4093822, 0x299F31D0),
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
DRAW = DropoutDraw(seed=7, step=3, sequences=range(4))


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_philox_gives_the_published_words(counter, key, words):
    assert philox(counter, key) == words
    tensors = [torch.tensor([word], dtype=torch.int64) for word in counter]
    assert [word.item() for word in philox(tensors, key)] == words


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_the_rate_and_the_mean_stays(rate):
    x = torch.ones(4, 64, 257, dtype=torch.float64)
    y = drop(x, rate, DRAW, 2, 3, torch.arange(64))
    sigma = (rate * (1 - rate) / x.numel()) ** 0.5
    assert abs((y == 0).double().mean() - rate) < 4 * sigma
    assert set(y.unique().tolist()) == {0.0, 1 / (1 - rate)}
    for dim in range(3):  # no line is dropped more than others, beyond chance
        others = [d for d in range(3) if d != dim]
        count = x.numel() // x.shape[dim]
        assert ((y == 0).double().mean(others) - rate).abs().max() < 5 * (rate * (1 - rate) / count) ** 0.5


def test_any_part_has_the_mask_of_the_whole(monkeypatch):
    x = torch.ones(4, 12, 10)
    whole = drop(x, 0.4, DRAW, 1, 2, torch.arange(12))
    two = DRAW._replace(sequences=range(2, 4))
    positions = torch.tensor([0, 5, 6, 11])
    assert drop(x[2:, :4], 0.4, two, 1, 2, positions).equal(whole[2:, positions])
    monkeypatch.setattr(dropout, "DROPPED", 100)  # masks of two positions at a time
    assert drop(x, 0.4, DRAW, 1, 2, torch.arange(12)).equal(whole)


@pytest.mark.parametrize(
    "other",
    [DRAW._replace(seed=8), DRAW._replace(seed=7 + 2**32), DRAW._replace(step=4), "block", "site"],
    ids=str,
)
def test_another_seed_step_block_or_site_has_another_mask(other):
    x = torch.ones(4, 16, 32)
    positions = torch.arange(16)
    first = drop(x, 0.5, DRAW, 1, 2, positions)
    block, site = (2 if other == "block" else 1), (3 if other == "site" else 2)
    second = drop(x, 0.5, DRAW if isinstance(other, str) else other, block, site, positions)
    agreeing = ((first == 0) == (second == 0)).double().mean()
    assert abs(agreeing - 0.5) < 5 * 0.5 / x.numel() ** 0.5


def probabilities(rate=0.3, heads=range(4)):
    return ProbabilityDropout(rate, 1, heads, DRAW)


def test_any_heads_queries_and_keys_have_the_mask_of_the_whole():
    cpu = torch.device("cpu")
    whole = probabilities().dropped(slice(0, 24), 24, 24, 24, cpu)
    assert abs(whole.double().mean() - 0.3) < 0.02
    keys = np.array([1, 2, 3, 9, 10, 22])
    queries = np.array([4, 5, 20])
    part = probabilities(heads=range(1, 3)).between(queries, keys)
    found = part.dropped(slice(1, 3), 3, 6, 5, cpu)
    assert found.equal(whole[:, 1:3][:, :, queries[1:]][..., keys[:5]])
    # the last 6 queries of a sequence that is cut
    assert probabilities().dropped(slice(2, 4), 6, 24, 20, cpu).equal(whole[:, :, 20:22, :20])


@pytest.mark.parametrize(("length", "window"), [(9, 0), (150, 0), (150, 20)])
def test_attention_with_dropout_is_that_of_autograd(length, window):
    """150 queries are more than are taken at a time."""
    dice = torch.Generator().manual_seed(1)
    q, grad = (torch.randn(4, 4, length, 6, dtype=torch.float64, generator=dice) for _ in range(2))
    k, v = (torch.randn(4, 2, length, 6, dtype=torch.float64, generator=dice) for _ in range(2))
    request = AttentionRequest(dropout=probabilities(), window=window)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    many = [x.repeat_interleave(2, 1) for x in leaves[1:]]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    seen = seen.triu(1 - window) if window else seen
    scores = (leaves[0] @ many[0].mT / 6**0.5).masked_fill(~seen, -torch.inf)
    mask = request.dropout.dropped(slice(0, length), length, length, length, q.device)
    expected = (scores.softmax(-1) * ~mask / 0.7) @ many[1]
    out, lse = attend_in_window(q, k, v, request) if window else attend(q, k, v, True, None, request)
    assert (out - expected).abs().max() < 1e-12
    assert (lse - scores.logsumexp(-1)).abs().max() < 1e-12
    expected.backward(grad)
    if window:
        grads = attend_in_window_backward(grad, q, k, v, out, lse, request)
    else:
        grads = attend_backward(grad, q, k, v, out, lse, True, None, request)
    for found, leaf in zip(grads, leaves):
        assert (found - leaf.grad).abs().max() < 1e-11
