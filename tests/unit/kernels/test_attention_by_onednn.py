"""Attention by oneDNN's products, against torch's in fp64.

Shapes that make other pieces, tiles, and where it is taken.
"""

import pytest
import torch
from torch.nn import functional

from mpitrain.kernels import attention_cpu_fp32, attention_tiles, processor
from mpitrain.kernels.attention import AttentionRequest
from mpitrain.model.attention_functions import attention

pytestmark = pytest.mark.skipif(processor.ONEDNN is None, reason="this torch has no oneDNN")

SHAPES = [  # B, H, K, T, C, width of a value
    (1, 6, 2, 256, 64, 64),
    (2, 2, 2, 130, 16, 16),  # a last piece of two queries, one head a group
    (1, 8, 1, 50, 32, 24),  # 48 queries a piece; narrower values
    (3, 500, 1, 3, 8, 8),  # more heads than rows of a piece
    (2, 3, 3, 1, 8, 8),
]


def made(shape, keys=None):
    """Return q, k, v and the gradient of the result, in memory as the projections leave them."""
    batch, heads, kv_heads, length, width, value_width = shape
    torch.manual_seed(1)
    of = lambda length, heads, width: torch.randn(batch, length, heads, width).transpose(1, 2)  # noqa: E731
    keys = keys or length
    return (
        of(length, heads, width),
        of(keys, kv_heads, width),
        of(keys, kv_heads, value_width),
        of(length, heads, value_width),
    )


@pytest.fixture(params=["as it is", "in fp32"])
def way(request, monkeypatch):
    """Make this processor one that multiplies 16 bits, or one that widens them."""
    fast = {torch.bfloat16, torch.float16} if request.param == "as it is" else set()
    monkeypatch.setattr(processor, "_fast_here", lambda: frozenset(fast))
    return request.param


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_16_bits_are_rounded_and_no_more(way, dtype, shape, causal):
    """torch's own attention: 0.25 units in the result, up to 0.6 in gradients of the first shapes,
    4 in those of the last. Here 1.02 at most, by AVX512_FP16.
    """
    if way == "as it is" and dtype not in processor.fast_types(torch.cpu.get_capabilities()):
        pytest.skip("this processor doesn't multiply them")
    q, k, v, grad = (x.to(dtype) for x in made(shape))
    out, lse = attention_cpu_fp32.attend(q, k, v, causal)
    grads = attention_cpu_fp32.attend_backward(grad, q, k, v, out, lse, causal)
    exact = by_torch(q, k, v, grad, causal)
    unit = torch.finfo(dtype).eps * (0.5 if way == "in fp32" else 1.5)
    assert lse.dtype == torch.float32 and (lse - exact[1]).norm() <= unit * exact[1].norm() + 1e-6
    for found, right in zip([out, *grads], [exact[0], *exact[2:]], strict=True):
        assert found.dtype == dtype and (found - right).norm() <= unit * right.norm() + 1e-6


def by_torch(q, k, v, grad, causal):
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    k_BHSC, v_BHSC = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in leaves[1:])
    scores = leaves[0] @ k_BHSC.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    out = scores.softmax(-1) @ v_BHSC
    return [out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, leaves, grad.double())]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("causal", "keys"), [(True, None), (False, None), (False, 77)])
