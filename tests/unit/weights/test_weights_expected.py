"""Digests that are made while an export is written: those of whole chunks, however runs of rows are cut."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.checkpoint.arrays import digest
from mpitrain.checkpoint.boxes import Box, Chunks, whole
from mpitrain.errors import CheckpointError, WeightsError
from mpitrain.weights.bits import BF16, DTYPES, SOME, cast, is_exact, widened
from mpitrain.weights.expected import (
    CastRows,
    ChunkDigests,
    ExpectedDigests,
    ExportDigests,
    as_read,
    largest_difference,
    together,
)

ROW = 1 << 17  # numbers: two rows of fp32 are a chunk


def of_runs(array, cuts):
    """Return the digests of an array that comes in runs of elements."""
    found = {}
    chunks = ChunkDigests(Chunks(array.shape, array.dtype.itemsize))
    flat = array.reshape(-1)
    for begin, end in cuts:
        found.update(chunks.add(begin, flat[begin:end]))
    return found


def checkpoint_of(numbers):
    """Return a checkpoint with one weight, and no file."""
    chunks = Chunks(numbers.shape, numbers.itemsize)
    boxes = {at: chunks.box(at).seen_from(whole(numbers.shape)) for at in range(chunks.count)}
    digests = {at: digest(numbers[box]) for at, box in boxes.items()}
    array = SimpleNamespace(dtype=numbers.dtype, chunks=chunks, digests=digests)
    return SimpleNamespace(path=Path("step"), array=lambda name: array)


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


def test_the_digests_of_all_ranks_are_one():
    parts = [ExportDigests({"a": {0: b"x"}}, 0.5), ExportDigests({"a": {1: b"y"}, "b": {0: b"z"}}, 0.25)]
    assert together(parts) == ExportDigests({"a": {0: b"x", 1: b"y"}, "b": {0: b"z"}}, 0.5)


@pytest.mark.parametrize(
    ("number", "code", "error", "message"),
    [
        (1e6, "F16", WeightsError, "parameters/w holds numbers that fp16 can't; use another --dtype"),
        (np.nan, "BF16", WeightsError, "parameters/w holds NaN or infinite numbers; use another step"),
        (np.inf, "F32", WeightsError, "parameters/w holds NaN or infinite numbers; use another step"),
        (7.0, "BF16", CheckpointError, r"parameters/w isn't what was saved \(chunk 0\); use another step"),
    ],
)
def test_what_cannot_be_exported_is_refused(number, code, error, message):
    kept = np.array([[1.0, number]], np.float32)
    saved = checkpoint_of(np.array([[1.0, 8.0]], np.float32) if number == 7 else kept)
    weight = SimpleNamespace(name="w", box=whole(kept.shape), ours=kept.shape)
    found = cast(kept, DTYPES[code])
    exact = is_exact(kept, found.dtype)
    with pytest.raises(error, match=message):
        ExpectedDigests(saved).add(CastRows(weight, 0, weight.box, kept, found, exact))


@given(st.sets(st.integers(0, 4)), st.sampled_from(["BF16", "F32", "F16"]), st.integers(4, 5))
def test_digests_are_those_of_what_is_read_back_whichever_rows_are_rounded(rounded, code, rows):
    kept = np.arange(5 * ROW, dtype=np.float32).reshape(5, ROW) % 128
    kept[list(rounded), 7] = 1.001
    weight = SimpleNamespace(name="w", box=whole((rows, ROW)), ours=(rows, ROW))  # of 4, a row is padding
    expected = ExpectedDigests(checkpoint_of(kept))
    for row in range(rows):
        some = kept[row : row + 1]
        exact = is_exact(some, DTYPES[code])
        assert exact == (code == "F32" or (code == "BF16" and row not in rounded))
        box = Box((row, 0), (row + 1, ROW))
        expected.add(CastRows(weight, 0, box, some, cast(some, DTYPES[code], exact), exact))
    read = as_read(cast(kept, DTYPES[code]), kept.dtype)[:rows]
    found = checkpoint_of(read).array("w").digests
    assert expected.so_far == ExportDigests({"w": found}, largest_difference(read, kept[:rows]))


def test_a_number_that_bf16_has_is_known_wherever_it_is():
    kept = np.full(3 * SOME, 1.5, np.float32)
    assert is_exact(kept, BF16) and (cast(kept, BF16, exact=True) == cast(kept, BF16)).all()
    for at in (0, SOME - 1, SOME, 3 * SOME - 1):
        other = kept.copy()
        other[at] = 1.001
        assert not is_exact(other, BF16)
    assert is_exact(kept[:0], BF16) and not is_exact(kept.astype(np.float64), BF16)
