"""Rounding to bf16 by chance: right in the mean, with the same bits wherever an element is computed."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.optim.stochastic_rounding import draw, places, round_into
from mpitrain.plan.declared.parameters import COLUMNS, ROWS, Shard, Spec, stack

N = 2**20
CPU = torch.device("cpu")


def chances(update=3, name="w", num=N):
    return draw(1, update, name, torch.arange(num, dtype=torch.int32))


def rounded(x, chance):
    kept = torch.empty(x.shape, dtype=torch.bfloat16)
    round_into(kept, x, chance.clone())
    return kept


# ---------------------------------------------------------------- the rounding


@pytest.mark.parametrize("half", [0, 16])
@pytest.mark.parametrize("x", [1.001, -1.001, 0.9999, 3e-9, -2e-41, 1.7e38, math.pi])
def test_the_mean_of_what_is_kept_is_what_was_given(x, half):
    found = rounded(torch.full((N,), x), chances() >> half).double()
    low = found.min().item()
    high = found.max().item()
    exact = torch.tensor(x).double().item()
    assert len(found.unique()) == 2 and low < exact < high
    share = (exact - low) / (high - low)
    error = (found == high).double().mean().item() - share
    assert abs(error) < 5 * math.sqrt(share * (1 - share) / N) + 2**-16, f"{error} of {share}"


def test_what_bf16_has_is_kept():
    numbers = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-133, 3.0e38, math.inf, -math.inf]).bfloat16().float()
    for x in numbers:
        found = rounded(x.expand(4096), chances(num=4096)).float()
        assert (found == x).all() and (found.signbit() == x.signbit()).all()
    assert rounded(torch.full((64,), math.nan), chances(num=64)).isnan().all()
    assert torch.equal(rounded(numbers.double(), chances(num=8)).float(), numbers)


# ---------------------------------------------------------------- the draws


def test_bits_are_even_and_know_nothing_of_one_another():
    """Of neighbours, of the two halves, of other updates and parameters.

    Within 5 standard deviations of chance.
    """
    every = [
        chances(),
        chances(update=4),
        chances(name="x"),
        chances() >> 16,
        chances().roll(1),
        chances().roll(1024),
    ]
    signs = [torch.stack([1 - 2 * ((bits >> k) & 1) for k in range(16)]).float() for bits in every]
    assert max(abs(sign.mean(1)).max().item() for sign in signs) < 5 / math.sqrt(N)
    for other in signs[1:]:
        assert (signs[0] @ other.T / N).abs().max() < 5 / math.sqrt(N)


def test_draws_are_those_of_the_place():
    whole = chances(num=5000)
    for begin, end in ((0, 1), (1023, 3000), (4999, 5000)):
        assert torch.equal(draw(1, 3, "w", torch.arange(begin, end, dtype=torch.int32)), whole[begin:end])
    assert not torch.equal(draw(2, 3, "w", torch.arange(5000, dtype=torch.int32)), whole)


@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from([1, 2, 3]), st.data())
def test_places_are_those_of_the_whole_parameter(rows, columns, tp, data):
    """Of norms, of matrices that are divided by rows and by columns, and of repeated heads."""
    shape, divided = data.draw(
        st.sampled_from([((columns,), None), ((rows * tp, columns), ROWS), ((rows, columns * tp), COLUMNS)])
    )
    spec = Spec("a", shape, 0.02, divided=divided).on(Shard(data.draw(st.integers(0, tp - 1)), tp))
    require_places(spec, data)


@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from([ROWS, COLUMNS]),
    st.data(),
)
def test_places_are_those_of_all_experts(rows, columns, etp, ep, divided, data):
    shape = [rows, columns]
    shape[divided] *= etp
    experts, hidden = ((data.draw(st.integers(0, size - 1)), size) for size in (ep, etp))
    require_places(
        stack("a", 2 * ep, *shape, divided, active=1.0).on(Shard(experts=experts, hidden=hidden)), data
    )


def require_places(spec, data):
    """Compare the places of any part of a box with the box cut out of all places."""
    begin = data.draw(st.integers(0, spec.numel - 1))
    end = data.draw(st.integers(begin + 1, spec.numel))
    box = tuple(slice(at, at + length) for at, length in zip(spec.offset, spec.shape))
    expected = (
        torch.arange(math.prod(spec.whole), dtype=torch.int32).view(spec.whole)[box].flatten()[begin:end]
    )
    assert torch.equal(places(spec, begin, end, CPU), expected)


def test_places_of_huge_parameters_wrap():
    for dim in (ROWS, COLUMNS):
        shape = [2**17, 2**17]
        shape[dim] *= 2
        spec = Spec("a", tuple(shape), 0.02, divided=dim).on(Shard(1, 2))
        begin = 2**33 + 2**17 - 2
        expected = [
            (spec.offset[0] + i // spec.shape[1]) * shape[1] + spec.offset[1] + i % spec.shape[1]
            for i in range(begin, begin + 5)
        ]
        assert places(spec, begin, begin + 5, CPU).tolist() == [(x + 2**31) % 2**32 - 2**31 for x in expected]
