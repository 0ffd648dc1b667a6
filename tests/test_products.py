"""Products of weights: right in every shape and type, and by oneDNN exactly where it was found to be faster."""

import pytest

OP = "mkldnn::_linear_pointwise"


def called(x, weight):
    """Return the product, and the names of the operations that made it."""
    from torch.profiler import ProfilerActivity, profile

    from mpitrain.model.linear import product

    with profile(activities=[ProfilerActivity.CPU]) as record:
        y = product(x, weight)
    return y, {event.key for event in record.key_averages()}


@pytest.mark.parametrize("rows", [(1,), (3,), (2, 33), (2, 128), (0,), (2, 0)])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (7, 640), (384, 384), (1024, 100)])
@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_product_is_that_of_fp64(rows, height, width, name, transposed):
    import torch

    torch.manual_seed(1)
    x, weight = torch.randn(*rows, width), torch.randn(*((width, height) if transposed else (height, width)))
    x, weight = (each.to(getattr(torch, name)) for each in (x, weight))
    weight = weight.t() if transposed else weight
    y, _ = called(x, weight)
    expected = x.double() @ weight.double().t()
    assert y.dtype == x.dtype and y.shape == expected.shape
    bound = {"float32": 2e-6, "float64": 1e-14, "bfloat16": 8e-3}[name] * width**0.5 * 4
    assert not y.numel() or (y.double() - expected).abs().max() <= bound


@pytest.mark.parametrize(("rows", "height", "width", "by_onednn"), [
    (256, 384, 384, True),
    (256, 4096, 384, True),
    (33, 1024, 1024, True),
    (32, 1024, 1024, False),  # few rows: packing the weight costs more than it gains
    (64, 64, 64, False),  # few products: so does the call
])  # fmt: skip
def test_onednn_multiplies_where_it_is_faster(rows, height, width, by_onednn):
    import torch

    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    for transposed in (False, True):
        weight = torch.randn(width, height).t() if transposed else torch.randn(height, width)
        assert (OP in called(torch.randn(rows, width), weight)[1]) == by_onednn
    assert OP not in called(torch.randn(rows, width).double(), weight.double())[1]


def test_a_rounded_product_is_that_of_its_factors_type():
    import torch

    from mpitrain.model.linear import add_product

    torch.manual_seed(1)
    total, a, b = torch.randn(5, 9), torch.randn(70, 5).bfloat16(), torch.randn(70, 9).bfloat16()
    expected = a.double().t() @ b.double()
    exact, rounded = total.clone(), total.clone()
    add_product(exact, a, b)
    add_product(rounded, a, b, rounded=True)
    assert (exact - total - expected).abs().max() < 1e-5
    error = ((rounded - total - expected) / expected).abs().max()
    assert 2**-10 < error < 2**-7  # half a unit in the last place of bf16, but not less
    assert torch.equal(rounded, total + (a.t() @ b))


@pytest.mark.parametrize("names", [("float32", "float32"), ("float32", "bfloat16"), ("float64", "float64")])
def test_gradients_are_added_in_the_wider_type(names):
    import torch

    from mpitrain.model.linear import add_product

    torch.manual_seed(1)
    total_type, type_ = (getattr(torch, name) for name in names)
    total, a, b = torch.randn(5, 9, dtype=total_type), torch.randn(70, 5).to(type_), torch.randn(70, 9).to(type_)
    expected = total.double() + a.double().t() @ b.double()
    add_product(total, a, b)
    assert total.dtype == total_type and (total.double() - expected).abs().max() < 1e-4
