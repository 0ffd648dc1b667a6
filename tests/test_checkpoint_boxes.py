"""The arithmetic of boxes and chunks, against arrays that simply count."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.checkpoint.boxes import CHUNK_BYTES, Box, Chunks, overlapping, whole

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
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    both = mask(one, shape) * mask(other, shape)
    assert one.overlap(other).size == other.overlap(one).size == both.sum()
    if both.any():
        assert (mask(one.overlap(other), shape) == both).all()


@given(st.data(), SHAPES)
def test_overlapping_finds_every_pair(data, shape):
    some = [data.draw(boxes(shape)) for _ in range(4)]
    masks = [mask(box, shape) for box in some]
    expected = [(i, j) for i in range(4) for j in range(i + 1, 4) if (masks[i] * masks[j]).any()]
    assert sorted(overlapping(some)) == expected


@given(st.data(), st.lists(st.integers(0, 500), max_size=3).map(tuple), st.sampled_from([1, 2, 4, 8]))
def test_chunks_tile_the_array_and_inside_finds_the_whole_ones(data, shape, itemsize):
    itemsize *= 1000  # so that small shapes have several chunks
    chunks, box = Chunks(shape, itemsize), data.draw(boxes(shape))
    cut = [chunks.box(chunk) for chunk in range(chunks.count)]
    assert sum(chunk.size for chunk in cut) == whole(shape).size
    assert not list(overlapping(cut))
    assert list(chunks.inside(box)) == [i for i, chunk in enumerate(cut) if chunk.overlap(box) == chunk]


def test_chunk_is_at_most_a_mebibyte_or_one_row():
    assert Chunks((10_000, 1000), 4).rows == 262 == CHUNK_BYTES // 4000
    assert Chunks((3, 1000, 1000), 4).rows == 1
    assert Chunks((), 4).count == 1
    assert Chunks((0, 3), 4).count == Chunks((3, 0), 4).count == 0
