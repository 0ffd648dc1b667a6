"""Attention of the one query of a token that is generated, to the keys and values of all before it.

B texts, H query heads, K key-value heads, G = H / K that share keys, S keys, C width of a key, V of a value.
"""

import torch

from mpitrain.kernels.attention import AttentionRequest
from mpitrain.kernels.precision import wide
from mpitrain.kernels.processor import multiplied_as


def attend_one_query(
    q_BH1C: torch.Tensor, k_BKSC: torch.Tensor, v_BKSV: torch.Tensor, request: AttentionRequest
) -> torch.Tensor:
    """Return attention [B, H, 1, V] to all keys given, in any order: a window's are those in it.

    request: its mask, [1, S] or [B, 1, 1, S], is added to the scores. Softmax is fp32 at least.
    """
    dtype = q_BH1C.dtype
    kind = multiplied_as(dtype) if q_BH1C.is_cpu else dtype
    batch, heads, _, width = q_BH1C.shape
    group = heads // k_BKSC.shape[1]
    q_BKGC = q_BH1C.reshape(batch, -1, group, width).to(kind)
    scores_BKGS = (q_BKGC @ k_BKSC.to(kind).transpose(-1, -2)).to(wide(dtype)) * request.scale_of(width)
    if request.soft_cap:
        scores_BKGS = torch.tanh(scores_BKGS / request.soft_cap) * request.soft_cap
    if request.mask is not None:
        scores_BKGS = scores_BKGS + request.mask
    shares_BKGS = _shares(scores_BKGS, request.sinks)
    return (shares_BKGS.to(kind) @ v_BKSV.to(kind)).to(dtype).reshape(batch, heads, 1, -1)


def _shares(scores_BKGS: torch.Tensor, sinks_H: torch.Tensor | None) -> torch.Tensor:
    """Return the softmax over keys, and over the sink of each head, whose share goes nowhere."""
    if sinks_H is None:
        return torch.softmax(scores_BKGS, -1)
    sinks = sinks_H.to(scores_BKGS.dtype).view(1, *scores_BKGS.shape[1:3], 1)
    both = torch.cat((scores_BKGS, sinks.expand(len(scores_BKGS), -1, -1, -1)), -1)
    return torch.softmax(both, -1)[..., :-1]
