"""Packed rows: every target once an epoch, full rows, and a slot alone decides its row."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.data import packed_rows
from mpitrain.data.balance import balanced_order
from mpitrain.data.packed_rows import BlockPlan, PackedSampler, best_fit
from mpitrain.data.token_rows import Text
from mpitrain.errors import DataError
from mpitrain.plan.division.sequence import SequencePlacement


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


def pieces_of(begins, lasts, sequence):
    """Return begin and end of the pieces of documents, one after the other."""
    found = []
    for begin, last in zip(begins.tolist(), lasts.tolist(), strict=True):
        found += [(at, min(at + sequence + 1, last)) for at in range(begin, last - 1, sequence)]
    return found


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 20))
def test_a_plan_is_best_fit_of_all_pieces(lengths, sequence):
    """Pieces that fill a row are not in its lists: rows are the same, and in the same order."""
    lasts = np.cumsum(np.array([3, *lengths]))
    begins = lasts - [3, *lengths]
    pieces = pieces_of(begins, lasts, sequence)
    assert all(1 < last - begin <= sequence + 1 for begin, last in pieces)
    rows = best_fit(np.array([last - begin for begin, last in pieces]), sequence + 1)
    plan = BlockPlan.of(begins, lasts, sequence)
    assert plan.num_rows == rows.max() + 1
    expected = [[pieces[i] for i in np.flatnonzero(rows == row)] for row in range(plan.num_rows)]
    assert [sorted(plan.pieces(row)) for row in range(plan.num_rows)] == [sorted(row) for row in expected]
    pairs = [sum((e - b - 1) * (e - b) // 2 for b, e in row) for row in expected]
    assert plan.pairs_of(np.arange(plan.num_rows)).tolist() == pairs and plan.num_pairs == sum(pairs)
    targets = [target for row in expected for begin, last in row for target in range(begin + 1, last)]
    assert sorted(targets) == [t for b, e in zip(begins.tolist(), lasts.tolist()) for t in range(b + 1, e)]


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
    rows = np.concatenate([one.rows(slots[:cut]).tokens, one.rows(slots[cut:]).tokens])
    alone = [PackedSampler(text_of(lengths), 16, 7).rows([slot]).tokens[0] for slot in slots[:3]]
    assert rows[:3].tolist() == [row.tolist() for row in alone]


def test_rows_of_short_and_long_documents_are_full_and_planned_at_once():
    """65,536 documents: some 25 ms on an idle core (AMD EPYC), fill 0.9999; the limit is for a busy one."""
    lengths = np.random.default_rng(0).lognormal(6, 1, packed_rows.BLOCK).astype(int) + 2
    lasts = np.cumsum(lengths)
    begin_s = time.process_time()
    plan = BlockPlan.of(lasts - lengths, lasts, 2048)
    seconds = time.process_time() - begin_s
    filled = [sum(end - begin for begin, end in plan.pieces(row)) for row in range(plan.num_rows)]
    assert max(filled) <= 2049
    assert sum(filled) / (2049 * plan.num_rows) > 0.97
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


def test_the_longest_documents_of_a_row_are_outside():
    lengths = [3, 9, 1, 5, 7]
    lasts = np.cumsum(lengths)
    pieces = packed_rows.long_outside(list(zip((lasts - lengths).tolist(), lasts.tolist(), strict=True)))
    assert [last - begin for begin, last in pieces] == [9, 5, 1, 3, 7]


@pytest.mark.parametrize(("size", "limit"), [(2, 1.09), (4, 1.1), (8, 1.12)])
def test_zigzag_divides_packed_rows_about_evenly(size, limit):
    """In pairs of query and key, the busiest rank over the mean; best fit alone has up to 1.29 with 8."""
    sequence = 2048
    lengths = np.random.default_rng(0).lognormal(np.log(sequence / 20), 1, 5000).astype(int) + 2
    sampler = PackedSampler(text_of(np.minimum(lengths, sequence + 1)), sequence, 1)
    positions = [SequencePlacement("zigzag", sequence, size).positions(rank) for rank in range(size)]
    busiest = mean = 0
    for slot in range(100):
        costs = [np.arange(1, last - begin) for begin, last in sampler.pieces(slot)]
        costs = np.concatenate([*costs, np.zeros(sequence)])[:sequence]
        loads = [costs[here].sum() for here in positions]
        busiest += max(loads)
        mean += sum(loads) / size
    assert busiest < limit * mean


def test_counts_that_are_known_give_the_same_rows_and_plan_nothing(monkeypatch):
    monkeypatch.setattr(packed_rows, "BLOCK", 16)
    text = text_of(np.random.default_rng(4).integers(1, 60, 200))
    one = PackedSampler(text, 20, 3)
    planned = []
    plan = BlockPlan.of
    monkeypatch.setattr(BlockPlan, "of", lambda *given: planned.append(1) or plan(*given))
    other = PackedSampler(text, 20, 3, counts=one.counts)
    assert not planned and other.num_sequences == one.num_sequences
    assert other.attended_length == one.attended_length
    slots = range(5, one.num_sequences, 7)
    assert other.rows(slots).tokens.tolist() == one.rows(slots).tokens.tolist() and planned


def test_costs_are_the_pairs_of_the_rows():
    one = PackedSampler(text_of(np.random.default_rng(4).integers(1, 60, 200)), 20, 3)
    slots = [3, 0, 2 * one.num_sequences + 1, 7]
    pairs = [sum((e - b - 1) * (e - b) // 2 for b, e in one.pieces(slot)) for slot in slots]
    assert one.costs(slots).tolist() == pairs


def test_rows_of_too_many_blocks_have_no_costs(monkeypatch):
    monkeypatch.setattr(packed_rows, "BLOCK", 4)
    one = PackedSampler(text_of([30] * 80), 20, 3)
    assert one.costs(range(4)) is not None and one.costs(range(one.num_sequences)) is None


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=96))
def test_a_balanced_batch_has_every_row_once(costs):
    order = balanced_order(costs)
    assert sorted(order) == list(range(len(costs)))
    assert len(set(costs)) > 1 or order == sorted(order)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_a_balanced_batch_is_balanced_for_any_number_of_ranks(ranks):
    """Of log-normal documents: 48 rows, of which the busiest rank has 14 to 60 % too much as they come."""
    dice = np.random.default_rng(ranks)
    for _ in range(50):
        costs = dice.lognormal(0, 0.6, 48) * 1000
        loads = costs[balanced_order(costs.tolist())].reshape(ranks, -1).sum(1)
        assert loads.max() < 1.06 * loads.mean() or loads.max() < 1.01 * costs.max() + loads.min()
