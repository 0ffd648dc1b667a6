"""Attention of the one query of a token that is generated, to the keys and values of all before it.

B texts, H query heads, K key-value heads, G = H / K that share keys, S keys, C width of a key, V of
a value.
"""

import torch
from torch.nn import functional

from mpitrain.kernels.attention import AttentionRequest
from mpitrain.kernels.precision import wide
from mpitrain.kernels.processor import multiplied_as


def attend_one_query(
    q_BH1C: torch.Tensor, k_BKSC: torch.Tensor, v_BKSV: torch.Tensor, request: AttentionRequest
) -> torch.Tensor:
    """Return attention [B, H, 1, V] to all keys given, in any order: a window's are those in it.

    request: its mask, [1, S] or [B, 1, 1, S], is added to the scores.
    """
    batch, heads, _, width = q_BH1C.shape
    kv_heads = k_BKSC.shape[1]
    # the heads that share keys are as many queries of one head: a product of matrices
    q_BKGC = q_BH1C.reshape(batch, kv_heads, heads // kv_heads, width)
    # torch's own attention is slow at a type that is widened
    widened = q_BH1C.is_cpu and multiplied_as(q_BH1C.dtype) != q_BH1C.dtype
    if widened or request.soft_cap or request.sinks is not None:
        out_BKGV = _attend_by_products(q_BKGC, k_BKSC, v_BKSV, request)
    else:
        out_BKGV = functional.scaled_dot_product_attention(
            q_BKGC, k_BKSC, v_BKSV, attn_mask=request.mask, scale=request.scale
        )
    return out_BKGV.reshape(batch, heads, 1, -1)


def _attend_by_products(q_BKGC, k_BKSC, v_BKSV, request: AttentionRequest) -> torch.Tensor:
    """Softmax is fp32 at least."""
    dtype = q_BKGC.dtype
    kind = multiplied_as(dtype) if q_BKGC.is_cpu else dtype
    scores_BKGS = (q_BKGC.to(kind) @ k_BKSC.to(kind).transpose(-1, -2)).to(wide(dtype))
    scores_BKGS = scores_BKGS * request.scale_of(q_BKGC.shape[-1])
    if request.soft_cap:
        scores_BKGS = torch.tanh(scores_BKGS / request.soft_cap) * request.soft_cap
    if request.mask is not None:
        scores_BKGS = scores_BKGS + request.mask
    shares_BKGS = _shares(scores_BKGS, request.sinks)
    return (shares_BKGS.to(kind) @ v_BKSV.to(kind)).to(dtype)


def _shares(scores_BKGS: torch.Tensor, sinks_H: torch.Tensor | None) -> torch.Tensor:
    """Return the softmax over keys, and over the sink of each head, whose share goes nowhere."""
    if sinks_H is None:
        return torch.softmax(scores_BKGS, -1)
    sinks = sinks_H.to(scores_BKGS.dtype).view(1, *scores_BKGS.shape[1:3], 1)
    both = torch.cat((scores_BKGS, sinks.expand(len(scores_BKGS), -1, -1, -1)), -1)
    return torch.softmax(both, -1)[..., :-1]
