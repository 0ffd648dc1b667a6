"""Attention of some queries to some keys, with what it takes to add tiles up: the log-sum-exp of the scores.

B sequences, H query heads, K key-value heads (K divides H), T queries, S keys, C width of a head.

The softmax over all keys is the mean of the tiles' results weighted by exp(log-sum-exp) (Blockwise
attention, arXiv:2305.19370). A tile's backward is exact when it is given the output and log-sum-exp
over *all* keys: then exp(score - log-sum-exp) is the probability itself.

The arithmetic is torch's own where it hands out the log-sum-exp:
    cpu  every dtype, with and without a mask: the flash attention behind
         scaled_dot_product_attention (the same ops in 2.11 to 2.13);
          without a mask by oneDNN's products where that is faster: attention_cpu_fp32.py
    cuda  16-bit floats without a mask, heads of a multiple of 8 up to 256, compute capability 8.0
          on: flash attention. Not run on a
          device yet
Else (fp32 and fp64 on a GPU, documents on a GPU, other devices) by plain matrix products, which
hold all scores of a tile at once.
"""

import math

import torch

from mpitrain.parallel.context import attention_cpu_fp32
from mpitrain.parallel.precision import wide

_aten = torch.ops.aten
INFINITY = math.inf


def attend(q_BHTC, k_BKSC, v_BKSC, causal: bool = False, visible=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [B, H, T, C] and the log-sum-exp [B, H, T], fp32 or fp64.

    For a query that sees no key, 0 and -inf.

    causal: T = S and key s is visible from query s on.
    visible: bool [B, 1, T, S] instead; it includes causality.
    """
    q_BHTC, k_BKSC, v_BKSC = _dense_rows(q_BHTC, k_BKSC, v_BKSC)
    if visible is None and attention_cpu_fp32.fits(q_BHTC, k_BKSC):
        return attention_cpu_fp32.attend(q_BHTC, k_BKSC, v_BKSC, causal)
    if q_BHTC.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu.default(
            q_BHTC,
            k_BKSC,
            v_BKSC,
            0.0,
            causal and visible is None,
            attn_mask=_additive(visible, q_BHTC.dtype),
        )
    elif _has_cuda_flash(q_BHTC, visible):
        out, lse = _aten._scaled_dot_product_flash_attention.default(q_BHTC, k_BKSC, v_BKSC, 0.0, causal)[:2]
    else:
        return attend_by_products(q_BHTC, k_BKSC, v_BKSC, causal, visible)
    if visible is not None:  # torch says 0 for a row without keys
        lse = lse.masked_fill(~visible.any(-1), -INFINITY)
    return out, lse


def attend_backward(
    grad_of_out, q_BHTC, k_BKSC, v_BKSC, out, lse, causal: bool = False, visible=None
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k and v that pass through this tile.

    `out` and `lse` are those over all keys.
    """
    grad_of_out, q_BHTC, k_BKSC, v_BKSC, out = _dense_rows(grad_of_out, q_BHTC, k_BKSC, v_BKSC, out)
    if visible is None and attention_cpu_fp32.fits(q_BHTC, k_BKSC):
        return attention_cpu_fp32.attend_backward(grad_of_out, q_BHTC, k_BKSC, v_BKSC, out, lse, causal)
    if q_BHTC.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            grad_of_out,
            q_BHTC,
            k_BKSC,
            v_BKSC,
            out,
            lse,
            0.0,
            causal and visible is None,
            attn_mask=_additive(visible, q_BHTC.dtype),
        )
    if _has_cuda_flash(q_BHTC, visible):
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
        )
    return attend_backward_by_products(grad_of_out, q_BHTC, k_BKSC, v_BKSC, out, lse, causal, visible)


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


def _has_cuda_flash(q: torch.Tensor, visible: torch.Tensor | None) -> bool:
    fits = (
        visible is None
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
    )
    return fits and q.is_cuda and torch.cuda.get_device_capability(q.device) >= (8, 0)


# ----------------------------------- by matrix products; queries of one key-value head side by side


def attend_by_products(
    q_BHTC, k_BKSC, v_BKSC, causal: bool = False, visible=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what attend() does on any device, in fp32 or fp64."""
    q, k, v = (x.to(wide(q_BHTC.dtype)) for x in (q_BHTC, k_BKSC, v_BKSC))
    scores = _scores(q, k, causal, visible)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -INFINITY, 0).unsqueeze(-1)).exp_()
    return (_by_group(weights, k) @ v).view(q.shape).to(q_BHTC.dtype), lse


def attend_backward_by_products(
    grad_of_out, q_BHTC, k_BKSC, v_BKSC, out, lse, causal: bool = False, visible=None
):
    """Do what attend_backward() does on any device, in fp32 or fp64."""
    grad, q, k, v = (x.to(wide(q_BHTC.dtype)) for x in (grad_of_out, q_BHTC, k_BKSC, v_BKSC))
    weights = (_scores(q, k, causal, visible) - lse.unsqueeze(-1)).exp_()
    grad_of_weights = (_by_group(grad, k) @ v.mT).view(weights.shape)
    along = (grad * out).sum(-1, keepdim=True)
    grad_of_scores = _by_group((grad_of_weights - along).mul_(weights).mul_(q.shape[-1] ** -0.5), k)
    grad_of_v = _by_group(weights, k).mT @ _by_group(grad, k)
    grads = (grad_of_scores @ k).view(q.shape), grad_of_scores.mT @ _by_group(q, k), grad_of_v
    return tuple(x.to(q_BHTC.dtype) for x in grads)


def _by_group(x_BHTX: torch.Tensor, k_BKSC: torch.Tensor) -> torch.Tensor:
    """Return [B, K, H/K * T, X]: the queries that share keys as rows of one matrix."""
    return x_BHTX.unflatten(1, (k_BKSC.shape[1], -1)).flatten(2, 3)


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, visible: torch.Tensor | None) -> torch.Tensor:
    """Return the scores [B, H, T, S], -inf where a query doesn't see a key."""
    scores = (_by_group(q, k) @ k.mT).view(*q.shape[:-1], k.shape[-2]) * q.shape[-1] ** -0.5
    if visible is None and causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if visible is None else scores.masked_fill_(~visible, -INFINITY)
