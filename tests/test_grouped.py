"""Products in groups: right in every type and shape, and by torch's grouped_mm exactly where it can and where it was found to be faster."""

import pytest

OP = "aten::_grouped_mm"


@pytest.fixture(autouse=True)
def fast_in_16_bits(monkeypatch):
    """On a processor that isn't, bf16 is widened, one group after another: tests/test_processor.py."""
    import torch

    from mpitrain.parallel import processor

    monkeypatch.setattr(processor, "_fast_here", lambda: frozenset((torch.bfloat16, torch.float16)))


def called(x, weights, sizes):
    """Return the product, and the names of the operations that made it."""
    from torch.profiler import ProfilerActivity, profile

    from mpitrain.model.grouped import grouped_product

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
    kind, count = getattr(torch, name), len(sizes)
    x, weights = torch.randn(sum(sizes), width).to(kind), torch.randn(count, *((width, height) if transposed else (height, width))).to(kind)
    weights = weights.transpose(1, 2) if transposed else weights
    y, operations = called(x, weights, sizes)
    assert (OP in operations) == (name != "float64" and height * kind.itemsize % 16 == 0 and width * kind.itemsize % 16 == 0)
    expected = torch.cat([rows.double() @ weight.double().t() for rows, weight in zip(x.split(sizes), weights)])
    bound = {"float32": 2e-6, "float64": 1e-14, "bfloat16": 8e-3}[name] * width**0.5 * 4
    assert y.dtype == kind and y.shape == expected.shape
    assert not y.numel() or (y.double() - expected).abs().max() <= bound


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_both_ways_make_the_same(name, monkeypatch):
    import torch

    from mpitrain.model import grouped

    torch.manual_seed(1)
    x, weights, sizes = torch.randn(70, 64), torch.randn(3, 32, 64), (30, 0, 40)
    x, weights = (each.to(getattr(torch, name)) for each in (x, weights))
    at_once, operations = called(x, weights, sizes)
    monkeypatch.setattr(grouped, "_at_once", lambda x, weights: False)
    one_by_one, others = called(x, weights, sizes)
    assert OP in operations and OP not in others
    torch.testing.assert_close(at_once, one_by_one)


def test_large_groups_are_multiplied_one_by_one_in_fp32(monkeypatch):
    import torch

    from mpitrain.model import grouped

    monkeypatch.setattr(grouped, "mkl_is_slow", lambda: False)  # where it is, groups are large earlier: tests/test_products.py
    x, weights = torch.randn(2 * 128, 512), torch.randn(2, 512, 512)
    assert OP not in called(x, weights, (128, 128))[1]
    assert OP in called(x.bfloat16(), weights.bfloat16(), (128, 128))[1]
    assert OP in called(x[:120], weights, (60, 60))[1]


@pytest.mark.parametrize("slow", [False, True])
def test_groups_are_large_earlier_where_mkl_is_slow(slow, monkeypatch):
    import torch

    from mpitrain.model import grouped

    monkeypatch.setattr(grouped, "mkl_is_slow", lambda: slow)
    for rows, at_once in ((31, True), (32, not slow), (255, not slow), (256, False)):
        assert grouped._at_once(torch.empty(3 * rows, 256), torch.empty(3, 256, 256)) == at_once


@pytest.mark.parametrize("names", [("float32", "float32"), ("float32", "bfloat16"), ("float64", "float64")])
def test_weight_gradients_of_groups_are_added(names):
    import torch

    from mpitrain.layout.parameters import ROWS, stack
    from mpitrain.model.grouped import GroupedProduct
    from mpitrain.parallel.zero.parameters import Parameter

    torch.manual_seed(1)
    total, kind = (getattr(torch, name) for name in names)
    sizes, x, grad = (3, 0, 60), torch.randn(63, 9).to(kind), torch.randn(63, 5).to(kind)
    spec = stack("experts", 3, 5, 9, ROWS, active=1.0)
    parameter = Parameter(spec, grad=torch.randn(3, 5, 9, dtype=total))
    expected = parameter.grad.double() + torch.stack([a.double().t() @ b.double() for a, b in zip(grad.split(sizes), x.split(sizes))])
    GroupedProduct(parameter, x, grad, sizes).add()
    assert (parameter.grad.double() - expected).abs().max() < 1e-4
