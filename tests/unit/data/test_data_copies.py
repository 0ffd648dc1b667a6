"""Documents that are copies of held-out ones: found by their tokens, and left out of training."""

import numpy as np
import pytest

from mpitrain.data import split as split_module
from mpitrain.data.copies import copies_of
from mpitrain.data.split import Split, split, without

END = 9


def corpus(*documents, between=(END,)):
    """Return the tokens and the ends of documents, each but the last one with what ends it."""
    parts = [[*document, *between] for document in documents[:-1]] + [list(documents[-1])]
    return np.concatenate(parts).astype(np.uint8), np.cumsum([len(part) for part in parts])


@pytest.mark.parametrize("between", [(END,), ()])
@pytest.mark.parametrize("held_out", [0, 2, 5])
def test_documents_with_the_same_tokens_are_found(between, held_out):
    same = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3]
    begins_alike = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 4]
    other = [5]
    inner = [1, 2, 3, 1, 2, 3, 1, 7, 3, 1, 2, 3]
    tokens, ends = corpus(same, begins_alike, same, other, inner, same, between=between)
    begin = int(ends[held_out - 1]) if held_out else 0
    found = copies_of(tokens, ends, np.array([[begin, ends[held_out]]]), len(between))
    assert found.tolist() == [number for number in (0, 2, 5) if number != held_out]


def test_parts_of_documents_hold_nothing_out():
    tokens, ends = corpus([1, 2, 3], [1, 2, 3], [4])
    assert copies_of(tokens, ends, np.array([[1, 4]]), 1).size == 0
    assert copies_of(tokens, ends, np.array([[4, 9]]), 1).tolist() == [0]


def test_against_comparing_all():
    chosen = np.random.default_rng(0)
    for _ in range(100):
        documents = [chosen.integers(0, 2, chosen.integers(1, 6)).tolist() for _ in range(40)]
        tokens, ends = corpus(*documents)
        begins = np.concatenate([[0], ends[:-1]])
        numbers = np.sort(chosen.choice(40, 5, replace=False))
        found = copies_of(tokens, ends, np.stack([begins[numbers], ends[numbers]], 1), 1)
        texts = [documents[number] for number in numbers]
        expected = [number for number in range(40) if number not in numbers and documents[number] in texts]
        assert found.tolist() == expected


def test_what_is_left_to_train_on_has_no_token_of_them():
    documents = [[number % 7] * 20 for number in range(60)] + [[8, number] * 10 for number in range(60)]
    tokens, ends = corpus(*documents)
    before = split(ends, 0.1, 8, seed=1)
    copies = copies_of(tokens, ends, before.validation, 1)
    after = without(before, ends, copies, 8)
    trained = {
        bytes(tokens[begin:end])
        for begin, end in zip([0, *ends[:-1]], ends)
        if _within(after.train, begin, end)
    }
    validated = {
        bytes(tokens[begin:end])
        for begin, end in zip([0, *ends[:-1]], ends)
        if _within(after.validation, begin, end)
    }
    assert len(copies) and trained and validated and not trained & validated
    assert np.array_equal(after.validation, before.validation)
    sizes = [(part[:, 1] - part[:, 0]).sum() for part in (before.train, after.train)]
    assert sizes[0] - sizes[1] == sum(ends[number] - [0, *ends][number] for number in copies)
    assert after.description.endswith(
        f"; {len(copies)} documents that are copies of them are left out of training"
    )


def test_parts_are_taken_out_of_stretches_as_out_of_sets_of_tokens():
    dice = np.random.default_rng(1)
    for _ in range(300):
        cuts, others = (np.unique(dice.integers(0, 40, 2 * dice.integers(1, 9))) for _ in range(2))
        stretches, parts = (one[: len(one) // 2 * 2].reshape(-1, 2) for one in (cuts, others))
        left = split_module._minus(stretches, parts)
        tokens = [token for begin, end in left.tolist() for token in range(begin, end)]
        taken = {token for begin, end in parts.tolist() for token in range(begin, end)}
        whole = [token for begin, end in stretches.tolist() for token in range(begin, end)]
        assert tokens == [token for token in whole if token not in taken]
        assert (left[:, 0] < left[:, 1]).all()


def _within(stretches, begin, end):
    return any(first <= begin and end <= last for first, last in stretches.tolist())


def test_a_text_of_nothing_but_copies_is_trained_on_and_said_to_be_one():
    tokens, ends = corpus(*[[1, 2, 3, 4]] * 50)
    before = split(ends, 0.1, 4, seed=1)
    copies = copies_of(tokens, ends, before.validation, 1)
    after = without(before, ends, copies, 4)
    assert np.array_equal(after.train, before.train)
    assert after.description.endswith(
        f"; of the training text {len(copies)} documents are copies of them, without which it is too short"
    )


def test_no_copies_change_nothing():
    before = Split(np.array([[0, 5]]), np.array([[5, 9]]), "told")
    assert without(before, np.array([5, 9]), np.empty(0, np.int64), 2) is before
