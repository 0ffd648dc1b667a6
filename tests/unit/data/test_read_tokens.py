"""Tokens that are read where they are asked for equal those of a map."""

import numpy as np
import pytest

from mpitrain.data import read_tokens
from mpitrain.data.order import Sampler
from mpitrain.data.packed_rows import PackedSampler
from mpitrain.data.read_tokens import ReadTokens, open_numbers
from mpitrain.data.token_rows import Text
from mpitrain.errors import DataError


@pytest.fixture
def numbers(tmp_path):
    found = np.random.default_rng(1).integers(0, 60_000, 1000).astype("<u2")
    found.tofile(tmp_path / "tokens.bin")
    return tmp_path / "tokens.bin", found


def test_slices_and_places_are_those_of_the_file(numbers):
    file, expected = numbers
    tokens = open_numbers(file, np.dtype("<u2"), 1000, "pread")
    assert isinstance(tokens, ReadTokens) and len(tokens) == 1000
    for begin, last in ((0, 1000), (3, 17), (990, 2000), (5, 5), (999, 1000)):
        assert tokens[begin:last].tolist() == expected[begin:last].tolist()
    assert tokens[:].tolist() == expected.tolist()
    places = np.array([7, 0, 999])
    assert tokens[places].tolist() == expected[places].tolist() and tokens[places[:0]].size == 0


@pytest.mark.parametrize("kind", ["joined", "separate", "packed"])
def test_samplers_have_the_same_rows(numbers, kind):
    file, expected = numbers
    ends = np.array([10, 11, 200, 260, 1000])
    unscored = np.array([[5, 9], [300, 310]])

    def rows(tokens):
        text = Text(tokens, np.array([[3, 500], [600, 1000]]), None if kind == "joined" else ends, unscored)
        sampler = (PackedSampler if kind == "packed" else Sampler)(text, 24, 1)
        return sampler.rows(range(2 * sampler.num_sequences))

    for one, other in zip(
        rows(expected), rows(open_numbers(file, np.dtype("<u2"), 1000, "pread")), strict=True
    ):
        assert (one is other is None) or np.array_equal(one, other)


def test_a_map_that_is_refused_is_replaced_by_reading(numbers, monkeypatch):
    file, expected = numbers
    assert isinstance(open_numbers(file, np.dtype("<u2"), 1000), np.memmap)

    def refuse(*given, **keys):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(read_tokens.np, "memmap", refuse)
    found = open_numbers(file, np.dtype("<u2"), 1000)
    assert isinstance(found, ReadTokens) and found[:].tolist() == expected.tolist()


def test_a_file_that_becomes_shorter_is_named(numbers):
    file, _ = numbers
    tokens = open_numbers(file, np.dtype("<u2"), 1000, "pread")
    with open(file, "r+b") as opened:
        opened.truncate(100)
    assert len(tokens[:50]) == 50
    with pytest.raises(DataError, match=r"tokens.bin became shorter while it was read"):
        tokens[40:60]
