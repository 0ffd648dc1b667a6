"""The order of an epoch: each window once, in constant memory, and no pattern that a statistic finds."""

import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from conftest import but_for
from hypothesis import example, given
from hypothesis import strategies as st

from mpitrain.data.permutation import MOST_WINDOWS, FeistelOrder, SortedOrder, permuted_cells

MANY = 10**9 + 7
SEEDS = st.integers(0, 2**64 - 1)


def epoch_of(num_windows, seed, epoch):
    return FeistelOrder(num_windows, seed).windows(epoch, np.arange(num_windows))


def require_uniform(counts, deviations=5):
    """Hold counts of cells that are equally probable against chi-square's mean and deviation."""
    counts = np.asarray(counts)
    expected = counts.mean()
    degrees = counts.size - 1
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - degrees) < deviations * math.sqrt(2 * degrees), (chi_square, degrees)


# ---------------------------------------------------------------- a permutation


@given(num_windows=st.integers(1, 5000), seed=SEEDS, epoch=st.integers(0, 2**40))
@example(1, 0, 0)
@example(4096, 1, 0)  # a square of even side: no walk
@example(4097, 1, 0)  # one window more
def test_each_window_comes_once(num_windows, seed, epoch):
    assert sorted(epoch_of(num_windows, seed, epoch).tolist()) == list(range(num_windows))


@pytest.mark.parametrize("side", [1, 2, 3, 64, 101])
def test_the_network_permutes_the_cells_of_a_square(side):
    cells = permuted_cells(np.arange(side**2, dtype=np.uint64), side, np.arange(8, dtype=np.uint64))
    assert sorted(cells.tolist()) == list(range(side**2))


@given(num_windows=st.integers(2, MOST_WINDOWS), seed=SEEDS, data=st.data())
@example(MOST_WINDOWS, 1, None)
def test_different_places_have_different_windows_whatever_their_number(num_windows, seed, data):
    last = num_windows - 1
    drawn = data.draw(st.sets(st.integers(0, last), max_size=50)) if data else {0, 1, 2}
    places = np.array(sorted(drawn | {0, last}))
    found = FeistelOrder(num_windows, seed).windows(0, places)
    assert len(set(found.tolist())) == len(places) and found.min() >= 0 and found.max() < num_windows


def test_a_window_depends_on_its_place_alone():
    places = np.array([MANY - 1, 5, 5, 0])
    together = FeistelOrder(MANY, 7).windows(2, places)
    alone = [int(FeistelOrder(MANY, 7).windows(2, places[i : i + 1])[0]) for i in range(len(places))]
    assert together.tolist() == alone


def test_the_windows_of_a_large_corpus_stay_the_same():
    """Written down once: a change here would break the resume of everybody's runs."""
    many = FeistelOrder(MANY, 1234).windows(3, np.array([0, 1, 2, 10**9]))
    assert many.tolist() == [704932403, 975563063, 720955068, 689142002]
    most = FeistelOrder(MOST_WINDOWS, 2**64 - 1).windows(7, np.array([0, MOST_WINDOWS - 1]))
    assert most.tolist() == [1565141395706434527, 596309835177959638]


def test_more_windows_than_can_be_permuted_are_refused():
    with pytest.raises(ValueError, match="at most"):
        FeistelOrder(MOST_WINDOWS + 1, 1)


def window_of(place, num_windows, seed, epoch):
    """Compute one window in Python's integers, one at a time."""
    side = math.isqrt(num_windows - 1) + 1
    side += side % 2
    keys = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(8).tolist()
    while True:
        row, column = divmod(place, side)
        for key in keys:
            mixed = (column ^ key) * 0xBF58476D1CE4E5B9 % 2**64
            mixed = (mixed ^ mixed >> 32) * 0x94D049BB133111EB % 2**64
            row, column = column, (row + (mixed >> 32) * side // 2**32) % side
        place = row * side + column
        if place < num_windows:
            return place


@given(num_windows=st.integers(1, MOST_WINDOWS), seed=SEEDS, epoch=st.integers(0, 2**63), data=st.data())
def test_a_batch_has_the_windows_that_plain_integers_give(num_windows, seed, epoch, data):
    last = num_windows - 1
    places = data.draw(st.lists(st.integers(0, last), min_size=1, max_size=5))
    found = FeistelOrder(num_windows, seed).windows(epoch, np.array(places))
    assert found.tolist() == [window_of(place, num_windows, seed, epoch) for place in places]


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("num_windows", [MANY, 10**12 // 128])
def test_a_batch_of_a_large_corpus_takes_little_memory(num_windows):
    """An array of its windows would have 8 GB. The cost of a batch doesn't grow with the epoch."""
    order = FeistelOrder(num_windows, 1)
    tracemalloc.start()
    try:
        for epoch in range(3):
            order.windows(epoch, np.arange(1000) * (num_windows // 1000))
        assert tracemalloc.get_traced_memory()[1] < 1 << 17
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------- chance


@pytest.mark.parametrize("num_windows", but_for([2, 3, 4, 5], longer=[5]))
def test_all_permutations_of_few_windows_are_equally_probable(num_windows):
    num_orders = 40 * math.factorial(num_windows)
    found = Counter(tuple(epoch_of(num_windows, seed=3, epoch=epoch).tolist()) for epoch in range(num_orders))
    require_uniform([*found.values()] + [0] * (math.factorial(num_windows) - len(found)))


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
@pytest.mark.parametrize("num_windows", [10_000, 65_537, MANY, MOST_WINDOWS])
def test_windows_are_spread_evenly_and_so_are_steps_from_one_to_the_next(num_windows, seed):
    """A part of an epoch, as short as a run's: of places in a row, and of places of one rank of 8."""
    order = FeistelOrder(num_windows, seed)
    for places in (np.arange(5_000), np.arange(0, 10_000, 2)):
        windows = order.windows(1, places)
        cells = windows.astype(float) / num_windows
        require_uniform(np.histogram(cells, 50, (0, 1))[0], 6)
        pairs = np.histogram2d(cells[:-1], cells[1:], 8, ((0, 1), (0, 1)))[0]
        require_uniform(pairs, 6)
        steps = (windows[1:] - windows[:-1]) % num_windows / num_windows
        require_uniform(np.histogram(steps, 50, (0, 1))[0], 6)


@pytest.mark.parametrize("kind", [FeistelOrder, SortedOrder])
def test_no_window_keeps_its_place_or_its_neighbour_over_epochs_and_seeds(kind):
    """Of random permutations 1 window in the mean keeps its place, and 2 a neighbour (Poisson)."""
    many = 2_000
    orders = [kind(many, seed).windows(epoch, np.arange(many)) for seed in range(10) for epoch in range(10)]
    fixed = [int((order == np.arange(many)).sum()) for order in orders]
    neighbours = [int((np.abs(np.diff(order)) == 1).sum()) for order in orders]
    again = [int((one == other).sum()) for one, other in zip(orders, orders[1:], strict=False)]
    for counts, mean in ((fixed, 1), (neighbours, 2), (again, 1)):
        total = mean * len(counts)
        assert abs(sum(counts) - total) < 5 * math.sqrt(total) and max(counts) < mean + 10
