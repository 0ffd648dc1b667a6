"""The gradient norm: exact over blocks, however they are grouped."""

import math
import random
from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.optim.norm import PARTS, exact_sum, norm, squares

finite = st.floats(min_value=0, max_value=1e300, allow_nan=False)


@given(st.lists(finite, max_size=60), st.integers(1, 7))
def test_an_exact_sum_is_exact_in_any_grouping(numbers, groups):
    whole = exact_sum(numbers)
    parts = [exact_sum(numbers[i::groups]) for i in range(groups)]
    assert len(whole) == PARTS and sum(map(Fraction, whole)) == sum(map(Fraction, numbers))
    assert exact_sum([number for part in parts for number in part]) == whole


def test_the_widest_range_of_numbers_fits():
    numbers = [2.0**e for e in range(-1074, 1000, 13)] * 3
    random.Random(1).shuffle(numbers)
    assert sum(map(Fraction, exact_sum(numbers))) == sum(map(Fraction, numbers))


def test_the_norm_does_not_depend_on_where_a_shard_is_cut():
    grad = torch.randn(10_300, generator=torch.Generator().manual_seed(1))
    cuts = [[grad], [grad[:1024], grad[1024:]], [grad[i : i + 2048] for i in range(0, 10_300, 2048)]]
    norms = {norm(exact_sum([x for part in cut for x in squares([part])])) for cut in cuts}
    assert len(norms) == 1
    assert math.isclose(norms.pop(), grad.double().norm().item(), rel_tol=1e-6)


def test_what_is_not_finite_is_no_number():
    assert math.isnan(norm(exact_sum(squares([torch.tensor([1.0, math.inf])]))))
    assert math.isnan(norm(exact_sum([1.0, math.nan])))
    assert math.isnan(norm(exact_sum([1e308, 1e308])))
    assert norm(exact_sum(squares([]))) == 0
