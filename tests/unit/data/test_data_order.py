"""Split and order: nothing is seen twice in an epoch, nothing held out is trained on, and a slot
alone decides its row.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.data import split as split_module
from mpitrain.data.order import Sampler
from mpitrain.data.permutation import ORDERS
from mpitrain.data.split import split, tail
from mpitrain.data.token_rows import Text
from mpitrain.errors import DataError

TOKENS = np.arange(1000, dtype=np.uint16)  # a token is its own position


def test_windows_overlap_by_one_token():
    sampler = Sampler(np.arange(10, dtype=np.uint8), sequence=3)
    assert sampler.num_sequences == 3
    rows = sampler.rows([0, 1, 2]).tokens
    assert rows.dtype == np.int64
    assert rows.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]


@given(
    num_tokens=st.integers(2, 300),
    sequence=st.integers(1, 299),
    seed=st.none() | st.integers(0, 2**64 - 1),
    order=st.sampled_from([*ORDERS]),
)
def test_every_window_comes_exactly_once_per_epoch(num_tokens, sequence, seed, order):
    if num_tokens <= sequence:
        return
    sampler = Sampler(TOKENS[:num_tokens], sequence, seed, order)
    n = sampler.num_sequences
    for epoch in (0, 1, 7):
        starts = sampler.rows(range(epoch * n, (epoch + 1) * n)).tokens[:, 0]
        assert sorted(starts) == [i * sequence for i in range((num_tokens - 1) // sequence)]


@pytest.mark.parametrize("order", [*ORDERS])
def test_a_million_windows_come_once_an_epoch_and_none_has_a_token_that_is_held_out(order):
    lengths = np.random.default_rng(5).integers(1, 60, 150_000)
    ends = np.cumsum(lengths)
    parts = split(ends, 0.05, 4, 1)
    sampler = Sampler(Text(np.arange(ends[-1]), parts.train), 4, 7, order)
    assert sampler.num_sequences > 1_000_000
    held_out = np.zeros(ends[-1], bool)
    for begin, end in parts.validation.tolist():
        held_out[begin:end] = True
    for epoch in (0, 3):
        slots = epoch * sampler.num_sequences + np.arange(sampler.num_sequences)
        windows = sampler._windows(slots)
        assert np.bincount(windows).tolist() == [1] * sampler.num_sequences
    some = np.random.default_rng(6).choice(sampler.num_sequences, 20_000, replace=False)
    assert not held_out[sampler.rows(some).tokens].any()


@given(
    slots=st.lists(st.integers(0, 500), max_size=40), cut=st.integers(0, 40), order=st.sampled_from([*ORDERS])
)
def test_a_row_depends_on_its_slot_alone(slots, cut, order):
    """Whatever was asked before, however slots are grouped over ranks and microbatches, and over
    the end of an epoch.
    """
    one = Sampler(TOKENS, 10, 3, order)
    rows = np.concatenate([one.rows(slots[:cut]).tokens, one.rows(slots[cut:]).tokens])
    alone = [Sampler(TOKENS, 10, 3, order).rows([slot]).tokens[0] for slot in slots]
    assert rows.tolist() == [row.tolist() for row in alone]


@pytest.mark.parametrize("name", ORDERS)
def test_epochs_and_seeds_have_orders_of_their_own(name):
    n = Sampler(TOKENS, 10).num_sequences
    orders = [
        Sampler(TOKENS, 10, seed, name).rows(range(epoch * n, (epoch + 1) * n)).tokens
        for seed in (0, 1, 2**64 - 1)
        for epoch in (0, 1)
    ]
    assert len({order.tobytes() for order in orders}) == 6


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("sorted", [8, 9, 7, 3, 0, 1, 4, 2, 10, 5, 6, 0, 9, 5, 6, 4, 2, 8, 1, 10, 7, 3]),
        ("feistel", [7, 8, 5, 0, 3, 10, 9, 4, 6, 1, 2, 2, 4, 7, 5, 3, 6, 10, 8, 1, 9, 0]),
    ],
)
def test_order_is_the_same_in_every_numpy_version(order, expected):
    """Written down once: a change here would break the resume of everybody's runs."""
    rows = Sampler(np.arange(12), sequence=1, seed=1234, order=order).rows(range(22)).tokens
    assert rows[:, 0].tolist() == expected


def test_validation_order_is_the_text_itself_in_every_epoch():
    sampler = Sampler(TOKENS, 10)
    n = sampler.num_sequences
    assert sampler.rows(range(2 * n)).tokens[:, 0].tolist() == 2 * [10 * i for i in range(n)]


