"""What is asked of attention: every kernel takes it whole, and choose() names the one that computes it."""

import pytest
import torch

from mpitrain.kernels import attention, attention_cpu_16bit, attention_cpu_fp32, attention_tiles
from mpitrain.kernels.attention import PLAIN, AttentionRequest, Kernel, choose
from mpitrain.kernels.attention_torch import attend_by_torch
from mpitrain.kernels.attention_window import attend_in_window, attend_in_window_backward
from mpitrain.model.attention_functions import attention as differentiable

SCALE = 0.37
KERNELS = ["16 bits", "oneDNN", "torch", "flash", "capped", "products", "window"]


def made(dtype=torch.float64, length=40):
    """Return q, k, v and the gradient of the result."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 4, length, 16), (2, 2, length, 16), (2, 2, length, 16), (2, 4, length, 16))
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]


def by_kernel(name, q, k, v, grad, scale, monkeypatch):
    """Return the result and its gradients by one kernel."""
    request = AttentionRequest(scale=scale, soft_cap=1.5 if name == "capped" else 0.0)
    if name == "16 bits":
        out, _ = attention_cpu_16bit.attend(q, k, v, scale=scale)
        return out, *attention_cpu_16bit.attend_backward(grad, q, k, v, scale=scale)
    if name == "torch":
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend_by_torch(*leaves, request)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)
    if name == "window":
        out, lse = attend_in_window(q, k, v, AttentionRequest(scale=scale, window=7))
        given = (grad, q, k, v, out, lse, AttentionRequest(scale=scale, window=7))
        return out, *attend_in_window_backward(*given)
    if name == "products":
        monkeypatch.setattr(attention_tiles, "choose", lambda *a, **b: Kernel.PRODUCTS)
    if name == "oneDNN":
        monkeypatch.setattr(attention_tiles, "choose", lambda *a, **b: Kernel.CPU_ONEDNN)
    out, lse = attention_tiles.attend(q, k, v, True, request=request)
    return out, *attention_tiles.attend_backward(grad, q, k, v, out, lse, True, request=request)


@pytest.mark.parametrize("name", KERNELS)
def test_a_scale_multiplies_scores_in_every_kernel(name, monkeypatch):
    """As queries do that are multiplied first; their gradient is multiplied, too."""
    if name == "oneDNN" and attention_cpu_fp32.ONEDNN is None:
        pytest.skip("no oneDNN here")
    dtype = torch.float32 if name == "oneDNN" else torch.float64
    q, k, v, grad = made(dtype)
    ratio = SCALE * q.shape[-1] ** 0.5
    out, of_q, of_k, of_v = by_kernel(name, q, k, v, grad, SCALE, monkeypatch)
    expected = by_kernel(name, q * ratio, k, v, grad, None, monkeypatch)
    budget = 1e-5 if dtype == torch.float32 else 1e-12
    for found, wanted in zip((out, of_q / ratio, of_k, of_v), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=budget, atol=budget)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    "request_", [AttentionRequest(scale=SCALE), AttentionRequest(scale=SCALE, window=7)], ids=str
)
def test_the_scale_reaches_the_kernel_that_a_layer_takes(request_, again):
    q, k, v, grad = made()
    ratio = SCALE * q.shape[-1] ** 0.5
    found = []
    for query, asked in ((q, request_), (q * ratio, AttentionRequest(window=request_.window))):
        leaves = [x.clone().requires_grad_() for x in (query, k, v)]
        out, recompute = differentiable(*leaves, asked, again, selective=again, small=[])
        assert recompute is None or torch.equal(recompute(), out)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    found[0][1] /= ratio
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_request_is_kept_without_its_tensors():
    asked = AttentionRequest(0.5, 3, 2.0, torch.ones(2), torch.ones(3), torch.ones(4))
    assert asked.given() == AttentionRequest(0.5, 3, 2.0)
    assert asked.by_tiles and not PLAIN.by_tiles and not AttentionRequest(scale=2.0).by_tiles
    assert PLAIN.given(sinks=torch.ones(2)).by_tiles


@pytest.mark.parametrize(
    ("dtype", "request_", "masked", "tile", "kernel"),
    [
        ("bfloat16", PLAIN, False, False, Kernel.CPU_16BIT),
        ("bfloat16", PLAIN, True, False, Kernel.CPU_16BIT),
        ("float32", PLAIN, False, False, Kernel.CPU_ONEDNN),
        ("float32", PLAIN, True, False, Kernel.TORCH),
        ("float64", PLAIN, False, False, Kernel.TORCH),
        ("float32", PLAIN, False, True, Kernel.CPU_ONEDNN),
        ("float32", PLAIN, True, True, Kernel.CPU_FLASH),
        ("float64", AttentionRequest(window=5), False, False, Kernel.CPU_FLASH),
        ("bfloat16", AttentionRequest(soft_cap=2.0), False, False, Kernel.PRODUCTS_OF_SOME_ROWS),
        ("bfloat16", AttentionRequest(soft_cap=2.0), True, True, Kernel.PRODUCTS_OF_SOME_ROWS),
    ],
    ids=str,
)
def test_one_choice_names_the_kernel(dtype, request_, masked, tile, kernel, monkeypatch):
    """On a CPU that has oneDNN and is slow by MKL, so that each is met."""
    monkeypatch.setattr(attention_cpu_fp32, "mkl_is_slow", lambda: True)
    monkeypatch.setattr(attention_cpu_fp32, "ONEDNN", "there")
    q, k = (torch.empty(1, 1, 1, 64, dtype=getattr(torch, dtype)).expand(1, n, 512, 64) for n in (4, 2))
    assert choose(request_, q, k, masked, tile) is kernel


@pytest.mark.parametrize(("masked", "kernel"), [(False, "CUDA_FLASH"), (True, "PRODUCTS")])
def test_a_gpu_has_flash_attention_without_a_mask(masked, kernel, monkeypatch):
    monkeypatch.setattr(attention, "_has_cuda_flash", lambda q: True)
    q = torch.empty(1, 2, 8, 16, device="meta")
    assert choose(PLAIN, q, q, masked, tile=True) is Kernel[kernel]
    assert choose(PLAIN, q, q, masked) is Kernel.TORCH


@pytest.mark.parametrize(
    ("keys", "request_", "kernels"),
    [
        (("precision.compute=bf16",), PLAIN, [Kernel.CPU_16BIT]),
        (("precision.compute=fp64",), PLAIN, [Kernel.TORCH]),
        (("precision.compute=fp32",), AttentionRequest(window=5), [Kernel.CPU_FLASH]),
        (("precision.compute=fp32",), AttentionRequest(soft_cap=2.0), [Kernel.PRODUCTS_OF_SOME_ROWS]),
    ],
    ids=str,
)
def test_a_stage_notes_the_kernels_that_its_layers_take(keys, request_, kernels):
    """A run's first lines say them."""
    from mpitrain import config as settings
    from mpitrain.model.build_context import BuildContext, Heads
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.settings.resolve import resolve

    plan = plan_of(resolve(settings.load(None, ("model.preset=quickstart", *keys)), 1, 64))
    site = BuildContext(plan, torch.device("cpu"))
    site.note_kernel(request_, Heads(4, 2, 16), None)
    assert site.attention_kernels == kernels