def test_results_and_gradients_are_those_of_fp64(shape, causal, keys):
    q, k, v, grad = made(shape, keys)
    before = [x.clone() for x in (q, k, v, grad)]
    out, lse = attention_cpu_fp32.attend(q, k, v, causal)
    grads = attention_cpu_fp32.attend_backward(grad, q, k, v, out, lse, causal)
    for found, right in zip([out, lse, *grads], by_torch(q, k, v, grad, causal), strict=True):
        assert found.dtype == torch.float32 and found.shape == right.shape
        assert (found - right).norm() <= 2e-6 * right.norm() + 1e-6
    assert all(map(torch.equal, before, (q, k, v, grad)))
    assert out.transpose(1, 2).is_contiguous()
    assert all(found.stride() == of.stride() for found, of in zip(grads, (q, k, v)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_factor_has_gaps(shape, monkeypatch):
    """oneDNN multiplies those a thousand times as slowly."""
    q, k, v, grad = made(shape)
    dense = []
    product = attention_cpu_fp32.onednn_product

    def noted(x, weight):
        dense.append(weight.is_contiguous() or weight.t().is_contiguous())
        return product(x, weight)

    monkeypatch.setattr(attention_cpu_fp32, "onednn_product", noted)
    attention_cpu_fp32.attend_backward(grad, q, k, v, *attention_cpu_fp32.attend(q, k, v, True), True)
    assert dense and all(dense)


def test_tiles_add_up_to_the_whole():
    """The backward of a tile takes the result and the log-sum-exp over all keys."""
    q, k, v, grad = made((1, 6, 2, 140, 32, 32), keys=200)
    out, lse, *right = by_torch(q, k, v, grad, causal=False)
    out = out.float()
    lse = lse.float()
    tiles = [slice(0, 90), slice(90, 200)]
    parts = [
        attention_cpu_fp32.attend_backward(grad, q, k[:, :, tile], v[:, :, tile], out, lse, False)
        for tile in tiles
    ]
    of_q = parts[0][0] + parts[1][0]
    of_k, of_v = (torch.cat([part[i] for part in parts], 2) for i in (1, 2))
    for found, exact in zip((of_q, of_k, of_v), right, strict=True):
        assert (found - exact).norm() <= 2e-6 * exact.norm()


def test_a_sequence_has_the_same_bits_among_others():
    q, k, v, _ = made((4, 6, 2, 200, 32, 32))
    together = attention_cpu_fp32.attend(q, k, v, True)
    alone = attention_cpu_fp32.attend(*(x[1:2] for x in (q, k, v)), True)
    assert all(torch.equal(a[1:2], b) for a, b in zip(together, alone))


@pytest.fixture(params=[False, True], ids=["MKL is fast", "MKL is slow"])
def slow(request, monkeypatch):
    monkeypatch.setattr(attention_cpu_fp32, "mkl_is_slow", lambda: request.param)
    return request.param


@pytest.mark.parametrize(("shape", "large"), [
    ((1, 6, 2, 256, 64, 64), True),
    ((2, 8, 4, 256, 64, 64), True),  # as many as it needs
    ((9, 8, 8, 362, 64, 64), False),  # sequences and groups don't count
    ((9, 8, 8, 363, 64, 64), True),
])  # fmt: skip
def test_it_is_for_large_fp32_where_mkl_is_slow(slow, shape, large):
    q, k, *_ = made(shape)
    assert attention_cpu_fp32.fits(q, k) == (slow and large)
    assert attention_cpu_fp32.fits(q.bfloat16(), k.bfloat16()) == large and not attention_cpu_fp32.fits(
        q.double(), k.double()
    )
    assert not attention_cpu_fp32.fits(q.to("meta"), k.to("meta"))


@pytest.mark.parametrize(("length", "large"), [(64, False), (65, True)])
def test_fp16_goes_that_way_earlier_where_it_is_widened(way, length, large):
    q, k, *_ = made((9, 8, 8, length, 64, 64))
    assert attention_cpu_fp32.fits(q.half(), k.half()) == (large and way == "in fp32")
    assert not attention_cpu_fp32.fits(q.bfloat16(), k.bfloat16())


def trained(q, k, v, grad, visible, again):
    """Return the result and the gradients, and the bytes that are kept for them."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    kept = {}

    def note(x):
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out, recompute = attention(*leaves, AttentionRequest(mask=visible), again, selective=again)
    assert (recompute is not None) == again
    if again:
        assert torch.equal(recompute(), out)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)], sum(kept.values())


@pytest.mark.parametrize("masked", [False, True])
def test_a_layer_takes_it_and_keeps_what_it_would_keep_of_torchs(slow, masked):
    q, k, v, grad = made((1, 6, 2, 256, 64, 64))
    hidden = torch.ones(256, 256, dtype=torch.bool).triu(1)
    visible = torch.zeros(256, 256).masked_fill(hidden, -torch.inf) if masked else None
    found, kept = trained(q, k, v, grad, visible, again=False)
    again, less = trained(q, k, v, grad, visible, again=True)
    assert all(map(torch.equal, found, again))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    theirs = functional.scaled_dot_product_attention(
        *leaves, attn_mask=visible, is_causal=not masked, enable_gqa=True
    )
    same = torch.equal(theirs, found[0])
    assert same == (masked or not slow)
    for a, b in zip(found, [theirs, *torch.autograd.grad(theirs, leaves, grad)], strict=True):
        assert (a - b).norm() <= 2e-6 * b.norm()
    mask = 0 if visible is None else visible.nbytes
    assert less == q.nbytes + k.nbytes + v.nbytes + mask
    assert kept == less + found[0].nbytes + 4 * 6 * 256


def test_tiles_of_other_ranks_are_taken_by_it_too(slow):
    q, k, v, grad = made((1, 6, 2, 256, 64, 64))
    out, lse = attention_tiles.attend(q, k, v, causal=True)
    assert torch.equal(lse, attention_cpu_fp32.attend(q, k, v, True)[1]) == slow
    found = attention_tiles.attend_backward(grad, q, k, v, out, lse, causal=True)
    for a, b in zip([out, lse, *found], by_torch(q, k, v, grad, True), strict=True):
        assert (a - b).norm() <= 2e-6 * b.norm()
    seen = torch.ones(1, 1, 256, 256, dtype=torch.bool).tril()
    assert (attention_tiles.attend(q, k, v, visible=seen)[0] - out).norm() <= 2e-6 * out.norm()
