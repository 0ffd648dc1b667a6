"""Split and order: nothing is seen twice in an epoch, nothing held out is trained on, and a slot alone decides its row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.data.order import Sampler
from mpitrain.data.split import split
from mpitrain.errors import DataError

TOKENS = np.arange(1000, dtype=np.uint16)  # a token is its own position


def test_windows_overlap_by_one_token():
    sampler = Sampler(np.arange(10, dtype=np.uint8), sequence=3)
    assert sampler.num_sequences == 3
    rows = sampler.sequences([0, 1, 2])
    assert rows.dtype == np.int64
    assert rows.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]


@given(num_tokens=st.integers(2, 300), sequence=st.integers(1, 299), seed=st.none() | st.integers(0, 2**64 - 1))
def test_every_window_comes_exactly_once_per_epoch(num_tokens, sequence, seed):
    if num_tokens <= sequence:
        return
    sampler = Sampler(TOKENS[:num_tokens], sequence, seed)
    n = sampler.num_sequences
    for epoch in (0, 1, 7):
        starts = sampler.sequences(range(epoch * n, (epoch + 1) * n))[:, 0]
        assert sorted(starts) == [i * sequence for i in range((num_tokens - 1) // sequence)]


@given(slots=st.lists(st.integers(0, 500), max_size=40), cut=st.integers(0, 40))
def test_a_row_depends_on_its_slot_alone(slots, cut):
    """Whatever was asked before, however slots are grouped over ranks and microbatches, and over the end of an epoch."""
    one = Sampler(TOKENS, 10, seed=3)
    rows = np.concatenate([one.sequences(slots[:cut]), one.sequences(slots[cut:])])
    alone = [Sampler(TOKENS, 10, seed=3).sequences([slot])[0] for slot in slots]
    assert rows.tolist() == [row.tolist() for row in alone]


def test_epochs_and_seeds_have_orders_of_their_own():
    n = Sampler(TOKENS, 10).num_sequences
    orders = [Sampler(TOKENS, 10, seed).sequences(range(epoch * n, (epoch + 1) * n)) for seed in (0, 1, 2**64 - 1) for epoch in (0, 1)]
    assert len({order.tobytes() for order in orders}) == 6


def test_order_is_the_same_in_every_numpy_version():
    """Written down once: a change here would break the resume of everybody's runs."""
    rows = Sampler(np.arange(12), sequence=1, seed=1234).sequences(range(22))
    assert rows[:, 0].tolist() == [8, 9, 7, 3, 0, 1, 4, 2, 10, 5, 6, 0, 9, 5, 6, 4, 2, 8, 1, 10, 7, 3]


def test_validation_order_is_the_text_itself_in_every_epoch():
    sampler = Sampler(TOKENS, 10)
    n = sampler.num_sequences
    assert sampler.sequences(range(2 * n))[:, 0].tolist() == 2 * [10 * i for i in range(n)]


@given(num_tokens=st.integers(4, 1000), val_fraction=st.floats(0.001, 0.999), sequence=st.integers(1, 499))
def test_training_and_validation_never_overlap(num_tokens, val_fraction, sequence):
    if num_tokens < 2 * (sequence + 1):
        return
    train, val = split(TOKENS[:num_tokens], val_fraction, sequence)
    seen = [Sampler(part, sequence, seed) for part, seed in ((train, 5), (val, None))]
    trained, validated = (set(sampler.sequences(range(sampler.num_sequences)).flat) for sampler in seen)
    assert trained and validated and max(trained) < min(validated)
    assert len(train) + len(val) == num_tokens


def test_validation_is_the_tail():
    train, val = split(TOKENS, 0.05, 10)
    assert (len(train), val[0], len(val)) == (950, 950, 50)


def test_split_and_sampler_of_a_memmap_copy_only_the_rows(tmp_path):
    TOKENS.tofile(tmp_path / "t")
    train, _ = split(np.memmap(tmp_path / "t", np.uint16, mode="r"), 0.05, 10)
    assert isinstance(train, np.memmap)
    assert type(Sampler(train, 10, 0).sequences([0])) is np.ndarray


def test_sequence_longer_than_the_data_is_refused_with_numbers():
    with pytest.raises(DataError, match=r"data\.sequence = 512 needs 1026 tokens .* has 1000; use a smaller data\.sequence or more text"):
        split(TOKENS, 0.05, 512)
    with pytest.raises(DataError, match=r"data\.sequence = 1000 needs 1001 tokens, there are 1000"):
        Sampler(TOKENS, 1000, 0)


@pytest.mark.parametrize(("val_fraction", "sequence"), [(0, 8), (1, 8), (-0.1, 8), (float("nan"), 8), (0.05, 0)])
def test_impossible_settings_are_refused(val_fraction, sequence):
    with pytest.raises(DataError, match="must"):
        split(TOKENS, val_fraction, sequence)
