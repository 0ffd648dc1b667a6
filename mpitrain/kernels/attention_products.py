"""Attention by matrix products: on any device, in fp32 or fp64, also with soft-capped scores
and with dropout of probabilities.

B sequences, H query heads, K key-value heads (K divides H), T queries, S keys, C width of a head.
Queries of one key-value head are side by side, as rows of one matrix.

A soft cap c bounds the scores: c tanh(score / c) (Gemma 2, arXiv:2408.00118, section 2). No kernel
of torch knows one. As all scores at once would be most memory, ROWS queries are taken at a time.

Dropout (dropout.py) is of the probabilities that values are multiplied by, and not of their sum:
the log-sum-exp is that without it, and tiles add up as ever. The backward makes its mask again.
"""

import math
from collections.abc import Iterator

import torch

from mpitrain.kernels.attention import PLAIN, AttentionRequest
from mpitrain.kernels.precision import wide
from mpitrain.plan.declared.probabilities import ROWS

INFINITY = math.inf


def attend_by_products(
    q_BHTC, k_BKSC, v_BKSC, causal: bool = False, visible=None, request: AttentionRequest = PLAIN, mask=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what attend() of attention_tiles.py does; all scores are there at once.

    mask: of probabilities that are dropped, [B, H, T, S].
    """
    q, k, v = (x.to(wide(q_BHTC.dtype)) for x in (q_BHTC, k_BKSC, v_BKSC))
    scores = _masked(_scores(q, k, request), causal, visible)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -INFINITY, 0).unsqueeze(-1)).exp_()
    if mask is not None:
        request.dropout.without(weights, mask)
    return (_by_group(weights, k) @ v).view(q.shape).to(q_BHTC.dtype), lse


def attend_backward_by_products(
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
    """Do what attend_backward() of attention_tiles.py does; all scores are there at once."""
    grads = _grads(grad_of_out, q_BHTC, k_BKSC, v_BKSC, out, lse, causal, visible, request)
    return tuple(x.to(q_BHTC.dtype) for x in grads)


def attend_capped(
    q_BHTC, k_BKSC, v_BKSC, causal: bool, visible, request: AttentionRequest
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what attend() does with soft-capped scores, or with dropout.

    The output is in memory as the queries, mostly with the heads of a position side by side: then
    the product after attention keeps no copy.
    """
    out_BHTC = torch.empty_like(q_BHTC)
    lse_BHT = q_BHTC.new_empty(q_BHTC.shape[:-1], dtype=wide(q_BHTC.dtype))
    for rows, seen, visible_here in _some_rows(q_BHTC, k_BKSC, causal, visible):
        k, v = _seen(seen, k_BKSC, v_BKSC)
        mask = _dropped(request, rows, seen, q_BHTC, k_BKSC)
        output = attend_by_products(q_BHTC[..., rows, :], k, v, False, visible_here, request, mask)
        out_BHTC[..., rows, :], lse_BHT[..., rows] = output
    return out_BHTC, lse_BHT


def attend_backward_capped(
    grad_of_out, q_BHTC, k_BKSC, v_BKSC, out, lse, causal: bool, visible, request: AttentionRequest
) -> tuple[torch.Tensor, ...]:
    """Do what attend_backward() does with soft-capped scores, or with dropout."""
    grad_of_q = torch.empty_like(q_BHTC)
    grads_of_kv = [torch.zeros_like(x, dtype=wide(x.dtype)) for x in (k_BKSC, v_BKSC)]
    for rows, seen, visible_here in _some_rows(q_BHTC, k_BKSC, causal, visible):
        mask = _dropped(request, rows, seen, q_BHTC, k_BKSC)
        here = (x[..., rows, :] for x in (grad_of_out, q_BHTC))
        kv = _seen(seen, k_BKSC, v_BKSC)
        of_rows = out[..., rows, :], lse[..., rows]
        grads = _grads(*here, *kv, *of_rows, False, visible_here, request, mask)
        grad_of_q[..., rows, :] = grads[0]
        for whole, part in zip(grads_of_kv, grads[1:]):
            whole[..., :seen, :] += part
    return grad_of_q, *(x.to(q_BHTC.dtype) for x in grads_of_kv)


def _dropped(request: AttentionRequest, rows: slice, seen: int, q, k) -> torch.Tensor | None:
    """Return which probabilities of some queries are dropped; None without dropout."""
    if request.dropout is None:
        return None
    return request.dropout.dropped(rows, q.shape[-2], k.shape[-2], seen, q.device)


def _seen(seen: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x[..., :seen, :] for x in tensors)


def _some_rows(q, k, causal: bool, visible) -> Iterator[tuple[slice, int, torch.Tensor | None]]:
    """Yield (queries, how many of the keys they see at most, what of these is seen), some at a time."""
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    for begin in range(0, num_queries, ROWS):
        end = min(begin + ROWS, num_queries)
        rows = slice(begin, end)
        if visible is not None:
            yield rows, num_keys, visible[..., rows, :]
        elif causal:
            yield rows, end, torch.ones(end - begin, end, dtype=torch.bool, device=q.device).tril(begin)
        else:
            yield rows, num_keys, None


def _grads(
    grad_of_out, q_BHTC, k_BKSC, v_BKSC, out, lse, causal, visible, request: AttentionRequest, mask=None
):
    """Return the gradients of q, k and v, in fp32 or fp64. mask: of what is dropped."""
    grad, q, k, v = (x.to(wide(q_BHTC.dtype)) for x in (grad_of_out, q_BHTC, k_BKSC, v_BKSC))
    scores = _scores(q, k, request)
    # of the cap; scores that aren't seen become infinite
    slope = 1 - (scores / request.soft_cap).square_() if request.soft_cap else None
    weights = (_masked(scores, causal, visible) - lse.unsqueeze(-1)).exp_()
    grad_of_weights = (_by_group(grad, k) @ v.mT).view(weights.shape)
    if mask is not None:
        request.dropout.without(grad_of_weights, mask)
    along = (grad * out).sum(-1, keepdim=True)
    grad_of_scores = (grad_of_weights - along).mul_(weights).mul_(request.scale_of(q.shape[-1]))
    grad_of_scores = _by_group(grad_of_scores if slope is None else grad_of_scores.mul_(slope), k)
    if mask is not None:
        request.dropout.without(weights, mask)
    grad_of_v = _by_group(weights, k).mT @ _by_group(grad, k)
    return (grad_of_scores @ k).view(q.shape), grad_of_scores.mT @ _by_group(q, k), grad_of_v


def _by_group(x_BHTX: torch.Tensor, k_BKSC: torch.Tensor) -> torch.Tensor:
    """Return [B, K, H/K * T, X]: the queries that share keys as rows of one matrix."""
    return x_BHTX.unflatten(1, (k_BKSC.shape[1], -1)).flatten(2, 3)


def _scores(q: torch.Tensor, k: torch.Tensor, request: AttentionRequest) -> torch.Tensor:
    """Return the scores [B, H, T, S] of all keys."""
    soft_cap = request.soft_cap
    scores = (_by_group(q, k) @ k.mT).view(*q.shape[:-1], k.shape[-2]) * request.scale_of(q.shape[-1])
    return scores.div_(soft_cap).tanh_().mul_(soft_cap) if soft_cap else scores


def _masked(scores: torch.Tensor, causal: bool, visible: torch.Tensor | None) -> torch.Tensor:
    """Make scores -inf where a query doesn't see a key, in their memory."""
    if visible is None and causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores if visible is None else scores.masked_fill_(~visible, -INFINITY)
