"""Mixtures: shares that are exact to less than one sequence, sources that end, weights that change."""

import random
from fractions import Fraction

import numpy as np
import pytest
from conftest import WITH_LONG

from mpitrain.config import Batch, Data, DataSource
from mpitrain.data import mixture as mixture_module
from mpitrain.data.batch_sizes import BatchSizes, amount_in
from mpitrain.data.mixture import (
    Blend,
    HeldOutMixture,
    Mixture,
    MixtureSampler,
    Shares,
    first_weights,
    in_integers,
    weights_by_step,
)
from mpitrain.data.order import Sampler
from mpitrain.data.token_rows import TokenRows
from mpitrain.errors import ConfigError, DataError

SLOTS = 1_000_000 if WITH_LONG else 20_000


def blend(number):
    """Return weights of a mixture of 3 to 20 sources, with two or three digits."""
    rng = random.Random(number)
    digits = rng.choice((2, 3))
    return [max(round(rng.random(), digits), 0.01) for _ in range(rng.randint(3, 20))]


def largest_deviation(sources, weights):
    exact = np.arange(1, len(sources) + 1)
    shares = np.array(weights) / sum(weights)
    return max(np.abs(np.cumsum(sources == i) - share * exact).max() for i, share in enumerate(shares))


@pytest.mark.parametrize("number", range(10))
def test_every_prefix_has_its_shares_to_less_than_one(number):
    weights = blend(number)
    sources = Mixture([Blend(0, tuple(weights))], [0] * len(weights)).places(np.arange(SLOTS)).sources
    assert largest_deviation(sources, weights) < 1 - 1 / (2 * len(weights) - 2) + 1e-6


def test_the_known_beginning_of_a_mixture():
    """Chairman assignment with weights 1/2, 1/3, 1/6: a period of six, each source by its share."""
    found = Shares([3, 2, 1]).sources(np.arange(12)).tolist()
    assert found[:6] == found[6:] and sorted(found[:6]) == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("number", range(6))
def test_any_slot_is_what_it_is_in_the_whole_order(number):
    rng = np.random.default_rng(number)
    num = int(rng.integers(2, 6))
    blends = [Blend(0, tuple(rng.integers(1, 9, num).tolist())), Blend(311, (0.0, *[1.5] * (num - 1)))]
    mixture = Mixture(blends, [0, *rng.integers(50, 400, num - 1).tolist()])
    count = mixture.length or 2000
    whole = mixture.places(np.arange(count))
    for source in range(num):
        numbers = whole.numbers[whole.sources == source]
        assert (numbers == np.arange(len(numbers))).all()
    slots = rng.integers(0, count, 300)
    again = Mixture(blends, mixture._most.tolist()).places(slots)
    assert (again.sources == whole.sources[slots]).all() and (again.numbers == whole.numbers[slots]).all()


def test_a_source_ends_and_the_others_share_its_slots():
    mixture = Mixture([Blend(0, (2.0, 1.0, 1.0))], [6, 0, 0])
    sources = mixture.places(np.arange(40)).sources
    last = int(np.flatnonzero(sources == 0)[-1])
    assert (sources == 0).sum() == 6 and mixture.phases[1].begin == last + 1
    assert largest_deviation(sources[last + 1 :] - 1, [1, 1]) < 1


def test_all_sources_end():
    mixture = Mixture([Blend(0, (2.0, 1.0))], [6, 5])
    assert mixture.length == 11
    assert np.bincount(mixture.places(np.arange(11)).sources).tolist() == [6, 5]
    with pytest.raises(DataError, match="all sources end after 11 sequences, 12 needed"):
        mixture.places(np.arange(12))


def test_weights_in_integers():
    assert in_integers([0.5, 0.3, 0.2]) == [5, 3, 2]
    assert in_integers([0.1, 0.2]) == [1, 2]
    fine = in_integers([1 / 3, 0.123456789])
    assert Fraction(*fine) == Fraction(repr(1 / 3)) / Fraction("0.123456789")


@pytest.mark.parametrize("number", range(3))
def test_weights_of_many_digits_have_their_shares_too(number):
    rng = random.Random(number)
    weights = [rng.random() for _ in range((3, 7, 20)[number])]
    shares = Shares(in_integers(weights))
    count = SLOTS if not number else 20_000
    assert largest_deviation(shares.sources(np.arange(count)), weights) < 1 - 1e-3


def test_a_long_period_starts_again(monkeypatch):
    monkeypatch.setattr(mixture_module, "MOST_PERIOD", 5000)
    weights = [0.123456789, 0.2, 0.67654321101]
    shares = Shares(in_integers(weights))
    sources = shares.sources(np.arange(3 * 5000))
    assert (sources[:5000] == sources[5000:10_000]).all()
    assert largest_deviation(sources, weights) < 3
    for source in range(3):
        places = np.flatnonzero(sources == source)
        numbers = range(0, len(places), 97)
        assert [shares.slot_of(source, n) for n in numbers] == places[::97].tolist()
    assert shares.counts(12_345).tolist() == np.bincount(sources[:12_345]).tolist()


def test_a_weight_below_a_millionth_is_read_too(monkeypatch):
    monkeypatch.setattr(mixture_module, "MOST_PERIOD", 1 << 14)
    monkeypatch.setattr(mixture_module, "LEAST_SHARE", Fraction(1, 1 << 14))
    shares = Shares(in_integers([1.0, 1e-12]))
    assert shares.counts(shares.period)[1] == 1


