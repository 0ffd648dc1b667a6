"""Attention of some queries to some keys, with what it takes to add tiles up: the log-sum-exp of the scores.

B sequences, H query heads, K key-value heads (K divides H), T queries, S keys, C width of a head.

The softmax over all keys is the mean of the tiles' results weighted by exp(log-sum-exp) (Blockwise
attention, arXiv:2305.19370). A tile's backward is exact when it is given the output and log-sum-exp
over *all* keys: then exp(score - log-sum-exp) is the probability itself.

Which kernel computes a tile says choose() of attention.py. torch's own hand out the log-sum-exp:
    cpu   every dtype, with and without a mask: the flash attention after
          scaled_dot_product_attention (the same ops in 2.11 to 2.13)
    cuda  16-bit floats without a mask, heads of a multiple of 8 up to 256, compute capability 8.0
          on: flash attention. Not run on a device yet
No kernel but plain matrix products knows soft caps, our dropout, or documents on a GPU:
attention_products.py.
"""

import math

import torch

from mpitrain.kernels import attention_cpu_fp32
from mpitrain.kernels.attention import PLAIN, AttentionRequest, Kernel, choose
from mpitrain.kernels.attention_products import (
    attend_backward_by_products,
    attend_backward_capped,
    attend_by_products,
    attend_capped,
)

_aten = torch.ops.aten
INFINITY = math.inf


def attend(
    q_BHTC, k_BKSC, v_BKSC, causal: bool = False, visible=None, request: AttentionRequest = PLAIN
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [B, H, T, C] and the log-sum-exp [B, H, T], fp32 or fp64; for a query that
    sees no key, 0 and -inf.

    causal: T = S and key s is visible from query s on.
    visible: bool [B, 1, T, S] instead; it includes causality.
    request: its scale and its soft cap are those of a tile; window, sinks and documents are the
    caller's.
    """
    kernel = choose(request, q_BHTC, k_BKSC, masked=visible is not None, tile=True)
    if kernel is Kernel.PRODUCTS_OF_SOME_ROWS:
        return attend_capped(q_BHTC, k_BKSC, v_BKSC, causal, visible, request)
    q_BHTC, k_BKSC, v_BKSC = _dense_rows(q_BHTC, k_BKSC, v_BKSC)
    if kernel is Kernel.CPU_ONEDNN:
        return attention_cpu_fp32.attend(q_BHTC, k_BKSC, v_BKSC, causal, request.scale)
    if kernel is Kernel.PRODUCTS:
        return attend_by_products(q_BHTC, k_BKSC, v_BKSC, causal, visible, request)
    if kernel is Kernel.CUDA_FLASH:
        return _aten._scaled_dot_product_flash_attention.default(
            q_BHTC, k_BKSC, v_BKSC, 0.0, causal, scale=request.scale
        )[:2]
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu.default(
        q_BHTC,
        k_BKSC,
        v_BKSC,
        0.0,
        causal and visible is None,
        attn_mask=_additive(visible, q_BHTC.dtype),
        scale=request.scale,
    )
    if visible is not None:  # torch says 0 for a row without keys
        lse = lse.masked_fill(~visible.any(-1), -INFINITY)
    return out, lse


def attend_backward(
    grad_of_out,
    q_BHTC,
    k_BKSC,
    v_BKSC,
    out,
    lse,
    causal: bool = False,
    visible=None,
    request: AttentionRequest = PLAIN,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k and v that pass through this tile.

    `out` and `lse` are those over all keys.
    """
    kernel = choose(request, q_BHTC, k_BKSC, masked=visible is not None, tile=True)
    if kernel is Kernel.PRODUCTS_OF_SOME_ROWS:
        return attend_backward_capped(grad_of_out, q_BHTC, k_BKSC, v_BKSC, out, lse, causal, visible, request)
    grad_of_out, q_BHTC, k_BKSC, v_BKSC, out = _dense_rows(grad_of_out, q_BHTC, k_BKSC, v_BKSC, out)
    tensors = (grad_of_out, q_BHTC, k_BKSC, v_BKSC, out, lse)
    if kernel is Kernel.CPU_ONEDNN:
        return attention_cpu_fp32.attend_backward(*tensors, causal, request.scale)
    if kernel is Kernel.PRODUCTS:
        return attend_backward_by_products(*tensors, causal, visible, request)
    if kernel is Kernel.CUDA_FLASH:
        return _cuda_flash_backward(*tensors, causal, request.scale)
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        *tensors,
        0.0,
        causal and visible is None,
        attn_mask=_additive(visible, q_BHTC.dtype),
        scale=request.scale,
    )


def _cuda_flash_backward(
    grad_of_out, q_BHTC, k_BKSC, v_BKSC, out, lse, causal: bool, scale: float | None
) -> tuple[torch.Tensor, ...]:
    # of the dropout, which there is none of
    seed = torch.zeros(2, dtype=torch.uint64, device=q_BHTC.device)
    num_queries = q_BHTC.shape[-2]
    num_keys = k_BKSC.shape[-2]
    return _aten._scaled_dot_product_flash_attention_backward.default(
        grad_of_out,
        q_BHTC,
        k_BKSC,
        v_BKSC,
        out,
        lse.contiguous(),
        None,
        None,
        num_queries,
        num_keys,
        0.0,
        causal,
        seed,
        seed[0],
        scale=scale,
    )


def _dense_rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copy what has gaps in its last dim.

    The CPU's attention doesn't look at that stride, and returns wrong numbers (torch 2.13).
    """
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _additive(visible: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Turn a mask into what the CPU's attention takes: 0 or -inf, in the dtype of the queries."""
    return (
        None if visible is None else torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -INFINITY)
    )
