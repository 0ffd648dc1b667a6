"""Attention by torch's scaled_dot_product_attention, which autograd differentiates."""

import torch
from torch.nn import functional

from mpitrain.kernels.attention import AttentionRequest


def attend_by_torch(
    q_BHTC: torch.Tensor, k_BKSC: torch.Tensor, v_BKSC: torch.Tensor, request: AttentionRequest
) -> torch.Tensor:
    """Return causal attention with grouped queries (arXiv:2305.13245), [B, H, T, C]."""
    mask = request.mask
    if (
        q_BHTC.is_cuda
        and k_BKSC.shape[1] < q_BHTC.shape[1]
        and (mask is not None or q_BHTC.dtype.itemsize > 2)
    ):
        # Of CUDA's kernels only flash attention knows groups; without it torch would multiply whole
        # matrices, and keep all probabilities.
        group = q_BHTC.shape[1] // k_BKSC.shape[1]
        k_BKSC, v_BKSC = (x.repeat_interleave(group, 1) for x in (k_BKSC, v_BKSC))
    return functional.scaled_dot_product_attention(
        q_BHTC, k_BKSC, v_BKSC, attn_mask=mask, is_causal=mask is None, scale=request.scale, enable_gqa=True
    )
