"""Attention of documents by themselves equals that of whole rows under a mask, and of each document alone."""

import numpy as np
import pytest
import torch

from mpitrain.kernels import document_spans
from mpitrain.kernels.attention import AttentionRequest
from mpitrain.kernels.attention_documents import attend_by_documents, attend_by_documents_backward
from mpitrain.kernels.attention_window import attend_in_window, attend_in_window_backward
from mpitrain.kernels.document_spans import spans_between, spans_of
from mpitrain.kernels.dropout import DropoutDraw, ProbabilityDropout

LENGTHS = ((1, 1, 30, 2, 9, 7), (50,), tuple([1] * 50), (3, 3, 3, 41))


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    monkeypatch.setattr(document_spans, "LEAST", 8)


def rows():
    """Return the document of each position, [4, 50]."""
    return torch.stack([torch.arange(len(x)).repeat_interleave(torch.tensor(x)) for x in LENGTHS])


def tensors(dtype=torch.float64, queries=50, keys=50):
    torch.manual_seed(1)
    shapes = (queries, 6), (keys, 2), (keys, 2), (queries, 6)
    return [torch.randn(4, n, heads, 8, dtype=dtype).transpose(1, 2) for n, heads in shapes]


def test_spans_cover_each_position_once_and_hold_whole_documents():
    dice = np.random.default_rng(1)
    for _ in range(200):
        lengths = torch.from_numpy(dice.integers(1, 20, dice.integers(1, 9)))
        documents = torch.arange(len(lengths)).repeat_interleave(lengths)[None]
        begin = int(dice.integers(0, documents.shape[1]))
        spans = spans_of(documents, begin)
        covered = [place for span in spans for place in range(span.queries.start, span.queries.stop)]
        assert covered == list(range(documents.shape[1] - begin))
        for span in spans:
            inside = documents[0, span.keys]
            outside = torch.cat((documents[0, : span.keys.start], documents[0, span.keys.stop :]))
            assert not set(inside.tolist()) & set(outside.tolist())
            assert (span.documents is None) == (len(set(inside.tolist())) == 1)
            assert span.documents is None or span.num_keys < 2 * document_spans.LEAST


@pytest.mark.parametrize(
    "keys", [{}, {"window": 5}, {"window": 300}, {"soft_cap": 2.0}, {"sinks": torch.arange(6.0)}], ids=str
)
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("segment", [(0, 50), (0, 20), (20, 50), (49, 50)])
def test_documents_by_themselves_equal_rows_under_a_mask(keys, dropped, segment):
    begin, end = segment
    documents = rows()
    q, k, v, grad = tensors(queries=end - begin, keys=end)
    dropout = ProbabilityDropout(0.3, 2, range(4, 10), DropoutDraw(7, 3, range(8, 12))) if dropped else None
    request = AttentionRequest(dropout=dropout, **keys)
    visible = (documents[:, begin:end, None] == documents[:, None, :end])[:, None]
    out, lse = attend_in_window(q, k, v, request, visible)
    spans = spans_of(documents, begin, end)
    found = attend_by_documents(q, k, v, request, spans)
    for one, other in zip(found, (out, lse), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    expected = attend_in_window_backward(grad, q, k, v, out, lse, request, visible)
    grads = attend_by_documents_backward(grad, q, k, v, *found, request, spans)
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("length", [8, 10**6])
def test_what_a_layer_calls_equals_each_document_alone(dtype, again, length, monkeypatch):
    """Through autograd, forwards made again for the backward, too, by every kernel of a CPU."""
    from mpitrain.model.attention_functions import attention

    monkeypatch.setattr(document_spans, "LEAST", length)
    documents = rows()
    leaves = [x.requires_grad_() for x in tensors(dtype)[:3]]
    grad = tensors(dtype)[3]
    out, made_again = attention(*leaves, AttentionRequest(spans=spans_of(documents)), again, again)
    assert (made_again is not None) == again
    assert not again or torch.equal(made_again(), out)
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    parts = []
    for row in range(len(documents)):
        of_row = []
        for number in documents[row].unique():
            here = documents[row] == number
            q, k, v = (x[row : row + 1, :, here].repeat_interleave(6 // x.shape[1], 1) for x in exact)
            of_row.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        parts.append(torch.cat(of_row, 2))
    whole = torch.cat(parts)
    expected = [whole.detach(), *torch.autograd.grad(whole, exact, grad.double())]
    budget = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=budget, atol=budget)


def test_only_the_document_that_keys_before_end_with_is_shared():
    queries, keys = torch.tensor([[2, 2, 3], [5, 6, 6], [7, 7, 7]]), torch.tensor([[1, 2], [4, 4], [7, 7]])
    first, second = spans_between(queries, keys)
    assert (first.sequence, first.queries, first.keys) == (0, slice(0, 2), slice(1, 2))
    assert (second.sequence, second.queries, second.keys) == (2, slice(0, 3), slice(0, 2))


def test_documents_that_queries_and_keys_share_are_joined_while_they_are_short(monkeypatch):
    queries, keys = torch.tensor([[0, 0, 1, 1, 4]]), torch.tensor([[0, 1, 1, 3]])
    (span,) = spans_between(queries, keys)
    assert (span.queries, span.keys, span.documents is None) == (slice(0, 4), slice(0, 3), False)
    monkeypatch.setattr(document_spans, "LEAST", 2)
    spans = spans_between(queries, keys)
    assert [(span.queries, span.keys) for span in spans] == [
        (slice(0, 2), slice(0, 1)),
        (slice(2, 4), slice(1, 3)),
    ]
    assert all(span.documents is None for span in spans)
