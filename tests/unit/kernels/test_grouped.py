"""Products in groups: right in every type and shape, and by torch's grouped_mm exactly where it can
and where it was found to be faster.
"""

import pytest
from conftest import but_for

OP = "aten::_grouped_mm"


@pytest.fixture(autouse=True)
def fast_in_16_bits(monkeypatch):
    """On a processor that isn't, bf16 is widened, one group after another: test_processor.py."""
    import torch

    from mpitrain.kernels import processor

    monkeypatch.setattr(processor, "_fast_here", lambda: frozenset((torch.bfloat16, torch.float16)))


def called(x, weights, sizes):
    """Return the product, and the names of the operations that made it."""
    from torch.profiler import ProfilerActivity, profile

    from mpitrain.kernels.grouped import grouped_product

    with profile(activities=[ProfilerActivity.CPU]) as record:
        y = grouped_product(x, weights, sizes)
    return y, {event.key for event in record.key_averages()}


@pytest.mark.parametrize("sizes", [(3, 5, 1), (0, 7, 0), (0, 0, 0), (40, 0, 2)])
@pytest.mark.parametrize(("height", "width"), [(16, 24), (7, 24), (16, 5), (256, 512)])
@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_each_group_meets_its_own_matrix(sizes, height, width, name, transposed):
    import torch

    torch.manual_seed(1)
    kind = getattr(torch, name)
    count = len(sizes)
    x = torch.randn(sum(sizes), width).to(kind)
    weights = torch.randn(count, *((width, height) if transposed else (height, width))).to(kind)
    weights = weights.transpose(1, 2) if transposed else weights
    y, operations = called(x, weights, sizes)
    aligned = height * kind.itemsize % 16 == 0 and width * kind.itemsize % 16 == 0
    assert (OP in operations) == (name == "float32" and aligned)
    expected = torch.cat(
        [rows.double() @ weight.double().t() for rows, weight in zip(x.split(sizes), weights)]
    )
    bound = {"float32": 2e-6, "float64": 1e-14, "bfloat16": 8e-3}[name] * width**0.5 * 4
    assert y.dtype == kind and y.shape == expected.shape
    assert not y.numel() or (y.double() - expected).abs().max() <= bound


def test_both_ways_make_the_same(monkeypatch):
    import torch

    from mpitrain.kernels import grouped

    torch.manual_seed(1)
    x = torch.randn(70, 64)
    weights = torch.randn(3, 32, 64)
    sizes = (30, 0, 40)
    at_once, operations = called(x, weights, sizes)
    monkeypatch.setattr(grouped, "_at_once", lambda x, weights: False)
    one_by_one, others = called(x, weights, sizes)
    assert OP in operations and OP not in others
    torch.testing.assert_close(at_once, one_by_one)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("width", "name"),
    but_for(
        [(256, "float32"), (258, "float32"), (256, "bfloat16"), (256, "float16")],
        longer=[(256, "bfloat16"), (256, "float16")],
    ),
)
def test_groups_of_many_sizes_leave_no_kernels_behind(width, name):
    """oneDNN keeps one of each shape, 0.3 MB or more. width: with 258 there is no grouped_mm."""
    import torch

    from mpitrain.cluster.resident import resident
    from mpitrain.kernels.grouped import grouped_product
    from mpitrain.model.linear import GroupedProduct
    from mpitrain.parallel.zero.parameters import Parameter
    from mpitrain.plan.declared.parameters import ROWS, stack

    if resident() is None:
        pytest.skip("this system doesn't say")
    parameter = Parameter(
        stack("experts", 2, width, width, ROWS, active=1.0), grad=torch.zeros(2, width, width)
    )
    x = torch.randn(600, width).to(getattr(torch, name))
    weights = torch.randn(2, width, width).to(x.dtype)

    def multiply(rows):
        sizes = rows, 600 - rows
        GroupedProduct(parameter, x, grouped_product(x, weights, sizes), sizes).add()

    for rows in (300, *range(1, 300, 32)):
        multiply(rows)
    before = resident()
    for rows in range(1, 300):
        multiply(rows)
    assert resident() - before < 20_000_000, f"{(resident() - before) / 1e6:.0f} MB more"


@pytest.mark.parametrize("names", [("float32", "float32"), ("float32", "bfloat16"), ("float64", "float64")])
def test_weight_gradients_of_groups_are_added(names):
    import torch

    from mpitrain.model.linear import GroupedProduct
    from mpitrain.parallel.zero.parameters import Parameter
    from mpitrain.plan.declared.parameters import ROWS, stack

    torch.manual_seed(1)
    total, kind = (getattr(torch, name) for name in names)
    sizes = (3, 0, 60)
    x = torch.randn(63, 9).to(kind)
    grad = torch.randn(63, 5).to(kind)
    spec = stack("experts", 3, 5, 9, ROWS, active=1.0)
    parameter = Parameter(spec, grad=torch.randn(3, 5, 9, dtype=total))
    expected = parameter.grad.double() + torch.stack(
        [a.double().t() @ b.double() for a, b in zip(grad.split(sizes), x.split(sizes))]
    )
    GroupedProduct(parameter, x, grad, sizes).add()
    assert (parameter.grad.double() - expected).abs().max() < 1e-4
