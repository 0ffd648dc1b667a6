"""Attention of the documents of a row by themselves, span by span (document_spans.py), on a CPU.

B sequences, H query heads, K key-value heads, T queries, S keys, of which the last T are those of
the queries, C width of a head.
"""

from collections.abc import Sequence

import numpy as np
import torch

from mpitrain.kernels import attention_cpu_16bit
from mpitrain.kernels.attention import AttentionRequest
from mpitrain.kernels.attention_window import attend_in_window, attend_in_window_backward
from mpitrain.kernels.document_spans import DocumentSpan, Spans
from mpitrain.kernels.precision import wide


def attend_by_documents(
    q_BHTC, k_BKSC, v_BKSC, request: AttentionRequest, spans: Spans
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what attend_in_window() does. The output is in memory [B, T, H, C]."""
    out_BHTC = _empty_output(q_BHTC, v_BKSC)
    lse_BHT = q_BHTC.new_empty(q_BHTC.shape[:3], dtype=wide(q_BHTC.dtype))
    for span in spans:
        qkv = _of_span(span, (q_BHTC,), (k_BKSC, v_BKSC))
        out, lse = attend_in_window(*qkv, asked_of(span, request), span.visible())
        span.of(out_BHTC, span.queries).copy_(out)
        span.of(lse_BHT, span.queries).copy_(lse)
    return out_BHTC, lse_BHT


def attend_by_documents_backward(
    grad_of_out, q_BHTC, k_BKSC, v_BKSC, out, lse, request: AttentionRequest, spans: Spans
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k and v. out, lse: as attend_by_documents() returned them."""
    grads = _zeros_where_unseen(q_BHTC, k_BKSC, v_BKSC)
    for span in spans:
        given = _of_span(span, (grad_of_out, q_BHTC), (k_BKSC, v_BKSC))
        given += _of_span(span, (out, lse), ())
        _put(grads, span, attend_in_window_backward(*given, asked_of(span, request), span.visible()))
    return grads


def attend_in_16_bits(q_BHTC, k_BKSC, v_BKSC, scale: float | None, spans: Spans) -> torch.Tensor:
    """Do the same by attention_cpu_16bit.py, which needs only queries, keys and values for its backward."""
    out_BHTC = _empty_output(q_BHTC, v_BKSC)
    for span in spans:
        qkv = _of_span(span, (q_BHTC,), (k_BKSC, v_BKSC))
        out, _ = attention_cpu_16bit.attend(*qkv, _added(span, q_BHTC.dtype), scale=scale)
        span.of(out_BHTC, span.queries).copy_(out)
    return out_BHTC


def attend_in_16_bits_backward(
    grad_of_out, q_BHTC, k_BKSC, v_BKSC, scale: float | None, spans: Spans
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k and v."""
    grads = _zeros_where_unseen(q_BHTC, k_BKSC, v_BKSC)
    for span in spans:
        given = _of_span(span, (grad_of_out, q_BHTC), (k_BKSC, v_BKSC))
        added = _added(span, q_BHTC.dtype)
        _put(grads, span, attention_cpu_16bit.attend_backward(*given, added, scale=scale))
    return grads


def asked_of(span: DocumentSpan, request: AttentionRequest) -> AttentionRequest:
    """Return what is asked of a span: dropout has the numbers of its sequence and of its positions."""
    keys = np.arange(span.keys.start, span.keys.stop)
    here = request.given(sinks=request.sinks).of_sequence(span.sequence)
    return here.between(keys[-span.num_queries :], keys)


def _of_span(
    span: DocumentSpan, of_queries: Sequence[torch.Tensor], of_keys: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    queries = [span.of(x, span.queries) for x in of_queries]
    return queries + [span.of(x, span.keys) for x in of_keys]


def _added(span: DocumentSpan, dtype: torch.dtype) -> torch.Tensor | None:
    """Return what is added to the scores of a span, 0 or -inf, [1, 1, queries, keys]; None: it is causal."""
    visible = span.visible()
    if visible is None and span.num_queries == span.num_keys:
        return None
    seen = torch.ones(span.num_queries, span.num_keys, dtype=torch.bool)
    seen = seen.tril(span.num_keys - span.num_queries)
    seen = seen if visible is None else seen & visible
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)[None, None]


def _empty_output(q_BHTC: torch.Tensor, v_BKSC: torch.Tensor) -> torch.Tensor:
    """Return an empty output, in memory [B, T, H, C]: then the product after attention keeps no copy."""
    batch, heads, length, _ = q_BHTC.shape
    return q_BHTC.new_empty(batch, length, heads, v_BKSC.shape[-1]).transpose(1, 2)


def _zeros_where_unseen(q, k, v) -> tuple[torch.Tensor, ...]:
    """Return where gradients are put, in memory as their tensors are.

    Of keys of earlier segments some may be of documents that have ended.
    """
    of_kv = torch.empty_like if q.shape[2] == k.shape[2] else torch.zeros_like
    return torch.empty_like(q), of_kv(k), of_kv(v)


def _put(grads: Sequence[torch.Tensor], span: DocumentSpan, found: Sequence[torch.Tensor]) -> None:
    """Write the gradients of a span. Spans share neither queries nor keys."""
    for whole, positions, part in zip(grads, (span.queries, span.keys, span.keys), found, strict=True):
        span.of(whole, positions).copy_(part)
