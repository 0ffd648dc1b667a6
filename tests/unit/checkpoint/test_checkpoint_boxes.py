"""The arithmetic of boxes and chunks, against arrays that simply count."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.checkpoint.boxes import CHUNK_BYTES, Bounds, Box, Chunks, run_boxes, whole

SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@st.composite
def boxes(draw, shape):
    ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


def mask(box, shape):
    """Return an array of `shape` that is 1 in the box."""
    out = np.zeros(shape, int)
    out[box.seen_from(whole(shape))] = 1
    return out


@given(st.data(), SHAPES)
def test_overlap_is_what_both_hold(data, shape):
    one = data.draw(boxes(shape))
    other = data.draw(boxes(shape))
    both = mask(one, shape) * mask(other, shape)
    assert one.overlap(other).size == other.overlap(one).size == both.sum()
    if both.any():
        assert (mask(one.overlap(other), shape) == both).all()


@given(st.data(), SHAPES, st.integers(0, 5), st.sampled_from([1, 2, 64]))
def test_bounds_find_every_pair_and_whoever_meets_a_box(data, shape, count, sweep):
    some = [data.draw(boxes(shape)) for _ in range(count)]
    box = data.draw(boxes(shape))
    masks = [mask(one, shape) for one in some]
    bounds = Bounds(some, len(shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpitrain.checkpoint.boxes.SWEEP", sweep)
        pairs = sorted(bounds.overlapping())
    assert pairs == [(i, j) for i in range(count) for j in range(i + 1, count) if (masks[i] * masks[j]).any()]
    assert bounds.meeting(box) == [i for i in range(count) if (masks[i] * mask(box, shape)).any()]


@given(st.data(), SHAPES)
def test_run_boxes_are_the_run_element_by_element(data, shape):
    """A plain loop: every element of the run, in its order, is the next one of its box."""
    size = whole(shape).size
    begin, end = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
    elements = np.arange(size).reshape(shape)
    parts = run_boxes(shape, begin, end)
    found = [element for box, _ in parts for element in elements[box.seen_from(whole(shape))].flatten()]
    assert found == list(range(begin, end))
    assert [part.stop - part.start for _, part in parts] == [box.size for box, _ in parts]
    assert [0, *(part.stop for _, part in parts)] == [*(part.start for _, part in parts), end - begin]
    assert len(parts) <= max(1, 2 * len(shape) - 1)


def test_run_of_a_matrix_is_at_most_three_boxes():
    assert run_boxes((4, 4), 2, 15) == [
        (Box((0, 2), (1, 4)), slice(0, 2)),
        (Box((1, 0), (3, 4)), slice(2, 10)),
        (Box((3, 0), (4, 3)), slice(10, 13)),
    ]
    assert run_boxes((4, 4), 0, 16) == [(whole((4, 4)), slice(0, 16))]
    assert run_boxes((4, 4), 5, 7) == [(Box((1, 1), (2, 3)), slice(0, 2))]
    assert run_boxes((4, 4), 8, 8) == run_boxes((0, 4), 0, 0) == run_boxes((), 1, 1) == []
    for begin, end in ((-1, 3), (3, 17), (5, 4)):
        with pytest.raises(ValueError, match=r"shape \[4, 4\] has no elements"):
            run_boxes((4, 4), begin, end)


def test_thousands_of_boxes_are_compared_in_less_than_a_second():
    """512 writers on each of 8 tensor-parallel ranks; all pairs of all their boxes would be 150 million."""
    bounds = np.linspace(0, 1000 * 1001, 513).astype(int)
    runs = [box for cut in pairwise(bounds) for box, _ in run_boxes((1000, 1001), *cut)]
    corners = [(*box.start, *box.stop) for box in runs]
    everywhere = [
        Box((a, b + first), (c, d + first)) for first in range(0, 8008, 1001) for a, b, c, d in corners
    ]
    start = time.process_time()
    assert len(everywhere) > 8000 and not list(Bounds(everywhere, 2).overlapping())
    assert time.process_time() - start < 1


@given(st.data(), st.lists(st.integers(0, 500), max_size=3).map(tuple), st.sampled_from([1, 2, 4, 8]))
def test_chunks_tile_the_array_and_inside_finds_the_whole_ones(data, shape, itemsize):
    itemsize *= 1000  # so that small shapes have several chunks
    chunks = Chunks(shape, itemsize)
    box = data.draw(boxes(shape))
    cut = [chunks.box(chunk) for chunk in range(chunks.count)]
    assert sum(chunk.size for chunk in cut) == whole(shape).size
    assert not list(Bounds(cut, len(shape)).overlapping())
    assert list(chunks.inside(box)) == [i for i, chunk in enumerate(cut) if chunk.overlap(box) == chunk]


def test_chunk_is_at_most_a_mebibyte_or_one_row():
    assert Chunks((10_000, 1000), 4).rows == 262 == CHUNK_BYTES // 4000
    assert Chunks((3, 1000, 1000), 4).rows == 1
    assert Chunks((), 4).count == 1
    assert Chunks((0, 3), 4).count == Chunks((3, 0), 4).count == 0
