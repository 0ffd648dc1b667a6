"""The gradient norm: exact over blocks, however they are grouped."""

import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.optim import norm as module
from mpitrain.optim.norm import AT_ONCE, PARTS, exact_sum, norm, squares, summed

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


DEVICES = ["cpu", "as a GPU does", *(["cuda"] if torch.cuda.is_available() else [])]
MOST = 1.7976931348623157e308
TINY = 5e-324


def agrees(numbers, device="cpu"):
    """Whether integers on a device give the parts that math.fsum gives of the numbers themselves."""
    found = summed(torch.tensor(numbers, dtype=torch.float64, device=device))
    return len(found) <= PARTS and repr(exact_sum(found)) == repr(exact_sum(numbers))


@pytest.fixture
def device(request, monkeypatch):
    """Where to add; a CPU adds as a GPU does if told to."""
    if request.param == "as a GPU does":
        monkeypatch.setattr(module, "_add_one_by_one", module._add_by_product)
        return "cpu"
    return request.param


@given(st.lists(finite | st.floats(min_value=0) | st.just(math.nan), max_size=80))
def test_digits_of_integers_give_the_parts_of_the_numbers(numbers):
    assert agrees(numbers)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize(
    "numbers",
    [
        [],
        [0.0, 0.0],
        [TINY],
        [TINY] * 1000 + [2.0**-1022, math.nextafter(2.0**-1022, 0)],
        [2.0**e for e in range(-1074, 1024)],
        [math.nextafter(2.0**e, 0) for e in range(-1073, 1023)],
        [1.0, 2.0**-53, 2.0**-106, TINY],
        [1.0, 2.0**-53, 2.0**-53],
        [MOST, TINY],
        [MOST, 2.0**969],
        [MOST, 2.0**970],
        [MOST, math.nextafter(2.0**970, 0), TINY],
        [MOST / 2] * 2,
        [MOST / 2] * 3,
        [MOST, MOST],
        [1.0, math.inf],
        [math.nan, TINY],
    ],
    ids=lambda numbers: (
        f"{len(numbers)}x{max(numbers, default=0):.2g}" if isinstance(numbers, list) else numbers
    ),
)
def test_digits_hold_whatever_numbers_there_are(numbers, device):
    """The smallest, the largest, all together, sums that fp64 just holds and just not, ties between
    two of its numbers.
    """
    assert agrees(numbers, device)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("count", [AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE + 7])
def test_many_numbers_of_all_sizes_are_added_exactly(count, device):
    dice = torch.Generator().manual_seed(count)
    exponents = torch.randint(-1000, 900, (count,), generator=dice) // 400 * 200
    assert agrees(
        torch.ldexp(torch.rand(count, generator=dice, dtype=torch.float64), exponents.double()).tolist(),
        device,
    )


@pytest.mark.parametrize("device", DEVICES[:2], indirect=True)
def test_digits_do_not_overflow(device):
    """Numbers with all bits set, in one place: 2^20 of them, of the 2^31 that fit."""
    number = math.nextafter(2.0, 0)
    count = 2**20
    assert sum(
        map(Fraction, summed(torch.tensor([number], dtype=torch.float64).expand(count)))
    ) == count * Fraction(number)
    digits = torch.zeros(module.NUM_DIGITS, dtype=torch.int64)
    for at in range(52, 84):  # every place in a digit
        assert agrees([math.ldexp(number, at)] * 2)
        module._add(torch.tensor([math.ldexp(number, at)], dtype=torch.float64), digits.zero_())
        assert digits.min() >= 0 and digits.max() <= module.MASK


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_squares_of_blocks_are_those_of_their_norms(dtype):
    dice = torch.Generator().manual_seed(1)
    grads = [
        torch.randn(n, generator=dice).to(dtype) * 10.0 ** (n % 7 - 3) for n in (1, 1023, 1024, 5000, 70_000)
    ]
    blocks = [
        torch.linalg.vector_norm(block).double().item() ** 2 for grad in grads for block in grad.split(1024)
    ]
    assert exact_sum(squares(grads)) == exact_sum(blocks)