@given(num_tokens=st.integers(4, 1000), val_fraction=st.floats(0.001, 0.999), sequence=st.integers(1, 499))
def test_training_and_validation_never_overlap(num_tokens, val_fraction, sequence):
    if num_tokens < 2 * (sequence + 1):
        return
    texts = [Text(TOKENS, stretches) for stretches in tail(num_tokens, val_fraction, sequence)[:2]]
    seen = [Sampler(text, sequence, seed) for text, seed in zip(texts, (5, None), strict=True)]
    trained, validated = (set(sampler.rows(range(sampler.num_sequences)).tokens.flat) for sampler in seen)
    assert trained and validated and max(trained) < min(validated)
    assert sum(map(len, texts)) == num_tokens


def test_validation_of_an_older_run_is_the_tail():
    train, val, _ = tail(1000, 0.05, 10)
    assert (train.tolist(), val.tolist()) == ([[0, 950]], [[950, 1000]])


@given(
    ends=st.sets(st.integers(1, 99), max_size=20),
    cuts=st.sets(st.integers(1, 99), min_size=2, max_size=20),
    starts=st.lists(st.integers(0, 60), min_size=1, max_size=5),
)
def test_rows_of_stretches_say_where_documents_end(ends, cuts, starts):
    """Held against tokens and marks that are put together at once.

    Where a stretch is cut off, a document ends, too.
    """
    cuts = sorted(cuts)[: len(cuts) // 2 * 2]
    stretches = np.array(cuts).reshape(-1, 2)
    marks = np.isin(np.arange(1, 101), [*ends, *stretches[:, 1]])
    tokens, marks = (np.concatenate([x[begin:end] for begin, end in stretches]) for x in (TOKENS, marks))
    text = Text(TOKENS[:100], stretches, np.array(sorted(ends | {100}), "<i8"))
    assert len(text) == len(tokens)
    length = max(1, len(tokens) // 2)
    for start in (start for start in starts if start + length <= len(tokens)):
        rows = text.rows(np.array([start]), length)
        assert rows.tokens[0].tolist() == tokens[start : start + length].tolist()
        assert rows.ends[0].tolist() == marks[start : start + length].tolist()


def test_split_and_sampler_of_a_memmap_copy_only_the_rows(tmp_path):
    TOKENS.tofile(tmp_path / "t")
    tokens = np.memmap(tmp_path / "t", np.uint16, mode="r")
    text = Text(tokens, tail(len(tokens), 0.05, 10).train)
    assert np.shares_memory(text._tokens, tokens)
    assert type(Sampler(text, 10, 0).rows([0]).tokens) is np.ndarray


def test_sequence_longer_than_the_data_is_refused_with_numbers():
    with pytest.raises(
        DataError,
        match=r"data\.sequence = 512 needs 1026 tokens .* has 1000; use a smaller data\.sequence or more "
        r"text",
    ):
        split(np.array([1000]), 0.05, 512, 1)
    with pytest.raises(DataError, match=r"data\.sequence = 1000 needs 1001 tokens, there are 1000"):
        Sampler(TOKENS, 1000, 0)


@pytest.mark.parametrize(
    ("val_fraction", "sequence"), [(0, 8), (1, 8), (-0.1, 8), (float("nan"), 8), (0.05, 0)]
)
def test_impossible_settings_are_refused(val_fraction, sequence):
    with pytest.raises(DataError, match="must"):
        split(np.array([1000]), val_fraction, sequence, 1)


# ---------------------------------------------------------------- whole documents are held out


def documents_in(stretches, ends):
    """Return the numbers of the documents that stretches have whole; fail if one is cut."""
    begins = [0, *ends[:-1].tolist()]
    found = []
    for begin, end in stretches.tolist():
        first = begins.index(begin)
        last = ends.tolist().index(end)
        found += range(first, last + 1)
    return found


@given(
    lengths=st.lists(st.integers(1, 30), min_size=120, max_size=200),
    val_fraction=st.floats(0.06, 0.5),
    seed=st.integers(0, 2**63 - 1),
)
def test_whole_documents_are_held_out_and_no_token_is_in_both(lengths, val_fraction, seed):
    ends = np.cumsum(lengths)
    if val_fraction * ends[-1] < max(*lengths, 9):
        return
    train, validation, description = split(ends, val_fraction, 8, seed)
    trained = documents_in(train, ends)
    validated = documents_in(validation, ends)
    assert sorted(trained + validated) == list(range(len(lengths)))
    held_out = sum(lengths[each] for each in validated)
    assert 0 <= held_out - val_fraction * ends[-1] < max(lengths)
    assert description.startswith(f"{held_out:,} tokens: {len(validated):,} whole documents")
    assert (train[1:, 0] > train[:-1, 1]).all() and (validation[1:, 0] > validation[:-1, 1]).all()


def test_a_corpus_that_is_ordered_by_its_sources_is_validated_with_all_of_them():
    ends = np.arange(1, 2001) * 10
    found = np.array(documents_in(split(ends, 0.05, 8, 1).validation, ends))
    assert [int(((found >= begin) & (found < begin + 500)).sum()) for begin in (0, 500, 1000, 1500)] == [
        20,
        23,
        30,
        27,
    ]


def test_which_documents_are_held_out_is_the_same_in_every_version():
    """Written down once: a change here would mix the validation of everybody's runs into their training."""
    ends = np.arange(1, 201) * 10
    found = [documents_in(split(ends, 0.05, 8, seed).validation, ends) for seed in (1, 2)]
    assert found == [
        [10, 11, 77, 84, 90, 116, 133, 143, 151, 164],
        [10, 27, 31, 35, 47, 55, 81, 133, 146, 152],
    ]


def test_documents_are_held_out_in_the_order_of_their_hashes_whatever_the_blocks(monkeypatch):
    monkeypatch.setattr(split_module, "BLOCK", 7)
    dice = np.random.default_rng(3)
    for seed in range(60):
        lengths = dice.integers(1, 40, dice.integers(50, 300))
        ends = np.cumsum(lengths)
        hashes = split_module._hashes(np.arange(len(ends)), seed).tolist()
        order = sorted(range(len(ends)), key=hashes.__getitem__)
        sums = np.cumsum(lengths[order])
        number = int(np.argmax(sums >= sums[-1] * 0.2)) + 1
        expected = {token for one in order[:number] for token in range(ends[one] - lengths[one], ends[one])}
        stretches = split(ends, 0.2, 8, seed).validation.tolist()
        assert {token for begin, end in stretches for token in range(begin, end)} == expected


def test_of_long_documents_the_end_is_held_out():
    """Each of them, in its part: three files, one of each source."""
    train, validation, description = split(np.array([1000, 1500, 3000]), 0.1, 8, 1)
    assert validation.tolist() == [[900, 1000], [1450, 1500], [2850, 3000]]
    assert (
        train.tolist() == [[0, 900], [1000, 1450], [1500, 2850]]
        and description == "300 tokens: the end of 3 long documents"
    )
    one = split(np.array([1000]), 0.05, 10, 7)
    assert [one.train.tolist(), one.validation.tolist()] == [
        each.tolist() for each in tail(1000, 0.05, 10)[:2]
    ]


def test_a_giant_document_among_short_ones_gives_its_part():
    ends = np.cumsum([10] * 50 + [10_000] + [10] * 50)
    found = split(ends, 0.05, 8, 3)
    assert [
        10_500 - 500,
        10_500,
    ] in found.validation.tolist() and "the end of 1 long document" in found.description
    assert 500 + 50 <= sum(end - begin for begin, end in found.validation.tolist()) <= 500 + 60


@pytest.mark.parametrize("val_fraction", [0.001, 0.999])
def test_where_documents_give_too_little_the_tail_is_held_out(val_fraction):
    found = split(np.arange(1, 101) * 10, val_fraction, 99, 1)
    assert (
        found.description.endswith("the end of the text") and len(found.train) == len(found.validation) == 1
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_conversation_is_held_out_whole_or_not_at_all(seed):
    """However few there are; of other documents the end may be."""
    ends = np.array([10, 25, 31])
    train, validation, _ = split(ends, 0.05, 4, seed, [(0, 3)])
    assert documents_in(validation, ends) and len(validation) == 1
    assert {*train.flatten().tolist(), *validation.flatten().tolist()} <= {0, 10, 25, 31}
    mixed = np.array([1000, 1010, 1025, 1031])
    bounds = split(mixed, 0.05, 4, seed, [(1, 4)]).validation.flatten().tolist()
    assert bounds[0] == 950 and {*bounds[1:]} <= {*mixed.tolist()} and bounds[-1] > 1000
    with pytest.raises(DataError, match="one conversation: none is left to validate with"):
        split(np.array([100]), 0.05, 4, seed, [(0, 1)])
