"""Documents of a row: their numbers, the targets that carry loss, and what attention sees of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.data.documents import IGNORED, num_counted, separate
from mpitrain.model.kv_history import mask

END = 9


def test_an_end_of_text_belongs_to_its_document_and_predicts_nothing():
    documents, targets = separate(torch.tensor([[1, 2, 9, 3, 4, 5, 9, 9, 6]]), END)
    assert documents.tolist() == [[0, 0, 0, 1, 1, 1, 1, 2]]
    assert targets.tolist() == [[2, 9, IGNORED, 4, 5, 9, IGNORED, IGNORED]]
    assert num_counted(targets).item() == 5


def test_a_row_without_an_end_is_one_document():
    tokens = torch.tensor([[1, 2, 3, 4], [1, 2, 3, END]])
    documents, targets = separate(tokens, END)
    assert not documents.any() and targets.equal(tokens[:, 1:])


@given(st.lists(st.lists(st.sampled_from([1, 2, END]), min_size=9, max_size=9), min_size=1, max_size=4))
def test_rows_are_numbered_apart_from_each_other(rows):
    tokens = torch.tensor(rows)
    documents, targets = separate(tokens, END)
    for row, numbers, predicted in zip(rows, documents.tolist(), targets.tolist()):
        assert numbers == [row[:t].count(END) for t in range(8)]
        assert predicted == [IGNORED if row[t] == END else row[t + 1] for t in range(8)]
    assert torch.equal(tokens, torch.tensor(rows))
    shaped, _ = separate(tokens.unflatten(0, (1, -1)), END)
    assert shaped[0].equal(documents)


@pytest.mark.parametrize(("begin", "end"), [(0, 8), (0, 3), (3, 8), (7, 8)])
def test_attention_sees_earlier_positions_of_its_document(begin, end):
    documents, _ = separate(torch.tensor([[1, 2, 9, 3, 4, 5, 9, 9, 6], [1] * 9]), END)
    added = mask(begin, end, documents, torch.float64, torch.device("cpu"))
    assert added.shape == (2, 1, end - begin, end)
    for row, numbers in enumerate(documents.tolist()):
        seen = [[k <= q and numbers[k] == numbers[q] for k in range(end)] for q in range(begin, end)]
        assert (added[row, 0] == 0).tolist() == seen and (
            added[row, 0] == -torch.inf
        ).logical_not().tolist() == seen


def test_without_documents_attention_sees_every_earlier_position():
    added = mask(2, 4, None, torch.float32, torch.device("cpu"))
    assert added.isfinite().tolist() == [[True, True, True, False], [True, True, True, True]]
