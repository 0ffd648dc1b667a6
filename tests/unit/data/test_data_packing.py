"""Packed rows: every target once an epoch, full rows, and a slot alone decides its row."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.data import packed_rows
from mpitrain.data.packed_rows import PackedSampler, best_fit, pieces_of
from mpitrain.data.token_rows import Text
from mpitrain.errors import DataError


def one_by_one(lengths, capacity):
    """Return the room left in each row by best-fit decreasing, a piece at a time."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@given(st.lists(st.integers(2, 40), min_size=1, max_size=80), st.integers(40, 60))
def test_rows_are_those_of_best_fit_decreasing(lengths, capacity):
    rows = best_fit(np.array(lengths), capacity)
    used = np.bincount(rows, weights=lengths)
    assert rows.min() == 0 and sorted(capacity - used) == one_by_one(lengths, capacity)


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 20))
def test_pieces_of_a_document_have_every_target_once(lengths, sequence):
    lasts = np.cumsum(np.array([3, *lengths]))
    begins = lasts - [3, *lengths]
    found = list(zip(*(part.tolist() for part in pieces_of(begins, lasts, sequence)), strict=True))
    assert all(1 < last - begin <= sequence + 1 for begin, last in found)
    targets = [target for begin, last in found for target in range(begin + 1, last)]
    assert targets == [t for b, e in zip(begins.tolist(), lasts.tolist()) for t in range(b + 1, e)]


def text_of(lengths, stretches=None):
    ends = np.cumsum(lengths)
    return Text(np.arange(ends[-1]), stretches, ends)  # a token is its own position


@pytest.mark.parametrize("seed", [None, 1, 2**64 - 1])
def test_an_epoch_has_every_target_of_every_document_once(monkeypatch, seed):
    """Over blocks, of stretches that leave documents and parts of one out."""
    monkeypatch.setattr(packed_rows, "BLOCK", 16)
    lengths = np.random.default_rng(1).integers(1, 40, 90)
    ends = np.cumsum(lengths)
    stretches = np.array([[0, ends[20]], [ends[30], ends[60] + 1], [ends[61], ends[-1]]])
    sampler = PackedSampler(text_of(lengths, stretches), 24, seed)
    n = sampler.num_sequences
    orders = []
    for epoch in (0, 3):
        found = sampler.rows(range(epoch * n, (epoch + 1) * n))
        first_of_document = np.roll(found.ends, 1, axis=1)
        first_of_document[:, 0] = True
        trained = found.tokens[found.scored & ~first_of_document]
        inside = [t for begin, last in stretches for t in range(begin, last)]
        begins = {0, *ends.tolist(), *stretches[:, 0].tolist()}
        assert sorted(trained) == [t for t in inside if t not in begins]
        orders.append(found.tokens.tolist())
    assert (orders[0] == orders[1]) == (seed is None) and sorted(orders[0]) == sorted(orders[1])


@given(slots=st.lists(st.integers(0, 400), max_size=30), cut=st.integers(0, 30))
def test_a_row_depends_on_its_slot_alone(slots, cut):
    lengths = np.random.default_rng(2).integers(1, 30, 60)
    one = PackedSampler(text_of(lengths), 16, 7)
    rows = np.concatenate([one.sequences(slots[:cut]), one.sequences(slots[cut:])])
    alone = [PackedSampler(text_of(lengths), 16, 7).sequences([slot])[0] for slot in slots[:3]]
    assert rows[:3].tolist() == [row.tolist() for row in alone]


def test_rows_of_short_and_long_documents_are_full_and_planned_at_once():
    """65,536 documents: some 25 ms on an idle core (AMD EPYC), fill 0.9999; the limit is for a busy one."""
    lengths = np.random.default_rng(0).lognormal(6, 1, packed_rows.BLOCK).astype(int) + 2
    begins, lasts = pieces_of(np.cumsum(lengths) - lengths, np.cumsum(lengths), 2048)
    pieces = lasts - begins
    begin_s = time.process_time()
    rows = best_fit(pieces, 2049)
    seconds = time.process_time() - begin_s
    assert np.bincount(rows, weights=pieces).max() <= 2049
    assert pieces.sum() / (2049 * (rows.max() + 1)) > 0.97
    assert seconds < 0.5


def test_what_is_without_loss_stays_so_and_rooms_have_none():
    text = Text(np.arange(10), None, np.array([4, 10]), np.array([[1, 3]]))
    rows = PackedSampler(text, 7).rows([0, 1])
    assert rows.tokens.tolist() == [[4, 5, 6, 7, 8, 9, 0, 0], [0, 1, 2, 3, 0, 0, 0, 0]]
    assert rows.scored.astype(int).tolist() == [[1, 1, 1, 1, 1, 1, 0, 0], [1, 0, 0, 1, 0, 0, 0, 0]]
    assert np.argwhere(rows.ends).tolist() == [[0, 5], [1, 3]]


def test_documents_of_one_token_are_refused():
    with pytest.raises(DataError, match="no document of the text has two tokens"):
        PackedSampler(text_of([1, 1, 1]), 8)
