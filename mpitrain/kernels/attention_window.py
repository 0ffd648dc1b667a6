"""Attention in a sliding window (Mistral, arXiv:2310.06825, section 2), and with sinks (gpt-oss,
arXiv:2508.10925, section 2.2).

In a window of w a query sees the w positions that end with its own. Queries are taken in blocks,
each with the keys that any of them sees:

    queries   0 1 2 3 | 4 5 6 7 | 8 9 ...        w = 3, blocks of 4
    keys      0 1 2 3 | 2 ... 7 | 6 ...

A sink is a learnt number for each head: the score of one more key, whose value is 0. So attention
can be to nothing. The result is that of the keys times their share of the sum of exponentials, and
the backward is that of any tile, given the log-sum-exp with the sink in it.

B sequences, H query heads, K key-value heads, T queries, S keys, of which the last T are those of
the queries, C width of a head.
"""

from collections.abc import Iterator

import torch

from mpitrain.kernels.attention import AttentionRequest
from mpitrain.kernels.attention_tiles import attend, attend_backward
from mpitrain.kernels.precision import wide

BLOCK = 128  # queries, at least: shorter ones make many small products


def attend_in_window(
    q_BHTC, k_BKSC, v_BKSC, request: AttentionRequest, visible=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [B, H, T, C] and the log-sum-exp [B, H, T], sinks included, fp32 or fp64.

    visible: what may be seen besides, bool, broadcast to [B, 1, T, S]; every query sees itself. It
    is what the request's mask or its documents say.
    """
    outputs = [
        attend(
            q_BHTC[..., rows, :],
            k_BKSC[..., keys, :],
            v_BKSC[..., keys, :],
            True,
            seen,
            _between(request, rows, keys, q_BHTC, k_BKSC),
        )
        for rows, keys, seen in _blocks(q_BHTC, k_BKSC, request.window, visible)
    ]
    out, lse = (torch.cat(parts, 2) if len(parts) > 1 else parts[0] for parts in zip(*outputs))
    return (out, lse) if request.sinks is None else with_sinks(out, lse, request.sinks)


def with_sinks(out, lse, sinks_H) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp of all keys and the sink, from those of all keys."""
    sinks_H1 = sinks_H.to(lse.dtype)[:, None]
    return out * torch.sigmoid(lse - sinks_H1).unsqueeze(-1).to(out.dtype), torch.logaddexp(lse, sinks_H1)


def attend_in_window_backward(
    grad_of_out, q_BHTC, k_BKSC, v_BKSC, out, lse, request: AttentionRequest, visible=None
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k and v. out, lse: as attend_in_window returned them."""
    if not request.window:
        ((_, _, seen),) = _blocks(q_BHTC, k_BKSC, 0, visible)
        return attend_backward(grad_of_out, q_BHTC, k_BKSC, v_BKSC, out, lse, True, seen, request)
    grad_of_q = torch.empty_like(q_BHTC)
    grads_of_k, grads_of_v = (torch.zeros_like(x, dtype=wide(x.dtype)) for x in (k_BKSC, v_BKSC))
    for rows, keys, seen in _blocks(q_BHTC, k_BKSC, request.window, visible):
        grad, q, o = (x[..., rows, :] for x in (grad_of_out, q_BHTC, out))
        k, v = k_BKSC[..., keys, :], v_BKSC[..., keys, :]
        of_block = _between(request, rows, keys, q_BHTC, k_BKSC)
        for_q, for_k, for_v = attend_backward(grad, q, k, v, o, lse[..., rows], True, seen, of_block)
        grad_of_q[..., rows, :] = for_q
        grads_of_k[..., keys, :] += for_k
        grads_of_v[..., keys, :] += for_v
    return grad_of_q, grads_of_k.to(k_BKSC.dtype), grads_of_v.to(v_BKSC.dtype)


def grad_of_sinks(grad_of_out, out, lse, sinks_H) -> torch.Tensor:
    """Return the gradient of the sinks, [H].

    Their probability times what the others lose by it, since the value of a sink is 0.
    """
    lost_BHT = (grad_of_out.to(lse.dtype) * out).sum(-1)
    return -((sinks_H.to(lse.dtype)[:, None] - lse).exp_() * lost_BHT).sum((0, 2))


def _between(request: AttentionRequest, rows: slice, keys: slice, q, k) -> AttentionRequest:
    """Return what is asked of a block, whose queries are the last of the keys."""
    return request.block(rows, keys, q.shape[-2], k.shape[-2]) if request.window else request


def _blocks(q, k, window: int, visible) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """Yield (queries, keys, what of these is seen) of each block; None: all that is causal."""
    num_queries = q.shape[-2]
    num_keys = k.shape[-2]
    before = num_keys - num_queries
    step = max(window, BLOCK) if window else num_queries
    for begin in range(0, num_queries, step):
        end = min(begin + step, num_queries)
        rows = slice(begin, end)
        keys = slice(max(0, before + begin - window + 1) if window else 0, before + end)
        if (
            visible is None
            and not (window and end - begin > window)
            and keys.stop - keys.start == end - begin
        ):
            yield rows, keys, None
            continue
        at_query = torch.arange(before + begin, before + end, device=q.device)[:, None]
        distance = at_query - torch.arange(keys.start, keys.stop, device=q.device)
        seen = (distance >= 0) & (distance < window) if window else distance >= 0
        yield rows, keys, seen if visible is None else seen & visible[..., rows, keys]
