"""What export does in a second thread, and how it compares rounded numbers: the same as without."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.checkpoint.dtypes import BF16
from mpitrain.weights.bits import cast, difference_from_bf16, widened
from mpitrain.weights.prefetch import DEPTH, prefetched


@pytest.mark.parametrize("count", [0, 1, DEPTH, 100])
def test_items_come_in_their_order_from_another_thread(count):
    def items():
        for number in range(count):
            yield number, threading.current_thread().name

    found = list(prefetched(items()))
    assert [number for number, _ in found] == list(range(count))
    assert all(name.startswith("mpitrain-prefetch") for _, name in found)


def test_what_fails_is_raised_where_its_item_would_come():
    def items():
        yield from range(10)
        raise ValueError("the eleventh")

    seen = []
    with pytest.raises(ValueError, match="the eleventh"):
        seen.extend(prefetched(items()))
    assert seen == list(range(10))


def test_no_more_is_made_than_is_asked_for():
    made = []
    items = prefetched(made.append(number) or number for number in range(1000))
    assert next(items) == 0
    items.close()
    assert len(made) <= DEPTH + 2
    assert not [each for each in threading.enumerate() if each.name.startswith("mpitrain-prefetch")]


ROUNDED = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)


@given(ROUNDED)
def test_a_rounded_number_is_known_as_cast_makes_it(bits):
    exact = np.array(bits, np.uint32).view(np.float32)
    exact = exact[np.isfinite(exact)]
    rounded = widened(cast(exact, BF16))
    if not exact.size or not np.isfinite(rounded).all():
        return
    expected = float(np.abs(rounded.astype(np.float64) - exact.astype(np.float64)).max())
    found = difference_from_bf16(exact, rounded)
    assert found is not None and np.isclose(found, expected, rtol=1e-6, atol=0)


@given(st.integers(0, 0x7F7E), st.integers(0, 0xFFFF), st.sampled_from([-1, 1]), st.booleans())
def test_a_neighbour_of_a_rounded_number_is_none(high, low, step, negative):
    """Of all numbers, halfway ones with the other parity among them; also one that is no bf16."""
    exact = np.array([(high + 1 << 16 | low) | negative << 31], np.uint32).view(np.float32)
    rounded = widened(cast(exact, BF16))
    for wrong in (step << 16, step):
        other = (rounded.view(np.int32) + wrong).view(np.float32)
        assert difference_from_bf16(exact, other) is None or (other == exact).all()


@pytest.mark.parametrize("bits", [0x3F808000, 0x3F818000])
def test_halfway_the_even_one_is_right(bits):
    exact = np.array([bits], np.uint32).view(np.float32)
    down, up = ((np.array([(bits & 0xFFFF0000) + more], np.uint32)).view(np.float32) for more in (0, 0x10000))
    right, wrong = (down, up) if not (bits >> 16) & 1 else (up, down)
    assert difference_from_bf16(exact, right) == abs(float(right[0]) - float(exact[0]))
    assert difference_from_bf16(exact, wrong) is None