def test_weights_from_steps_on():
    def data(*changes):
        return Data(
            sequence=16, sources=(DataSource(path="a", weight=2.0), DataSource(path="b", weight=changes))
        )

    alike = BatchSizes(Batch(global_=10))
    steps = [(1, (2, 0)), (5, (2, 1)), (9, (2, 0))]
    assert weights_by_step(data((5, 1.0), (9, 0.0)), alike) == steps
    assert weights_by_step(data(("640", 1.0), (9, 0.0)), alike) == steps
    assert weights_by_step(data((9, 0.0), ("0.481K", 1.0)), alike) == steps
    with pytest.raises(ConfigError, match="two weights hold from step 5 on"):
        weights_by_step(data((5, 1.0), ("640", 0.0)), alike)
    with pytest.raises(ConfigError, match="no weight"):
        weights_by_step(data(), alike)


@pytest.mark.parametrize(
    ("text", "amount"),
    [("15T", 15 * 10**12), ("15e12", 15 * 10**12), ("1.5E+9", 1_500_000_000), ("0.3k", 300)]
    + [(text, 0) for text in ("e12", "12e", "1e-3", "1e99", "-1", "4 B", "many", "")],
)
def test_a_number_of_tokens_is_written_with_a_unit_or_an_exponent(text, amount):
    assert amount_in(text) == amount


def test_sizes_of_steps_are_functions_of_their_numbers():
    growing = BatchSizes(Batch(global_=10, growth=((1, 10), (3, 20), (7, 40)), lengths=((1, 8), (5, 16))))
    assert [growing.at(step) for step in (1, 2, 3, 6, 7, 99)] == [10, 10, 20, 20, 40, 40]
    assert [growing.before(step) for step in (1, 3, 5, 7, 8)] == [0, 20, 60, 100, 140]
    assert [growing.length_at(step) for step in (1, 4, 5, 9)] == [8, 8, 16, 16]
    assert growing.alike(3, 9) == range(3, 5) and growing.alike(9, 9) == range(7, 10)
    for tokens in range(1, 3_000, 7):
        step = growing.step_of(str(tokens), 16, "batch.growth")
        assert 16 * growing.before(step) >= tokens > 16 * growing.before(step - 1)
    past = BatchSizes(Batch(global_=10, growth=((1, 10), (3, 20)), lengths=((1, 8), (5, 16))))
    assert growing.first_difference(past, 6, 16) is None and growing.first_difference(past, 7, 16) == 7


def test_rows_are_divided_with_the_next_token_at_their_ends():
    rows = TokenRows(np.arange(14).reshape(2, 7), None, np.arange(14).reshape(2, 7) % 2 == 0).divided(3)
    assert rows.tokens.tolist() == [[0, 1, 2], [2, 3, 4], [4, 5, 6], [7, 8, 9], [9, 10, 11], [11, 12, 13]]
    assert rows.ends is None and (rows.scored == (rows.tokens % 2 == 0)).all()


# ---------------------------------------------------------------- rows


def sampler_of(sizes, weights, most):
    texts = [np.arange(1000 * n, 1000 * n + 4 * size + 1) for n, size in enumerate(sizes)]
    return MixtureSampler([Sampler(text, 4, seed=3) for text in texts], Mixture(weights, most))


def test_no_sequence_comes_twice_in_an_epoch_of_its_source():
    sampler = sampler_of((30, 50), [Blend(0, (1.0, 1.0))], (0, 0))
    first = sampler.rows(range(60)).tokens[:, 0]
    assert len(set(first.tolist())) == 60


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_read_what_one_rank_reads_after_any_restart(ranks):
    """Ten restarts in a row, across a change of weights, an epoch's end and a source that ends."""
    arguments = (30, 50, 9), [Blend(0, (3.0, 2.0, 1.0)), Blend(70, (1.0, 4.0, 1.0))], (0, 0, 18)
    whole = sampler_of(*arguments).rows(range(25 * 8)).tokens
    rng = random.Random(ranks)
    stops = sorted({0, 25, *(rng.randrange(1, 25) for _ in range(10))})
    read = []
    for begin, end in zip(stops, stops[1:], strict=False):
        sampler = sampler_of(*arguments)
        for step in range(begin, end):
            local = 8 // ranks
            firsts = range(step * 8, step * 8 + 8, local)
            read += [sampler.rows(range(first, first + local)).tokens for first in firsts]
    assert (np.concatenate(read) == whole).all()


def test_held_out_sequences_come_by_weights_and_none_twice():
    """Held against weights of 3 : 1; what fills a batch after the last sequence is the first ones again."""
    texts = [np.arange(1000 * n, 1000 * n + 4 * size + 1) for n, size in enumerate((30, 50, 9))]
    held_out = HeldOutMixture([Sampler(text, 4) for text in texts], (3.0, 1.0, 1.0))
    first = held_out.rows(range(10)).tokens[:, 0]
    assert np.bincount(first // 1000).tolist() == [6, 2, 2]
    assert [first[first // 1000 == n].tolist() for n in (0, 2)] == [[*range(0, 24, 4)], [2000, 2004]]
    whole = held_out.rows(range(93)).tokens[:, 0].tolist()
    assert held_out.num_sequences == len(set(whole)) == 89 and whole[89:] == whole[:4]


def test_validation_keeps_the_first_weights_of_sources():
    sources = (
        DataSource(path="a", weight=2.0),
        DataSource(path="b", weight=((1, 0.0), (5, 3.0), ("2K", 0.5))),
        DataSource(path="c", weight=0.0),
    )
    assert first_weights(Data(sequence=16, sources=sources), BatchSizes(Batch(global_=10))) == [2, 3, 0]
