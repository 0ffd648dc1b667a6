"""Digests that are made while an export is written: those of whole chunks, however runs of rows are cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.checkpoint.arrays import digest
from mpitrain.checkpoint.boxes import Chunks
from mpitrain.weights.bits import BF16, cast, widened
from mpitrain.weights.expected import ChunkDigests, Expected, as_read, largest_difference, together

ROW = 1 << 17  # numbers: two rows of fp32 are a chunk


def of_runs(array, cuts):
    """Return the digests of an array that comes in runs of elements."""
    found = {}
    chunks = ChunkDigests(Chunks(array.shape, array.dtype.itemsize))
    flat = array.reshape(-1)
    for begin, end in cuts:
        found.update(chunks.add(begin, flat[begin:end]))
    return found


@given(st.lists(st.integers(0, 5 * ROW), max_size=6))
def test_chunks_have_the_same_digest_in_runs_cut_anywhere(at):
    array = np.arange(5 * ROW, dtype=np.float32).reshape(5, ROW)
    bounds = [0, *sorted(at), 5 * ROW]
    found = of_runs(array, zip(bounds, bounds[1:]))
    assert found == {0: digest(array[:2]), 1: digest(array[2:4]), 2: digest(array[4:])}


@pytest.mark.parametrize(
    ("runs", "known"),
    [
        ([(0, 2), (3, 5)], {0, 2}),  # of the second chunk a row is missing
        ([(1, 5)], {1, 2}),  # its first one was written elsewhere
        ([(2, 3), (0, 2), (3, 4), (4, 5)], {0, 2}),  # in another order
    ],
)
def test_a_chunk_that_did_not_come_in_order_has_none(runs, known):
    array = np.arange(5 * ROW, dtype=np.float32).reshape(5, ROW)
    found = of_runs(array, [(a * ROW, b * ROW) for a, b in runs])
    assert found.keys() == known


def test_what_an_import_will_have_and_how_far_it_is_off():
    kept = np.array([1.0, 1.00390625, -3.0], np.float32)  # the second is halfway between two of bf16
    found = cast(kept, BF16)
    assert (as_read(found, kept.dtype) == widened(found)).all()
    assert largest_difference(as_read(found, kept.dtype), kept) == 0.00390625
    assert as_read(kept, kept.dtype) is kept and as_read(found, np.dtype(np.float64)).dtype == np.float64


def test_what_ranks_have_written_is_one():
    parts = [Expected({"a": {0: b"x"}}, 0.5), Expected({"a": {1: b"y"}, "b": {0: b"z"}}, 0.25)]
    assert together(parts) == Expected({"a": {0: b"x", 1: b"y"}, "b": {0: b"z"}}, 0.5)
